"""Objects that are read many at once, before they are asked for one after another."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from diloco.bucket.store.operations import All, Operation, Oversized, Raised, Read, Task, advance

T = TypeVar("T")
SMALL = 64 << 10
"""Bytes of an object that is worth it: a larger one takes its time because of its bytes, not because of its request."""
OBJECTS, BYTES = 64, 1 << 20
"""The most that is read at once, so that what is not checked yet does not fill the memory."""


class ReadAhead:
    """Answers of the store, for later. Only of objects that never change: so it does not matter when they were read.
    Each answer is given once: a reader that finds it invalid and looks again looks into the store."""

    def __init__(self) -> None:
        self._answers: dict[str, bytes] = {}

    def read(self, sizes: Mapping[str, int]) -> Task[None]:
        """Read the first small ones of the objects with these sizes, as many as are allowed; none, if the first of them
        is still at hand. Forgets what was not asked for."""
        names = _first(sizes)
        if not names or names[0] in self._answers:
            return
        answers = yield All([Read(name, SMALL) for name in names])
        # What is not there, or refused, is asked for again: it may be there by then.
        self._answers = {name: data for name, data in zip(names, answers, strict=True) if isinstance(data, bytes)}

    def serve(self, task: Task[T]) -> Task[T]:
        """Drive a task, and answer what it reads as far as possible."""
        answer: Any = None
        while True:
            try:
                operation = advance(task, answer)
            except StopIteration as stop:
                return stop.value
            try:
                if isinstance(operation, All):
                    answer = yield from self._several(operation.operations)
                else:
                    answer = self._take(operation) if self._has(operation) else (yield operation)
            except Exception as error:  # of a Work: it is the task's to catch
                answer = Raised(error)

    def _several(self, operations: Sequence[Operation]) -> Task[list[Any]]:
        answers = {k: self._take(each) for k, each in enumerate(operations) if self._has(each)}
        rest = {k: each for k, each in enumerate(operations) if k not in answers}
        if rest:
            answers |= dict(zip(rest, (yield All(list(rest.values()))), strict=True))
        return [answers[k] for k in sorted(answers)]

    def _has(self, operation: Operation) -> bool:
        return isinstance(operation, Read) and operation.first is None and operation.name in self._answers

    def _take(self, operation: Operation) -> bytes | Oversized:
        assert isinstance(operation, Read)
        data = self._answers.pop(operation.name)
        return data if len(data) <= operation.limit else Oversized(len(data))


def _first(sizes: Mapping[str, int]) -> list[str]:
    names, total = [], 0
    for name, size in sizes.items():
        if size > SMALL:
            continue
        total += size
        if len(names) == OBJECTS or total > BYTES:
            break
        names.append(name)
    return names
