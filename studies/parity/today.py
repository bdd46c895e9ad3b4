"""The second part: what the trainer does today, Muon inside and an outer rule that grows, beside data-parallel.

Its runs are lines of today.jsonl: python -m studies.parity.today. Learning rates are AdamW's best of the first part;
for Muon, whose updates have the size of AdamW's, √2 times as much was tried and was no better.
"""

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.record import table
from studies.parity.cell import Cell, data_parallel
from studies.parity.paired import MANY
from studies.parity.results import Results, load, once
from studies.parity.run import check_corpus, train
from studies.parity.spread import Bar, Noise, Spread, residual, signed, spread

PATH = Path(__file__).parent / "today.jsonl"
ALL = 1 << 21
"""More than all of the held-out text, which has 0.6 MB."""
SEEDS = 3
LR = 0.0113
TAIL = 60
_dp = replace(data_parallel(lr=LR), evaluated=ALL)
_streaming = Cell(lr=LR, momentum=0, outer="growing", evaluated=ALL)
_muon = replace(_streaming, inner="muon")
_fixed = replace(_muon, outer="following", outer_lr=0.7, momentum=0.5)
ADAMW, MUON, DEFAULTS = "data-parallel, AdamW", "data-parallel, Muon", "the trainer's defaults"
SAME, LARGEST = "defaults with AdamW", "1M parameters"
TWO_BITS, TOPK = "defaults, 2 bits", "defaults, top-k"
ONE, FOUR, EIGHT = (f"defaults, M = {replicas}" for replicas in (1, 4, 8))
KEPT, KEPT_MUON = f"{FOUR}, twice the batch and the tokens", f"{MUON}, twice the batch and the tokens"
AVERAGED = f"data-parallel, Muon, mean of the last {TAIL} steps' weights"


def _larger(cell: Cell, batch: int) -> Cell:
    """A larger batch at equal tokens; the learning rate grows with its root."""
    return replace(cell, batch=batch, steps=cell.steps // batch, lr=round(cell.lr * batch**0.5, 4))


def at_batch(batch: int, name: str) -> str:
    return name if batch == 1 else f"batch × {batch}: {name}"


def _largest(cell: Cell) -> Cell:
    """20 bytes for each of 1.0M parameters. The learning rate is that of width 64: it was not tuned again."""
    return replace(cell, width=112, batch=2, steps=4920)


def as_large(cell: Cell, name: str) -> str:
    """The row of this name with the size and the batch of the cell."""
    return at_batch(cell.batch, name) if cell.width == _muon.width else f"{LARGEST}: {name}"


ROWS: dict[str, Cell] = {
    DEFAULTS: _muon,
    ADAMW: _dp,
    MUON: replace(_dp, inner="muon"),
    SAME: _streaming,
    TWO_BITS: replace(_muon, codec="twobit"),
    f"{TWO_BITS}, sync_every 70": replace(_muon, codec="twobit", sync_every=70),
    f"{TWO_BITS}, sync_every 270": replace(_muon, codec="twobit", sync_every=270),
    TOPK: replace(_muon, codec="topk"),
    "defaults, outer 0.7/0.5": replace(_fixed, outer="paper"),
    "defaults, outer 0.7/0.5 that follows the lr": _fixed,
    "defaults, outer 0.28/0.9 that follows the lr": replace(_fixed, outer_lr=0.28, momentum=0.9),
    "defaults, overlap 5": replace(_muon, overlap=5),
    ONE: replace(_muon, replicas=1),
    FOUR: replace(_muon, replicas=4),
    f"{FOUR}, outer 1/0.5": replace(_fixed, replicas=4, outer_lr=1.0),
    EIGHT: replace(_muon, replicas=8),
    f"{EIGHT}, outer 1.41/0.5": replace(_fixed, replicas=8, outer_lr=1.41),
    f"{EIGHT}, outer 1/0 to 0.9/0.8": replace(_muon, replicas=8, outer="capped", outer_lr=0.9, momentum=0.8),
    f"{EIGHT}, weight decay ÷ 8": replace(_muon, replicas=8, decay=1 / 8),
    f"{EIGHT}, mean sent in bfloat16": replace(_muon, replicas=8, second="bfloat16"),
    f"{EIGHT}, sync_every 12": replace(_muon, replicas=8, sync_every=12),
    KEPT: replace(_muon, replicas=4, batch=2),
    KEPT_MUON: replace(_dp, inner="muon", batch=2),
    f"{KEPT_MUON}, lr × √2": replace(_dp, inner="muon", batch=2, lr=0.016),
    AVERAGED: replace(_dp, inner="muon", tail=TAIL),
    **{
        at_batch(batch, name): _larger(cell, batch)
        for batch in (2, 4)
        for name, cell in ((DEFAULTS, _muon), (MUON, replace(_dp, inner="muon")), (ADAMW, _dp))
    },
    **{
        f"{LARGEST}: {name}": _largest(cell)
        for name, cell in ((DEFAULTS, _muon), (ADAMW, _dp), (MUON, replace(_dp, inner="muon")))
    },
}
"""The most important first."""
HEADLINES = (DEFAULTS, ADAMW, MUON)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", default=[""], metavar="TEXT", help="rows with one of these in the name")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1, SEEDS + 1)), help="1 2 3 unless given")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--list", action="store_true", help="say what is to be run, and end")
    args = parser.parse_args()
    known = load(PATH)
    check_corpus(PATH, known)
    missing = wanted(known, args.rows, args.seeds)
    for name, cell in missing:
        print(f"to run: {name}, seed {cell.seed}", flush=True)
    if args.list:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        names = {pool.submit(run, cell): f"{name}, seed {cell.seed}" for name, cell in missing}
        for done in as_completed(names):
            final = done.result()
            print(f"{names[done]}: {'elsewhere' if final is None else f'{final:.4f}'}", flush=True)


