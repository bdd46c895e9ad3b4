"""The members of a run as one member sees them, and how long it waits for them.

A member is alive while the counter in its entry keeps changing, judged by the local clock.
"""

import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from itertools import islice
from math import inf
from typing import NamedTuple

from diloco.bucket.rounds import MEMBER
from diloco.bucket.rules import expected
from diloco.bucket.store import All, Delete, List, Read, Task, Write, create, in_batches
from diloco.bucket.store.envelope import PREFIX, Envelope, Invalid, Opened, Reject, flag, integer, number, refuses, text
from diloco.errors import ConfigError, DiLoCoError

MEMBERS = "members/"
_ENTRY = re.compile(rf"{MEMBERS}({MEMBER})/([0-9]{{6}})")
_PLACE = re.compile(rf"{MEMBERS}{MEMBER}(/[0-9]{{6}})?")
"""An entry, or the folder of a member's entries, which a folder store lists too."""
SAMPLE = 32
"""Entries read per heartbeat. With more members, each is read every few heartbeats."""
SELDOM = 8
"""Additional entries read per heartbeat, of members that are probably dead."""
STILL = 5
"""Reads without a heartbeat after which a member is probably dead. Its entry is not deleted: it may only sleep."""
INCARNATIONS = 1_000_000
"""Maximum incarnations of one member name."""
ENTRY = PREFIX.size + (16 << 10)
ADDRESS = 500
"""Maximum characters of an address."""
STUCK = 300.0
"""Seconds without a step, and at least 20 steps, after which rounds stop waiting for a member despite its heartbeat."""
STEPS, UPLOAD, POLL = "steps", "upload_seconds", "poll_seconds"
"""Published figures. The others set their straggler timeout by the last two and by the step time."""
LONGEST_STRAGGLER_TIMEOUT = 30.0
IDLE, LOOKS = 10.0, 8
"""While it has no delta in flight, a member polls at most this many seconds apart, and about this often between two of
its deltas."""
LATE = 2.0
"""Seconds after which an averaged share is late, beyond the expected time."""


class Phase(Enum):
    """What a fragment is doing; the value says what it waits for. Members publish the place of a phase in this list."""

    IDLE = "steps, or another member's delta"
    ENCODING = "the delta to be encoded"
    DELIVERING = "the store to take the delta"
    DELIVERED = "the others' deltas, or the straggler timeout"
    OPEN = "the store to say whether the round is closed"
    COMMITTED = "the deltas that the record names"
    AVERAGING = "the averaged shares"
    READY = "training to apply the round"
    JUDGING = "the others' deltas, to see which bits most of them hold"
    JUMPING = "a snapshot"
    ENDED = "nothing: this was the last round"


class Superseded(DiLoCoError):
    """Another process has joined under this member's name."""


@dataclass(frozen=True)
class Member:
    """A member's entry in the store, written by itself."""

    name: str
    incarnation: int
    counter: int = 0
    held: tuple[int, ...] = ()  # index of each fragment
    wants: tuple[tuple[int, int], ...] = ()  # (fragment, minimum index) of snapshots
    joining: bool = True
    left: bool = False
    step_seconds: float = 0.0
    published: dict[str, float] = field(default_factory=dict)  # loss, steps, …
    phases: str = ""  # of each fragment: the place of its phase in `Phase`, as a hexadecimal digit
    address: str = ""  # where it serves its payloads

    @property
    def object_name(self) -> str:
        return f"{MEMBERS}{self.name}/{self.incarnation:06d}"

    def sealed(self, envelope: Envelope) -> bytes:
        return envelope.seal(self.object_name, "member", {"member": asdict(self)}).body

    def phase(self, fragment: int) -> Phase | None:
        """What a fragment of the member is doing."""
        return list(Phase)[int(self.phases[fragment], 16)] if fragment < len(self.phases) else None


_DIGITS = {f"{place:x}" for place in range(len(Phase))}


def check_name(name: str) -> str:
    if not re.fullmatch(MEMBER, name):
        raise ConfigError(f"member name {name!r}: use 1 to 63 of a-z, 0-9, - and _, starting with a letter or digit")
    return name


