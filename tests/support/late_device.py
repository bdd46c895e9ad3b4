"""A device, "late", that does everything as late as an accelerator may, without hardware.

Its tensors are real to torch (PrivateUse1 as a Python backend) and keep their values in the memory of the host. Kernels
and copies go into the queue of a stream, and run only when somebody waits for them. So whatever is used before it was
waited for shows:

    a copy to the host      its target is nan (every byte 255) until the copy runs
    a copy to the device    reads its source when it runs; a source that was changed since is a `Race`
    two streams             of which one uses what the other writes, with no event between them: a `Race`
    memory freed            while another stream may still use it: a `Race`, as the allocator would hand it out again

Host memory. As CUDA: a copy from pageable memory reads its source at once, a copy to it waits, even with
`non_blocking`. `Counters.pageable` counts their bytes. Memory is pinned if it was allocated with `pin_memory=True` or
comes from `Tensor.pin_memory`; `is_pinned` says so. torch cannot ask a Python backend for pinned memory, so `install`
replaces the functions that allocate it, and with them torch.Event, torch.Stream and the functions of torch.accelerator
for streams, which torch does not forward to a Python backend either.

What does not work: FSDP2, which resizes the storage of its tensors (these have none; DTensors do work), and operations
that both write to an argument and return something new.

`install` holds for the rest of the process: call it in a process of the test's own (`tests.support.processes.run`).
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "late"
DEVICE = torch.device("privateuseone", 0)  # what it is called until `install` gives it its name
POLLS = 3
"""An event that is asked so often whether it has happened lets the device catch up with it."""


class Race(AssertionError):
    """Memory was used in an order that nothing guarantees."""


@dataclass
class Counters:
    copied: Counter[tuple[int, str]] = field(default_factory=Counter)  # bytes, by number of the stream and direction
    pageable: Counter[str] = field(default_factory=Counter)  # of them, from ("up") or to ("down") pageable memory
    waits: Counter[str] = field(default_factory=Counter)  # for work that was not done, by the name of the thread
    pending: Counter[str] = field(default_factory=Counter)  # events that had not happened when first asked, by thread
    kernels: Counter[int] = field(default_factory=Counter)  # by number of the stream


counters = Counters()
races: list[str] = []
"""All so far: an error may be swallowed on the way."""
_lock = threading.RLock()
_current = threading.local()


@dataclass(eq=False)
class Work:
    """One entry of a stream's queue."""

    stream: "Stream"
    number: int
    run: Callable[[], None]
    done: bool = False

    def precedes(self, stream: "Stream") -> bool:
        """Whether what is put into the stream now runs after this. What is done somebody has waited for."""
        return self.done or self.stream is stream or stream._after.get(self.stream, 0) >= self.number


class Stream:
    _all: list["Stream"] = []  # noqa: RUF012 (streams are never given back, as torch's pool)

    def __init__(self, device: Any = None, *, priority: int = 0) -> None:
        self.device, self.priority = DEVICE, priority
        self.stream_id = len(self._all)
        self._queue: deque[Work] = deque()
        self._issued = 0
        self._after: dict[Stream, int] = {}  # the work of other streams that all work from now on comes after
        self._before: list[Stream] = []
        self._all.append(self)

    def wait_event(self, event: "Event") -> None:
        with _lock:
            if (work := event._work) is not None:
                for stream, number in (*event._after.items(), (work.stream, work.number)):
                    self._after[stream] = max(number, self._after.get(stream, 0))
                _enqueue(self, partial(_finish, work))

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        if self._queue:
            self.record_event().synchronize()

    def __enter__(self) -> "Stream":
        self._before.append(current_stream())  # here, as torch does, whatever the thread
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(self._before.pop())


