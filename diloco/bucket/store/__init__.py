"""Effects as values: store operations, heavy work, a pause.

The protocol is written as generators, called tasks, that yield operations and are sent the answers. The same code runs
on threads over a real store, and in tests that interleave members, crashes and lost replies in any order.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Unusable:
    """Instead of bytes: why an object that exists cannot be read."""

    reason: str


FORBIDDEN = Unusable("the store refuses to read it")
UNDECIPHERED = Unusable("it is not encrypted with the key of this run")


def too_large(size: int) -> Unusable:
    return Unusable(f"it is too large: {size} bytes")


@dataclass(frozen=True)
class Raised:
    """Instead of an answer: the exception that a `Work` raised. `advance` raises it inside the task."""

    error: Exception


@dataclass(frozen=True)
class Create:
    """Put an object if its name is free. The answer is ignored: a reply may be lost, so only reading the object tells
    who won."""

    name: str
    data: bytes
    stale: Callable[[bool], bool] = field(default=lambda failed: False, repr=False)
    """Whether to stop. `failed`: an attempt has failed."""


@dataclass(frozen=True)
class Write:
    """Put an object, overwriting any previous one. Only for objects with one owner."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Read:
    """→ bytes, Unusable, or None if there is no such object. `first`: read only this many
    bytes starting at `at`, whatever the size; fewer if the object ends earlier. `patient`: the answer is final for all
    members, so accept a refusal only if it persists."""

    name: str
    limit: int
    first: int | None = None
    patient: bool = False
    at: int = 0


@dataclass(frozen=True)
class Size:
    """→ bytes of the object, or None. 0 if the store refuses to tell."""

    name: str


@dataclass(frozen=True)
class List:
    """→ {name: size} of all objects below a prefix that ends in a slash. `after`: only names that sort after this one,
    by bytes."""

    prefix: str
    after: str = ""


@dataclass(frozen=True)
class Delete:
    name: str


@dataclass(frozen=True)
class Work:
    """A slow computation that touches no shared state. → its result."""

    function: Callable[[], Any]

    def perform(self) -> Any:
        try:
            return self.function()
        except Exception as error:
            return Raised(error)


@dataclass(frozen=True)
class Fetch:
    """Ask a member for a payload, which may take a while. → the payload, checked; None: read it from the store."""

    function: Callable[[], bytes | None]


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class All:
    """Several operations at once, in any order. → their answers, in the given order."""

    operations: Sequence["Operation"]


Operation = Create | Write | Read | Size | List | Delete | Work | Fetch | Pause | All
Task = Generator[Operation, Any, T]


def backoff(first: float, longest: float) -> Iterator[float]:
    """Seconds to pause between tries: each pause is twice the previous one, up to `longest`.

    >>> from itertools import islice
    >>> list(islice(backoff(0.5, 3.0), 4))
    [0.5, 1.0, 2.0, 3.0]
    """
    while True:
        yield first
        first = min(2 * first, longest)


def advance(task: Task[Any], answer: Any) -> Operation:
    """Send a task its answer and return the next operation. Raises StopIteration at the end of the task."""
    return task.throw(answer.error) if isinstance(answer, Raised) else task.send(answer)


def create(name: str, data: bytes, limit: int) -> Task[bytes | Unusable]:
    """Create an object and return the one the store then has: this one, or an earlier one."""
    return (yield from until_there(Create(name, data), Read(name, limit)))


def until_there(create: Create, look: Read | Size) -> Task[Any]:
    """Create an object and return the answer to `look`; None if the object became stale first."""
    pauses, failed = backoff(0.05, 5.0), False
    while not create.stale(failed):
        yield create
        answer = yield look
        if answer is not None:
            return answer
        failed = True
        yield Pause(next(pauses))  # refused although the name is free: it conflicted with another write, which failed
    return None


def together(tasks: Sequence[Task[T]]) -> Task[list[T]]:
    """Run several tasks concurrently: their next operations are performed at once."""
    results: dict[int, T] = {}
    pending: dict[int, Operation] = {}

    def step(number: int, answer: Any) -> None:
        try:
            pending[number] = advance(tasks[number], answer)
        except StopIteration as stop:
            results[number] = stop.value

    for number in range(len(tasks)):
        step(number, None)
    while pending:
        batch, pending = pending, {}
        flat: list[Operation] = []
        for operation in batch.values():
            flat += operation.operations if isinstance(operation, All) else [operation]
        answers = iter((yield All(flat)))
        for number, operation in batch.items():
            if isinstance(operation, All):
                step(number, [next(answers) for _ in operation.operations])
            else:
                step(number, next(answers))
    return [results[number] for number in range(len(tasks))]


def in_batches(tasks: Sequence[Task[T]], size: int) -> Task[list[T]]:
    """Run tasks concurrently, at most `size` at a time."""
    results = []
    for start in range(0, len(tasks), size):
        results += yield from together(tasks[start : start + size])
    return results
