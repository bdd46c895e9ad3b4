"""What a member asks of the outside, as values: store operations, heavy work, a pause.

The protocol is written as generators, called tasks, that yield operations and are sent the answers. So the same code
runs on threads over a real store, and in a test that interleaves members, crashes and lost replies in any order.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Oversized:
    """In place of bytes: the object is larger than allowed, and was not read."""

    size: int


@dataclass(frozen=True)
class Forbidden:
    """In place of bytes: the store refuses to read this object, while other operations succeed."""


@dataclass(frozen=True)
class Undeciphered:
    """In place of bytes: the object is not encrypted with the key that this member has."""


@dataclass(frozen=True)
class Raised:
    """In place of an answer: the exception that a `Work` raised. `advance` raises it inside the task."""

    error: Exception


@dataclass(frozen=True)
class Create:
    """Put an object if its name is free. There is no answer: whatever the store says, only reading tells what is
    there."""

    name: str
    data: bytes
    stale: Callable[[], bool] | None = None  # stop trying once this is true


@dataclass(frozen=True)
class Write:
    """Put an object, over what is there. Only for objects with one owner."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Read:
    """→ bytes, Oversized, Forbidden, Undeciphered, or None if there is no such object. `first`: only this many bytes
    from `at` on, whatever the size; fewer if the object ends before. `patient`: the answer is final for all members,
    so a refusal is believed only if it lasts."""

    name: str
    limit: int
    first: int | None = None
    patient: bool = False
    at: int = 0


@dataclass(frozen=True)
class Size:
    """→ bytes of the object, or None. 0, if the store refuses to say."""

    name: str


@dataclass(frozen=True)
class List:
    """→ {name: size} of all objects below a prefix that ends in a slash. `after`: only of names that follow this one in
    the order of bytes."""

    prefix: str
    after: str = ""


@dataclass(frozen=True)
class Delete:
    name: str


@dataclass(frozen=True)
class Work:
    """Something that takes long and touches nothing shared. → its result."""

    function: Callable[[], Any]

    def perform(self) -> Any:
        try:
            return self.function()
        except Exception as error:
            return Raised(error)


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class All:
    """Several operations at once, in any order. → their answers, in the order given."""

    operations: Sequence["Operation"]


Operation = Create | Write | Read | Size | List | Delete | Work | Pause | All
Task = Generator[Operation, Any, T]


def advance(task: Task[Any], answer: Any) -> Operation:
    """Give a task the answer it waits for; returns what it asks next. Raises StopIteration at its end."""
    return task.throw(answer.error) if isinstance(answer, Raised) else task.send(answer)


def create(name: str, data: bytes, limit: int) -> Task[bytes | Oversized | Forbidden | Undeciphered]:
    """Create an object, and return what is there afterwards: this one, or the one that was there before."""
    return (yield from until_there(Create(name, data), Read(name, limit)))


def until_there(create: Create, look: Read | Size) -> Task[Any]:
    """Create an object and look at what is there afterwards; None if it became stale on the way."""
    pause = 0.05
    while create.stale is None or not create.stale():
        yield create
        answer = yield look
        if answer is not None:
            return answer
        yield Pause(pause)  # refused although nothing is there: a conflict with another write, which failed
        pause = min(2 * pause, 5.0)
    return None


def together(tasks: Sequence[Task[T]]) -> Task[list[T]]:
    """Run several tasks side by side: what they ask for next is done at once."""
    results: dict[int, T] = {}
    wanted: dict[int, Operation] = {}

    def step(number: int, answer: Any) -> None:
        try:
            wanted[number] = advance(tasks[number], answer)
        except StopIteration as stop:
            results[number] = stop.value

    for number in range(len(tasks)):
        step(number, None)
    while wanted:
        batch, wanted = wanted, {}
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