class Event:
    def __init__(self, device: Any = None, *, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.device, self._timed = DEVICE, enable_timing
        self._work: Work | None = None
        self._after: dict[Stream, int] = {}
        self._polls, self._time = 0, 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        with _lock:
            self._work, self._after, self._polls = _enqueue(stream, self._happen), dict(stream._after), 0

    def _happen(self) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        with _lock:
            self._polls += 1
            if self._work is not None and self._polls > POLLS:
                _finish(self._work)
            done = self._work is None or self._work.done
            if not (done or self._timed) and self._polls == 1:  # timed ones are asked in passing, not waited for
                counters.pending[threading.current_thread().name] += 1
            return done

    def synchronize(self) -> None:
        if self._work is not None:
            _wait(self._work)

    def elapsed_time(self, other: "Event") -> float:
        if not (self._timed and other._timed and self.query() and other.query()):
            raise RuntimeError("both events must have been created with enable_timing=True, and have happened")
        return 1000 * (other._time - self._time)


_default = Stream()


def current_stream(device: Any = None) -> Stream:
    return getattr(_current, "stream", _default)


def set_stream(stream: Stream) -> None:
    _current.stream = stream


def current_device_index() -> int:
    """Of this thread, as CUDA keeps it. Nothing here depends on it."""
    return getattr(_current, "index", 0)


def set_device_index(index: int) -> None:
    _current.index = index


def synchronize(device: Any = None) -> None:
    for stream in Stream._all:
        stream.synchronize()


class Block:
    """Memory that the device may use, and what has used it."""

    def __init__(self, stream: Stream | None = None) -> None:
        self.stream = stream  # that it was allocated on; None: on the host
        self.uses: list[tuple[Work, bool]] = []  # not done, as far as known, and whether it writes
        self.shared: set[Stream] = set()  # streams that `record_stream` has named

    def use(self, work: Work, writes: bool) -> None:
        for other, wrote in self.uses:
            if (writes or wrote) and not other.precedes(work.stream):
                uses = [(work.stream.stream_id, writes), (other.stream.stream_id, wrote)]
                mine, theirs = (f"stream {number} {'writes' if write else 'reads'}" for number, write in uses)
                _race(f"{mine} what {theirs}, without an event between them")
        self.uses = [(other, wrote) for other, wrote in self.uses if not other.done]
        self.uses.append((work, writes))

    def __del__(self) -> None:
        for other, _ in self.uses:
            if self.stream is not None and other.stream not in self.shared and not other.precedes(self.stream):
                races.append(f"memory was freed that stream {other.stream.stream_id} may still use")


def _race(what: str) -> None:
    races.append(what)
    raise Race(what)


def _enqueue(
    stream: Stream, run: Callable[[], None], reads: Iterable[Block] = (), writes: Iterable[Block] = ()
) -> Work:
    with _lock:
        stream._issued += 1
        work = Work(stream, stream._issued, run)
        for block in reads:
            block.use(work, writes=False)
        for block in writes:
            block.use(work, writes=True)
        stream._queue.append(work)
        return work


def _finish(work: Work) -> None:
    """Run all of the stream up to this."""
    with _lock:
        while not work.done:
            first = work.stream._queue.popleft()
            first.done = True
            first.run()


def _wait(work: Work) -> None:
    """The host waits."""
    with _lock:
        if not work.done:
            counters.waits[threading.current_thread().name] += 1
            _finish(work)


class Late(Tensor):
    """A tensor on the device."""

    memory: Tensor
    block: Block

    @staticmethod
    def __new__(cls, memory: Tensor, block: Block) -> "Late":
        made = Tensor._make_wrapper_subclass(
            cls, memory.shape, strides=memory.stride(), storage_offset=memory.storage_offset(), dtype=memory.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.memory, made.block = memory, block
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"Late(shape={tuple(self.shape)}, dtype={self.dtype})"

    def record_stream(self, stream: Stream) -> None:
        self.block.shared.add(stream)


def _spoiled(memory: Tensor) -> Tensor:
    """Every byte 255: nan in floats."""
    memory.view(-1).view(torch.uint8).fill_(1 if memory.dtype == torch.bool else 255)
    return memory


def _empty(shape: Any, stride: Any, dtype: torch.dtype) -> Late:
    extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    memory = _spoiled(torch.empty(extent, dtype=dtype, device="cpu"))
    return Late(memory.as_strided(tuple(shape), tuple(stride)), Block(current_stream()))


aten = torch.ops.aten
_ANSWERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    returns = func._schema.returns
    if func is aten.copy_.default:
        return _copy(*args, **kwargs)
    if func is aten._foreach_copy_.default:
        for target, source in zip(*args[:2], strict=True):
            _copy(target, source, *args[2:], **kwargs)
        return None
    if func is aten._to_copy.default and torch.device(kwargs.get("device") or NAME).type == "cpu":
        return _to_host(*args, **kwargs)
    if _ANSWERS & set(func.tags) or any("Tensor" not in str(r.type) for r in returns):  # the host needs the values
        _wait(_enqueue(current_stream(), lambda: None, [t.block for t in _tensors(args, kwargs)]))
        answer = func(*_memories(args), **_memories(kwargs))
        return tree_map(lambda x: Late(x, Block(current_stream())) if isinstance(x, Tensor) else x, answer)
    if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):  # a view
        base = next(t for t in args if isinstance(t, Late))
        return tree_map(lambda x: Late(x, base.block), func(*_memories(args), **_memories(kwargs)))
    return _launch(func, args, kwargs)


def _tensors(*trees: Any) -> list[Late]:
    return [x for x in tree_flatten(trees)[0] if isinstance(x, Late)]


def _memories(tree: Any) -> Any:
    """What the code for the host gets instead. A tensor that is on the host may only be a scalar: its present value."""

    def memory(x: Any) -> Any:
        if isinstance(x, Late):
            return x.memory
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if isinstance(x, Tensor):
            if x.dim():
                raise RuntimeError(f"expected all tensors to be on the same device, found {NAME} and {x.device}")
            return x.clone()
        return x

    return tree_map(memory, tree)


def _launch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Queue a kernel. Its results have their shapes at once, and their values when it has run."""
    counters.kernels[current_stream().stream_id] += 1
    schema = func._schema
    values = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
    written = [(a.alias_info, values[a.name]) for a in schema.arguments
               if a.alias_info is not None and a.alias_info.is_write and a.name in values]  # fmt: skip
    targets, memories = _tensors([value for _, value in written]), (_memories(args), _memories(kwargs))
    made: list[Late] = []
    if written:
        if any(r.alias_info is None for r in schema.returns):
            raise NotImplementedError(f"{func} both writes to an argument and returns something new")
        out = [next(v for info, v in written if info.before_set == r.alias_info.before_set) for r in schema.returns]
        results = out[0] if len(out) == 1 else tuple(out) or None
    else:
        leaves, spec = tree_flatten((args, kwargs))
        shapes, results_spec = _shapes(func, tuple(map(_description, leaves)), spec)
        made = [_empty(*shape) for shape in shapes]
        results = tree_unflatten(made, results_spec)
    outputs = [t.memory for t in made]

    def run() -> None:
        computed = func(*memories[0], **memories[1])
        for output, value in zip(outputs, tree_flatten(computed)[0] if outputs else (), strict=True):
            output.copy_(value)

    reads = [t.block for t in _tensors(args, kwargs) if all(t is not target for target in targets)]
    _enqueue(current_stream(), run, reads, [t.block for t in (*targets, *made)])
    return results


def _description(x: Any) -> Any:
    """What the shapes of results depend on; hashable."""
    return (Tensor, tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), x)


@cache
def _shapes(func: Any, leaves: tuple[Any, ...], spec: Any) -> tuple[list[Any], Any]:
    """Shape, strides and type of each result: of zeros instead of the values, which are not known yet."""

    def example(kind: type, *what: Any) -> Any:
        if kind is not Tensor:
            return torch.device("cpu") if kind is torch.device else what[0]
        shape, stride, dtype = what
        return torch.zeros(1 + sum(n * step for n, step in zip(shape, stride, strict=True)), dtype=dtype).as_strided(
            shape, stride
        )

    args, kwargs = tree_unflatten([example(*leaf) for leaf in leaves], spec)
    results, results_spec = tree_flatten(func(*args, **kwargs))
    return [(r.shape, r.stride(), r.dtype) for r in results], results_spec


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(target, Late) and isinstance(source, Late):
        return _launch(aten.copy_.default, (target, source), {})
    if not target.numel():
        return target
    host, stream = (source, current_stream()) if isinstance(target, Late) else (target, current_stream())
    block = _pinned_block(host) if host.is_contiguous() else None
    direct, direction = block is not None and non_blocking, "up" if host is source else "down"
    counters.copied[stream.stream_id, direction] += host.nbytes
    if block is None:
        counters.pageable[direction] += host.nbytes
    blocks = [] if block is None else [block]
    host = host if block is None else _alias(host)
    if isinstance(target, Late):
        source = host
        work = _enqueue(stream, partial(_up, target.memory, source if direct else source.clone(), source.clone()),
                        reads=blocks, writes=[target.block])  # fmt: skip
    else:
        assert isinstance(source, Late)
        spoiled = _spoiled(target).clone() if direct else None
        work = _enqueue(stream, partial(_down, host, source.memory, spoiled), reads=[source.block], writes=blocks)
    if not direct and (block is not None or direction == "down"):
        _wait(work)
    return target


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """What torch.tensor calls."""
    return _copy(target, source, non_blocking)


def _up(target: Tensor, source: Tensor, queued: Tensor) -> None:
    """`queued`: the source as it was when the copy was queued."""
    if not _same_bits(source, queued):
        _race("the source of a copy to the device was changed before the copy was done")
    target.copy_(source)


def _down(target: Tensor, source: Tensor, spoiled: Tensor | None) -> None:
    if spoiled is not None and not _same_bits(target, spoiled):
        _race("the target of a copy to the host was changed before the copy was done")
    target.copy_(source)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = (x.contiguous().view(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def _to_host(
    source: Late, *, dtype: torch.dtype | None = None, non_blocking: bool = False, memory_format: Any = None, **_: Any
) -> Tensor:
    form = torch.preserve_format if memory_format is None else memory_format
    target = torch.empty_like(source.memory, dtype=dtype, memory_format=form)
    return _copy(_pin(target) if non_blocking else target, source, non_blocking)


_pinned: dict[int, tuple[StorageWeakRef, Block]] = {}
"""By address."""


def _pin(memory: Tensor) -> Tensor:
    if memory.device.type != "cpu":
        raise RuntimeError("only dense CPU tensors can be pinned")
    storage = memory.untyped_storage()
    _pinned[storage.data_ptr()] = StorageWeakRef(storage), Block()
    return memory


def _pinned_block(memory: Tensor) -> Block | None:
    if isinstance(memory, Late):
        return None
    alive, block = _pinned.get(memory.untyped_storage().data_ptr(), (None, None))
    return block if alive is not None and not alive.expired() else None


def _alias(memory: Tensor) -> Tensor:
    """The same values for a queued copy, which keeps pinned memory allocated, but not the tensors over it."""
    storage = torch.UntypedStorage._new_with_weak_ptr(_pinned[memory.untyped_storage().data_ptr()][0].cdata)
    return torch.empty(0, dtype=memory.dtype).set_(storage, memory.storage_offset(), memory.shape, memory.stride())


def _allocating(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = function(*args, **kwargs)
        return _pin(made) if pin_memory else made

    return allocate


def _empty_of(size: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Late:
    return _empty_strided(size, torch.empty(size, device="meta").stride(), dtype=dtype)


def _empty_strided(size: Any, stride: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Late:
    return _empty(size, stride, dtype or torch.get_default_dtype())


def _arange(*bounds: Any, **options: Any) -> Late:
    return _launch(aten.arange.start_step, (*bounds, 1)[:3] if len(bounds) > 1 else (0, *bounds, 1), options)


def _module() -> ModuleType:
    module = ModuleType(f"torch.{NAME}")
    functions: dict[str, Any] = {
        "is_available": lambda: True, "is_initialized": lambda: True, "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda device: None,
        "manual_seed_all": lambda seed: None, "current_stream": current_stream, "synchronize": synchronize,
        "Stream": Stream, "Event": Event, "stream": lambda stream: stream,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
    }  # fmt: skip
    vars(module).update(functions)
    return module


_library: Any = None


def install() -> None:
    """Make it the accelerator of this process."""
    global _library
    if _library is not None:
        return
    _setup_privateuseone_for_python_backend(NAME, backend_module=_module())
    _library = torch.library.Library("aten", "IMPL")
    factories = {
        "empty.memory_format": _empty_of, "empty_strided": _empty_strided, "arange": _arange, "arange.start": _arange,
        "arange.start_step": _arange, "_copy_from": _copy_from,
    }  # fmt: skip
    for name, function in factories.items():
        _library.impl(name, function, "PrivateUse1")
    for name in ("empty", "empty_like", "empty_strided", "zeros", "full"):
        setattr(torch, name, _allocating(getattr(torch, name)))
    replaced: dict[Any, dict[str, Any]] = {
        torch: {"Event": Event, "Stream": Stream},
        torch.accelerator: {
            "current_stream": current_stream, "set_stream": set_stream, "synchronize": synchronize,
            "get_memory_info": lambda device=None: (1 << 30, 1 << 30),
            "current_device_index": current_device_index, "set_device_index": set_device_index,
        },
        Tensor: {
            "is_pinned": lambda self, device=None: _pinned_block(self) is not None,
            "pin_memory": lambda self, device=None: _pin(self.clone()),
        },
    }  # fmt: skip
    for owner, names in replaced.items():
        for name, value in names.items():
            setattr(owner, name, value)
