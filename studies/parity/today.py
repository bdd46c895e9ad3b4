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
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.record import table
from studies.parity.cell import EVALUATED, Cell, data_parallel
from studies.parity.claims import percent, signed
from studies.parity.paired import MANY
from studies.parity.results import Results, append, claim, load
from studies.parity.rows import DP, NAMED, STREAMING
from studies.parity.rows import WIDTH as NARROWER
from studies.parity.run import check_corpus, train
from studies.parity.spread import Spread, spread
from studies.parity.tuning import tuned

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
ADAMW, MUON, DEFAULTS = "data-parallel, AdamW", "data-parallel, Muon", "streaming, Muon: the trainer's defaults"
E3M0, TWO_BITS, TOPK = (f"streaming, Muon, {how}" for how in (
    "E3M0 with feedback 0.9", "2 bits with feedback 0.9", "top-k with feedback 0.95, outer SGD"))  # fmt: skip
AVERAGED = f"data-parallel, Muon, mean of the last {TAIL} steps' weights"


def _larger(cell: Cell, batch: int) -> Cell:
    """A larger batch at equal tokens; the learning rate grows with its root."""
    return replace(cell, batch=batch, steps=cell.steps // batch, lr=round(cell.lr * batch**0.5, 4))


def at_batch(batch: int, name: str) -> str:
    return name if batch == 1 else f"batch × {batch}: {name}"


ROWS: dict[str, Cell] = {
    DEFAULTS: _muon,
    ADAMW: _dp,
    MUON: replace(_dp, inner="muon"),
    "streaming, AdamW": _streaming,
    TWO_BITS: replace(_muon, codec="twobit", feedback=0.9),
    TOPK: replace(_muon, codec="topk", feedback=0.95, outer="sgd", outer_lr=1.0),
    E3M0: replace(_muon, feedback=0.9),
    "streaming, Muon, 3 bits": replace(_muon, codec="threebit"),
    "streaming, Muon, 3 bits with feedback 0.9": replace(_muon, codec="threebit", feedback=0.9),
    "streaming, Muon, outer 0.7/0.5": replace(_fixed, outer="paper"),
    "streaming, Muon, outer 0.7/0.5 that follows the lr": _fixed,
    "streaming, Muon, outer 0.28/0.9 that follows the lr": replace(_fixed, outer_lr=0.28, momentum=0.9),
    "streaming, Muon, M = 4": replace(_muon, replicas=4),
    "streaming, Muon, M = 4, outer 1/0.5": replace(_fixed, replicas=4, outer_lr=1.0),
    "streaming, Muon, M = 8": replace(_muon, replicas=8),
    "streaming, Muon, M = 8, outer 1.41/0.5": replace(_fixed, replicas=8, outer_lr=1.41),
    "streaming, Muon, overlap 5": replace(_muon, overlap=5),
    AVERAGED: replace(_dp, inner="muon", tail=TAIL),
    **{
        at_batch(batch, name): _larger(cell, batch)
        for batch in (2, 4)
        for name, cell in ((DEFAULTS, _muon), (MUON, replace(_dp, inner="muon")), (ADAMW, _dp))
    },
}
"""The most important first. An outer rule 0.7/0.5 has the learning rate 0.7 and momentum 0.5."""
HEADLINES = (DEFAULTS, ADAMW, MUON)

GROWING = replace(_streaming, width=NARROWER, evaluated=EVALUATED)
"""With AdamW inside, at the width of the first part's rows."""


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
        runs = {pool.submit(run, cell): f"{name}, seed {cell.seed}" for name, cell in missing}
        for done in as_completed(runs):
            final = done.result()
            print(f"{runs[done]}: {'elsewhere' if final is None else f'{final:.4f}'}", flush=True)


def wanted(known: Results, rows: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, Cell]]:
    """Runs without a result, the most important first: all seeds of the headlines, then one seed of all rows."""
    named = [(name, cell) for name, cell in (ROWS | {"growing": GROWING}).items() if any(text in name for text in rows)]
    order = [(name, replace(cell, seed=seed)) for name, cell in named if name in HEADLINES for seed in seeds]
    order += [(name, replace(cell, seed=seed)) for seed in seeds for name, cell in named if name not in HEADLINES]
    return [(name, cell) for name, cell in order if cell.key not in known]


