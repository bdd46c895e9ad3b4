"""Nanoseconds that this machine takes per value of a round: measured in a fraction of a second, then cached.

The planner assumes the same for the machines that will train, unless their figures are set. The estimate is rough: one
core, the best of a few runs. benchmarks/ measures complete rounds.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco import __version__, codecs
from diloco.codecs.formats import FORMATS, gathers

VALUES = 1 << 19
"""Values to encode or decode: few enough for the CPU cache, because the communication thread has just received them."""
MODEL = 1 << 22
"""Values that the hook copies and the outer step updates: too many for the CPU cache."""
TIMES = 5


def default_cache() -> Path:
    """The folder `diloco` in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or ("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return Path(base).expanduser() / "diloco"


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


def measured(folder: Path | None = None, *, again: bool = False) -> Speed:
    """This machine's speed: cached, or measured now and then cached. `again` measures it even if it is cached."""
    file, key = (folder or default_cache()) / "speed.json", _key()
    cache: Any = None
    with suppress(OSError, ValueError):
        cache = json.loads(file.read_text(encoding="utf-8"))
    cache = cache if isinstance(cache, dict) else {}  # machines that share the folder have an entry each
    with suppress(KeyError, TypeError):
        cached = Speed(**cache[key])
        if cached.encode.keys() == FORMATS.keys() and not again:
            return cached
    speed = _measure()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(cache | {key: asdict(speed)}), encoding="utf-8")
    return speed


def _key() -> str:
    """Version, processor, and whether compiled kernels run; without importing torch."""
    processor = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    compiled = Path(codecs.__file__).with_name("_kernels.so").exists()
    return f"{__version__}; {platform.machine()} {processor}; {os.environ.get('DILOCO_KERNELS') or compiled}"


def _measure() -> Speed:
    import torch  # not at the top: a plan on a known machine must start quickly

    from diloco.codecs.codec import codec_named, pack, weighted
    from diloco.core.fragment import Piece
    from diloco.core.memory import Memory
    from diloco.core.next_state import NextState
    from diloco.core.outer import Nesterov
    from diloco.core.view import FlatView
    from diloco.exchange.mean import Encoded
    from diloco.exchange.reducer import State

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
    """Nanoseconds per value in the best of several runs. Thread time, because the result is cached and this thread may
    have to share its core just now."""
    seconds = []
    for _ in range(TIMES):
        began = time.thread_time()
        act()
        seconds.append(time.thread_time() - began)
    return min(seconds) / values * 1e9
