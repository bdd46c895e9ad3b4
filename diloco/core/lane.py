"""Copies between the host and an accelerator, on their own stream, so that the training stream runs only kernels.

Nothing waits on the host. What follows a copy waits for its event on the device:

    send    copies: anchor up ──▶ training: delta = anchor − local ──▶ copies: delta down ──▶ communication thread
    apply   copies: next anchor up, as soon as it is computed ──▶ training: local ← anchor
"""

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

BUFFERS = 3
"""On the device, each as large as the largest fragment: a delta and its payload for a send, a state to be applied."""
AHEAD = BUFFERS - 1
"""Free buffers that a copy leaves to the send and the apply that may come before anybody needs it."""

Wait = Callable[[], None]


def already() -> None:
    """Nothing to wait for."""


def has_lane(device: torch.device) -> bool:
    """Not a Mac's GPU, whose memory is the host's, and not devices that torch drives without streams."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type != "mps"


class Lane:
    """The way to one device and back, shared by all fragments. `size`: of the largest, in values."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.device, self._copies = device, torch.Stream(device)
        self._lock = threading.Lock()
        self._free: list[tuple[Tensor, torch.Event | None]] = [
            (torch.empty(size, dtype=torch.float32, device=device), None) for _ in range(BUFFERS)
        ]
        self._intervals: list[tuple[torch.Event, torch.Event]] = []
        self._copies.wait_stream(self._training)  # memory that was just freed may still be in use

    @property
    def _training(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

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
        self.give(buffer, self._training.record_event())

    def upload(self, values: Tensor, *, leave: int = 0) -> "Upload | None":
        """Begin to copy host values to the device, if more than `leave` buffers are free. May be called on any thread;
        `values` must not change until `mark` says so."""
        buffer = self._take(self._copies, leave=leave)
        if buffer is None:
            return None
        with self._copies:
            buffer[: len(values)].copy_(values, non_blocking=True)
        return Upload(self, buffer, len(values), self._copies.record_event())

    def scratch(self) -> Tensor:
        """A buffer that training writes to, and `download` gives back."""
        buffer = self._take(self._training)
        assert buffer is not None, "uploads ahead of time leave enough"
        return buffer

    def download(self, buffer: Tensor, out: Tensor) -> Wait:
        """Begin to copy what training has written to the host, and give the buffer back."""
        self._copies.wait_event(self._training.record_event())
        with self._copies:
            out.copy_(buffer[: len(out)], non_blocking=True)
        arrived = self._copies.record_event()
        self.give(buffer, arrived)
        return lambda: sleep_until(arrived)

    def mark(self) -> Wait:
        """A function that waits for all copies so far."""
        event = self._copies.record_event()
        return lambda: sleep_until(event)

    def capturing(self) -> bool:
        """Whether a graph is being captured, which would replay this step's copies forever."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def timed(self) -> Callable[[], None]:
        """Time what the training stream does until the function that this returns is called."""
        began, ended = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        began.record(self._training)

        def end() -> None:
            ended.record(self._training)
            self._intervals.append((began, ended))

        return end

    def seconds(self) -> float:
        """Of the training stream, in what was timed and has ended since the last call."""
        done = [pair for pair in self._intervals if pair[1].query()]
        self._intervals = [pair for pair in self._intervals if pair not in done]
        return sum(began.elapsed_time(ended) for began, ended in done) / 1000

    def close(self) -> None:
        """Wait for all copies."""
        self.mark()()

    def __del__(self) -> None:  # the buffers are freed for the training stream
        self._training.wait_stream(self._copies)


class Upload:
    """Host values on their way to the device."""

    def __init__(self, lane: Lane, buffer: Tensor, n: int, arrived: torch.Event) -> None:
        self._lane, self._n, self._arrived = lane, n, arrived
        self._buffer: Tensor | None = buffer

    @property
    def released(self) -> bool:
        return self._buffer is None

    def values(self) -> Tensor:
        """For kernels on the training stream."""
        assert self._buffer is not None
        torch.accelerator.current_stream(self._lane.device).wait_event(self._arrived)
        return self._buffer[: self._n]

    def keep(self) -> Tensor:
        """The buffer, for `download`."""
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        return buffer

    def release(self) -> None:
        """The training stream has all the kernels that use the values."""
        if self._buffer is not None:
            self._lane.done(self.keep())

    def __del__(self) -> None:  # nobody used it
        if self._buffer is not None:
            self._lane.give(self._buffer, self._arrived)


def sleep_until(event: torch.Event) -> None:
    """Wait for an event without keeping a core busy, as `Event.synchronize` does on CUDA: at most 10 % too long."""
    began = time.perf_counter()
    while not event.query():
        time.sleep(min(max((time.perf_counter() - began) / 10, 1e-4), 0.02))
