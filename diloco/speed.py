"""What a round costs this machine, in nanoseconds a value: measured in a fraction of a second, then remembered.

The planner takes it for the machines that will train, unless it is told their figures. It is a rough figure: one core,
the quickest of a few times, values that are in the cache where a round has them there. What a round takes in the end,
benchmarks/ measures.
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

from diloco import __version__
from diloco.formats import FORMATS, GATHER, Sparse

VALUES = 1 << 19
"""What the communication thread computes with, it has just received: this much is in the cache."""
MODEL = 1 << 22
"""What the hook copies, and the state, is in memory."""
TIMES = 5


def default_cache() -> Path:
    """`diloco` in the user's cache folder on this platform."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or ("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return Path(base).expanduser() / "diloco"


@dataclass(frozen=True)
class Speed:
    """Nanoseconds a value, on one core."""

    encode: Mapping[str, float]
    """By codec."""
    decode: Mapping[str, float]
    """By codec, of one replica's delta."""
    outer: float
    hook: float
    """What the training thread does: take the delta, write the result."""

    def codec_ns(self, codec: str, replicas: int) -> float:
        """What the communication thread computes in a round. Above GATHER replicas it encodes and decodes shares."""
        encode, decode, row = self.encode[codec], self.decode[codec], FORMATS[codec]
        if replicas <= GATHER or isinstance(row, Sparse):
            return encode + replicas * decode + self.outer
        mean = row.mean or codec
        return encode + self.encode[mean] / replicas + decode + self.decode[mean] + self.outer

    def __str__(self) -> str:
        """For two replicas and the usual codec."""
        return f"{self.codec_ns('e3m0', 2):.1f} ns a value beside training, {self.hook:.1f} ns within it"


def known(folder: Path | None = None) -> Speed:
    """This machine's figures: remembered, or measured now. `folder`: instead of the user's cache folder."""
    file, key = (folder or default_cache()) / "speed.json", _key()
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = Speed(**json.loads(file.read_text(encoding="utf-8"))[key])
        if found.encode.keys() == FORMATS.keys():
            return found
    return remeasured(folder)


def remeasured(folder: Path | None = None) -> Speed:
    """Measure, and remember it for the next time, where the cache can be written."""
    file, speed = (folder or default_cache()) / "speed.json", _measure()
    others: object = None
    with suppress(OSError, ValueError):  # of other machines that share the folder
        others = json.loads(file.read_text(encoding="utf-8"))
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        known = {**(others if isinstance(others, dict) else {}), _key(): asdict(speed)}
        file.write_text(json.dumps(known), encoding="utf-8")
    return speed


def _key() -> str:
    """Version, processor, and which code runs, without torch."""
    processor = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    compiled = Path(__file__).with_name("_kernels.so").exists()
    return f"{__version__}; {platform.machine()} {processor}; {os.environ.get('DILOCO_KERNELS') or compiled}"


def _measure() -> Speed:
    import torch  # here, so that a plan on a known machine starts quickly

    from diloco.advance import Memory, NextState
    from diloco.codec import codec_named, pack, weighted
    from diloco.flat import FlatView
    from diloco.fragment import Piece
    from diloco.outer import Nesterov
    from diloco.reduce import State
    from diloco.reduce.mean import Encoded

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
        held, delta = torch.zeros(MODEL), torch.zeros(MODEL)
        hook = _best(lambda: (view.subtract(held, delta), view.write(held)), MODEL)
    finally:
        torch.set_num_threads(before)
    return Speed(encode, decode, outer, hook)


def _best(act: Callable[[], object], values: int) -> float:
    """Nanoseconds a value in the quickest of several times, of this thread: it may have to share the core, and what was
    measured on a busy machine is remembered."""
    seconds = []
    for _ in range(TIMES):
        began = time.thread_time()
        act()
        seconds.append(time.thread_time() - began)
    return min(seconds) / values * 1e9
