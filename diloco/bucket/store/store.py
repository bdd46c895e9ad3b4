"""The store as members use it: drives tasks, performs their operations, and retries each one until it succeeds."""

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from diloco.bucket.store import (
    FORBIDDEN,
    All,
    Create,
    Delete,
    Fetch,
    List,
    Operation,
    Pause,
    Read,
    Size,
    Task,
    Work,
    Write,
    advance,
    backoff,
)
from diloco.bucket.store.backend import TIMEOUT, Backend, Failure, Refused
from diloco.errors import ConfigError

CONNECTIONS = 16
"""Maximum concurrent operations of one task. `TransferLimit` allows fewer with large bodies."""
LONGEST_PAUSE = 5.0
"""Maximum seconds between two tries of an operation while no other operation succeeds, times 0.5 to 1.5 at random. A
member with n fragments has n + 1 operations waiting like this, and the first success wakes the others: with four
fragments, a member notices within about a second that the store is back."""
REFUSED = 900.0
"""Seconds for which a store may refuse everything that it allowed before."""
REFUSALS = 3
"""Refusals after which an object is left alone, while other operations succeed."""
SILENT = 10.0
"""Seconds without any success after which a failing store is reported as not answering: two heartbeats."""
LARGE, LARGEST = 1 << 20, 16 << 20
"""Bytes of a body from which on it counts as large, and of the largest."""
MAX_TRANSFERS = 8
_GIVEN_UP: dict[type, Any] = {Read: FORBIDDEN, Size: 0, Delete: None}
"""The answers when one object is refused: it is unusable, as if it were empty."""
T = TypeVar("T")
Report = Callable[..., None]
log = logging.getLogger("diloco")


class Closed(Exception):
    """The member is leaving: operations are neither started nor retried."""


