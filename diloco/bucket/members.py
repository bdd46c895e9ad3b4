"""Who takes part, as one member sees it. A member is alive while its counter keeps changing, judged by the local
clock."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import inf

from diloco.bucket.rounds import MEMBER
from diloco.bucket.store.envelope import PREFIX, Envelope, Invalid, Opened, integer, number, refuses
from diloco.bucket.store.operations import All, Delete, List, Read, Task, Write, create
from diloco.errors import ConfigError, DiLoCoError

PREFIX_OF_ALL = "members/"
_ENTRY = re.compile(rf"members/({MEMBER})/([0-9]{{6}})")
_PLACE = re.compile(rf"members/{MEMBER}(/[0-9]{{6}})?")
"""An entry, or the folder of a member's entries, which a folder lists too."""
SAMPLE = 32
"""Entries that are read at a time. Where there are more members, each is looked at every few heartbeats."""
SELDOM = 8
"""Entries that are read at a time besides, although nothing new is expected of them."""
STILL = 5
"""Reads that show no sign of life after which an entry is one of these. Nobody deletes it: its owner may only sleep."""
LIVES = 1_000_000
"""Of a name."""
ENTRY = PREFIX.size + (16 << 10)
STUCK = 300.0
"""Seconds without a step after which a member that shows signs of life is no longer awaited, and at least 20 steps."""
STEPS = "steps"


class Superseded(DiLoCoError):
    """Another process has joined under the name of this member."""


@dataclass(frozen=True)
class Member:
    """What a member says about itself."""

    name: str
    incarnation: int
    counter: int = 0
    held: tuple[int, ...] = ()  # index of each fragment
    wants: tuple[tuple[int, int], ...] = ()  # (fragment, least index) of snapshots
    joining: bool = True
    left: bool = False
    step_seconds: float = 0.0
    published: dict[str, float] = field(default_factory=dict)  # loss, steps, …: for whoever watches

    @property
    def object_name(self) -> str:
        return f"{PREFIX_OF_ALL}{self.name}/{self.incarnation:06d}"

    def sealed(self, envelope: Envelope) -> bytes:
        fields = asdict(self)
        fields[_PUBLISHED] = fields.pop("published")
        return envelope.seal(self.object_name, "member", {"member": fields}).body


_PUBLISHED = "told"
"""The key of `published` in the store."""
_KEYS = {_PUBLISHED, *Member.__dataclass_fields__} - {"published"}


def check_name(name: str) -> str:
    if not re.fullmatch(MEMBER, name):
        raise ConfigError(f"member name {name!r}: give 1 to 63 of a-z, 0-9, - and _, beginning with a letter or digit")
    return name


@refuses
def read_member(found: Opened) -> Member:
    """Raises Invalid."""
    said = found.header.get("member")
    if not isinstance(said, dict) or set(said) != _KEYS:
        raise Invalid("its fields are not those of a member")
    held, wants, published = said["held"], said["wants"], said[_PUBLISHED]
    if not isinstance(held, list) or not isinstance(wants, list) or not isinstance(published, dict):
        raise Invalid("held and wants are not lists, or what it publishes is not an object")
    if any(not isinstance(w, list) or len(w) != 2 for w in wants):
        raise Invalid("wants is not a list of pairs")
    if not isinstance(said["joining"], bool) or not isinstance(said["left"], bool):
        raise Invalid("joining and left are not booleans")
    member = Member(
        name=str(said["name"]),
        incarnation=integer(said["incarnation"], "incarnation", 0, LIVES - 1),
        counter=integer(said["counter"], "counter", 0, 1 << 60),
        held=tuple(integer(i, "held", 0, 1 << 40) for i in held),
        wants=tuple((integer(f, "fragment", 0, 1 << 30), integer(i, "index", 0, 1 << 40)) for f, i in wants),
        joining=said["joining"],
        left=said["left"],
        step_seconds=number(said["step_seconds"], "step_seconds", 0, 1e6),
        published={str(key)[:64]: number(value, str(key)[:64], -1e30, 1e30) for key, value in published.items()},
    )
    if found.name != member.object_name:
        raise Invalid("it is another member than its name says")
    return member


@dataclass
class _Sight:
    member: Member
    since: float  # when its counter was last seen to change
    moved: float  # when it was last seen to make a step, or to join