@refuses
def read_member(opened: Opened) -> Member:
    """Raises Invalid."""
    fields, published = opened.header["member"], opened.header["member"]["published"]
    if set(fields) != set(Member.__dataclass_fields__):
        raise Invalid("its fields are not those of a member")
    member = Member(
        name=str(fields["name"]),
        incarnation=integer(fields["incarnation"], "incarnation", 0, INCARNATIONS - 1),
        counter=integer(fields["counter"], "counter", 0, 1 << 60),
        held=tuple(integer(i, "held", 0, 1 << 40) for i in fields["held"]),
        wants=tuple((integer(f, "fragment", 0, 1 << 30), integer(i, "index", 0, 1 << 40)) for f, i in fields["wants"]),
        joining=flag(fields["joining"], "joining"),
        address=text(fields["address"], "address")[:ADDRESS],
        phases=text(fields["phases"], "phases"),
        left=flag(fields["left"], "left"),
        step_seconds=number(fields["step_seconds"], "step_seconds", 0, 1e6),
        published={str(key)[:64]: number(value, str(key)[:64], -1e30, 1e30) for key, value in published.items()},
    )
    if opened.name != member.object_name:
        raise Invalid("it belongs to another member than its name says")
    if not set(member.phases) <= _DIGITS:
        raise Invalid("its phases are not all known")
    return member


@dataclass
class _Sight:
    member: Member
    beat: float  # when its counter was last seen to change
    moved: float  # when it was last seen to make a step, or to join
    excused: bool = False  # once for each heartbeat: nobody could be seen while the store or this process was away


class Members:
    """The other members, and which of them rounds wait for."""

    def __init__(self, name: str, ttl: float) -> None:
        self.name, self.ttl = name, ttl
        self._seen: dict[str, _Sight] = {}
        self._alive: tuple[float, float, dict[str, Member]] | None = None  # for a ttl, until a time: the members
        self._expected: set[str] | None = None  # None: no closed round was seen yet
        self.active: set[str] = set()  # members that have delivered since the last update
        self.all_seen = False  # every entry was read at least once
        self._looked = -inf  # when entries were last read

    def update(self, members: Iterable[Member], now: float) -> list[Member]:
        """Take in the entries of other members. Returns those that are new or have left."""
        silent = now - self._looked
        if silent > self.ttl / 2:
            for sight in self._seen.values():
                sight.beat += 0.0 if sight.excused else silent
                sight.moved += silent - self.ttl / 2
                sight.excused = True
            self._alive = None
        new, self._looked = [], now
        for member in members:
            known = self._seen.get(member.name)
            if known and (member.incarnation, member.counter) <= (known.member.incarnation, known.member.counter):
                continue  # unchanged, or an older incarnation
            moved = now
            if known and known.member.incarnation == member.incarnation and not known.member.joining:
                same = known.member.published.get(STEPS) == member.published.get(STEPS)
                moved = known.moved if same else now
            self._seen[member.name], self._alive = _Sight(member, now, moved), None
            if (known is None or known.member.joining) and not member.joining:
                new.append(member)
                if not member.left:
                    self._expect(member.name)
            elif member.left and not (known and known.member.left):
                new.append(member)
        self.active.clear()
        return new

    def alive(self, now: float) -> dict[str, Member]:
        """All other living members. A first sight counts for one ttl; a member that has left is dead at once. Cached,
        because it is called far more often than it changes. Nobody dies long after the last look."""
        now = min(now, self._looked + self.ttl / 4)
        if self._alive is None or self._alive[0] != self.ttl or now > self._alive[1]:
            sights = [
                sight for name, sight in self._seen.items()
                if name != self.name and not sight.member.left and now - sight.beat <= self.ttl
            ]  # fmt: skip
            until = min((sight.beat + self.ttl for sight in sights), default=inf)
            self._alive = self.ttl, until, {sight.member.name: sight.member for sight in sights}
        return self._alive[2]

    def away(self, names: Iterable[str], now: float) -> set[str]:
        """Which of these are known to be dead. One whose entry has not been read yet may be alive: a full scan takes
        several heartbeats, and if everyone trusted only what it had read, everyone would do everyone's work."""
        living = self.alive(now)
        return {name for name in names if name not in living and (self.all_seen or name in self._seen)}

    def is_gone(self, name: str, incarnation: int, now: float) -> bool:
        """Whether this incarnation of a member is known to have left or died. An unread one may have just joined."""
        sight = self._seen.get(name)
        if sight is None or sight.member.incarnation < incarnation:
            return False
        silent = min(now, self._looked) - sight.beat
        return sight.member.incarnation > incarnation or sight.member.left or silent > self.ttl

    def stuck(self, now: float) -> set[str]:
        """Members with a heartbeat that make no steps."""
        now = min(now, self._looked + self.ttl / 4)
        living = ((name, self._seen[name]) for name in self.alive(now))
        return {
            name for name, sight in living
            if now - sight.moved > max(STUCK, 20 * sight.member.step_seconds) and not sight.member.joining
        }  # fmt: skip

    def closed(self, names: Iterable[str]) -> None:
        """A round was closed with these members. Rounds wait for the others only once they deliver again."""
        self._expected = set(names)

    def delivered(self, name: str) -> None:
        self._expect(name)
        self.active.add(name)

    def _expect(self, name: str) -> None:
        if self._expected is not None:
            self._expected.add(name)

    def awaited(self, now: float, everyone: bool) -> dict[str, Member]:
        """The members whose deltas a round waits for."""
        stuck = self.stuck(now)
        training = {name: m for name, m in self.alive(now).items() if not m.joining and name not in stuck}
        return {name: training[name] for name in expected(training, self._expected, everyone)}

    def wanted(self, fragment: int, held: int, now: float) -> int:
        """The highest snapshot index that a living member waits for and that this member has reached, or -1."""
        pairs = (pair for member in self.alive(now).values() for pair in member.wants)
        return max((index for number, index in pairs if number == fragment and index <= held), default=-1)


