"""One run of the study: the trainer's model, data, optimizer and schedule, the production DiLoCo, replicas in turn in
one process (`diloco.exchange.local`, the bits of the collective reducer)."""

import platform
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import machine
from diloco.codecs.codec import Codec, codec_named
from diloco.codecs.formats import FORMATS
from diloco.core.diloco import DiLoCo
from diloco.core.fragment import fragmenter
from diloco.core.muon import INNERS
from diloco.core.outer import SGD, Nesterov, Outer
from diloco.core.schedule import Schedule
from diloco.core.tensors import find_layers, trainable
from diloco.exchange import local
from diloco.runs.config import TrainConfig
from diloco.train.data.corpus import Corpus, prepare
from diloco.train.model import Decoder, held_out_loss
from diloco.train.settings import lr_at
from diloco.train.setup import set_lr
from studies.parity.cell import BATCH, CONTEXT, SHAPES, Cell
from studies.parity.controls import Capped, Zeroing
from studies.parity.results import Results

CURVE_EVERY, CURVE_TOKENS = 300, 16_384
COMPILED = 500
"""Steps from which on compiling the model pays for itself."""
CPU = torch.device("cpu")


def train(cell: Cell) -> dict[str, Any]:
    """Train and evaluate. Losses are in nats a byte; `final` is of the model that a user would export."""
    began = time.process_time()
    text = prepare((), "bytes")
    run = _replica if cell.replicas else _data_parallel
    codec = _codec(cell)
    found = local.run(
        max(cell.replicas, 1), lambda reduce: run(_Loop(cell, text, reduce.replica), reduce, codec),
        mean_codec=codec_named(cell.second) if cell.second else None,
    )  # fmt: skip
    mean = torch.stack([each.pop("weights") for each in found]).mean(0)
    average = _Loop(cell, text, 0)
    torch.nn.utils.vector_to_parameters(mean, average.model.parameters())
    result = found[0] | {"mean": average.loss(cell.evaluated)}
    measured = {"cpu_seconds": round(time.process_time() - began, 1), "corpus": corpus(), "on": machine()}
    return {"key": cell.key, "cell": asdict(cell), **measured, **result}


def corpus() -> str:
    """What names the text of all runs: the sources of this Python's standard library."""
    return prepare((), "bytes").sha256[:16]


def check_corpus(path: Path, results: Results) -> None:
    """Results of different texts do not go into one file."""
    if {result["corpus"] for result in results.values()} - {corpus()}:
        sys.exit(f"{path} was measured on the standard library of another Python: move it away to begin anew on that "
                 f"of Python {platform.python_version()}")  # fmt: skip


