"""A study: named rows, the runs that they need, and what the results say about one row beside another."""

import argparse
import multiprocessing
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log
from pathlib import Path
from typing import Any

import torch

from studies.parity.cell import Cell
from studies.parity.results import Results, append, load
from studies.parity.run import can_run, check_corpus, train
from studies.parity.spread import Noise, Spread, residual, spread

SEEDS = range(1, 4)
"""Of a row, unless it asks for more."""
MANY = range(1, 10)
"""Seeds that results are looked for. Learning rates were tuned on seed 0."""


@dataclass(frozen=True)
class Study:
    path: Path
    rows: Mapping[str, Cell]
    """The most important first."""
    headlines: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    """Rows of which all seeds come first, and these seeds."""
    alike: Callable[[str], Hashable] = lambda name: None
    """Rows with the same value share one estimate of noise; None: the row has its own."""

    @cached_property
    def results(self) -> Results:
        return load(self.path)

    def runs(self, row: str) -> dict[int, dict[str, Any]]:
        """Results by seed."""
        keys = {seed: replace(self.rows[row], seed=seed).key for seed in MANY}
        return {seed: self.results[key] for seed, key in keys.items() if key in self.results}

    def gap(self, row: str, against: str, what: str = "final", of: str = "final") -> Spread | None:
        """Difference in percent of the loss, paired by seed."""
        ours, theirs = self.runs(row), self.runs(against)
        both = sorted(ours.keys() & theirs.keys())
        differences = [100 * (ours[seed][what] / theirs[seed][of] - 1) for seed in both]
        return spread(differences, self.noise(row, against) if row != against else None) if both else None

    def noise(self, row: str, against: str) -> Noise | None:
        """Of a paired difference in percent. Few differences alone say little about it."""
        groups = {self.alike(row), self.alike(against)}
        if None in groups:
            return None
        alike = [name for name in self.rows if self.alike(name) in groups]
        return residual({(name, seed): 100 * log(result["final"])
                         for name in alike for seed, result in self.runs(name).items()})  # fmt: skip

    def wanted(self, names: Sequence[str] = ("",), seeds: Sequence[int] | None = None) -> list[tuple[str, Cell]]:
        """Runs without a result, of rows that have one of these names, or a part of one: headlines first, then seed by
        seed."""
        texts = [text for text in names if text not in self.rows]
        rows = {name: cell for name, cell in self.rows.items()
                if can_run(cell) and (name in names or any(t in name for t in texts))}  # fmt: skip
        order = [(name, seed) for name in rows if name in self.headlines for seed in seeds or self.headlines[name]]
        order += [(name, seed) for seed in seeds or SEEDS for name in rows if name not in self.headlines]
        cells = [(name, replace(rows[name], seed=seed)) for name, seed in order]
        return [(name, cell) for name, cell in cells if cell.key not in self.results]

    def run(self, missing: Sequence[tuple[str, Cell]], processes: int) -> None:
        """Results are added to the file one by one, so that an interrupted study goes on where it was."""
        check_corpus(self.path, self.results)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            names = {pool.submit(_run, self.path, cell): f"{name}, seed {cell.seed}" for name, cell in missing}
            for done in as_completed(names):
                print(f"{names[done]}: {done.result():.4f}", flush=True)


def _run(path: Path, cell: Cell) -> float:
    """The final loss."""
    result = train(cell)
    append(path, result)
    return result["final"]


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--rows", nargs="+", default=[""], metavar="TEXT", help="their names, or a part of them")
    parser.add_argument("--seeds", nargs="+", type=int, help="1 2 3, and more for headlines, unless given")
    parser.add_argument("--list", action="store_true", help="say what is to be run, and end")
    return parser


def main(study: Study, args: argparse.Namespace) -> None:
    missing = study.wanted(args.rows, args.seeds)
    for name, cell in missing:
        print(f"to run: {name}, seed {cell.seed}", flush=True)
    if not args.list:
        study.run(missing, args.processes)
