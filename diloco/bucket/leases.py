"""Leases: which member trains on which windows of the corpus, without a server.

Each epoch is cut into ranges of windows. A member takes a range by creating an object, which only one member can, and
says in a second one how far rounds have counted its work there:

    leases/EPOCH/RANGE.ATTEMPT            the lease: the member, and the first window of the range that is still to do
    leases/EPOCH/RANGE.ATTEMPT.to-WINDOW  the windows before this one are counted

A range whose holder has died is taken again, by the next attempt, from the last window that is known to be counted. So
windows are trained twice only if their holder died between a round and the second object, and the attempts name them.
"""

import contextlib
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.bucket.run import Session
from diloco.bucket.store import All, List, Read, Task, create
from diloco.bucket.store.envelope import HEADER, PREFIX, Envelope, Invalid, Reject

LEASES = "leases/"
_NAME = re.compile(rf"{LEASES}([0-9]{{6}})/([0-9]{{6}})\.([0-9]{{2}})(?:\.to-([0-9]{{1,12}}))?")
ATTEMPTS = 99
MOST = 10_000
"""Maximum ranges of an epoch: every claim lists their objects."""
LIMIT = PREFIX.size + HEADER
PATIENCE = 10.0
"""Seconds that training waits for a lease once; until the store answers again it goes on without."""


