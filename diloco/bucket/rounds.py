"""A round: the deltas of one fragment and index, and the record that closes it. Pure functions of what was read."""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.bucket.store.envelope import DIGEST, Invalid, Opened, integer, number, text
from diloco.codec import Codec, chunks
from diloco.reduce import State
from diloco.reduce.mean import Encoded

CLIP = 10.0
NORMS, FEWEST_NORMS = 16, 8
FINGERPRINTS = 1 << 63
_DELTA = re.compile(r"d-([a-z0-9][a-z0-9_-]*)-([0-9a-f]{64})")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def folder(fragment: int, index: int) -> str:
    return f"rounds/{fragment:04d}/{index:08d}/"


def delta_name(fragment: int, index: int, member: str, digest: str = DIGEST) -> str:
    """The name holds the digest, because a member that restarts may send another delta for the same round."""
    return f"{folder(fragment, index)}d-{member}-{digest}"


def member_of(name: str) -> str | None:
    """The member that a delta belongs to, by the name of the object."""
    match = _DELTA.fullmatch(name.rpartition("/")[2])
    return match[1] if match else None


def record_name(fragment: int, index: int, slot: int) -> str:
    return f"{folder(fragment, index)}closed.{slot}"


@dataclass(frozen=True)
class Contribution:
    """A delta that was read, checked and decoded once."""

    member: str
    digest: str
    fingerprint: int
    tokens: float
    norm: float
    payload: Tensor  # encoded
    nbytes: int


def delta_fields(fragment: int, index: int, member: str, fingerprint: int, tokens: float) -> dict[str, Any]:
    """The header of a delta. It says nothing about the process: sent again after a restart, the object is the same."""
    return {"fragment": fragment, "index": index, "member": member, "fingerprint": fingerprint, "tokens": tokens}


def read_delta(found: Opened, fragment: int, index: int, codec: Codec, n: int) -> Contribution:
    """Raises Invalid. Size and checksum have been checked; this checks the round, the member, and that all values are
    finite."""
    if (found.header.get("fragment"), found.header.get("index")) != (fragment, index):
        raise Invalid("it belongs to another round")
    member = found.text("member")
    if member != member_of(found.name):
        raise Invalid("it belongs to another member than its name says")
    fingerprint, tokens = found.integer("fingerprint", 0, FINGERPRINTS), found.number("tokens", 0, 1e18)
    payload = torch.frombuffer(bytearray(found.payload), dtype=torch.uint8) if n else torch.empty(0, dtype=torch.uint8)
    norm = norm_of(codec, payload, n)
    if not norm < float("inf"):
        raise Invalid("it holds inf or nan")
    return Contribution(member, found.digest, fingerprint, tokens, norm, payload, found.nbytes)


def norm_of(codec: Codec, payload: Tensor, n: int) -> float:
    """The norm of the decoded values; inf or nan if one of them is."""
    total = 0.0
    for values, data in chunks(codec, n):
        total += float(codec.decode(payload[data], values.stop - values.start).double().square_().sum())
    return total**0.5


@dataclass(frozen=True)
class Entry:
    member: str
    digest: str  # of the delta
    share: float
    clip: float
    norm: float  # before clipping


@dataclass(frozen=True)
class Record:
    """Which members are in a round, and with which weight. The valid record with the lowest slot is the round's,
    forever."""

    fragment: int
    index: int
    previous: str  # digest of the previous record
    fingerprint: int  # of the state that all its deltas are against
    by: str  # the member that wrote it
    entries: tuple[Entry, ...]
    digest: str = ""

    def fields(self) -> dict[str, Any]:
        out = asdict(self)
        del out["digest"]
        return {**out, "entries": [[e.member, e.digest, e.share, e.clip, e.norm] for e in self.entries]}

    @property
    def members(self) -> dict[str, float]:
        return {e.member: e.share for e in self.entries}


@dataclass(frozen=True)
class Followed:
    """A closed round, ready to be applied."""

    record: Record
    mean: Encoded
    received: int
    state: State | None  # the one after it, if a delta was taken against the one before it


def read_record(found: Opened, fragment: int, index: int, previous: str) -> Record:
    """Raises Invalid. Depends only on the bytes, the run, the key and the previous record, so all members agree."""
    if (found.header.get("fragment"), found.header.get("index")) != (fragment, index):
        raise Invalid("it belongs to another round")
    if found.header.get("previous") != previous:
        raise Invalid("it does not follow the previous record")
    listed = found.header.get("entries")
    if not isinstance(listed, list) or not listed or any(not isinstance(e, list) or len(e) != 5 for e in listed):
        raise Invalid("its list of deltas is missing or empty")
    entries = []
    for member, digest, share, clip, norm in listed:
        if not _DIGEST.fullmatch(text(digest, "digest")) or not member_of(f"d-{text(member, 'member')}-{digest}"):
            raise Invalid("it names something that is not a delta")
        if number(clip, "clip", 0, 1) == 0:
            raise Invalid("it clips a delta to zero")
        entries.append(Entry(member, digest, number(share, "share", 0, 1), clip, number(norm, "norm", 0, 1e300)))
    names = [e.member for e in entries]
    if names != sorted(set(names)):
        raise Invalid("its members are not sorted, or one is listed twice")
    total = sum(e.share for e in entries)
    if abs(total - 1) > 1e-6 and total != 0:
        raise Invalid(f"its shares sum to {total:g}")
    fingerprint = integer(found.header.get("fingerprint"), "fingerprint", 0, FINGERPRINTS)
    return Record(fragment, index, previous, fingerprint, found.text("by"), tuple(entries), found.digest)


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


def entries_of(deltas: Sequence[Contribution], norms: Sequence[Sequence[float]], max_work: float) -> tuple[Entry, ...]:
    """Shares by work done, at most `max_work` each. A delta far larger than those of the last rounds is clipped."""
    works = [min(delta.tokens, max_work) for delta in deltas]
    total = sum(works)
    limit = CLIP * statistics.median(x for each in norms for x in each) if len(norms) >= FEWEST_NORMS else float("inf")
    return tuple(
        Entry(delta.member, delta.digest, work / total if total else 0.0, clip_of(delta.norm, limit), delta.norm)
        for delta, work in zip(deltas, works, strict=True)
    )


def clip_of(norm: float, limit: float) -> float:
    return limit / norm if norm > limit > 0 else 1.0


def mean_of(record: Record, payloads: Mapping[str, Tensor], codec: Codec, n: int) -> Encoded:
    """Σ share · clip · decoded delta, in the order of the record."""
    factors = [e.share * e.clip for e in record.entries]
    return Encoded(0, n, codec, [payloads[e.digest] for e in record.entries], factors)
