"""What a member wants from the outside, as values: store operations, heavy work, a pause.

The protocol is written as generators that yield operations and are sent the answers. So the same code runs on threads
over a real store, and in a test that interleaves members, crashes and lost replies in any order.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Oversized:
    """In place of bytes: the object is larger than it may be, and was not read."""

    size: int


@dataclass(frozen=True)
class Create:
    """Put where nothing is. No answer: whatever the store said, only a look tells what is there."""

    name: str
    data: bytes
    stale: Callable[[], bool] | None = None  # stop trying when this holds


@dataclass(frozen=True)
class Write:
    """Put, over what is there. Only for objects with one owner."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Read:
    """→ bytes, Oversized, or None if there is nothing. `first`: only so many bytes, whatever the size."""

    name: str
    limit: int
    first: int | None = None


@dataclass(frozen=True)
class Size:
    """→ bytes of the object, or None."""

    name: str


@dataclass(frozen=True)
class List:
    """→ {name: size} of all objects below a prefix that ends in a slash."""

    prefix: str


@dataclass(frozen=True)
class Delete:
    name: str


@dataclass(frozen=True)
class Work:
    """Something that takes long and touches nothing shared. → its result."""

    function: Callable[[], Any]


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class All:
    """Several at once, in any order. → their answers, in the order given."""

    operations: Sequence["Operation"]


Operation = Create | Write | Read | Size | List | Delete | Work | Pause | All
Task = Generator[Operation, Any, T]


def create(name: str, data: bytes, limit: int) -> Task[bytes | Oversized]:
    """Create, and return what is there then: this, or what was there before."""
    pause = 0.05
    while True:
        yield Create(name, data)
        found = yield Read(name, limit)
        if found is not None:
            return found
        yield Pause(pause)  # refused, and yet nothing there: a conflict with a write that failed
        pause = min(2 * pause, 5.0)


def together(tasks: Sequence[Task[T]]) -> Task[list[T]]:
    """Run several tasks side by side: what they want next is done at once."""
    results: dict[int, T] = {}
    wanted: dict[int, Operation] = {}

    def advance(number: int, answer: Any) -> None:
        try:
            wanted[number] = tasks[number].send(answer)
        except StopIteration as stop:
            results[number] = stop.value

    for number in range(len(tasks)):
        advance(number, None)
    while wanted:
        batch, wanted = wanted, {}
        flat: list[Operation] = []
        for operation in batch.values():
            flat += operation.operations if isinstance(operation, All) else [operation]
        answers = iter((yield All(flat)))
        for number, operation in batch.items():
            if isinstance(operation, All):
                advance(number, [next(answers) for _ in operation.operations])
            else:
                advance(number, next(answers))
    return [results[number] for number in range(len(tasks))]