class Store:
    """Performs operations: several at once, each retried until it succeeds or the store is closed."""

    def __init__(
        self,
        backend: Backend,
        *,
        clock: Callable[[], float] = time.monotonic,
        report: Report = lambda event, **values: None,
    ) -> None:
        """`report` is called with an event and its values when the store fails and when it recovers."""
        self._backend, self._clock, self._report = backend, clock, report
        self.closing = threading.Event()
        self.sent = self.received = self.requests = 0
        self._counting = threading.Lock()
        self._down = threading.Event()
        self._succeeded: float | None = None  # time of the last success
        self._refused: float | None = None  # since when every operation is refused
        self._failing: set[str] = set()  # what was reported as not listable or not writable
        self._news = threading.Condition()  # notified when the store answers again or is closed
        self._transfers = TransferLimit(TIMEOUT)

    def run(self, task: Task[T], lock: Any) -> T:
        """Drive a task. Its own code runs under the lock; the operations it yields do not."""
        answer: Any = None
        while True:
            with lock:
                try:
                    operation = advance(task, answer)
                except StopIteration as stop:
                    return stop.value
            answer = self.perform(operation)

    def perform(self, operation: Operation) -> Any:
        match operation:
            case All(operations):
                return self._at_once(operations)
            case Work():
                return operation.perform()
            case Fetch(function):
                return function()
            case Pause(seconds):
                self.closing.wait(seconds * random.uniform(0.5, 1.5))
                return None
        refusals, began, refused = 0, self._clock(), None
        for pause in backoff(0.1, LONGEST_PAUSE):
            if self.closing.is_set():
                raise Closed
            try:
                answer = self._transfer(operation) if size_of(operation) > LARGE else self._backend.attempt(operation)
            except Failure as failure:
                if isinstance(operation, Create) and operation.stale(True):
                    return None
                if isinstance(failure, Refused):
                    refusals, refused = refusals + 1, self._clock() if refused is None else refused
                    if isinstance(operation, Write) and self._clock() - refused > REFUSED:  # reads may still succeed
                        raise ConfigError(str(failure)) from None
                    if self._is_forbidden(operation, failure, refusals, began):
                        return _GIVEN_UP[type(operation)]
                else:
                    refused = None
                self._report_failing(operation, failure, began)
                self._wait_to_retry(failure, pause)
                continue
            self._note_success()
            self._failing.discard(_needed(operation))
            self._count(operation, answer)
            return answer
        raise AssertionError

    def _report_failing(self, operation: Operation, failure: Failure, began: float) -> None:
        """A member cannot continue without listings and its heartbeat, so report them even though other operations
        succeed."""
        name = _needed(operation)
        if not name or name in self._failing or self._succeeded is None:
            return
        if self._succeeded > began and self._clock() - began > SILENT:
            self._failing.add(name)
            does = "does not list" if isinstance(operation, List) else "takes no writes"
            log.warning("the store %s: %s (%s); retrying", does, name, failure)
            self._report(f"store {does}", object=name, reason=str(failure))

    def _note_success(self) -> None:
        self._succeeded, self._refused = self._clock(), None
        if self._down.is_set():
            self._down.clear()
            log.warning("the store answers again")
            self._report("store answers")
            self._wake_waiting()

    def _is_forbidden(self, operation: Operation, refused: Refused, times: int, began: float) -> bool:
        """Whether only this object is refused, while other operations succeed. Raises ConfigError if nothing was ever
        allowed, or nothing for a long time: a moment with wrong credentials must not end a run."""
        now = self._clock()
        self._refused = now if self._refused is None else self._refused
        if self._succeeded is None or now - self._refused > REFUSED:
            raise ConfigError(str(refused))
        lasts = now - began > REFUSED if isinstance(operation, Read) and operation.patient else times >= REFUSALS
        return type(operation) in _GIVEN_UP and lasts and self._succeeded > began

    def close(self) -> None:
        self.closing.set()
        self._transfers.wake()
        self._wake_waiting()

    def _transfer(self, operation: Operation) -> Any:
        """Try an operation with a large body once."""
        with self._transfers.transfer(self.closing):
            if self.closing.is_set():
                raise Closed
            if isinstance(operation, Create) and operation.stale(False):
                raise Failure("it became stale while it waited")
            began = self._clock()
            try:
                answer = self._backend.attempt(operation)
            except Failure:
                self._transfers.failed(self._clock() - began)
                raise
            moved = len(answer) if isinstance(answer, bytes) else size_of(operation)
            self._transfers.succeeded(moved, self._clock() - began)
            return answer

    def _at_once(self, operations: Sequence[Operation]) -> list[Any]:
        """Use daemon threads: a pool's threads would keep the process alive while the store does not answer. Work stays
        on this thread, because torch starts a new team of threads in every thread that computes."""
        answers: list[Any] = [None] * len(operations)
        errors: list[BaseException] = []
        rest: queue.SimpleQueue[int] = queue.SimpleQueue()
        for k, operation in enumerate(operations):
            if not isinstance(operation, Work):
                rest.put(k)
        works = len(operations) - rest.qsize()

        def perform_rest() -> None:
            try:
                while True:
                    k = rest.get_nowait()
                    answers[k] = self.perform(operations[k])
            except queue.Empty:
                pass
            except BaseException as error:
                errors.append(error)

        helpers = min(rest.qsize(), CONNECTIONS) - (not works)  # this thread helps too, unless it has Work to do
        threads = list[threading.Thread]()
        with suppress(RuntimeError):  # no more threads can be started: fewer do the same
            for _ in range(helpers):
                thread = threading.Thread(target=perform_rest, name="store", daemon=True)
                thread.start()
                threads.append(thread)
        for k, operation in enumerate(operations):
            if isinstance(operation, Work):
                answers[k] = operation.perform()
        perform_rest()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return answers

    def _wait_to_retry(self, failure: Failure, pause: float) -> None:
        silent = self._succeeded is None or self._clock() - self._succeeded > SILENT
        if silent and not self._down.is_set():  # one failing object does not count while others can be read
            self._down.set()
            refused = isinstance(failure, Refused)
            log.warning("the store %s (%s); retrying while training continues",
                        "refuses everything" if refused else "does not answer", failure)  # fmt: skip
            self._report("store refuses" if refused else "store does not answer", reason=str(failure))
        with self._news:
            if not self.closing.is_set():
                self._news.wait(pause * random.uniform(0.5, 1.5))

    def _wake_waiting(self) -> None:
        with self._news:
            self._news.notify_all()

    def _count(self, operation: Operation, answer: Any) -> None:
        with self._counting:
            self.requests += 1
            match operation:
                case Create(data=data) | Write(data=data):
                    self.sent += len(data)
                case Read() if isinstance(answer, bytes):
                    self.received += len(answer)


def _needed(operation: Operation) -> str:
    """The prefix of a listing or the name of a heartbeat; empty for other operations."""
    match operation:
        case List(prefix=name) | Write(name=name):
            return name
    return ""


def size_of(operation: Operation) -> int:
    """The most that it may move: heartbeats and records never wait behind deltas and snapshots."""
    match operation:
        case Create(data=data) | Write(data=data):
            return len(data)
        case Read(limit=limit, first=first):
            return limit if first is None else first
    return 0


class TransferLimit:
    """Large transfers travel several at a time. Once one has timed out they take turns, until the link is seen to carry
    several within half of the timeout."""

    def __init__(self, timeout: float) -> None:
        self.allowed = MAX_TRANSFERS
        self._timeout, self._busy = timeout, 0
        self._changed = threading.Condition()

    @contextmanager
    def transfer(self, closing: threading.Event) -> Iterator[None]:
        """Wait for a free place, unless the store is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._busy < self.allowed or closing.is_set())
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def failed(self, seconds: float) -> None:
        """An early failure says nothing about the link."""
        if seconds >= self._timeout / 2:
            self.allowed = 1

    def succeeded(self, nbytes: int, seconds: float) -> None:
        if 2 * MAX_TRANSFERS * LARGEST * seconds < nbytes * self._timeout:
            self.allowed = MAX_TRANSFERS

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
