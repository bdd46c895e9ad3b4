"""A round: the deltas of one fragment and index, and the record that closes it. Pure functions of what was read."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from diloco.bucket.store.envelope import DIGEST, Invalid, Opened, integer, number, refuses, text
from diloco.reduce import State
from diloco.reduce.mean import Encoded

LIMIT, LIMIT_OF_FEW, FEW = 2.0, 10.0, 2
"""How much one delta counts, its norm times its work, as a multiple of what is usual: a third of what the other members
count together, so that one that pulls the other way leaves half of the speed, but at least the usual and at most LIMIT.
With at most FEW members nothing tells the unusual from the usual."""
FREE = 8
"""First rounds in which a member that is alone has no limit: nothing is usual yet."""
LARGEST_LR = 1e9
MOST = 4096
"""Members of a round."""
FINGERPRINTS = 1 << 63
ROUNDS, PIECES = "rounds/", "pieces/"
MEMBER = "[a-z0-9][a-z0-9_-]{0,62}"
"""The pattern of a member's name."""
_HEX = "[0-9a-f]{64}"
_OBJECT = rf"d-({MEMBER})-({_HEX})|closed\.[0-9]+|heads-{_HEX}|s[0-9]{{4}}\.[0-9]+"
_NAME = re.compile(rf"rounds/([0-9]{{5}})/([0-9]{{3}})/([0-9]{{4}})/(?:{_OBJECT})")
_PIECES = re.compile(rf"pieces/([0-9]{{5}})/([0-9]{{3}})/([0-9]{{4}})/{MEMBER}-{_HEX}\.[0-9]+")
_PART = re.compile(r"\.p[0-9]+$")
THOUSAND = 1000
"""Rounds in a folder: a file system that has to list 100,000 of them takes a tenth of a second for it."""


def round_prefix(index: int, top: str = ROUNDS) -> str:
    return f"{top}{index // THOUSAND:05d}/{index % THOUSAND:03d}/"


def folder(fragment: int, index: int, top: str = ROUNDS) -> str:
    """The index comes first, so that one listing from an index on serves all fragments."""
    return f"{round_prefix(index, top)}{fragment:04d}/"


def delta_name(fragment: int, index: int, member: str, digest: str = DIGEST) -> str:
    """The name holds the digest, because a member that restarts may send another delta for the same round."""
    return f"{folder(fragment, index)}d-{member}-{digest}"


def member_of(name: str) -> str | None:
    """The member that a delta belongs to, by the full name of the object."""
    match = _NAME.fullmatch(name)
    return match[4] if match else None


def place_of(name: str) -> tuple[int, int] | None:
    """(fragment, index) of anything that belongs to a round: a delta, a part or the pieces of one, a record, the heads
    that it lists, or an averaged share."""
    match = _NAME.fullmatch(_PART.sub("", name)) or _PIECES.fullmatch(name)
    return (int(match[3]), int(match[1]) * THOUSAND + int(match[2])) if match else None


def is_record(name: str) -> bool:
    return "/closed." in name and _NAME.fullmatch(name) is not None


def record_name(fragment: int, index: int, slot: int) -> str:
    return f"{folder(fragment, index)}closed.{slot}"


def heads_name(fragment: int, index: int, digest: str = DIGEST) -> str:
    """The heads of all deltas that a record names, together."""
    return f"{folder(fragment, index)}heads-{digest}"


def share_name(fragment: int, index: int, share: int, slot: int) -> str:
    return f"{folder(fragment, index)}s{share:04d}.{slot}"


def pieces_name(fragment: int, index: int, member: str, digest: str, part: int) -> str:
    """The pieces of a delta do not lie in the folder of the round, so that nobody has to list them."""
    return f"{folder(fragment, index, PIECES)}{member}-{digest}.{part}"


@dataclass(frozen=True)
class Piece:
    """A piece of a delta, as its head describes it."""

    size: int  # of its body
    digest: str
    norm: float


@dataclass(frozen=True)
class Contribution:
    """A delta that was read and checked, or its head alone."""

    member: str
    digest: str
    fingerprint: int
    tokens: float
    norm: float
    payloads: tuple[Tensor, ...] | None  # encoded, one for each piece; None: only the head was read
    nbytes: int
    lr: float = 0.0
    pieces: tuple[Piece, ...] = ()  # none, if the delta is one object
    head: bytes = b""  # the object that lists the pieces


