"""One listing of the rounds that are open serves all fragments of a member."""

from math import inf

from diloco.bucket.rounds import ROUNDS, THOUSAND, folder, place_of, round_prefix
from diloco.bucket.store.operations import List, Task
from diloco.bucket.timing import Timing

REACH = 8
"""Rounds before the newest one that the listing covers at most, if a fragment is so far behind. One that is further
behind lists its own round."""


class Listing:
    """Each fragment uses a listing once: if it asks again, it wants to see what is new. A round that is known to be
    closed needs no new listing."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._newest = 0  # the highest index that was asked for
        self._asked: dict[int, int] = {}  # fragment: the last index
        self._from = 0
        self._names: dict[tuple[int, int], dict[str, int]] = {}
        self._used: set[int] = set()  # by which fragments
        self._closed: set[tuple[int, int]] = set()  # was said to be closed; who asks again found that it is not
        self._at = -inf  # when it was asked for

    def names(self, fragment: int, index: int, age: float | None = None) -> Task[dict[str, int]]:
        """`age`: what was listed up to so many seconds ago will do, even if it was used before."""
        self._newest, self._asked[fragment] = max(self._newest, index), index
        if index < self._newest - REACH:
            return (yield List(folder(fragment, index)))
        known = self._names.get((fragment, index), {})
        if index >= self._from and (fragment, index) not in self._closed and any("/closed." in name for name in known):
            self._closed.add((fragment, index))
            return known
        old = self._timing.clock() - self._at > (self._timing.poll if age is None else age)
        if old or (age is None and fragment in self._used) or index < self._from:
            yield from self._look()
        self._used.add(fragment)
        return self._names.get((fragment, index), {})

    def _look(self) -> Task[None]:
        first, asked = min(i for i in self._asked.values() if i >= self._newest - REACH), self._timing.clock()
        found = yield List(ROUNDS, after=round_prefix(first))
        names: dict[tuple[int, int], dict[str, int]] = {}
        for name, size in found.items():
            if (place := _place(name)) is not None:
                names.setdefault(place, {})[name] = size
        self._from, self._names, self._used, self._at = first, names, set(), asked
        self._closed = {place for place in self._closed if place[1] >= first}


def _place(name: str) -> tuple[int, int] | None:
    """Where a name belongs, whatever it is: what lies in the folder of a round is judged there."""
    parts = name.split("/")
    if len(parts) < 5 or not all(part.isascii() and part.isdigit() for part in parts[1:4]):
        return None
    return place_of(name) or (int(parts[3]), int(parts[1]) * THOUSAND + int(parts[2]))
