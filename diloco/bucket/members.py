"""Who takes part, as one member sees it. A member is alive while its counter keeps changing, judged by the local
clock."""

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from diloco.bucket.store.envelope import HEADER, PREFIX, Envelope, Invalid, Opened, integer, number
from diloco.bucket.store.operations import All, List, Read, Task, Write, create
from diloco.errors import ConfigError, DiLoCoError

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
PREFIX_OF_ALL = "members/"


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
    if not NAME.fullmatch(name):
        raise ConfigError(f"member name {name!r}: give 1 to 63 of a-z, 0-9, - and _, beginning with a letter or digit")
    return name


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
        incarnation=integer(said["incarnation"], "incarnation", 0, 999_999),
        counter=integer(said["counter"], "counter", 0, 1 << 60),
        held=tuple(integer(i, "held", 0, 1 << 40) for i in held),
        wants=tuple((integer(f, "fragment", 0, 1 << 30), integer(i, "index", 0, 1 << 40)) for f, i in wants),
        joining=said["joining"],
        left=said["left"],
        step_seconds=number(said["step_seconds"], "step_seconds", 0, 1e6),
        published={str(key): number(value, str(key), -1e30, 1e30) for key, value in published.items()},
    )
    if found.name != member.object_name:
        raise Invalid("it is another member than its name says")
    return member


@dataclass
class _Sight:
    member: Member
    since: float  # when its counter was last seen to change


class Members:
    """Which other members are there, and which of them rounds wait for."""

    def __init__(self, me: str, ttl: float) -> None:
        self.me, self.ttl = me, ttl
        self._seen: dict[str, _Sight] = {}
        self._expected: set[str] | None = None  # None: no closed round was seen yet
        self.stranger = False  # a member has delivered that was not seen yet

    def saw(self, members: Iterable[Member], now: float) -> list[Member]:
        """All others were read. Returns those that are new."""
        new = []
        for member in members:
            known = self._seen.get(member.name)
            if known and (member.incarnation, member.counter) <= (known.member.incarnation, known.member.counter):
                continue  # unchanged, or from an older life of it
            self._seen[member.name] = _Sight(member, now)
            if (known is None or known.member.joining) and not member.joining:
                new.append(member)
                if not member.left:
                    self._expect(member.name)  # joined since
        self.stranger = False
        return new

    def alive(self, now: float) -> dict[str, Member]:
        """All other living members. First sight counts for one ttl; a member that has left is dead at once."""
        return {
            name: sight.member
            for name, sight in self._seen.items()
            if name != self.me and not sight.member.left and now - sight.since <= self.ttl
        }

    def closed(self, names: Iterable[str]) -> None:
        """A round was closed with these members: the others are not waited for until they deliver again."""
        self._expected = set(names)

    def delivered(self, name: str) -> None:
        self._expect(name)
        self.stranger |= name not in self._seen and name != self.me

    def _expect(self, name: str) -> None:
        if self._expected is not None:
            self._expected.add(name)

    def awaited(self, now: float, everyone: bool) -> dict[str, Member]:
        """The members whose deltas a round waits for: all that live; or, of these, those that were in the last closed
        round or have delivered or joined since. So a dead or slow member costs the grace once, not in every round."""
        living = {name: m for name, m in self.alive(now).items() if not m.joining}
        expected = living if everyone or self._expected is None else self._expected
        return {name: m for name, m in living.items() if name in expected}

    def wanted(self, fragment: int, now: float) -> int:
        """The least index of a snapshot that a living member waits for, or -1."""
        pairs = (pair for member in self.alive(now).values() for pair in member.wants)
        return max((index for number, index in pairs if number == fragment), default=-1)


def read_members(envelope: Envelope, reject: Callable[[str, Invalid], None]) -> Task[list[Member]]:
    """The newest incarnation of every member."""
    names = yield List(PREFIX_OF_ALL)
    newest: dict[str, str] = {}
    for path in sorted(names):
        name, _, number_ = path.removeprefix(PREFIX_OF_ALL).partition("/")
        if NAME.fullmatch(name) and re.fullmatch(r"\d{6}", number_):
            newest[name] = path
    paths = list(newest.values())
    answers = yield All([Read(path, PREFIX.size + HEADER) for path in paths])
    members = []
    for path, data in zip(paths, answers, strict=True):
        try:
            if data is not None:
                members.append(read_member(envelope.open(path, "member", data, 0)))
        except Invalid as reason:
            reject(path, reason)
    return members


def register(envelope: Envelope, name: str, nonce: float) -> Task[Member]:
    """Begin a new incarnation of a name: the first number that is free. `nonce` tells the own entry from that of
    another process."""
    names: dict[str, Any] = yield List(f"{PREFIX_OF_ALL}{name}/")
    taken = [int(path[-6:]) for path in names if re.fullmatch(r"\d{6}", path[-6:])]
    incarnation = max(taken, default=-1) + 1
    while True:
        mine = Member(name, incarnation, published={"nonce": nonce})
        body = mine.sealed(envelope)
        found = yield from create(mine.object_name, body, PREFIX.size + HEADER)
        if found == body:
            return mine
        incarnation += 1


def write_member(envelope: Envelope, mine: Member) -> Task[None]:
    yield Write(mine.object_name, mine.sealed(envelope))