@dataclass(frozen=True)
class Entry:
    member: str
    digest: str  # of the delta
    tokens: float
    norm: float
    lr: float = 0.0


@dataclass(frozen=True)
class Link:
    """What a record has to follow."""

    digest: str = ""  # of the previous record
    usual: float = 0.0  # norm of deltas, as of the rounds so far


@dataclass(frozen=True)
class Record:
    """Which deltas are in a round. The valid record with the lowest slot is the round's, forever. What each delta
    counts follows from the record and from what was usual before: no member decides it."""

    fragment: int
    index: int
    previous: Link
    fingerprint: int  # of the state that all its deltas are against
    by: str  # the member that wrote it
    entries: tuple[Entry, ...]
    digest: str = ""
    heads: str = ""  # digest of the object with the heads of its deltas, if each member averages a share
    voids: str = ""  # digest of the record in an earlier slot that it replaces, because that one's deltas are lost

    def sealed(self) -> tuple[dict[str, Any], bytes]:
        """Fields and payload of the object."""
        fields = {"fragment": self.fragment, "index": self.index, "fingerprint": self.fingerprint, "by": self.by,
                  "previous": self.previous.digest, "usual": self.previous.usual,
                  "heads": self.heads, "voids": self.voids}  # fmt: skip
        return fields, json.dumps([[e.member, e.digest, e.tokens, e.norm, e.lr] for e in self.entries]).encode()

    @cached_property
    def _works(self) -> list[float]:
        """Work done, in units of that of the median member, within the limit."""
        usual = _usual([e.tokens for e in self.entries])
        return [min(e.tokens / usual, self._limit) if usual else 0.0 for e in self.entries]

    @cached_property
    def shares(self) -> list[float]:
        """By work done, within the limit."""
        total = sum(self._works)
        return [work / total if total else 0.0 for work in self._works]

    @cached_property
    def lr(self) -> float:
        """Mean over the members by their share, each within the limit, as with work."""
        most = self._limit * _usual([e.lr for e in self.entries])
        return sum(share * min(e.lr, most) for e, share in zip(self.entries, self.shares, strict=True))

    @cached_property
    def clips(self) -> list[float]:
        """Factors that keep norm times work within the limit. With several members, what most of them have is usual at
        once."""
        usual, alone = self.previous.usual, len(self.entries) == 1
        if not (alone and self.index > FREE):
            usual = max(usual, _usual([e.norm for e in self.entries]))
        most = self._limit * usual
        works = zip(self.entries, self._works, strict=True)
        return [clip_of(e.norm, most / max(work, 1.0)) for e, work in works]

    @cached_property
    def factors(self) -> list[float]:
        """What each delta is multiplied with in the mean."""
        return [share * clip for share, clip in zip(self.shares, self.clips, strict=True)]

    @property
    def _limit(self) -> float:
        members = len(self.entries)
        return LIMIT_OF_FEW if members <= FEW else min(max((members - 1) / 3, 1.0), LIMIT)

    @cached_property
    def link(self) -> Link:
        """What the next record has to follow. What was clipped counts as it was clipped."""
        now = _usual([e.norm * clip for e, clip in zip(self.entries, self.clips, strict=True)])
        before = self.previous.usual
        return Link(self.digest, before + (now - before) / 4 if before else now)

    @property
    def members(self) -> dict[str, float]:
        return {e.member: share for e, share in zip(self.entries, self.shares, strict=True)}


