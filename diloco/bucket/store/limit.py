"""How many large bodies travel at once: as many as the link carries within the timeout of each."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from diloco.bucket.store.operations import Create, Operation, Read, Write

LARGE = 1 << 20
MAX_TRANSFERS = 8
STEADY = 4
"""Quick transfers in a row before one more may travel."""


def large(operation: Operation) -> bool:
    """Judged by the most that it may move, so that heartbeats and records never wait behind deltas and snapshots."""
    match operation:
        case Create(data=data) | Write(data=data):
            return len(data) > LARGE
        case Read(limit=limit, first=first):
            return (limit if first is None else first) > LARGE
    return False


class TransferLimit:
    """Halved when a transfer times out, down to one; raised by one after several quick transfers."""

    def __init__(self, timeout: float) -> None:
        self.allowed = MAX_TRANSFERS
        self._timeout = timeout
        self._busy = self._quick = self._halved = 0
        self._changed = threading.Condition()

    @contextmanager
    def transfer(self, closing: threading.Event) -> Iterator[int]:
        """Wait for one's turn, unless the store is closed. Yields how often the limit was halved before."""
        with self._changed:
            self._changed.wait_for(lambda: self._busy < self.allowed or closing.is_set())
            self._busy += 1
            halved = self._halved
        try:
            yield halved
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def failed(self, seconds: float, halved: int) -> None:
        """Transfers that travel together time out together: that counts once. What fails early says nothing about the
        link."""
        with self._changed:
            if seconds >= self._timeout / 2 and halved == self._halved:
                self.allowed, self._quick, self._halved = max(self.allowed // 2, 1), 0, halved + 1

    def succeeded(self, seconds: float) -> None:
        """A transfer is quick if it would take less than half of the timeout with one more beside it."""
        with self._changed:
            quick = seconds * (self.allowed + 1) / self.allowed < self._timeout / 2
            self._quick = self._quick + 1 if quick else 0
            if self._quick >= STEADY and self.allowed < MAX_TRANSFERS:
                self.allowed, self._quick = self.allowed + 1, 0
                self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
