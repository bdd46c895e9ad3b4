"""What the store holds of a round: names, deltas, and the commit record that closes it. Pure functions; the rules of a
round are in rules.py."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from diloco.bucket.store.envelope import DIGEST, Invalid, Opened, number, refuses, text
from diloco.exchange.reducer import State

LIMIT, LIMIT_OF_FEW, FEW = 2.0, 10.0, 2
"""The limit on one member's work, as a multiple of the median: a third of the other members' total, but at least the
median and at most LIMIT. With at most FEW members nothing tells the unusual from the usual."""
LARGEST_LR = 1e9
MOST = 4096
"""Maximum members of a round."""
FINGERPRINTS = 1 << 63
ROUNDS, PIECES = "rounds/", "pieces/"
MEMBER = "[a-z0-9][a-z0-9_-]{0,62}"
"""The pattern of a member's name."""
_HEX = "[0-9a-f]{64}"
_OBJECT = rf"d-({MEMBER})-({_HEX})|closed\.[0-9]+|heads-{_HEX}|s[0-9]{{4}}\.[0-9]+"
_PLACE = r"([0-9]{5})/([0-9]{3})/([0-9]{4})"
_NAME = re.compile(rf"rounds/{_PLACE}/(?:{_OBJECT})")
_PIECES = re.compile(rf"pieces/{_PLACE}/{MEMBER}-{_HEX}\.[0-9]+")
_SNAPSHOT = re.compile(rf"anchors/[0-9]{{4}}/([0-9]{{8}})-{_HEX}")
_PART = re.compile(r"\.p[0-9]+$")
THOUSAND = 1000
"""Rounds in a folder: listing 100,000 entries takes a file system a tenth of a second."""


def round_prefix(index: int, top: str = ROUNDS) -> str:
    return f"{top}{index // THOUSAND:05d}/{index % THOUSAND:03d}/"


def folder(fragment: int, index: int, top: str = ROUNDS) -> str:
    """The index comes first, so that one listing from an index on serves all fragments."""
    return f"{round_prefix(index, top)}{fragment:04d}/"


def delta_name(fragment: int, index: int, member: str, digest: str = DIGEST) -> str:
    """The name holds the digest, because a restarted member may send a different delta for the same round."""
    return f"{folder(fragment, index)}d-{member}-{digest}"


def member_of(name: str) -> str | None:
    """The member that sent a delta, from the full name of the object."""
    match = _NAME.fullmatch(name)
    return match[4] if match else None


def without_part(name: str) -> str:
    """The object that a part of a large object belongs to; other names stay."""
    return _PART.sub("", name)


def place_of(name: str) -> tuple[int, int] | None:
    """(fragment, index) of any object of a round: a delta, its parts or pieces, a record, its heads, or an averaged
    share."""
    match = _NAME.fullmatch(without_part(name)) or _PIECES.fullmatch(name)
    return (int(match[3]), int(match[1]) * THOUSAND + int(match[2])) if match else None


def is_record(name: str) -> bool:
    return "/closed." in name and _NAME.fullmatch(name) is not None


def record_name(fragment: int, index: int, attempt: int) -> str:
    return f"{folder(fragment, index)}closed.{attempt}"


def heads_name(fragment: int, index: int, digest: str = DIGEST) -> str:
    """The object with the heads of all deltas of a record."""
    return f"{folder(fragment, index)}heads-{digest}"


def share_name(fragment: int, index: int, share: int, attempt: int) -> str:
    return f"{folder(fragment, index)}s{share:04d}.{attempt}"


def snapshot_folder(fragment: int) -> str:
    return f"anchors/{fragment:04d}/"


def snapshot_index(name: str) -> int | None:
    """The round after which a snapshot was taken."""
    match = _SNAPSHOT.fullmatch(name)
    return int(match[1]) if match else None


def pieces_name(fragment: int, index: int, member: str, digest: str, part: int) -> str:
    """The pieces of a delta are outside of the round's folder, so that members do not list them."""
    return f"{folder(fragment, index, PIECES)}{member}-{digest}.{part}"


@dataclass(frozen=True)
class Piece:
    """A piece of a delta, as its head describes it."""

    size: int  # bytes of its body
    digest: str


@dataclass(frozen=True)
class Contribution:
    """A checked delta, or its head alone."""

    member: str
    digest: str
    fingerprint: int  # of the state that it was trained from
    tokens: float
    payloads: tuple[Tensor, ...] | None  # encoded, one per piece; None: only the head was read
    nbytes: int
    lr: float = 0.0
    pieces: tuple[Piece, ...] = ()  # empty if the delta is one object
    head: bytes = b""  # the object that lists the pieces