class Members:
    """Which other members are there, and which of them rounds wait for."""

    def __init__(self, me: str, ttl: float) -> None:
        self.me, self.ttl = me, ttl
        self._seen: dict[str, _Sight] = {}
        self._alive: tuple[float, float, dict[str, Member]] | None = None  # for which ttl, until when it holds, and who
        self._expected: set[str] | None = None  # None: no closed round was seen yet
        self.heard: set[str] = set()  # members that have delivered since the last look
        self.stranger = False  # a member has delivered that was not seen yet
        self.all_seen = False  # every entry was read at least once

    def saw(self, members: Iterable[Member], now: float) -> list[Member]:
        """All others were read. Returns those that are new, and those that have left since."""
        new = []
        for member in members:
            known = self._seen.get(member.name)
            if known and (member.incarnation, member.counter) <= (known.member.incarnation, known.member.counter):
                continue  # unchanged, or from an older life of it
            moved = now
            if known and known.member.incarnation == member.incarnation and not known.member.joining:
                same = known.member.published.get(STEPS) == member.published.get(STEPS)
                moved = known.moved if same else now
            self._seen[member.name], self._alive = _Sight(member, now, moved), None
            if (known is None or known.member.joining) and not member.joining:
                new.append(member)
                if not member.left:
                    self._expect(member.name)  # joined since
            elif member.left and not (known and known.member.left):
                new.append(member)
        self.stranger = False
        self.heard.clear()
        return new

    def alive(self, now: float) -> dict[str, Member]:
        """All other living members. First sight counts for one ttl; a member that has left is dead at once. It is asked
        far more often than it changes."""
        if self._alive is None or self._alive[0] != self.ttl or now > self._alive[1]:
            sights = [
                sight for name, sight in self._seen.items()
                if name != self.me and not sight.member.left and now - sight.since <= self.ttl
            ]  # fmt: skip
            until = min((sight.since + self.ttl for sight in sights), default=inf)
            self._alive = self.ttl, until, {sight.member.name: sight.member for sight in sights}
        return self._alive[2]

    def away(self, names: Iterable[str], now: float) -> set[str]:
        """Which of these are known not to live. One that was not looked for yet may live: where members are many, it
        takes a while to see everybody, and if each counted only on those that it has seen, all would do the work of
        all."""
        living = self.alive(now)
        return {name for name in names if name not in living and (self.all_seen or name in self._seen)}

    def stuck(self, now: float) -> set[str]:
        """Members that show signs of life and make no steps."""
        living = ((name, self._seen[name]) for name in self.alive(now))
        return {
            name for name, sight in living
            if now - sight.moved > max(STUCK, 20 * sight.member.step_seconds) and not sight.member.joining
        }  # fmt: skip

    def closed(self, names: Iterable[str]) -> None:
        """A round was closed with these members: the others are not waited for until they deliver again."""
        self._expected = set(names)

    def delivered(self, name: str) -> None:
        self._expect(name)
        self.heard.add(name)
        self.stranger |= name not in self._seen and name != self.me

    def _expect(self, name: str) -> None:
        if self._expected is not None:
            self._expected.add(name)

    def awaited(self, now: float, everyone: bool) -> dict[str, Member]:
        """The members whose deltas a round waits for: all that live; or, of these, those that were in the last closed
        round or have delivered or joined since. So a dead or slow member costs the grace once, not in every round."""
        stuck = self.stuck(now)
        living = {name: m for name, m in self.alive(now).items() if not m.joining and name not in stuck}
        expected = living if everyone or self._expected is None else self._expected
        return {name: m for name, m in living.items() if name in expected}

    def wanted(self, fragment: int, held: int, now: float) -> int:
        """The largest index of a snapshot that a living member waits for and that is held already, or -1."""
        pairs = (pair for member in self.alive(now).values() for pair in member.wants)
        return max((index for number, index in pairs if number == fragment and index <= held), default=-1)


