"""What a change of settings in mid-run does to the loss: real training, replicas in turn in one process.

No link is needed: the replicas wish at half of the run what the autopilot wishes on a link that drops to a third or
doubles, and agree on it as they do over a link.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.record import Record
from diloco import DiLoCo, Nesterov
from diloco.fragment import fragmenter
from diloco.reduce import local
from diloco.terms import Terms
from diloco.train.data.corpus import Corpus, prepare
from studies.parity.cell import Cell
from studies.parity.run import _Loop

NOISE = 0.009
"""Half the width of the parity study's interval for the trainer's defaults, two seeds (docs/parity.md)."""
SEEDS = 2
STEPS = 480
FAST, SLOW = (16, 1), (48, 3)
"""(sync_every, overlap) on a link, and on one of a third of its rate: ten rounds at least in so short a run."""


@dataclass(frozen=True)
class Flight:
    """The settings of a run, and those from its middle on."""

    first: tuple[int, int]
    then: tuple[int, int] | None = None


FLIGHTS = {
    "as for the faster link": Flight(FAST),
    "as for the slower link": Flight(SLOW),
    "the link drops to a third": Flight(FAST, SLOW),
    "the link triples": Flight(SLOW, FAST),
}


def losses(quick: bool) -> Record:
    """The loss of each flight, over seeds; of those that change, how far above the mean of the fixed ones."""
    steps, seeds = (60, 1) if quick else (STEPS, SEEDS)
    text = prepare((), "bytes")
    found = {name: [fly(flight, steps, seed, text) for seed in range(seeds)] for name, flight in FLIGHTS.items()}
    fixed = [fmean(found[name]) for name, flight in FLIGHTS.items() if flight.then is None]
    out: Record = {}
    for name, flight in FLIGHTS.items():
        if flight.then is not None:
            mean = fmean(found[name])
            above = mean / fmean(fixed) - 1
            out[name] = {"loss": mean, "fixed": fixed, "above": above, "seeds": seeds, "steps": steps}
    return out


def fly(flight: Flight, steps: int, seed: int, text: Corpus) -> float:
    cell = Cell(width=32, lr=0.0113, inner="muon", outer="growing", steps=steps, seed=seed)

    def replica(reduce: local.Local) -> Any:
        loop = _Loop(cell, text, reduce.replica)
        sync_every, overlap = flight.first
        diloco = DiLoCo(loop.model, loop.optimizers, sync_every=sync_every, overlap="auto", outer=Nesterov(),
                        fragments=fragmenter(cell.fragments), reduce=reduce)  # fmt: skip
        diloco.tuning.begin_with(overlap)
        with diloco:
            for t in range(1, steps + 1):
                if flight.then is not None and t == steps // 2:
                    diloco.tuning.wish = Terms(flight.then[0], "e3m0")
                    diloco.tuning.begin_with(flight.then[1])
                loop.step(t)
        return loop.loss(cell.evaluated) if reduce.replica == 0 else None

    return local.run(2, replica)[0]
