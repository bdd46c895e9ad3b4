"""One listing of the rounds that are open serves all fragments of a member."""

from collections.abc import Iterable, Mapping
from math import inf

from diloco.bucket.rounds import ROUNDS, THOUSAND, folder, is_record, member_of, place_of, round_prefix
from diloco.bucket.store.ahead import OBJECTS
from diloco.bucket.store.operations import List, Task
from diloco.bucket.timing import Timing

REACH = 8
"""Rounds before the newest one that the listing covers at most, if a fragment is so far behind. One that is further
behind lists its own round, and, if that is closed, once what follows."""


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
        self._behind: dict[tuple[int, int], dict[str, int]] = {}  # of fragments that are further behind: what is closed
        self._closed: set[tuple[int, int]] = set()  # was said to be closed; a fragment that asks again found it open
        self._at = -inf  # when it was asked for

    def names(self, fragment: int, index: int, age: float | None = None) -> Task[dict[str, int]]:
        """`age`: what was listed up to this many seconds ago will do, even if it was used before."""
        self._newest, self._asked[fragment] = max(self._newest, index), index
        known = self._known(fragment, index)
        if (fragment, index) not in self._closed and _is_closed(known):
            self._closed.add((fragment, index))
            return known
        if index < self._newest - REACH:
            return (yield from self._look_behind(fragment, index))
        old = self._timing.clock() - self._at > (self._timing.poll if age is None else age)
        if old or (age is None and fragment in self._used) or index < self._from:
            yield from self._look()
        self._used.add(fragment)
        return self._names.get((fragment, index), {})

    def closed(self, fragment: int, index: int) -> dict[str, int]:
        """The objects that a member reads when it follows the rounds of a fragment from this index on, as far as these
        are known to be closed. None, if only the first one is."""
        if not _is_closed(self._known(fragment, index + 1)):
            return {}
        names: dict[str, int] = {}
        while len(names) < OBJECTS and _is_closed(known := self._known(fragment, index)):
            heads = [name for name in known if "/heads-" in name]  # if there are, nobody reads the deltas one by one
            read = [*filter(is_record, known), *(heads or filter(member_of, known))]
            names |= {name: known[name] for name in sorted(read)}
            index += 1
        return names

    def _known(self, fragment: int, index: int) -> dict[str, int]:
        return (self._names if index >= self._from else self._behind).get((fragment, index), {})

    def _look_behind(self, fragment: int, index: int) -> Task[dict[str, int]]:
        """A round that is far behind may be one that stays open, as those of buffers do. So only if it is closed, all
        that follow are listed, of which there may be many."""
        names = yield List(folder(fragment, index))
        if _is_closed(names):
            found = _by_place((yield List(ROUNDS, after=round_prefix(index))))
            self._behind |= {place: found[place] for place in found if place[0] == fragment}
            self._closed.add((fragment, index))
        return names

    def _look(self) -> Task[None]:
        first, asked = min(i for i in self._asked.values() if i >= self._newest - REACH), self._timing.clock()
        found = yield List(ROUNDS, after=round_prefix(first))
        self._from, self._names, self._used, self._at = first, _by_place(found), set(), asked
        self._closed = {place for place in self._closed if self._ahead_of(place)}
        self._behind = {place: known for place, known in self._behind.items() if self._ahead_of(place)}

    def _ahead_of(self, place: tuple[int, int]) -> bool:
        """Whether its fragment has not passed it yet."""
        return place[1] >= self._asked.get(place[0], 0)


def _is_closed(names: Iterable[str]) -> bool:
    return any("/closed." in name for name in names)


def _by_place(found: Mapping[str, int]) -> dict[tuple[int, int], dict[str, int]]:
    names: dict[tuple[int, int], dict[str, int]] = {}
    for name, size in found.items():
        if (place := _place(name)) is not None:
            names.setdefault(place, {})[name] = size
    return names


def _place(name: str) -> tuple[int, int] | None:
    """Where a name belongs, whatever it is: what lies in the folder of a round is judged there."""
    parts = name.split("/")
    if len(parts) < 5 or not all(part.isascii() and part.isdigit() for part in parts[1:4]):
        return None
    return place_of(name) or (int(parts[3]), int(parts[1]) * THOUSAND + int(parts[2]))