class Roll:
    """Reads the entries of the members, not all at every time."""

    def __init__(self) -> None:
        self._read_at: dict[str, int] = {}  # entry: when it was read last
        self._over: set[str] = set()  # entries of members that have left, which do not change any more
        self._bad: dict[str, tuple[int, int]] = {}  # entry: the look at which it is tried again, and the pause until it
        self._still: dict[str, tuple[int, int]] = {}  # entry: its counter, and how many reads have shown the same one
        self._looks = 0
        self.spread = 1  # looks that it takes to see everybody
        self.through = False  # everybody was looked at
        self.behind = False  # an entry was found to be bad, so that another one behind it is read the next time

    def read(
        self, envelope: Envelope, reject: Callable[[str, Invalid], None], heard: Collection[str] = ()
    ) -> Task[list[Member]]:
        """The newest lives of some members, all if they are few; each in its turn, and the new ones first. `heard`: who
        has delivered something, and so lives."""
        self._looks, self.behind = self._looks + 1, False
        names = yield List(PREFIX_OF_ALL)
        for name in names:
            if not _PLACE.fullmatch(name):
                reject(name, Invalid("no entry of a member has such a name"))
        paths, seldom = self._due(lives_of(names), heard)
        self.spread = max(1, -(-len(paths) // SAMPLE))
        members, now = [], [*paths[:SAMPLE], *seldom[:SELDOM]]
        answers = yield All([Read(path, ENTRY) for path in now])
        self.through = all(path in self._read_at for path in paths[SAMPLE:])
        for path, data in zip(now, answers, strict=True):
            self._read_at[path] = self._looks
            try:
                if data is not None:
                    members.append(read_member(envelope.open(path, "member", data, 0)))
                    self._over |= {path} if members[-1].left else set()
                    self._bad.pop(path, None)
                    counter, same = self._still.get(path, (-1, 0))
                    self._still[path] = members[-1].counter, same + 1 if members[-1].counter == counter else 0
            except Invalid as reason:
                self.behind |= path not in self._bad
                pause = 2 * self._bad[path][1] if path in self._bad else SAMPLE
                self._bad[path] = self._looks + pause, pause
                reject(path, reason)
        return members

    def _due(self, lives: Mapping[str, list[str]], heard: Collection[str]) -> tuple[list[str], list[str]]:
        """What is to be read, what was not read for the longest time first: of each member the newest entry that is not
        bad. And seldom: those of the dead; and bad ones, because an owner may have written over them."""
        often, seldom = list[str](), list[str]()
        for name, paths in lives.items():
            for path in paths:
                if path in self._bad:
                    seldom += [path] if self._bad[path][0] <= self._looks else []
                    continue
                if path not in self._over and (name in heard or self._still.get(path, (0, 0))[1] < STILL):
                    often.append(path)
                elif path not in self._over and self._read_at[path] <= self._looks - SAMPLE:
                    seldom.append(path)
                break
        for paths in (often, seldom):
            paths.sort(key=lambda path: (self._read_at.get(path, 0), path))
        return often, seldom


def lives_of(names: Iterable[str]) -> dict[str, list[str]]:
    """The entries of each member, the newest life first."""
    lives: dict[str, list[str]] = {}
    for path in sorted(names, reverse=True):
        if match := _ENTRY.fullmatch(path):
            lives.setdefault(match[1], []).append(path)
    return lives


def read_members(envelope: Envelope, reject: Callable[[str, Invalid], None]) -> Task[list[Member]]:
    """The newest life of every member."""
    found: dict[str, Member] = {}
    roll = Roll()
    for _ in range(SAMPLE**2):
        members = yield from roll.read(envelope, reject)
        if all(m.name in found for m in members) and roll.through and not roll.behind:
            break
        found |= {m.name: m for m in members}
    return [found[name] for name in sorted(found)]


def register(envelope: Envelope, name: str, nonce: float) -> Task[Member]:
    """Begin a new life of a name: the number after the newest valid one, or the first free one after it. `nonce` tells
    the own entry from that of another process. Delete the entries of earlier lives but the last."""
    lives = lives_of((yield List(f"{PREFIX_OF_ALL}{name}/"))).get(name, [])
    newest = yield from _newest(envelope, lives)
    incarnation, taken = 0 if newest is None else newest.incarnation + 1, set(lives)
    old = [path for path in lives if newest is not None and path < newest.object_name]
    yield All([Delete(path) for path in old])
    free = (life for life in range(incarnation, LIVES) if Member(name, life).object_name not in taken)
    for life in islice(free, SAMPLE):
        mine = Member(name, life, published={"nonce": nonce})
        body = mine.sealed(envelope)
        found = yield from create(mine.object_name, body, ENTRY)
        if found == body:
            return mine
    raise DiLoCoError(f"of {SAMPLE} new entries of {name!r} the store has given none back as it was put: others join "
                      "under this name all the time, or the store alters objects")  # fmt: skip


def _newest(envelope: Envelope, lives: Sequence[str]) -> Task[Member | None]:
    """The newest valid one, whatever lies before it."""
    for at in range(0, len(lives), SAMPLE):
        some = lives[at : at + SAMPLE]
        for path, data in zip(some, (yield All([Read(path, ENTRY) for path in some])), strict=True):
            with suppress(Invalid):
                if data is not None:
                    return read_member(envelope.open(path, "member", data, 0))
    return None


def write_member(envelope: Envelope, mine: Member) -> Task[None]:
    yield Write(mine.object_name, mine.sealed(envelope))
