"""Host buffers that are reused: touching fresh pages costs several times as much as a pass over them."""

import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from diloco.core.lane import Lane, Wait, all_of, already
from diloco.errors import DiLoCoError

LARGE = 1 << 20
"""Values from which on pinned buffers are rounded up."""


class Buffers:
    """Buffers that were given back stay until a different size is requested. So fragments of equal size, synced in
    turn, share the memory of one, and never more is kept than was in use at one time.

    Pinned ones stay: allocating them would stop the device. They also come back by themselves once no tensor has them.
    Buffers that a reducer may still be reading cannot be given back, such as a delta that a newer one replaces.
    """

    def __init__(self, pinned: "Pinned | None" = None, lanes: Iterable[Lane] = ()) -> None:
        self._pinned, self._lanes = pinned, tuple(lanes)
        self._free: list[tuple[Tensor, Wait]] = []
        # By address: what lives as long as the memory is in use, and the whole buffer if it is pinned.
        self._lent: dict[int, tuple[weakref.ref[Any], Tensor | None]] = {}
        self._lock = threading.Lock()

    def take(self, n: int) -> Tensor:
        """Memory for n values. May wait for copies out of it."""
        size = n if self._pinned is None else rounded(n)
        with self._lock:
            self._reclaim()
            fitting = [i for i, (buffer, _) in enumerate(self._free) if len(buffer) == size]
            reused = self._free.pop(fitting[0]) if fitting else None
            if reused is None and n and self._pinned is None:
                self._free.clear()
        if reused is not None:
            buffer, wait_for_copies = reused
            wait_for_copies()
        elif self._pinned is not None:
            buffer = self._pinned.empty(size)
        else:
            buffer = torch.empty(size, dtype=torch.float32, device="cpu")
        return self._lend(buffer, n) if n else buffer

    def _lend(self, buffer: Tensor, n: int) -> Tensor:
        """The first n values. If pinned, in their own storage: any tensor over it, even a slice, keeps it alive."""
        array = None if self._pinned is None else buffer.numpy()[:n]
        with self._lock:
            self._lent[buffer.data_ptr()] = (
                (weakref.ref(buffer), None) if array is None else (weakref.ref(array), buffer)
            )
        return buffer if array is None else torch.from_numpy(array)

    def _reclaim(self) -> None:
        """Take back what no tensor has. Copies may still be running."""
        lost = [self._lent.pop(at)[1] for at, (holder, _) in list(self._lent.items()) if holder() is None]
        if pinned := [buffer for buffer in lost if buffer is not None]:
            copied = all_of([lane.mark() for lane in self._lanes])
            self._free += [(buffer, copied) for buffer in pinned]

    def give(self, buffer: Tensor, wait_for_copies: Wait) -> None:
        """Return memory that nobody reads or writes once `wait_for_copies` has returned. Memory that was not taken here
        is not kept: it may not be pinned, and where a reducer makes the states nobody takes any."""
        with self._lock:
            if lent := self._lent.pop(buffer.data_ptr(), None):
                self._free.append((buffer if lent[1] is None else lent[1], wait_for_copies))


def rounded(n: int) -> int:
    """Up by at most a sixteenth, if n is large: pinned buffers stay, so fragments of almost equal size must share them.
    Otherwise `Balanced` fragments would each pin another anchor."""
    unit = 1 << max(n.bit_length() - 5, 0)
    return -(-n // unit) * unit if n >= LARGE else n


class Memory:
    """Shared by all fragments: lanes to the accelerators, buffers for deltas in flight and for next states."""

    def __init__(self, lanes: Mapping[torch.device, Lane] | None = None, *, pinned: "Pinned | None" = None) -> None:
        self.lanes = lanes or {}
        self._pinned = Pinned(next(iter(lanes)).type, lanes.values()) if lanes else pinned
        self.deltas, self.anchors = (Buffers(self._pinned, self.lanes.values()) for _ in range(2))
        self.outers = Buffers()

    def reserve(self, *, delta: int, anchor: int = 0) -> None:
        """Pin what the first round of a fragment would otherwise have to pin."""
        for buffers, n in ((self.anchors, anchor), (self.deltas, delta)) if self.lanes else ():
            buffers.give(buffers.take(n), already)

    @property
    def pinned_bytes(self) -> int:
        return self._pinned.nbytes if self._pinned else 0

    def seconds(self) -> float:
        """Of the devices' training streams since the last call."""
        return sum(lane.seconds() for lane in self.lanes.values())

    def close(self) -> None:
        """No more copies follow."""
        for lane in self.lanes.values():
            lane.close()


class Pinned:
    """Pinned host memory, which a device copies without blocking the host.

    torch rounds pinned memory up to a power of two, by up to 78 % for the anchors of real models, and never returns it
    to the system. So on CUDA each buffer has pages of its own, which are pinned in place until it is freed.
    """

    def __init__(self, kind: str, lanes: Iterable[Lane] = ()) -> None:
        self._kind, self._lanes, self.nbytes = kind, tuple(lanes), 0

    def empty(self, n: int) -> Tensor:
        if self._kind == "cuda" and n:
            return self._register(n)
        self.nbytes += 4 * n
        return torch.empty(n, dtype=torch.float32, device="cpu", pin_memory=n > 0)

    def _register(self, n: int) -> Tensor:
        nbytes = -(-4 * n // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            pages = mmap.mmap(-1, nbytes)  # shared: after a fork, a write would move private pages away from the device
            pages.madvise(mmap.MADV_DONTFORK)  # otherwise the workers of a DataLoader keep them
            view = memoryview(pages)
            buffer = torch.frombuffer(view, dtype=torch.float32, count=n)
            torch.cuda.check_error(_cuda().cudaHostRegister(buffer.data_ptr(), nbytes, 0))
        except (OSError, RuntimeError) as error:
            raise DiLoCoError(
                f"cannot pin {nbytes:,} bytes of host memory, beside {self.nbytes:,} that DiLoCo has pinned: {error}. "
                "Free host memory, or raise the memory limit of the container and `ulimit -l`. Smaller fragments and "
                'state="device" need less.'
            ) from error
        self.nbytes += nbytes
        # The view dies with the tensor. The finalizer holds the pages, which are unmapped after it.
        weakref.finalize(view, self._unregister, pages, buffer.data_ptr(), os.getpid()).atexit = False
        return buffer

    def _unregister(self, pages: mmap.mmap, address: int, process: int) -> None:
        if os.getpid() != process:  # a fork, which may have something else at these addresses
            _elsewhere.append(pages)
            return
        for lane in self._lanes:  # nobody need have closed them
            lane.close()
        self.nbytes -= len(pages)
        torch.cuda.check_error(_cuda().cudaHostUnregister(address))


_elsewhere: list[mmap.mmap] = []
"""Pages that this process, a fork, does not have and must not unmap."""


def _cuda() -> Any:
    return torch.cuda.cudart()
