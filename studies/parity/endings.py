"""How short runs end: with few rounds, with no learning rate left, and with what `finish()` leaves.

python -m studies.parity.endings adds the missing lines of endings.jsonl, some minutes of a core;
python -m studies.parity.page writes them into docs/parity.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.record import table
from studies.parity.results import Results, load, once
from studies.parity.run import check_corpus
from studies.parity.short import Inner, Short, train

PATH = Path(__file__).parent / "endings.jsonl"
SEEDS = (1, 2)
INNERS: dict[Inner, str] = {"adamw": "AdamW", "muon": "Muon"}
RULES = ALONE, DEFAULT, EARLY, FIXED = "alone", "default", "0.67/0.5, following", "0.4/0.9"
DECAYS = {"constant": "constant", "linear": "linear to 0", "half": "to 0 at half of the run"}
FINISHES = [
    Short(size="0.82M", lr=0.002, sync_every=20, fragments="balanced:2", outer=outer, decay=decay, steps=190)
    for outer, decay in (("0.7/0.9", "constant"), ("0.4/0.9", "constant"), ("0.7/0.5", "constant"),
                         ("0.4/0.9", "linear"), (DEFAULT, "constant"), (DEFAULT, "linear"))
]  # fmt: skip
"""At the end of the 190 steps one of the two fragments was just sent, the other ten steps ago."""


_few = Short(steps=200, sync_every=5, decay="linear")
FEW = {
    "one replica alone": replace(_few, outer=ALONE),
    "4 bits (E3M0), default rule": _few,
    "4 bits (E3M0), plain averaging": replace(_few, outer="sgd"),
    "2 bits with feedback 0.9, default rule": replace(_few, codec="twobit"),
    "top-k with feedback 0.95, plain averaging": replace(_few, codec="topk", outer="sgd"),
}
"""Codecs in a run of 40 rounds."""


def schedules(inner: Inner, decay: str, outer: str) -> list[Short]:
    return [Short(inner=inner, decay=decay, outer=outer, seed=seed) for seed in SEEDS]


def wanted() -> Iterator[Short]:
    yield from FEW.values()
    for inner in INNERS:
        for decay in DECAYS:
            for outer in RULES:
                yield from schedules(inner, decay, outer)
    for short in FINISHES:
        yield short
        yield _stepped(short)


def main() -> None:
    torch.set_num_threads(1)
    check_corpus(PATH, load(PATH))
    for short in wanted():
        if result := once(PATH, short.key, partial(train, short)):
            print(short, f"{result['final']:.4f}", flush=True)


def schedules_table(results: Results) -> str:
    lines = []
    for inner in INNERS:
        for decay in DECAYS:
            losses = [f"{_loss(inner, decay, outer, results):.3f}" for outer in RULES]
            over = [f"{_over(inner, decay, outer, results):+.1f}" for outer in RULES[1:]]
            lines.append((INNERS[inner], DECAYS[decay], *losses, *over))
    rules = ("default rule", EARLY, f"fixed {FIXED}")
    head = ("inner", "learning rate", "alone", *rules, *(f"{rule}: to alone, %" for rule in rules))
    return table(head, lines)


def _loss(inner: Inner, decay: str, outer: str, results: Results) -> float:
    return fmean(results[short.key]["final"] for short in schedules(inner, decay, outer))


def _over(inner: Inner, decay: str, outer: str, results: Results) -> float:
    """Percent above training alone."""
    return 100 * (_loss(inner, decay, outer, results) / _loss(inner, decay, ALONE, results) - 1)


def _better(short: Short, results: Results) -> float:
    """The lower loss of the anchors before the last round and of the mean of the replicas."""
    found = results[replace(short, ending="mean").key]
    return min(found["anchors"], found["mean"])


def _stepped(short: Short) -> Short:
    return replace(short, ending="step")


def _lost(short: Short, results: Results) -> float:
    return 100 * (results[short.key]["final"] / _better(short, results) - 1)


def finishes_table(results: Results) -> str:
    lines = []
    for short in FINISHES:
        found, stepped = results[short.key], _stepped(short)
        losses = (found["anchors"], found["mean"], found["final"], results[stepped.key]["final"])
        lines.append((short.outer, DECAYS[short.decay], *(f"{loss:.4f}" for loss in losses),
                      f"{_lost(short, results):+.2f}", f"{_lost(stepped, results):+.2f}"))  # fmt: skip
    head = ("outer rule", "learning rate", "anchors", "mean", "after finish()", "after an outer step",
            "finish() to the better, %", "step to the better, %")  # fmt: skip
    return table(head, lines)


def codecs_table(results: Results) -> str:
    losses = {name: results[short.key]["final"] for name, short in FEW.items()}
    usual = losses["4 bits (E3M0), default rule"]
    lines = [(name, f"{loss:.3f}", f"{100 * (loss / usual - 1):+.1f}") for name, loss in losses.items()]
    return table(("what is sent", "loss", "to 4 bits with the default rule, %"), lines)


if __name__ == "__main__":
    main()
