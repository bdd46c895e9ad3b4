"""The fast way: kernels.c, compiled when the package is installed, called without holding the interpreter's lock.

What they compute has the bits of the code in codec.py, mean.py and outer.py, which is the reference, and which runs
where there was no compiler. Levels: "reference" (no native code), "plain" (C for any processor of its kind), "wide"
(AVX2 on x86-64).
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from diloco.codecs.formats import FORMATS
from diloco.errors import ConfigError

T = TypeVar("T")
CHUNK = 1 << 17
"""Values encoded at once; a multiple of every codec's block, so that the sizes of chunks add up exactly."""
LEVELS = ("reference", "plain", "wide")
VARIABLE = "DILOCO_KERNELS"
"""Environment variable: a level below the best one, or the path of a library that was compiled in another way."""
_CODECS = {"float32": 0, "bfloat16": 1, "e3m0": 2, "twobit": 3}
_ENCODED = ("e3m0", "twobit")
_MEAN, _SGD, _NESTEROV = range(3)


@dataclass(frozen=True)
class Rule:
    """An outer optimizer that the kernels know: SGD (no momentum), or Nesterov and what remains of its velocity."""

    lr: float
    momentum: float | None = None
    decay: float = 0.0


class _Round(ctypes.Structure):
    """`Round` of kernels.c."""

    _fields_ = (
        ("payloads", ctypes.POINTER(ctypes.c_void_p)),
        ("factors", ctypes.POINTER(ctypes.c_float)),
        ("members", ctypes.c_int32),
        ("codec", ctypes.c_int32),
        ("rule", ctypes.c_int32),
        ("lr", ctypes.c_float),
        ("momentum", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("anchor", ctypes.c_void_p),
        ("velocity", ctypes.c_void_p),
        ("new_anchor", ctypes.c_void_p),
        ("new_velocity", ctypes.c_void_p),
        ("anchor_words", ctypes.c_uint64),
        ("velocity_words", ctypes.c_uint64),
    )


def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or the reason why there is none."""
    given = os.environ.get(VARIABLE, "")
    path = Path(given) if given.endswith(".so") else Path(__file__).with_name("_kernels.so")
    if not path.exists():
        return None, "not compiled: install a C compiler, then diloco from its sources (pip: --no-binary diloco)"
    try:
        library = ctypes.CDLL(str(path))
        if library.diloco_layout() == len(_CODECS) * ctypes.sizeof(_Round) and library.diloco_copy_plain:
            return library, ""
        return None, "compiled from another version of diloco: install diloco again"
    except (OSError, AttributeError) as error:
        return None, f"cannot be loaded ({error}): install diloco again on this machine"


_library, missing = _load()


def levels() -> list[str]:
    """The levels that work here, slowest first."""
    if _library is None:
        return ["reference"]
    return list(LEVELS) if _library.diloco_wide() else ["reference", "plain"]


def _chosen() -> str:
    wanted = os.environ.get(VARIABLE, "")
    if not wanted or wanted.endswith(".so"):
        return levels()[-1]
    if wanted not in levels():
        raise ConfigError(f"{VARIABLE}={wanted}: on this machine it can be {', '.join(levels())}, or the path of a .so")
    return wanted


level = _chosen()


@contextmanager
def at_level(name: str) -> Iterator[None]:
    """Use another level for a while, in all threads: for tests and benchmarks."""
    global level
    before, level = level, name
    try:
        yield
    finally:
        level = before


_may = threading.local()


def use_threads(threads: int) -> None:
    """Let `encode`, `mean` and `advance` use this many threads when the calling thread asks for them."""
    _may.pool = ThreadPoolExecutor(threads, "diloco-kernels") if threads > 1 else None
    _may.threads = threads


def _each(n: int, act: Callable[[int, int], T]) -> list[T]:
    """act(first value, number of values) for runs of whole chunks of n values, one for each thread."""
    threads: int = getattr(_may, "threads", 1)
    size = max(-(-n // (threads * CHUNK)), 1) * CHUNK
    runs = [(at, min(size, n - at)) for at in range(0, max(n, 1), size)]
    if len(runs) == 1:
        return [act(*runs[0])]
    return list(_may.pool.map(lambda run: act(*run), runs))


def decodes(codec: str) -> bool:
    """Whether `mean` has native code for a codec of this name."""
    return level != "reference" and codec in _CODECS


def encodes(codec: str) -> bool:
    """Whether `encode` has native code for a codec of this name. The others are as fast as memory in torch."""
    return level != "reference" and codec in _ENCODED


def encode(codec: str, x: Tensor, payload: Tensor) -> bool:
    """Fill the payload of a flat fp32 tensor, as `pack` does. Returns whether all values are finite."""
    assert x.dtype == torch.float32 and x.is_contiguous() and payload.is_contiguous()
    function, number = getattr(_library, f"diloco_pack_{level}"), ctypes.c_int32(_CODECS[codec])

    def run(at: int, count: int) -> bool:
        values, out = x.data_ptr() + 4 * at, payload.data_ptr() + FORMATS[codec].nbytes(at)
        return bool(function(number, ctypes.c_void_p(values), ctypes.c_int64(count), ctypes.c_void_p(out)))

    return all(_each(len(x), run))


def mean(codec: str, payloads: Sequence[Tensor], factors: Sequence[float], out: Tensor) -> None:
    """out ← Σ factor · decoded payload, as `weighted` does."""
    _run(codec, payloads, factors, len(out), lambda at: _Round(rule=_MEAN, new_anchor=out[at:].data_ptr()))


def advance(
    codec: str,
    payloads: Sequence[Tensor],
    factors: Sequence[float],
    rule: Rule,
    old: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
) -> tuple[int, int]:
    """new ← what the rule makes of old, (anchor, velocity), and the mean. Returns, for anchor and velocity, the sum
    over the pairs of values in `new`, as words of 64 bits."""
    plain, n = rule.momentum is None, len(old[0])
    for tensor in (old[0], new[0]) if plain else (*old, *new):
        assert tensor.dtype == torch.float32 and tensor.is_contiguous() and len(tensor) == n

    def begin(at: int) -> _Round:
        work = _Round(rule=_SGD if plain else _NESTEROV, lr=rule.lr)
        work.anchor, work.new_anchor = old[0][at:].data_ptr(), new[0][at:].data_ptr()
        if rule.momentum is not None:
            work.momentum, work.decay = rule.momentum, rule.decay
            work.velocity, work.new_velocity = old[1][at:].data_ptr(), new[1][at:].data_ptr()
        return work

    done = _run(codec, payloads, factors, n, begin)
    return sum(work.anchor_words for work in done), sum(work.velocity_words for work in done)


def passes(*tensors: Tensor) -> bool:
    """Whether `subtract` and `copy` take these: fp32 in order, on the host. They use one core; if torch has several for
    the thread that asks, it is faster by itself."""
    if level == "reference" or torch.get_num_threads() > 1:
        return False
    return all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)


def subtract(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out ← a − b, past the caches: a third of the memory's traffic of torch.sub is reading what it overwrites."""
    _pass("subtract", a, b, out)


def copy(a: Tensor, out: Tensor) -> None:
    """out ← a, past the caches."""
    _pass("copy", a, out)


def _pass(name: str, *tensors: Tensor) -> None:
    assert all(t.dtype == torch.float32 and t.is_contiguous() and t.numel() == tensors[0].numel() for t in tensors)
    places = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
    getattr(_library, f"diloco_{name}_{level}")(*places, ctypes.c_int64(tensors[0].numel()))


def _run(
    codec: str, payloads: Sequence[Tensor], factors: Sequence[float], n: int, begin: Callable[[int], _Round]
) -> list[_Round]:
    """What becomes of the mean from a value on, `begin` says."""
    held, function = [payload.contiguous() for payload in payloads], getattr(_library, f"diloco_round_{level}")

    def run(at: int, count: int) -> _Round:
        work, offset = begin(at), FORMATS[codec].nbytes(at)
        work.codec, work.members = _CODECS[codec], len(held)
        work.payloads = (ctypes.c_void_p * len(held))(*(payload.data_ptr() + offset for payload in held))
        work.factors = (ctypes.c_float * len(held))(*factors)
        function(ctypes.byref(work), ctypes.c_int64(count))
        return work

    return _each(n, run)