class _Page(NamedTuple):
    """What was last read of an entry."""

    look: int  # that read it
    member: Member | None  # None: it was invalid
    same: int  # reads in a row that have shown the same


class Roll:
    """Reads the entries of the members, some at every heartbeat."""

    def __init__(self) -> None:
        self._pages: dict[str, _Page] = {}  # by entry
        self._looks = 0
        self.spread = 1  # looks needed to see everybody
        self.through = False  # everybody was looked at

    def read(self, envelope: Envelope, reject: Reject, active: Collection[str] = ()) -> Task[list[Member]]:
        """The newest incarnations of some members, or of all if they are few; each in its turn, new ones first.
        `active`: members that have delivered, and so are alive."""
        self._looks += 1
        names = yield List(MEMBERS)
        for name in names:
            if not _PLACE.fullmatch(name):
                reject(name, Invalid("it does not have the name of a member's entry"))
        paths, seldom = self._due(incarnations(names), active)
        self.spread = max(1, -(-len(paths) // SAMPLE))
        chosen = [*paths[:SAMPLE], *seldom[:SELDOM]]
        members = yield from _read_entries(envelope, chosen, reject)
        self.through = all(path in self._pages for path in paths[SAMPLE:])
        for path, member in zip(chosen, members, strict=True):
            last = self._pages.get(path)
            self._pages[path] = _Page(self._looks, member, last.same + 1 if last and last.member == member else 0)
        return [member for member in members if member is not None]

    def _due(self, entries: Mapping[str, list[str]], active: Collection[str]) -> tuple[list[str], list[str]]:
        """The entries to read, least recently read first: the newest valid one of each member. And those to read
        seldom: dead members', and invalid ones, because their owner may have overwritten them."""
        often, seldom = list[str](), list[str]()
        for name, paths in entries.items():
            for path in paths:
                page = self._pages.get(path)
                if page is None:
                    often.append(path)
                    break
                left = page.member is not None and page.member.left
                if page.member is not None and not left and (name in active or page.same < STILL):
                    often.append(path)
                elif not left and page.look <= self._looks - SAMPLE:
                    seldom.append(path)
                if page.member is not None:
                    break
        for paths in (often, seldom):
            paths.sort(key=lambda path: (self._pages[path].look if path in self._pages else 0, path))
        return often, seldom


def incarnations(names: Iterable[str]) -> dict[str, list[str]]:
    """The entries of each member, the newest incarnation first."""
    entries: dict[str, list[str]] = {}
    for path in sorted(names, reverse=True):
        if match := _ENTRY.fullmatch(path):
            entries.setdefault(match[1], []).append(path)
    return entries


def _read_entries(envelope: Envelope, paths: Sequence[str], reject: Reject) -> Task[list[Member | None]]:
    """None for each that is invalid or gone."""
    members = list[Member | None]()
    for path, data in zip(paths, (yield All([Read(path, ENTRY) for path in paths])), strict=True):
        try:
            members.append(None if data is None else read_member(envelope.open(path, "member", data, 0)))
        except Invalid as reason:
            members.append(reject(path, reason))
    return members


def read_members(envelope: Envelope, reject: Reject) -> Task[list[Member]]:
    """The newest incarnation of every member."""
    entries = incarnations((yield List(MEMBERS)))
    newest = [_newest(envelope, entries[name], reject) for name in sorted(entries)]
    return [member for member in (yield from in_batches(newest, SAMPLE)) if member is not None]


def register(envelope: Envelope, name: str, nonce: float) -> Task[Member]:
    """Begin a new incarnation: the first free number after the newest valid one. `nonce` tells this process's entry
    from another's. Deletes all earlier entries but the last."""
    paths = incarnations((yield List(f"{MEMBERS}{name}/"))).get(name, [])
    newest = yield from _newest(envelope, paths, lambda name, reason: None)
    first, taken = 0 if newest is None else newest.incarnation + 1, set(paths)
    yield All([Delete(path) for path in paths if newest is not None and path < newest.object_name])
    candidates = (Member(name, k, published={"nonce": nonce}) for k in range(first, INCARNATIONS))
    for entry in islice((entry for entry in candidates if entry.object_name not in taken), SAMPLE):
        body = entry.sealed(envelope)
        if (yield from create(entry.object_name, body, ENTRY)) == body:
            return replace(entry, published={})
    raise DiLoCoError(f"{SAMPLE} new entries of {name!r} read back differently than they were put: other processes "
                      "keep joining under this name, or the store alters objects")  # fmt: skip


def _newest(envelope: Envelope, paths: Sequence[str], reject: Reject) -> Task[Member | None]:
    """The newest valid entry, even behind many invalid ones."""
    for start in range(0, len(paths), SAMPLE):
        members = yield from _read_entries(envelope, paths[start : start + SAMPLE], reject)
        if valid := [member for member in members if member is not None]:
            return valid[0]
    return None


def write_member(envelope: Envelope, entry: Member) -> Task[None]:
    yield Write(entry.object_name, entry.sealed(envelope))


@dataclass(frozen=True)
class MemberOptions:
    """How this member takes part. Members of one run may differ."""

    quorum: int = 1
    straggler_timeout: float | None = None
    heartbeat: float = 5.0
    poll: float | None = None

    @property
    def ttl(self) -> float:
        """Seconds without a heartbeat after which a member is dead."""
        return max(10.0, 5 * self.heartbeat)


def default_poll(step_seconds: float) -> float:
    return min(max(step_seconds, 0.2), 5.0)


class Timing:
    """How long a member waits, from its own step and upload times and from those that the others publish."""

    def __init__(self, options: MemberOptions, sync_every: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.options, self.sync_every, self.clock = options, sync_every, clock
        self._stepped: float | None = None
        self.steps = 0
        self._steps: deque[float] = deque(maxlen=32)  # seconds
        self._uploads: dict[int, deque[float]] = {}  # fragment: seconds of the last uploads
        self._averages: dict[int, deque[float]] = {}  # fragment: seconds of the last averaged rounds

    def stepped(self) -> None:
        """The member has made a step."""
        now = self.clock()
        self.steps += 1
        if self._stepped is not None:
            self._steps.append(now - self._stepped)
        self._stepped = now

    def uploaded(self, fragment: int, seconds: float) -> None:
        """A delta took this long, from its first put until the store had all of it."""
        self._uploads.setdefault(fragment, deque(maxlen=8)).append(seconds)

    def averaged(self, fragment: int, seconds: float) -> None:
        """All shares of a round existed this long after its record."""
        self._averages.setdefault(fragment, deque(maxlen=8)).append(seconds)

    def late(self, fragment: int, load: float) -> float:
        """Seconds after which the next member averages a share too. `load`: how many times the fragment's size an
        averaging member reads."""
        recent = self._averages.get(fragment)
        usual = 3 * statistics.median(recent) if recent else 2 * self.upload_seconds * (1 + load)
        return LATE + 2 * self.poll + usual

    @property
    def turn(self) -> float:
        """Seconds after which the next member in turn may close a round, too."""
        return max(1.0, 2 * self.poll)

    @property
    def step_seconds(self) -> float:
        return statistics.median(self._steps) if self._steps else 0.0

    @property
    def poll(self) -> float:
        """Seconds between two looks at an open round."""
        return self.options.poll or default_poll(self.step_seconds)

    @property
    def idle(self) -> float:
        """Seconds between two looks while this member has no delta in flight and can only be called by others."""
        return max(self.poll, min(self.sync_every * self.step_seconds / LOOKS, IDLE))

    @property
    def upload_seconds(self) -> float:
        """The median of the slowest fragment."""
        return max((statistics.median(seconds) for seconds in self._uploads.values()), default=0.0)

    @property
    def published(self) -> dict[str, float]:
        """Figures that the others need to wait long enough for this member's deltas."""
        return {UPLOAD: self.upload_seconds, POLL: self.idle} if self._uploads else {}

    def straggler_timeout(self, awaited: Collection[Member], everyone: bool) -> float:
        """Seconds that a round stays open after its first delta: enough for the slowest awaited member to notice the
        round, finish its step and upload its delta. Unless the round waits for everyone, no longer than this member's
        steps between two rounds and its upload: one slow link must not slow down all."""
        if self.options.straggler_timeout is not None:
            return self.options.straggler_timeout
        step = max([self.step_seconds, *(m.step_seconds for m in awaited)])
        poll = max([self.idle, *(m.published.get(POLL, default_poll(m.step_seconds)) for m in awaited)])
        upload = max([self.upload_seconds, *(m.published.get(UPLOAD, 0.0) for m in awaited)])
        timeout = min(2 * step + poll + upload, LONGEST_STRAGGLER_TIMEOUT)
        period = self.sync_every * self.step_seconds + self.idle + self.upload_seconds
        return timeout if everyone or not self._steps else min(timeout, period)
