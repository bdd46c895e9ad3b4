"""The store: a folder or a bucket behind `obstore`, with retries. Members know it only through operations."""

import logging
import random
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from diloco.bucket.store.limit import TransferLimit, large
from diloco.bucket.store.operations import (
    All,
    Create,
    Delete,
    List,
    Operation,
    Oversized,
    Pause,
    Read,
    Size,
    Task,
    Work,
    Write,
)
from diloco.errors import ConfigError, DiLoCoError

TIMEOUT = 60.0
"""Seconds of one request. A part of 16 MB needs 2.2 Mbit/s if it travels alone, as `TransferLimit` makes it on a slow
link."""
LONGEST_PAUSE = 10.0
"""Between two tries of an operation, where no other operation succeeds meanwhile."""
SCHEMES = "a folder, file://, s3://, gs://, az:// or memory://"
T = TypeVar("T")
log = logging.getLogger("diloco")


class Closed(Exception):
    """The member leaves: no operation is begun or repeated any more."""


class Failure(Exception):
    """An operation that may succeed when it is repeated."""


class Backend(Protocol):
    """One try of one operation. Raises Failure, or a DiLoCoError if it makes no sense to repeat it."""

    def attempt(self, operation: Operation) -> Any: ...


def _stale(operation: Operation) -> bool:
    return isinstance(operation, Create) and operation.stale is not None and operation.stale()


class Store:
    """Performs operations: several at once, each again and again until it succeeds or the store is closed."""

    def __init__(self, backend: Backend, connections: int = 8) -> None:
        self._backend = backend
        self.closing = threading.Event()
        self._connections = connections
        self.sent = self.received = self.requests = 0
        self._down = threading.Event()
        self._news = threading.Condition()  # the store answers again, or is closed
        self._transfers = TransferLimit(lambda: TIMEOUT)

    def perform(self, operation: Operation) -> Any:
        match operation:
            case All(operations):
                return self._at_once(operations)
            case Work(function):
                return function()
            case Pause(seconds):
                self.closing.wait(seconds * random.uniform(0.5, 1.5))
                return None
        pause = 0.1
        while True:
            if self.closing.is_set():
                raise Closed
            try:
                answer = self._transfer(operation) if large(operation) else self._backend.attempt(operation)
            except Failure as failure:
                if _stale(operation):
                    return None
                if not self._down.is_set():
                    self._down.set()
                    log.warning("the store does not answer (%s); trying again, training goes on", failure)
                with self._news:
                    if not self.closing.is_set():
                        self._news.wait(pause * random.uniform(0.5, 1.5))
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if self._down.is_set():
                self._down.clear()
                log.warning("the store answers again")
                self._wake_waiting()
            self._count(operation, answer)
            return answer

    def _transfer(self, operation: Operation) -> Any:
        """One try of an operation that moves much."""
        with self._transfers.transfer(self.closing) as halved:
            if self.closing.is_set():
                raise Closed
            if _stale(operation):
                raise Failure("it waited until it was no longer wanted")
            began = time.monotonic()
            try:
                answer = self._backend.attempt(operation)
            except Failure:
                self._transfers.failed(time.monotonic() - began, halved)
                raise
            self._transfers.succeeded(time.monotonic() - began)
            return answer

    def _at_once(self, operations: Sequence[Operation]) -> list[Any]:
        """On threads that do not keep the process alive, as those of a pool would while the store does not answer. Work
        is done on this one: in a new thread torch would begin a team of threads of its own."""
        answers: list[Any] = [None] * len(operations)
        errors: list[BaseException] = []
        works = [k for k, operation in enumerate(operations) if isinstance(operation, Work)]
        others = [k for k, operation in enumerate(operations) if not isinstance(operation, Work)]
        rest = iter(others)

        def some(numbers: Iterable[int]) -> None:
            try:
                for k in numbers:  # may be shared: the next of a list's iterator is one step for the interpreter
                    answers[k] = self.perform(operations[k])
            except BaseException as error:
                errors.append(error)

        helpers = min(len(others), self._connections) - (not works)
        threads = [threading.Thread(target=some, args=(rest,), name="store", daemon=True) for _ in range(helpers)]
        for thread in threads:
            thread.start()
        some(works)
        some(rest)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return answers

    def _count(self, operation: Operation, answer: Any) -> None:
        self.requests += 1
        match operation:
            case Create(data=data) | Write(data=data):
                self.sent += len(data)
            case Read() if isinstance(answer, bytes):
                self.received += len(answer)

    def run(self, task: Task[T], lock: Any) -> T:
        """Drive a task; its own code runs under the lock, what it yields does not."""
        answer: Any = None
        while True:
            with lock:
                try:
                    operation = task.send(answer)
                except StopIteration as stop:
                    return stop.value
            answer = self.perform(operation)

    def close(self) -> None:
        self.closing.set()
        self._transfers.wake()
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        with self._news:
            self._news.notify_all()


