"""The store as members use it: drives tasks, performs their operations, and repeats each one until it succeeds."""

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from diloco.bucket.store.backend import TIMEOUT, Backend, Failure, Refused
from diloco.bucket.store.limit import TransferLimit, large
from diloco.bucket.store.operations import (
    All,
    Create,
    Delete,
    Forbidden,
    List,
    Operation,
    Pause,
    Read,
    Size,
    Task,
    Work,
    Write,
    advance,
)
from diloco.errors import ConfigError

CONNECTIONS = 16
"""Operations of one task that are under way at once. Of those with large bodies fewer are: see `TransferLimit`."""
LONGEST_PAUSE = 5.0
"""Seconds between two tries of an operation while no other operation succeeds, times 0.5 to 1.5 by chance. In a member
with n fragments n + 1 operations wait like this, and the first that succeeds wakes the others: with four fragments a
store that is back is noticed after about a second."""
REFUSED = 900.0
"""Seconds for which a store may refuse everything that it has allowed before."""
REFUSALS = 3
"""Refusals of one object, while other operations succeed, after which the object is left alone."""
SILENT = 10.0
"""Seconds without any success after which a store that fails is said not to answer: two heartbeats."""
_GIVEN_UP: dict[type, Any] = {Read: Forbidden(), Size: 0, Delete: None}
"""The answers where one object is refused: what there is cannot be used, as if it were empty."""
T = TypeVar("T")
Report = Callable[..., None]
log = logging.getLogger("diloco")


class Closed(Exception):
    """The member leaves: no operation is begun or repeated any more."""


class Store:
    """Performs operations: several at once, each again and again until it succeeds or the store is closed."""

    def __init__(
        self,
        backend: Backend,
        *,
        clock: Callable[[], float] = time.monotonic,
        report: Report = lambda event, **values: None,
    ) -> None:
        """`report`: told what goes wrong and right, as an event with values."""
        self._backend, self._clock, self._report = backend, clock, report
        self.closing = threading.Event()
        self.sent = self.received = self.requests = 0
        self._counting = threading.Lock()
        self._down = threading.Event()
        self._succeeded: float | None = None  # when an operation last did
        self._refused: float | None = None  # since when all that is asked is
        self._unlisted: set[str] = set()  # prefixes of which it was said
        self._news = threading.Condition()  # the store answers again, or is closed
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
            case Pause(seconds):
                self.closing.wait(seconds * random.uniform(0.5, 1.5))
                return None
        pause, refusals, began = 0.1, 0, self._clock()
        while True:
            if self.closing.is_set():
                raise Closed
            try:
                answer = self._transfer(operation) if large(operation) else self._backend.attempt(operation)
            except Failure as failure:
                if _stale(operation):
                    return None
                refusals += isinstance(failure, Refused)
                if isinstance(failure, Refused) and self._forbidden(operation, failure, refusals, began):
                    return _GIVEN_UP[type(operation)]
                self._say_unlisted(operation, failure, began)
                self._wait_to_repeat(failure, pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            self._note_success()
            self._unlisted.discard(getattr(operation, "prefix", ""))
            self._count(operation, answer)
            return answer

    def _say_unlisted(self, operation: Operation, failure: Failure, began: float) -> None:
        """Without a listing nothing goes on, so it is said, although the store does other things for us."""
        if not isinstance(operation, List) or operation.prefix in self._unlisted or self._succeeded is None:
            return
        if self._succeeded > began and self._clock() - began > SILENT:
            self._unlisted.add(operation.prefix)
            log.warning("the store does not list %s (%s); trying again", operation.prefix, failure)
            self._report("store does not list", object=operation.prefix, reason=str(failure))

    def _note_success(self) -> None:
        self._succeeded, self._refused = self._clock(), None
        if self._down.is_set():
            self._down.clear()
            log.warning("the store answers again")
            self._report("store answers")
            self._wake_waiting()

    def _forbidden(self, operation: Operation, refused: Refused, times: int, began: float) -> bool:
        """Whether this one object is refused, while the store does other things for us. Raises ConfigError if nothing
        was ever allowed, or nothing for a long time: a moment without the right credentials must not end a run."""
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
        """One try of an operation with a large body."""
        with self._transfers.transfer(self.closing) as halved:
            if self.closing.is_set():
                raise Closed
            if _stale(operation):
                raise Failure("it waited until it was no longer wanted")
            began = self._clock()
            try:
                answer = self._backend.attempt(operation)
            except Failure:
                self._transfers.failed(self._clock() - began, halved)
                raise
            self._transfers.succeeded(self._clock() - began)
            return answer

    def _at_once(self, operations: Sequence[Operation]) -> list[Any]:
        """On daemon threads: those of a pool would keep the process alive while the store does not answer. Work stays
        on this thread, because torch would start a team of threads of its own in a new one."""
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

        helpers = min(rest.qsize(), CONNECTIONS) - (not works)  # this thread is one, unless it has work to do
        threads = [threading.Thread(target=perform_rest, name="store", daemon=True) for _ in range(helpers)]
        for thread in threads:
            thread.start()
        for k, operation in enumerate(operations):
            if isinstance(operation, Work):
                answers[k] = operation.perform()
        perform_rest()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return answers

    def _wait_to_repeat(self, failure: Failure, pause: float) -> None:
        silent = self._succeeded is None or self._clock() - self._succeeded > SILENT
        if silent and not self._down.is_set():  # not because of one object, while others can be read
            self._down.set()
            refused = isinstance(failure, Refused)
            log.warning("the store %s (%s); trying again, training goes on",
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


def _stale(operation: Operation) -> bool:
    return isinstance(operation, Create) and operation.stale is not None and operation.stale()