def wanted(known: Results, rows: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, Cell]]:
    """Runs without a result, the most important first: all seeds of the headlines, then one seed of all rows."""
    named = [(name, cell) for name, cell in ROWS.items() if any(text in name for text in rows)]
    order = [(name, replace(cell, seed=seed)) for name, cell in named if name in HEADLINES for seed in seeds]
    order += [(name, replace(cell, seed=seed)) for seed in seeds for name, cell in named if name not in HEADLINES]
    return [(name, cell) for name, cell in order if cell.key not in known]


def run(cell: Cell) -> float | None:
    """The final loss, or None where another process does or has done this run."""
    result = once(PATH, cell.key, lambda: train(cell))
    return None if result is None else result["final"]


def gap(row: str, against: str, results: Results) -> Spread | None:
    """Difference in percent of the loss, paired by seed."""
    found = differences(row, against, results)
    return spread(found, noise(row, against, results)) if found else None


def differences(row: str, against: str, results: Results) -> list[float]:
    return [100 * (ours["final"] / theirs["final"] - 1) for ours, theirs in _pairs(row, against, results)]


def _pairs(row: str, against: str, results: Results) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    ours, theirs = runs(row, results), runs(against, results)
    return [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]


def runs(row: str, results: Results) -> dict[int, dict[str, Any]]:
    """By seed."""
    keys = {seed: replace(ROWS[row], seed=seed).key for seed in range(1, MANY + 1)}
    return {seed: results[key] for seed, key in keys.items() if key in results}


def noise(row: str, against: str, results: Results) -> Noise | None:
    """Of a paired difference in percent. Rows that are alike share it: few differences alone say little about it."""
    inners = {ROWS[row].inner, ROWS[against].inner}
    alike = [name for name, cell in ROWS.items() if _is_plain(cell) and cell.inner in inners]
    if not {row, against} <= set(alike):
        return None
    return residual({(name, seed): 100 * log(result["final"])
                     for name in alike for seed, result in runs(name, results).items()})  # fmt: skip


def _is_plain(cell: Cell) -> bool:
    """Of one size and batch, and of the weights after the last step: a mean of weights varies with the run it is of."""
    return cell.width == _muon.width and cell.batch == 1 and not cell.tail


def _bits(result: dict[str, Any]) -> float:
    """Sent for each parameter in a round. What `finish()` sends makes up for the first period, in which some wait."""
    rounds = result["cell"]["steps"] / result["cell"]["sync_every"]
    return 8 * result["bytes_sent"] / result["parameters"] / rounds


def bars(results: Results) -> list[Bar]:
    return [
        Bar("the defaults, to data-parallel AdamW", gap(DEFAULTS, ADAMW, results), high=-1.5),
        Bar(f"the same with {LARGEST}", gap(f"{LARGEST}: {DEFAULTS}", f"{LARGEST}: {ADAMW}", results), high=-1.5),
        Bar("the defaults, to data-parallel Muon", gap(DEFAULTS, MUON, results), high=0.5),
        Bar("the defaults with AdamW, to data-parallel AdamW", gap(SAME, ADAMW, results), high=0.5),
        Bar("four replicas, to data-parallel Muon", gap(FOUR, MUON, results), high=1.0),
        Bar("eight replicas, to data-parallel Muon", gap(EIGHT, MUON, results), high=2.0),
        Bar("2 bits, to 4 bits", gap(TWO_BITS, DEFAULTS, results), high=0.2),
        Bar("top-k, to 4 bits", gap(TOPK, DEFAULTS, results), high=1.0),
    ]


def rows(results: Results) -> str:
    lines = [_line(name, cell, results) for name, cell in ROWS.items() if runs(name, results)]
    return table(("row", "seeds", "loss", "to data-parallel Muon, %", "to the defaults, %", "bits"), lines)


def _line(name: str, cell: Cell, results: Results) -> tuple[str, ...]:
    found = runs(name, results).values()
    others = [as_large(cell, other) for other in (MUON, DEFAULTS)]
    gaps = [gap(name, other, results) if name != other else None for other in others]
    shown = ["" if one is None else signed(one) for one in gaps]
    bits = f"{fmean(_bits(result) for result in found):.3g}" if cell.replicas else ""
    return name, str(len(found)), f"{fmean(result['final'] for result in found):.4f}", *shown, bits


if __name__ == "__main__":
    main()