def probe(backend: Backend) -> None:
    """Refuse a store that does not keep its word on create-only puts. Eight at once: a store that looks first and
    writes then passes when they come one by one."""
    name = f"probe/{secrets.token_hex(8)}"
    won: list[bytes] = []

    def attempt(body: bytes) -> None:
        if backend.attempt(Create(name, body)) is True:
            won.append(body)

    bodies = [f"{i}".encode() for i in range(9)]
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(attempt, bodies[:8]))
        first = backend.attempt(Read(name, 16))
        attempt(bodies[8])
        second = backend.attempt(Read(name, 16))
        backend.attempt(Delete(name))
    except Failure as failure:
        raise DiLoCoError(f"the store does not answer: {failure}") from None
    if len(won) != 1 or first != won[0] or second != first:
        raise ConfigError(
            f"the store has no create-only puts: of 9 that raced for one name {len(won)} were told that they won, "
            f"and {'the name was' if first == second else 'it was overwritten: it'} read as {second!r}. Members could "
            "then disagree on who is in a round. S3, R2, GCS, Azure, MinIO, a local folder and NFS have them."
        )


def open_store(url: str, *, create: bool = True) -> Backend:
    """A backend for a URL or the path of a folder."""
    try:
        import obstore.store as stores
    except ImportError:
        raise ConfigError("the bucket needs obstore: pip install 'diloco[bucket]'") from None
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        folder = Path(rest if separator else url).expanduser().absolute()
        if not create and not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}")
        try:
            return Obstore(stores.LocalStore(folder, mkdir=True), url)
        except OSError as error:
            raise ConfigError(f"{url}: {error}") from None
    if scheme == "memory":
        return _MEMORIES.setdefault(rest, Obstore(stores.MemoryStore(), url))
    if scheme not in ("s3", "gs", "az"):
        raise ConfigError(f"{url}: give {SCHEMES}")
    # http is for a server of one's own that was given as the endpoint; the clouds' addresses are all https.
    options: Any = {"timeout": f"{TIMEOUT:.0f}s", "connect_timeout": "10s", "allow_http": True}
    retries: Any = {"max_retries": 1}
    try:
        return Obstore(stores.from_url(url, client_options=options, retry_config=retries), url)
    except Exception as error:
        raise ConfigError(f"{url}: {_first_line(error)}") from None


_MEMORIES: dict[str, Backend] = {}


class Obstore:
    """One try through obstore."""

    def __init__(self, store: Any, url: str) -> None:
        self._store, self._url = store, url

    def attempt(self, operation: Operation) -> Any:
        import obstore
        from obstore import exceptions

        try:
            match operation:
                case Create(name, data):
                    obstore.put(self._store, name, data, mode="create", use_multipart=False)
                    return True
                case Write(name, data):
                    obstore.put(self._store, name, data, use_multipart=False)
                    return None
                case Read(name, limit, first):
                    return self._read(obstore, name, limit, first)
                case Size(name):
                    return obstore.head(self._store, name)["size"]
                case List(prefix):
                    return {m["path"]: m["size"] for part in obstore.list(self._store, prefix) for m in part}
                case Delete(name):
                    return obstore.delete(self._store, name)
        except FileNotFoundError as error:
            if isinstance(operation, (Create, Write)):
                raise ConfigError(f"{self._url}: there is no such bucket ({_first_line(error)})") from None
            return {} if isinstance(operation, List) else None
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            return False
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
            raise self._refused(error) from None
        except (exceptions.NotSupportedError, exceptions.InvalidPathError, NotImplementedError) as error:
            raise ConfigError(f"{self._url}: {_first_line(error)}") from None
        except (exceptions.BaseError, OSError) as error:
            if any(word in str(error) for word in _REFUSED):
                raise self._refused(error) from None
            raise Failure(_first_line(error)) from None
        raise TypeError(f"{operation} is no store operation")

    def _read(self, obstore: Any, name: str, limit: int, first: int | None) -> bytes | Oversized:
        if first is not None:
            return bytes(obstore.get_range(self._store, name, start=0, length=first))
        result = obstore.get(self._store, name)
        size = result.meta["size"]
        if size > limit:
            return Oversized(size)
        data = bytes(result.bytes())
        if len(data) != size:
            raise Failure(f"{name}: {len(data)} of {size} bytes came")
        return data

    def _refused(self, error: BaseException) -> DiLoCoError:
        return ConfigError(f"{self._url}: access is refused ({_first_line(error)}); check the credentials")


_REFUSED = ("403 Forbidden", "401 Unauthorized", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied",
            "NoSuchBucket")  # fmt: skip


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