class _Loop:
    """A plain training loop of one replica; the batches of all replicas together are the same for any number."""

    def __init__(self, cell: Cell, corpus: Corpus, replica: int) -> None:
        replicas, batch, steps = max(cell.replicas, 1), BATCH * cell.batch, cell.steps
        self.cell, self.corpus = cell, corpus
        self.config = TrainConfig(lr=cell.lr, steps=steps)
        self.model = Decoder(SHAPES[cell.width], CONTEXT)
        self.model.initialize(torch.Generator().manual_seed(cell.seed))
        self.compiled: Any = torch.compile(self.model, dynamic=False) if steps >= COMPILED else self.model
        self.optimizers = INNERS[cell.inner](self.model, cell.lr, 1 / steps)
        self.data = corpus.batches(replica, replicas, batch // replicas, CONTEXT, cell.seed)
        self.fragments = _fragments_of(self.model, cell) if cell.freeze else []
        self.schedule = Schedule(cell.sync_every, max(len(self.fragments), 1))

    def step(self, t: int) -> None:
        set_lr(self.optimizers, lr_at(self.config, t))
        self.compiled(*self.data.next()).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.fragments:
            trained = self.fragments[self._next_to_send(t)]
            for name, parameter in self.model.named_parameters():
                if name not in trained:
                    parameter.grad = None
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _next_to_send(self, t: int) -> int:
        later = range(t + self.cell.sync_every, t + 2 * self.cell.sync_every)  # past the first period, where some wait
        return next(p for s in later for p in range(len(self.fragments)) if self.schedule.sends_at(p, s))

    def loss(self, tokens: int) -> float:
        return held_out_loss(self.compiled, self.corpus.evaluation(CONTEXT, tokens), CPU)


def _data_parallel(loop: _Loop, *_: object) -> dict[str, Any]:
    """Equal to averaging gradients over replicas: the batch is the union of theirs, the loss its mean."""
    curve, tail = [], deque[Tensor](maxlen=loop.cell.tail)
    for t in range(1, loop.cell.steps + 1):
        loop.step(t)
        if loop.cell.tail:
            tail.append(_flat(loop))
        if t % CURVE_EVERY == 0:
            with _mean_of(tail, loop):
                curve.append(loop.loss(CURVE_TOKENS))
            _say(loop, t, curve[-1])
    with _mean_of(tail, loop):
        final, weights = loop.loss(loop.cell.evaluated), _flat(loop)
    return {"final": final, "replica": final, "curve": curve, "weights": weights, "parameters": len(weights)}


@contextmanager
def _mean_of(tail: deque[Tensor], loop: _Loop) -> Iterator[None]:
    """The model has the mean of these weights, if there are any; then its own again."""
    if not tail:
        yield
        return
    own = _flat(loop)
    torch.nn.utils.vector_to_parameters(torch.stack(list(tail)).mean(0), loop.model.parameters())
    yield
    torch.nn.utils.vector_to_parameters(own, loop.model.parameters())


def _replica(loop: _Loop, reduce: local.Local, codec: Codec) -> dict[str, Any]:
    cell, first = loop.cell, reduce.replica == 0
    overlap = cell.overlap
    if cell.overlap_of_last is not None and reduce.replica == cell.replicas - 1:
        overlap = cell.overlap_of_last
    diloco = DiLoCo(
        loop.model, loop.optimizers, sync_every=cell.sync_every, fragments=fragmenter(cell.fragments),
        overlap=overlap, keep_local=cell.keep_local, codec=codec,
        outer=_outer(cell), reducer=reduce,
    )  # fmt: skip
    curve: list[float] = []
    with diloco:
        for t in range(1, loop.cell.steps + 1):
            loop.step(t)
            if t % CURVE_EVERY == 0 and first:
                with diloco.anchors():
                    curve.append(loop.loss(CURVE_TOKENS))
                _say(loop, t, curve[-1])
        found: dict[str, Any] = {"weights": _flat(loop)}
        if first:
            found["replica"] = loop.loss(loop.cell.evaluated)
            with diloco.anchors():
                found["anchors"] = loop.loss(loop.cell.evaluated)
    if first:
        found |= {"final": loop.loss(loop.cell.evaluated), "curve": curve, "parameters": len(found["weights"]),
                  "bytes_sent": diloco.stats.bytes_sent}  # fmt: skip
    return found


def _say(loop: _Loop, t: int, loss: float) -> None:
    """A run of a million parameters takes more than an hour."""
    print(f"step {t} of {loop.cell.steps}: {loss:.4f} ({loop.cell})", flush=True)


def _outer(cell: Cell) -> Outer:
    match cell.outer:
        case "paper" | "following":
            return Nesterov(cell.outer_lr, cell.momentum, follow=cell.outer == "following")
        case "growing":
            return Nesterov()
        case "capped":
            return Capped(cell.outer_lr, cell.momentum)
        case _:
            return SGD(cell.outer_lr)


def _flat(loop: _Loop) -> Tensor:
    return torch.nn.utils.parameters_to_vector(loop.model.parameters()).detach()


def _fragments_of(model: torch.nn.Module, cell: Cell) -> list[set[str]]:
    parameters = dict(trainable(model))
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    split = fragmenter(cell.fragments).split(shapes, find_layers(model, parameters))
    return [{piece.name for piece in fragment} for fragment in split]


def can_run(cell: Cell) -> bool:
    """False for results of a codec that was cut."""
    return cell.codec in (*FORMATS, "zeroing")


def _codec(cell: Cell) -> Codec:
    if cell.codec == "zeroing":
        return Zeroing(torch.Generator().manual_seed(cell.seed))
    return codec_named(cell.codec)