def run(cell: Cell) -> float | None:
    """The final loss, or None where another process does or has done this run."""
    with claim(cell.key) as mine:
        if not mine or cell.key in load(PATH):
            return None
        result = train(cell)
        append(PATH, result)
        return result["final"]


def gap(row: str, against: str, results: Results, what: str = "final", of: str = "final") -> Spread | None:
    """Difference in percent of the loss, paired by seed, with the Student interval of the differences."""
    ours, theirs = ROWS[row], ROWS[against]
    pairs = [(replace(ours, seed=seed).key, replace(theirs, seed=seed).key) for seed in range(1, MANY + 1)]
    found = [100 * (results[a][what] / results[b][of] - 1) for a, b in pairs if a in results and b in results]
    return spread(found) if found else None


def _bits(result: dict[str, Any]) -> float:
    """Sent for each parameter in a round, the last one of `finish()` included."""
    rounds = result["cell"]["steps"] / result["cell"]["sync_every"] + 1
    return 8 * result["bytes_sent"] / result["parameters"] / rounds


def summary(results: Results, first: Results) -> str:
    below, own, growing = gap(DEFAULTS, ADAMW, results), gap(DEFAULTS, MUON, results), growth(results, first)
    return f"""
With the trainer's defaults (Muon inside, an outer rule that grows with the rounds and follows the inner learning rate,
overlap 1, 4 bits) two replicas of 0.34M parameters end {percent(below)} from data-parallel training with AdamW, and
{percent(own)} from data-parallel training with Muon. The outer rule alone, with AdamW inside, at 0.09M parameters:
{percent(growing[DP])} from data-parallel, {percent(growing[STREAMING])} from the fixed rule of 0.7 and momentum 0.5.
Below 0 is better. Intervals are of 95 %, by Student's distribution, of the seeds that were run: with two seeds they
are wide, and with one there is none.
"""


def settings(results: Results) -> str:
    there = next(iter(results.values()))["on"] if results else {}
    hours = sum(result["cpu_seconds"] for result in results.values()) / 3600
    return f"""
Width 64, M = 2, sync_every 30, 3000 steps, the model, data and schedule of the second part; learning rate {LR:g} for
all, the best of AdamW's grid; for Muon, whose updates have the size of AdamW's, √2 times as much was tried and was no
better. Losses are in nats a byte on all of the held-out text (0.6 MB). {len(results)} runs, {hours:.1f} hours of one
core ({there.get("cpu", "")}); `python -m studies.parity.today` goes on where it was stopped. Not run yet are rows
without a loss.
"""


def section(results: Results) -> str:
    lines = [_line(name, cell, results) for name, cell in ROWS.items()]
    head = ("row", "seeds", "loss", "to data-parallel AdamW, %", "to data-parallel Muon, %", "to the defaults, %",
            "bits sent a parameter and round")  # fmt: skip
    return table(head, lines)


def _line(name: str, cell: Cell, results: Results) -> tuple[str, ...]:
    seeds = [key for seed in range(1, MANY + 1) if (key := replace(cell, seed=seed).key) in results]
    if not seeds:
        return name, "0", "not run", "", "", "", ""
    others = [at_batch(cell.batch, other) for other in (ADAMW, MUON, DEFAULTS)]
    gaps = [gap(name, other, results) if name != other else None for other in others]
    shown = ["" if one is None else signed(one) for one in gaps]
    bits = f"{fmean(_bits(results[key]) for key in seeds):.2f}" if cell.replicas else ""
    return name, str(len(seeds)), f"{fmean(results[key]['final'] for key in seeds):.4f}", *shown, bits


def growth(results: Results, first: Results) -> dict[str, Spread | None]:
    """The outer rule that grows, with AdamW inside at the first part's width, against rows of the first part."""
    gaps: dict[str, Spread | None] = {}
    for name in (DP, STREAMING):
        cell = tuned(NAMED[name], first)[0]
        if cell is None:
            continue
        pairs = [(replace(GROWING, seed=seed).key, replace(cell, seed=seed).key) for seed in range(1, MANY + 1)]
        found = [100 * (results[a]["final"] / first[b]["final"] - 1) for a, b in pairs if a in results and b in first]
        gaps[name] = spread(found) if found else None
    return gaps


if __name__ == "__main__":
    main()
