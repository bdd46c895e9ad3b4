"""Copies between the host and an accelerator, on their own stream, so that the training stream runs only kernels.

Nothing waits on the host. What follows a copy waits for its event on the device:

    send    copies: anchor up ──▶ training: delta = anchor − local ──▶ copies: delta down ──▶ communication thread
    apply   copies: next anchor up, as soon as it is computed ──▶ training: local ← anchor
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

import torch
from torch import Tensor

BUFFERS = 3
"""On the device, each as large as the largest fragment: a delta and its payload for a send, a state to be applied."""
AHEAD = BUFFERS - 1
"""Free buffers that a copy leaves to the send and the apply that may come before anybody needs it."""

CLOSING = 60.0
"""Seconds to wait for the last copies: a device that does not answer must not keep a process from ending."""

Wait = Callable[[], object]


def already() -> None:
    """Nothing to wait for."""


def all_of(waits: Sequence[Wait]) -> Wait:
    def wait() -> None:
        for wait_for_device in waits:
            wait_for_device()

    return wait


def has_lane(device: torch.device) -> bool:
    """Not a Mac's GPU, whose memory is the host's, and not devices that torch drives without streams."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type != "mps"


class Lane:
    """The way to one device and back, shared by all fragments. `size`: of the largest, in values."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.device, self.copies = device, torch.Stream(device)
        self._lock = threading.Lock()
        self._free: list[tuple[Tensor, torch.Event | None]] = [
            (torch.empty(size, dtype=torch.float32, device=device), None) for _ in range(BUFFERS)
        ]
        self._intervals: list[tuple[torch.Event, torch.Event]] = []
        self.copies.wait_stream(self.training)  # memory that was just freed may still be in use

    @property
    def training(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Run what is inside on the stream of copies. Not `with self.copies`: torch keeps what to return to in the
        stream, so two threads would return to each other's."""
        index, before = torch.accelerator.current_device_index(), self.training
        torch.accelerator.set_stream(self.copies)  # this also changes the current device
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(index)

    def _take(self, stream: torch.Stream, *, leave: int = 0) -> Tensor | None:
        """A buffer that `stream` may write to. None if no more than `leave` are free."""
        with self._lock:
            if len(self._free) <= leave:
                return None
            buffer, used = self._free.pop(0)
        if used is not None:
            stream.wait_event(used)
        return buffer

    def give(self, buffer: Tensor, used: torch.Event) -> None:
        """Return a buffer that nobody uses after this event."""
        with self._lock:
            self._free.append((buffer, used))

    def done(self, buffer: Tensor) -> None:
        """Give back a buffer that training has used."""
        self.give(buffer, self.training.record_event())

    def upload(self, values: Tensor, *, leave: int = 0) -> "Upload | None":
        """Begin to copy host values to the device, if more than `leave` buffers are free. May be called on any thread;
        `values` must not change until `mark` says so."""
        buffer = self._take(self.copies, leave=leave)
        if buffer is None:
            return None
        with self.copying():
            buffer[: len(values)].copy_(values, non_blocking=True)
        upload = Upload(self, buffer, len(values))
        upload.arrived = self.copies.record_event()
        return upload

    def scratch(self) -> Tensor:
        """A buffer that training writes to. Give it back."""
        buffer = self._take(self.training)
        assert buffer is not None, "uploads ahead of time leave enough"
        return buffer

    def download(self, values: Tensor, out: Tensor) -> torch.Event:
        """Begin to copy what training has written to the host: out ← the first of the values."""
        self.copies.wait_event(self.training.record_event())
        with self.copying():
            out.copy_(values[: len(out)], non_blocking=True)
        return self.copies.record_event()

    def pair(self, n: int) -> "tuple[Upload, Upload] | None":
        """Two buffers that the stream of copies may write to, if that leaves one for a send."""
        first = self._take(self.copies, leave=2)
        second = None if first is None else self._take(self.copies, leave=1)
        if first is None or second is None:
            if first is not None:
                self.give(first, self.copies.record_event())
            return None
        return Upload(self, first, n), Upload(self, second, n)

    def mark(self) -> Wait:
        """A function that waits for all copies so far."""
        event = self.copies.record_event()
        return lambda: sleep_until(event)

    def capturing(self) -> bool:
        """Whether a graph is being captured, which would replay this step's copies forever."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time what the training stream does inside."""
        began, ended = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        began.record(self.training)
        yield
        ended.record(self.training)
        self._intervals.append((began, ended))

    def seconds(self) -> float:
        """Of the training stream, in what was timed and has ended since the last call."""
        done = [pair for pair in self._intervals if pair[1].query()]
        self._intervals = [pair for pair in self._intervals if pair not in done]
        return sum(began.elapsed_time(ended) for began, ended in done) / 1000

    def close(self) -> None:
        """Wait for all copies, unless the device hangs."""
        if not sleep_until(self.copies.record_event(), CLOSING):
            warnings.warn(f"copies to and from {self.device} have not ended in {CLOSING:g} s: it may hang, and the "
                          "memory that they use must not be used again", stacklevel=2)  # fmt: skip

    def __del__(self) -> None:  # the buffers are freed for the training stream
        self.training.wait_stream(self.copies)


class Upload:
    """A buffer on the device, filled by the stream of copies: valid after `arrived`."""

    def __init__(self, lane: Lane, buffer: Tensor, n: int) -> None:
        self._lane, self._n = lane, n
        self._buffer: Tensor | None = buffer
        self.arrived = lane.copies.record_event()

    @property
    def released(self) -> bool:
        return self._buffer is None

    def room(self) -> Tensor:
        """For kernels on the stream of copies. Record `arrived` after them."""
        assert self._buffer is not None
        return self._buffer[: self._n]

    def values(self) -> Tensor:
        """For kernels on the training stream."""
        self._lane.training.wait_event(self.arrived)
        return self.room()

    def keep(self) -> Tensor:
        """The buffer, which the caller gives back."""
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        return buffer

    def release(self) -> None:
        """The training stream has all the kernels that use the values."""
        if self._buffer is not None:
            self._lane.done(self.keep())

    def __del__(self) -> None:  # nobody used it
        if self._buffer is not None:
            self._lane.give(self._buffer, self.arrived)


def sleep_until(event: torch.Event, most: float = inf) -> bool:
    """Wait for an event without keeping a core busy, as `Event.synchronize` does on CUDA: at most 10 % too long.
    Returns whether it happened within `most` seconds."""
    began = time.perf_counter()
    while not event.query():
        if (waited := time.perf_counter() - began) > most:
            return False
        time.sleep(min(max(waited / 10, 1e-4), 0.02))
    return True