def _usual(values: Sequence[float]) -> float:
    """The upper median of what is not zero; of two the smaller, because nothing tells which one is unusual."""
    positive = sorted(value for value in values if value > 0)
    return positive[len(positive) // 2 if len(positive) > FEW else 0] if positive else 0.0


@dataclass(frozen=True)
class Followed:
    """A closed round, ready to be applied."""

    record: Record
    mean: tuple[Encoded, ...]
    received: int
    at: float  # by the clock of this member
    state: State | None  # the one after it, if a delta was taken against the one before it


class Branched(Invalid):
    """A record that is as it should be, but follows another one than that known here."""


@refuses
def read_record(found: Opened, fragment: int, index: int, previous: Link | None) -> Record:
    """Raises Invalid. Depends only on the bytes, the run, the key and the previous record, so all members agree.
    `previous`: None if it is not known."""
    if (found.header.get("fragment"), found.header.get("index")) != (fragment, index):
        raise Invalid("it belongs to another round")
    follows = Link(found.text("previous"), found.number("usual", 0, 1e300))
    fingerprint = integer(found.header.get("fingerprint"), "fingerprint", 0, FINGERPRINTS)
    heads, voids = found.text("heads"), found.text("voids")
    if not all(re.fullmatch(f"({_HEX})?", digest) for digest in (heads, voids)):
        raise Invalid("what it names as heads, or as the record it voids, is not a digest")
    entries = _read_entries(found)
    record = Record(fragment, index, follows, fingerprint, found.text("by"), entries, found.digest, heads, voids)
    if previous is not None and previous != follows:
        raise Branched("it does not follow the previous record")
    return record


def _read_entries(found: Opened) -> tuple[Entry, ...]:
    try:
        listed = json.loads(found.payload)
    except (ValueError, RecursionError):
        raise Invalid("its list of deltas is not JSON") from None
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST:
        raise Invalid(f"its list of deltas is missing, empty or has more than {MOST}")
    if any(not isinstance(e, list) or len(e) != 5 for e in listed):
        raise Invalid("its list of deltas has something else in it")
    entries = []
    for member, digest, tokens, norm, lr in listed:
        if not _NAME.fullmatch(delta_name(0, 1, text(member, "member"), text(digest, "digest"))):
            raise Invalid("it names something that is not a delta")
        figures = number(tokens, "tokens", 0, 1e18), number(norm, "norm", 0, 1e300)
        entries.append(Entry(member, digest, *figures, number(lr, "lr", 0, LARGEST_LR)))
    names = [e.member for e in entries]
    if names != sorted(set(names)):
        raise Invalid("its members are not sorted, or one is listed twice")
    return tuple(entries)


def may_close(present: set[str], awaited: Iterable[str], waited: float, grace: float, quorum: int) -> bool:
    """Whether all awaited members are in, or the grace is over. In any case the quorum must be met."""
    return len(present) >= quorum and (present.issuperset(awaited) or waited >= grace)


def one_per_member(deltas: Iterable[Contribution], fingerprint: int, mine: str) -> list[Contribution]:
    """At most one delta of each member, against the state held, in the order of names. Of several deltas of one member:
    the one whose digest is `mine`, otherwise the one with the most work."""
    best: dict[str, Contribution] = {}
    for delta in deltas:
        if delta.fingerprint == fingerprint:
            known = best.get(delta.member)
            rank = (delta.digest == mine, delta.tokens, delta.digest)
            if known is None or rank > (known.digest == mine, known.tokens, known.digest):
                best[delta.member] = delta
    return [best[name] for name in sorted(best)]


def count_votes(deltas: Iterable[Contribution], fingerprint: int) -> tuple[int, int]:
    """How many members have sent a delta against the state with this fingerprint, and how many, at most, against the
    same other one."""
    votes = Counter(seen for _, seen in {(delta.member, delta.fingerprint) for delta in deltas})
    return votes.pop(fingerprint, 0), max(votes.values(), default=0)


def entries_of(deltas: Sequence[Contribution], max_work: float, mine: str) -> tuple[Entry, ...]:
    """The deltas that a record names, at most MOST, with the own one. Work counts up to `max_work`."""
    kept = sorted(deltas, key=lambda delta: (delta.digest != mine, delta.member))[:MOST]
    kept.sort(key=lambda delta: delta.member)
    return tuple(Entry(d.member, d.digest, min(d.tokens, max_work), d.norm, d.lr) for d in kept)


def truthful(record: Record, deltas: Mapping[str, Contribution], max_work: float) -> bool:
    """Whether a record says of its deltas what they are. Norms are sums, which machines add in different orders."""
    return all(
        e.tokens == min(deltas[e.digest].tokens, max_work)
        and e.lr == deltas[e.digest].lr
        and abs(e.norm - deltas[e.digest].norm) <= 1e-6 * deltas[e.digest].norm
        for e in record.entries
    )


def clip_of(norm: float, limit: float) -> float:
    return limit / norm if norm > limit > 0 else 1.0