@dataclass(frozen=True)
class Ranges:
    """How an epoch of `windows` is cut: a setting of the run."""

    windows: int
    size: int

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.windows or self.count > MOST:
            raise ValueError(f"{self.windows} windows in ranges of {self.size}")

    @property
    def count(self) -> int:
        return -(-self.windows // self.size)

    def bounds(self, number: int) -> tuple[int, int]:
        return number * self.size, min((number + 1) * self.size, self.windows)


def read_ranges(note: object) -> Ranges | None:
    """The ranges that a run's note describes, if it does."""
    match note:
        case {"windows": int(windows), "size": int(size)}:
            with contextlib.suppress(ValueError):
                return Ranges(windows, size)
    return None


def ranges_of(windows: int, wanted: int) -> Ranges:
    """Ranges of about the work that a member does between two syncs.

    >>> ranges_of(1000, 64), ranges_of(3, 64), ranges_of(1_000_000, 1)
    (Ranges(windows=1000, size=64), Ranges(windows=3, size=3), Ranges(windows=1000000, size=100))
    """
    return Ranges(windows, min(max(wanted, -(-windows // MOST)), windows))


@dataclass
class Lease:
    """A range that this member has taken."""

    epoch: int
    number: int
    attempt: int
    first: int
    end: int
    used: int = 0  # windows handed to training
    last_step: int = 0  # that used a window of it

    @property
    def name(self) -> str:
        return f"{LEASES}{self.epoch:06d}/{self.number:06d}.{self.attempt:02d}"

    @property
    def exhausted(self) -> bool:
        return self.first + self.used == self.end


@dataclass
class Attempts:
    """What the names in the store say about one range: how far each attempt is counted, or None."""

    counted: dict[int, int | None] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        return max(self.counted, default=-1)

    def start(self, first: int) -> int:
        """The first window that is not counted."""
        return max([first, *(to for to in self.counted.values() if to is not None)])

    def is_done(self, first: int, end: int) -> bool:
        return self.start(first) >= end


def read_names(names: Iterator[str] | Mapping[str, int]) -> dict[tuple[int, int], Attempts]:
    """By epoch and range."""
    ranges: dict[tuple[int, int], Attempts] = {}
    for name in sorted(names):
        if match := _NAME.fullmatch(name):
            counted = ranges.setdefault((int(match[1]), int(match[2])), Attempts()).counted
            counted[int(match[3])] = int(match[4]) if match[4] else counted.get(int(match[3]))
    return ranges


@dataclass(frozen=True)
class Holder:
    member: str
    incarnation: int
    first: int


def read_holder(envelope: Envelope, name: str, data: Any) -> Holder:
    """Raises Invalid."""
    opened = envelope.open(name, "lease", data, 0)
    return Holder(opened.text("member"), opened.integer("incarnation", 0, 1 << 30), opened.integer("first", 0, 1 << 40))


class Leases:
    """The leases of one member. Training calls `take` and `trained`; a thread of the bucket drives `tick`. All of it
    runs under the bucket's lock."""

    def __init__(self, session: Session, ranges: Ranges, lock: Any, wake: Callable[[], None]) -> None:
        self._session, self._ranges, self._lock, self._wake = session, ranges, lock, wake
        self._queue: deque[Lease] = deque()  # with windows left
        self._open: list[Lease] = []  # with windows that no round has counted yet
        self._dropped: set[str] = set()  # whose work was lost
        self._holders: dict[str, Holder | None] = {}
        self._epoch = self._counted = self._most = 0
        self._short = False
        self.unleased = 0
        """Windows that training took without a lease, because the store did not answer."""

    def take(self, count: int, step: int) -> list[tuple[int, int, int]]:
        """(epoch, first, end) of windows to train on in this step: fewer than `count` if the store does not answer."""
        with self._lock:
            self._most = max(self._most, count)
            if self._left < count:
                self._wake()
            self._short = not self._lock.wait_for(lambda: self._left >= count, 0.0 if self._short else PATIENCE)
            spans = []
            while count and self._queue:
                lease = self._queue[0]
                begin = lease.first + lease.used
                taken = min(count, lease.end - begin)
                spans.append((lease.epoch, begin, begin + taken))
                lease.used, lease.last_step, count = lease.used + taken, step, count - taken
                if lease.exhausted:
                    self._queue.popleft()
            self.unleased += count
            if self._left < self._wanted:
                self._wake()
            return spans

    def trained(self, counted: int, lost: tuple[int, int] = (0, 0)) -> None:
        """`counted`: the steps that rounds of all fragments have counted. `lost`: the last steps whose work was given
        up, after the first number up to the second: others may take their ranges again, or this member."""
        with self._lock:
            self._counted = counted
            for lease in [lease for lease in self._open if lost[0] < lease.last_step <= lost[1]]:
                self._open.remove(lease)
                self._dropped.add(lease.name)
                if not lease.exhausted:
                    self._queue.remove(lease)
            if any(self._is_counted(lease) for lease in self._open):
                self._wake()

    def tick(self) -> Task[None]:
        for lease in [lease for lease in self._open if self._is_counted(lease)]:
            yield from self._close(lease)
        while self._left < self._wanted:
            lease = yield from self._claim()
            if not self._wanted:  # released meanwhile
                return (yield from self._close(lease))
            self._open.append(lease)
            self._queue.append(lease)

    def release(self) -> Task[None]:
        """This member leaves: close what is counted, and free the rest. Ranges whose last steps no round has counted
        stay open until others notice that this member has left."""
        self._queue.clear()
        self._most = 0  # takes no more
        for lease in self._open.copy():
            if lease.last_step <= self._counted:
                yield from self._close(lease)

    @property
    def _left(self) -> int:
        return sum(lease.end - lease.first - lease.used for lease in self._queue)

    @property
    def _wanted(self) -> int:
        return self._ranges.size + 2 * self._most if self._most else 0

    def _is_counted(self, lease: Lease) -> bool:
        return lease.exhausted and lease.last_step <= self._counted

    def _close(self, lease: Lease) -> Task[None]:
        name = f"{lease.name}.to-{lease.first + lease.used}"
        yield from create(name, self._session.envelope.seal(name, "leased", {}).body, LIMIT)
        if lease in self._open:  # not given up meanwhile
            self._open.remove(lease)

    def _claim(self) -> Task[Lease]:
        """Take a range: of the first epoch that is not complete, or of the next one."""
        epoch = self._epoch
        while True:
            known = read_names((yield List(f"{LEASES}{epoch:06d}/")))
            ranges = {number: known.get((epoch, number), Attempts()) for number in range(self._ranges.count)}
            rest = {n: a for n, a in ranges.items() if not a.is_done(*self._ranges.bounds(n))}
            lease = yield from self._first_free(epoch, rest)
            if lease is not None:
                return lease
            if not rest and epoch == self._epoch:
                self._epoch += 1
            epoch += 1

    def _first_free(self, epoch: int, ranges: Mapping[int, Attempts]) -> Task[Lease | None]:
        """Begin at a place of this member's own, so that members seldom want the same range."""
        begin = zlib.crc32(self._session.name.encode()) % self._ranges.count
        for number in sorted(ranges, key=lambda number: (number - begin) % self._ranges.count):
            attempts, (first, end) = ranges[number], self._ranges.bounds(number)
            lease = Lease(epoch, number, attempts.newest + 1, attempts.start(first), end)
            before = Lease(epoch, number, attempts.newest, first, end).name
            if attempts.counted.get(attempts.newest, end) is None and not (yield from self._is_free(before)):
                continue
            if lease.attempt > ATTEMPTS:
                continue
            entry = self._session.entry
            holder = {"member": entry.name, "incarnation": entry.incarnation, "first": lease.first}
            body = self._session.envelope.seal(lease.name, "lease", holder).body
            if (yield from create(lease.name, body, LIMIT)) == body:
                if attempts.newest >= 0:
                    self._session.event("lease taken again", epoch=epoch, range=number, attempt=lease.attempt)
                return lease
        return None

    def _is_free(self, name: str) -> Task[bool]:
        """Whether the holder of an open lease is dead, or has given up its work."""
        if name in self._dropped:
            return True
        if name not in self._holders:
            data = yield Read(name, LIMIT)
            try:
                self._holders[name] = None if data is None else read_holder(self._session.envelope, name, data)
            except Invalid as reason:
                self._session.reject(name, reason)
                self._holders[name] = None
        holder, entry = self._holders[name], self._session.entry
        if holder is None:
            return True
        if holder.member == entry.name:
            return holder.incarnation < entry.incarnation
        return self._session.members.is_gone(holder.member, holder.incarnation, self._session.clock())


@dataclass(frozen=True)
class Audit:
    """How often each range of an epoch was trained."""

    epoch: int
    ranges: int
    once: int
    """Counted by one member, or in parts by several, each window once."""
    open: dict[int, Holder | None]
    """Taken and not counted yet: the holder of each."""
    again: dict[int, tuple[str, ...]]
    """Taken again after a holder died or lost its work: all holders, in order. Windows may be trained twice."""


def audit(envelope: Envelope, ranges: Ranges, reject: Reject) -> Task[list[Audit]]:
    known = read_names((yield List(LEASES)))
    audits = []
    for epoch in sorted({epoch for epoch, _ in known}):
        once, still, again = 0, dict[int, Holder | None](), dict[int, tuple[str, ...]]()
        for number in range(ranges.count):
            attempts, (first, end) = known.get((epoch, number), Attempts()), ranges.bounds(number)
            counted = [attempts.counted[k] for k in sorted(attempts.counted)]
            done = attempts.is_done(first, end)
            if done and None not in counted and len(counted) == 1:
                once += 1
                continue
            names = [Lease(epoch, number, k, first, end).name for k in sorted(attempts.counted)]
            holders = list[Holder | None]()
            for name, data in zip(names, (yield All([Read(name, LIMIT) for name in names])), strict=True):
                try:
                    holders.append(read_holder(envelope, name, data))
                except Invalid as reason:
                    reject(name, reason)
                    holders.append(None)
            firsts = [holder.first if holder else first for holder in holders]
            parts = list(zip(counted, firsts[1:], strict=False))
            if any(to is None or to > begin for to, begin in parts):
                again[number] = tuple(f"{h.member}/{h.incarnation}" if h else "?" for h in holders)
            elif done:
                once += 1
            if not done and counted and counted[-1] is None:
                still[number] = holders[-1]
        audits.append(Audit(epoch, ranges.count, once, still, again))
    return audits