@dataclass(frozen=True)
class Entry:
    """A delta in a record."""

    member: str
    digest: str
    tokens: float
    lr: float = 0.0


@dataclass(frozen=True)
class Record:
    """The commit record of a round: which deltas are in it. The first valid attempt is final. The weight of each delta
    follows from the record; no member chooses it."""

    fragment: int
    index: int
    previous: str  # digest of the record before it
    fingerprint: int  # of the state that all its deltas were trained from
    by: str  # the member that wrote it
    entries: tuple[Entry, ...]
    digest: str = ""
    heads: str = ""  # digest of the object with the heads of its deltas, if each member averages a share
    voids: str = ""  # digest of an earlier record that it replaces, because that one's deltas are lost

    def sealed(self) -> tuple[dict[str, Any], bytes]:
        """Fields and payload of the object."""
        fields = {"fragment": self.fragment, "index": self.index, "fingerprint": self.fingerprint, "by": self.by,
                  "previous": self.previous, "heads": self.heads, "voids": self.voids}  # fmt: skip
        return fields, json.dumps([[e.member, e.digest, e.tokens, e.lr] for e in self.entries]).encode()

    @cached_property
    def _works(self) -> list[float]:
        """Work relative to the median member's, within the limit."""
        usual = _usual([e.tokens for e in self.entries])
        return [min(e.tokens / usual, self._limit) if usual else 0.0 for e in self.entries]

    @cached_property
    def shares(self) -> list[float]:
        """The weight of each delta, by its work."""
        total = sum(self._works)
        return [work / total if total else 0.0 for work in self._works]

    @cached_property
    def lr(self) -> float:
        """Mean over the members, weighted by their shares, each within the limit."""
        most = self._limit * _usual([e.lr for e in self.entries])
        return sum(share * min(e.lr, most) for e, share in zip(self.entries, self.shares, strict=True))

    @property
    def _limit(self) -> float:
        members = len(self.entries)
        return LIMIT_OF_FEW if members <= FEW else min(max((members - 1) / 3, 1.0), LIMIT)

    @property
    def members(self) -> dict[str, float]:
        return {e.member: share for e, share in zip(self.entries, self.shares, strict=True)}


def _usual(values: Sequence[float]) -> float:
    """The upper median of the nonzero values; the smaller of two, because nothing tells which one is unusual."""
    positive = sorted(value for value in values if value > 0)
    return positive[len(positive) // 2 if len(positive) > FEW else 0] if positive else 0.0


@dataclass(frozen=True)
class Followed:
    """A closed round, ready to be applied."""

    record: Record
    received: int  # bytes
    at: float  # by this member's clock
    state: State  # after the round
    digests: Mapping[str, int]  # of the deltas, by member; empty if no member has read all of them


class Attempts(NamedTuple):
    """The attempts at a record that were read."""

    record: Record | None  # of the round
    free: int  # the first attempt that nobody has made
    branched: bool  # whether some record follows another one than the known one


class Branched(Invalid):
    """A well-formed record that follows a different record than the known one."""


@refuses
def read_record(opened: Opened, fragment: int, index: int, previous: str | None) -> Record:
    """Raises Invalid. Depends only on the bytes, the run, the key and the previous record, so all members agree.
    `previous`: None if unknown."""
    if (opened.header.get("fragment"), opened.header.get("index")) != (fragment, index):
        raise Invalid("it belongs to another round")
    follows = opened.text("previous")
    fingerprint = opened.integer("fingerprint", 0, FINGERPRINTS)
    heads, voids = opened.text("heads"), opened.text("voids")
    if not all(re.fullmatch(f"({_HEX})?", digest) for digest in (heads, voids)):
        raise Invalid("its heads or voids are not a digest")
    entries = _read_entries(opened)
    record = Record(fragment, index, follows, fingerprint, opened.text("by"), entries, opened.digest, heads, voids)
    if previous is not None and previous != follows:
        raise Branched("it does not follow the previous record")
    return record


def _read_entries(opened: Opened) -> tuple[Entry, ...]:
    rows, entries = json.loads(opened.payload), []
    if not 0 < len(rows) <= MOST:
        raise Invalid(f"its list of deltas is empty or has more than {MOST} entries")
    for member, digest, tokens, lr in rows:
        if not _NAME.fullmatch(delta_name(0, 1, text(member, "member"), text(digest, "digest"))):
            raise Invalid("an entry does not name a delta")
        entries.append(Entry(member, digest, number(tokens, "tokens", 0, 1e18), number(lr, "lr", 0, LARGEST_LR)))
    names = [e.member for e in entries]
    if names != sorted(set(names)):
        raise Invalid("its members are not sorted, or one is listed twice")
    return tuple(entries)
