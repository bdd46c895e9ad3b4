"""How short runs end: with few rounds, with no learning rate left, and with what `finish()` leaves.

python -m studies.parity.endings adds the missing lines of endings.jsonl, some minutes of a core;
python -m studies.parity.page writes them into docs/parity.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import nan
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


def section(results: Results) -> str:
    """What was measured; a row wants all of its seeds."""
    rows: list[tuple[Inner, str]] = [(inner, decay) for inner in INNERS for decay in DECAYS
            if all(short.key in results for outer in RULES for short in schedules(inner, decay, outer))]  # fmt: skip
    ends = [short for short in FINISHES if {short.key, _stepped(short).key} <= results.keys()]
    few = [name for name, short in FEW.items() if short.key in results]
    missing = len(INNERS) * len(DECAYS) - len(rows) + len(FINISHES) - len(ends) + len(FEW) - len(few)
    left = f"; {missing} rows are not measured yet" if missing else ""
    parts = [_schedules(rows, results) if rows else "", _finishes(ends, results) if ends else "", _codecs(few, results)]
    return "\n\n".join((*(part.strip() for part in parts), f"`python -m studies.parity.endings` measures these{left}."))


def _loss(inner: Inner, decay: str, outer: str, results: Results) -> float:
    return fmean(results[short.key]["final"] for short in schedules(inner, decay, outer))


def _over(inner: Inner, decay: str, outer: str, results: Results) -> float:
    """Percent above training alone."""
    return 100 * (_loss(inner, decay, outer, results) / _loss(inner, decay, ALONE, results) - 1)


def _schedules(rows: list[tuple[Inner, str]], results: Results) -> str:
    worst, early, fixed = (max(_over(*row, outer, results) for row in rows) for outer in RULES[1:])
    lost = max(_over(*row, EARLY, results) - _over(*row, DEFAULT, results) for row in rows)
    lines = []
    for inner, decay in rows:
        losses = [f"{_loss(inner, decay, outer, results):.3f}" for outer in RULES]
        over = [f"{_over(inner, decay, outer, results):+.1f}" for outer in RULES[1:]]
        lines.append((INNERS[inner], DECAYS[decay], *losses, *over))
    rules = ("default rule", EARLY, f"fixed {FIXED}")
    head = ("inner", "learning rate", "alone", *rules, *(f"{rule}: to alone, %" for rule in rules))
    return f"""
**The learning rate ends.** Two replicas of 0.09M parameters, 300 steps, sync_every 30, beside one of them alone, which
sees half of the data; mean of {len(SEEDS)} seeds. A fixed momentum is late, and runs on when the learning rate is gone:
it ends up to {fixed:+.1f} % from training alone. With the default rule, which in these ten rounds is plain averaging,
the worst is {worst:+.1f} %; with momentum from the first round on, which follows the learning rate, {early:+.1f} %, but
that ends up to {lost:.1f} points above the default rule where AdamW trains.

{table(head, lines)}
"""


def _better(short: Short, results: Results) -> float:
    """The lower loss of the anchors before the last round and of the mean of the replicas."""
    found = results[replace(short, ending="mean").key]
    return min(found["anchors"], found["mean"])


def _stepped(short: Short) -> Short:
    return replace(short, ending="step")


def _lost(short: Short, results: Results) -> float:
    return 100 * (results[short.key]["final"] / _better(short, results) - 1)


def _finishes(ends: list[Short], results: Results) -> str:
    lost, before = max(_lost(short, results) for short in ends), max(_lost(_stepped(short), results) for short in ends)
    lines = []
    for short in ends:
        found, stepped = results[short.key], _stepped(short)
        losses = (found["anchors"], found["mean"], found["final"], results[stepped.key]["final"])
        lines.append((short.outer, DECAYS[short.decay], *(f"{loss:.4f}" for loss in losses),
                      f"{_lost(short, results):+.2f}", f"{_lost(stepped, results):+.2f}"))  # fmt: skip
    head = ("outer rule", "learning rate", "anchors", "mean", "after finish()", "after an outer step",
            "finish() to the better, %", "step to the better, %")  # fmt: skip
    return f"""
**What `finish()` leaves.** 0.82M parameters, AdamW at 0.002, 190 steps, sync_every 20, two fragments; one seed. In the
last round the anchors become the mean of the replicas, within what four bits lose. That ends at most {lost:+.2f} % from
the better of the anchors before it and the mean; a step of the outer rule, as in every other round, up to
{before:+.2f} %. A round that is under way when `finish()` is called ends by the outer rule, like those before it: with
a fixed momentum of 0.9 and no learning rate left (AdamW, to 0 at half of the run) that alone costs
{_under_way(results)}.

{table(head, lines)}
"""


def _under_way(results: Results) -> str:
    shorts = [short for short in schedules("adamw", "half", FIXED) if short.key in results]
    return f"{fmean(_lost(short, results) for short in shorts):+.1f} %" if shorts else "more"


def _codecs(few: list[str], results: Results) -> str:
    losses = {name: results[FEW[name].key]["final"] for name in few}
    usual = losses.get("4 bits (E3M0), default rule", nan)
    lines = [(name, f"{loss:.3f}", f"{100 * (loss / usual - 1):+.1f}") for name, loss in losses.items()]
    return f"""
**Few rounds.** 0.09M parameters, AdamW, learning rate linear to 0, {_few.steps} steps, sync_every {_few.sync_every}:
{_few.steps // _few.sync_every} rounds; one seed. Top-k sends one value in 64, so in 40 rounds a replica sends at most
five values of eight: it is for runs of many hundred rounds.

{table(("what is sent", "loss", "to 4 bits with the default rule, %"), lines)}
"""


if __name__ == "__main__":
    main()
