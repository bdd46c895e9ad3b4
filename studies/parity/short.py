"""One short run: two replicas in one process (`diloco.reduce.local`), with the model and the data of the other runs.

The learning rate may end before the run does, and the last round may be any other one: what `finish()` could do is
measured beside what it does.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.record import machine
from diloco.codec import codec_named
from diloco.diloco import DiLoCo
from diloco.fragment import fragmenter
from diloco.outer import SGD, Nesterov, Outer
from diloco.presets import Shape
from diloco.reduce import local
from diloco.runs.config import TrainConfig
from diloco.train.data.corpus import prepare
from diloco.train.model import Decoder, held_out_loss
from diloco.train.setup import optimizers, set_lr
from studies.parity.cell import CONTEXT, SHAPES
from studies.parity.run import corpus

Inner = Literal["adamw", "muon"]
REPLICAS, BATCH = 2, 16
"""Sequences of a replica's step."""
SIZES: dict[str, Shape] = {
    "0.09M": SHAPES[32],
    "0.82M": Shape(layers=4, width=128, heads=4, mlp=336, vocabulary=257, tied=True),
}
RULES: dict[str, Outer] = {
    "default": Nesterov(),
    "0.67/0.5, following": Nesterov(2 / 3, 0.5),
    "0.7/0.9": Nesterov(0.7, 0.9, follow=False),
    "0.4/0.9": Nesterov(0.4, 0.9, follow=False),
    "0.7/0.5": Nesterov(0.7, 0.5, follow=False),
    "sgd": SGD(),
}


@dataclass(frozen=True, kw_only=True)
class Short:
    size: str = "0.09M"
    outer: str = "default"
    """A name of RULES, or "alone": one replica without the other."""
    lr: float = 0.008
    decay: str = "constant"
    """The learning rate after the warm-up: constant; linear to 0; half: linear to 0 at half of the run."""
    inner: Inner = "adamw"
    steps: int = 300
    sync_every: int = 30
    fragments: str = "strided:3"
    codec: str = "e3m0"
    ending: Literal["mean", "step"] = "mean"
    """How the last round ends: as all replicas together do, or with a step of the outer rule."""
    evaluated: int = 1 << 16
    seed: int = 1

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def lr_at(self, step: int) -> float:
        left = {"constant": 1.0, "linear": 1 - step / self.steps, "half": max(1 - 2 * step / self.steps, 0.0)}
        return self.lr * min(10 * step / self.steps, 1.0) * left[self.decay]


def train(short: Short) -> dict[str, Any]:
    """Losses in nats a byte: `final` is of the model that a user would export."""
    alone = short.outer == "alone"
    run = _alone if alone else _together
    found = local.run(1 if alone else REPLICAS, lambda reduce: run(_Replica(short, reduce.replica), reduce))
    losses = {"final": found[0]["final"]}
    if not alone and short.ending == "mean":
        losses |= _losses([each["weights"] for each in found], found[0]["anchors"], _Replica(short, 0))
    return {"key": short.key, "short": asdict(short), "corpus": corpus(), "on": machine(), **losses}


class _Replica:
    """Model, optimizers and data of one replica."""

    def __init__(self, short: Short, replica: int) -> None:
        self.short, text = short, prepare((), "bytes")
        self.model = Decoder(SIZES[short.size], CONTEXT)
        self.model.initialize(torch.Generator().manual_seed(short.seed))
        self.optimizers = optimizers(self.model, TrainConfig(lr=short.lr, weight_decay=0.0, inner=short.inner))
        self.data = text.batches(replica, REPLICAS, BATCH, CONTEXT, short.seed)
        self.held_out = text.evaluation(CONTEXT, short.evaluated)

    def train(self) -> None:
        for step in range(1, self.short.steps + 1):
            set_lr(self.optimizers, self.short.lr_at(step))
            self.model(*self.data.next()).loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    def loss(self) -> float:
        return held_out_loss(self.model, self.held_out, torch.device("cpu"))


def _alone(replica: _Replica, _: object) -> dict[str, Any]:
    replica.train()
    return {"final": replica.loss()}


def _together(replica: _Replica, reduce: local.Local) -> dict[str, Any]:
    short = replica.short
    if short.ending == "step":
        reduce.settle = _not_together(reduce.settle)
    diloco = DiLoCo(
        replica.model, replica.optimizers, sync_every=short.sync_every, fragments=fragmenter(short.fragments),
        codec=codec_named(short.codec), outer=RULES[short.outer], reduce=reduce,
    )  # fmt: skip
    with diloco:
        replica.train()
        weights = replica.weights()
        with diloco.anchors():
            anchors = replica.weights()
    return {"weights": weights, "anchors": anchors, "final": replica.loss() if reduce.replica == 0 else 0.0}


def _not_together(settle: Callable[[], bool]) -> Callable[[], bool]:
    """The last round is one like the others then, as in a bucket, where others may train on."""
    return lambda: settle() and False


def _losses(weights: list[Tensor], anchors: Tensor, replica: _Replica) -> dict[str, float]:
    """Of what else `finish()` could leave: the anchors before it, the mean of the replicas, a point between them."""
    mean = torch.stack(weights).mean(0)
    losses = {}
    for name, share in (("anchors", 0.0), ("three quarters", 0.75), ("mean", 1.0)):
        nn.utils.vector_to_parameters(anchors + share * (mean - anchors), replica.model.parameters())
        losses[name] = replica.loss()
    return losses
