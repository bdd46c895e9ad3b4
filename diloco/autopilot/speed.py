"""Nanoseconds that this machine takes per value of a round.

The estimate is rough, and low: one core, the best of a few runs. benchmarks/ measures complete rounds.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from diloco.codecs.codec import codec_named, pack, weighted
from diloco.codecs.formats import FORMATS, gathers
from diloco.core.fragment import Piece
from diloco.core.memory import Memory
from diloco.core.next_state import NextState
from diloco.core.outer import Nesterov
from diloco.core.view import FlatView
from diloco.exchange.mean import Encoded
from diloco.exchange.reducer import State

VALUES = 1 << 19
"""Values to encode or decode: few enough for the CPU cache, because the communication thread has just received them."""
MODEL = 1 << 22
"""Values that the hook copies and the outer step updates: too many for the CPU cache."""
TIMES = 5


@dataclass(frozen=True)
class Speed:
    """Nanoseconds per value, on one core."""

    encode: Mapping[str, float]
    """By codec."""
    decode: Mapping[str, float]
    """By codec, for one replica's delta."""
    outer: float
    hook: float
    """Time of the training thread: take the delta, write the result."""

    def codec_ns(self, codec: str, replicas: int) -> float:
        """Time of the communication thread in a round. Above GATHER replicas it encodes and decodes shares."""
        encode, decode, row = self.encode[codec], self.decode[codec], FORMATS[codec]
        if gathers(replicas):
            return encode + replicas * decode + self.outer
        mean = row.mean or codec
        return encode + self.encode[mean] / replicas + decode + self.decode[mean] + self.outer

    def __str__(self) -> str:
        """For two replicas and the default codec."""
        return f"{self.codec_ns('e3m0', 2):.1f} ns per value while training runs, {self.hook:.1f} ns of training"


def measured() -> Speed:
    """This machine's speed, in about two seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.randn(VALUES)
        encode, decode = {}, {}
        for name in FORMATS:
            codec = codec_named(name)
            payload = pack(codec, x)
            encode[name] = _best(lambda codec=codec: pack(codec, x), VALUES)
            two = [payload, payload.clone()]
            decode[name] = _best(lambda codec=codec, two=two: weighted(codec, two, [0.5, 0.5], VALUES), 2 * VALUES)
        memory, state = Memory(), State(0, torch.zeros(MODEL), torch.zeros(MODEL))
        mean = Encoded(0, MODEL, codec_named("e3m0"), [pack(codec_named("e3m0"), torch.randn(MODEL))] * 2, [0.5, 0.5])

        def advance() -> None:
            next = NextState(state, Nesterov(), memory, 1.0)
            next.add(mean)
            made = next.state(1)
            memory.anchors.give(made.anchor, lambda: None)
            memory.outers.give(made.outer, lambda: None)

        outer = max(_best(advance, MODEL) - 2 * decode["e3m0"], 0.0)
        view = FlatView((Piece("local", 0, MODEL),), {"local": torch.zeros(MODEL)})
        anchor, delta = torch.zeros(MODEL), torch.zeros(MODEL)
        hook = _best(lambda: (view.subtract(anchor, delta), view.write(anchor)), MODEL)
    finally:
        torch.set_num_threads(before)
    return Speed(encode, decode, outer, hook)


def _best(act: Callable[[], object], values: int) -> float:
    """Nanoseconds per value in the best of several runs. Thread time: this thread may have to share its core."""
    seconds = []
    for _ in range(TIMES):
        began = time.thread_time()
        act()
        seconds.append(time.thread_time() - began)
    return min(seconds) / values * 1e9
