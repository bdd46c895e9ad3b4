"""A cell: everything that makes one training run, and the key under which its result is kept."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Literal

from diloco.runs.presets import Shape

SHAPES = {
    width: Shape(layers=6, width=width, heads=heads, mlp=3 * width, vocabulary=257, tied=True)
    for width, heads in ((16, 1), (32, 1), (64, 2), (112, 4), (128, 4))
}
BATCH = 32
"""Sequences of a step, all replicas together. With a quarter of it the replicas' steps are mostly noise, and rounding
alone moves the final loss by 1 %."""
CONTEXT = 64
EVALUATED = 131_072
STEPS = 3000
"""100 rounds of each fragment at sync_every=30: fewer say nothing about outer momentum."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    width: int = 64
    replicas: int = 2
    """0: data-parallel, one model on the complete batch."""
    lr: float
    outer_lr: float = 0.0
    momentum: float = 0.5
    sync_every: int = 30
    fragments: str = "strided:3"
    """As in the trainer's flag; balanced:1 is the complete model at once."""
    overlap: int = 1
    overlap_of_last: int | None = None
    """Overlap of the last replica, where it differs."""
    keep_local: float = 0.0
    codec: str = "e3m0"
    second: str | None = None
    """Codec of the mean on its way back, which 4 and more replicas encode again; None: the same."""
    freeze: bool = False
    """Train only the fragment that is sent next (the paper's negative control)."""
    steps: int = STEPS
    seed: int = 0
    inner: Literal["adamw", "muon"] = "adamw"
    """Inner optimizer, as in the trainer's flag."""
    outer: str = "paper"
    """paper: Nesterov with `outer_lr` and `momentum`; following: the same, and it follows the inner lr; growing: the
    trainer's default, which reads neither; capped: the trainer's, which grows to these two; sgd: with `outer_lr`."""
    batch: int = 1
    """Times BATCH; with as many times fewer steps the tokens are equal."""
    evaluated: int = EVALUATED
    """Held-out tokens behind the final loss."""
    tail: int = 0
    """Last steps on whose mean of weights data-parallel is evaluated, at the end and on the way; 0: the last one's."""

    def __str__(self) -> str:
        """What differs from the default, for people."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return " ".join(f"{name}={value}" for name, value in given.items())

    @property
    def key(self) -> str:
        return _key(self)


LATER = ("inner", "outer", "batch", "evaluated", "tail")


@cache
def _key(cell: Cell) -> str:
    """Settings that came later count only where they are not at their default, so that earlier results keep theirs."""
    default = {f.name: f.default for f in fields(cell)}
    known = {name: value for name, value in asdict(cell).items() if name not in LATER or value != default[name]}
    everything = [known, asdict(SHAPES[cell.width]), BATCH, CONTEXT]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:16]


def data_parallel(*, lr: float, width: int = 64, steps: int = STEPS, seed: int = 0) -> Cell:
    """What only sync would read has one value, so that equal runs have equal keys."""
    return Cell(
        width=width, replicas=0, lr=lr, momentum=0, overlap=0, codec="float32", fragments="balanced:1", steps=steps,
        seed=seed,
    )  # fmt: skip
