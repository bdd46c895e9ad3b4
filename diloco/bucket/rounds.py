"""What the store holds of a round: names, deltas, and the commit record that closes it. Pure functions; the rules of a
round are in rules.py.

A delta is one object if it is small, otherwise a head, and pieces that can be read one by one. The head names the state
that the delta was trained from and its work, and lists size and digest of every piece. The cut does not depend on the
members, because nobody knows who will be in a round when a delta is put.
"""

import json
import re
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from diloco.bucket.carriers import digest_of
from diloco.bucket.store.envelope import (
    DIGEST,
    HEADER,
    PART,
    PREFIX,
    Answer,
    Envelope,
    Invalid,
    Opened,
    Sealed,
    integer,
    number,
    refuses,
    text,
)
from diloco.codecs.codec import Codec, chunks, is_finite, pack_checked, unpack
from diloco.exchange.mean import codec_of_mean

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

SHARES, LEAST = 16, 16 << 10
"""Shares of a fragment, and the minimum bytes of one. A member reads every averaged share, and for each share that it
averages a piece of every delta. More shares mean more requests per round, whatever the number of members; fewer mean
that averaging members read more at once: members ÷ shares times the fragment."""
UNIT = 4096
"""Pieces are a multiple of this many values, which is a multiple of every codec's block."""
_LENGTH = struct.Struct("<I")

# Names.


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


# Deltas.


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
class Layout:
    """How the deltas of a fragment are encoded and cut; the same on all members. With enough members, each piece is a
    share that one member averages."""

    n: int
    codec: Codec
    cuts: tuple[slice, ...]

    @property
    def cut(self) -> bool:
        return len(self.cuts) > 1

    @property
    def mean_codec(self) -> Codec:
        return codec_of_mean(self.codec, None)

    def count(self, share: int) -> int:
        """Values of a share."""
        return self.cuts[share].stop - self.cuts[share].start

    @property
    def nbytes(self) -> int:
        """Bytes of an encoded delta."""
        return sum(self.codec.nbytes(self.count(k)) for k in range(len(self.cuts))) if self.n else 0

    def pack(self, values: Tensor) -> tuple[tuple[Tensor, ...], bool]:
        """The payload of each piece, and whether all values are finite."""
        if not self.n:
            return (torch.empty(0, dtype=torch.uint8),), True
        encoded = [pack_checked(self.codec, values[cut]) for cut in self.cuts]
        return tuple(payload for payload, _ in encoded), all(finite for _, finite in encoded)

    def unpack(self, payloads: Sequence[Tensor]) -> Tensor:
        out = torch.empty(self.n, dtype=torch.float32, device="cpu")
        for k, (cut, payload) in enumerate(zip(self.cuts, payloads, strict=True)):
            out[cut] = unpack(self.codec, payload, self.count(k))
        return out


def layout_of(codec: Codec, n: int) -> Layout:
    nbytes = codec.nbytes(n) if n else 0
    count = max(min(SHARES, nbytes // LEAST), -(-nbytes // (PART // 2)))
    if count < 2:
        return Layout(n, codec, (slice(0, n),))
    size = -(-n // (count * UNIT)) * UNIT
    return Layout(n, codec, tuple(slice(at, min(at + size, n)) for at in range(0, n, size)))


def check_finite(codec: Codec, payload: Tensor, n: int) -> None:
    """Raises Invalid if a value is not finite."""
    if not all(is_finite(unpack(codec, payload[data], at.stop - at.start)) for at, data in chunks(codec, n)):
        raise Invalid("it has non-finite values")


def delta_fields(
    fragment: int, index: int, member: str, fingerprint: int, tokens: float, lr: float = 0.0
) -> dict[str, Any]:
    """The header of a delta. It says nothing about the process: sent again after a restart, the object is the same."""
    return {"fragment": fragment, "index": index, "member": member, "fingerprint": fingerprint, "tokens": tokens,
            "lr": lr}  # fmt: skip


@dataclass(frozen=True)
class EncodedDelta:
    """A member's delta, as the others will read it, and the objects to put: first the pieces, packed into as few
    objects as possible, then the head. `needs_own`: its round must return it."""

    contribution: Contribution
    head: Sealed
    objects: tuple[Sealed, ...] = ()
    needs_own: bool = False

    @property
    def payloads(self) -> dict[str, memoryview]:
        """The pieces by digest."""
        bodies, pieces = [memoryview(sealed.body) for sealed in self.objects], self.contribution.pieces
        cut = zip(pieces, places(pieces), strict=True)
        return {piece.digest: bodies[part][at : at + piece.size] for piece, (part, at) in cut}


def seal_delta(
    envelope: Envelope, layout: Layout, fields: dict[str, Any], payloads: tuple[Tensor, ...], needs_own: bool = False
) -> EncodedDelta:
    fragment, index, member = fields["fragment"], fields["index"], fields["member"]
    name, bodies = delta_name(fragment, index, member), [payload.numpy().tobytes() for payload in payloads]
    pieces, parts = tuple[Piece, ...](), dict[int, list[bytes]]()
    if layout.cut:
        for k, body in enumerate(bodies):
            bodies[k] = envelope.seal(_piece_name(fragment, index, member, k), "piece", {}, body).body
        pieces = tuple(Piece(len(body), digest_of(body)) for body in bodies)
        for (part, _), body in zip(places(pieces), bodies, strict=True):
            parts.setdefault(part, []).append(body)
        head = envelope.seal(name, "delta", {**fields, "pieces": [[piece.size, piece.digest] for piece in pieces]})
    else:
        head = envelope.seal(name, "delta", fields, bodies[0])
    names = [pieces_name(fragment, index, member, head.digest, part) for part in parts]
    objects = tuple(Sealed(name, "", b"".join(parts[part]), ()) for part, name in enumerate(names))
    contribution = Contribution(
        member, head.digest, fields["fingerprint"], fields["tokens"], payloads,
        nbytes=head.nbytes + sum(sealed.nbytes for sealed in objects), lr=fields["lr"], pieces=pieces,
        head=head.body if layout.cut else b"",
    )  # fmt: skip
    return EncodedDelta(contribution, head, objects, needs_own)


def digests_of(deltas: Sequence[Contribution], layout: Layout) -> dict[str, int]:
    """Digests of the values of deltas, by member, to find equal ones; 0 if all values are zeros."""
    digests = {}
    for delta in deltas:
        digest = 0
        for payload in delta.payloads or ():
            digest = crc32(payload.numpy().data, digest)
        digests[delta.member] = digest
    counts = Counter(digests.values())
    for delta in deltas:
        if counts[digests[delta.member]] > 1 and not layout.unpack(delta.payloads or ()).any():
            digests[delta.member] = 0
    return digests


def places(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """(object, offset) of each piece."""
    out, part, at = [], 0, 0
    for piece in pieces:
        if at and at + piece.size > PART:
            part, at = part + 1, 0
        out.append((part, at))
        at += piece.size
    return out


def sizes(pieces: Sequence[Piece]) -> list[int]:
    """Bytes of each object that holds pieces."""
    out: dict[int, int] = {}
    for (part, at), piece in zip(places(pieces), pieces, strict=True):
        out[part] = at + piece.size
    return [out[part] for part in sorted(out)]


@refuses
def read_head(opened: Opened, body: bytes, fragment: int, index: int, layout: Layout) -> Contribution:
    """The description of a delta, without its values. Raises Invalid."""
    if (opened.header.get("fragment"), opened.header.get("index")) != (fragment, index):
        raise Invalid("it belongs to another round")
    member = opened.text("member")
    if member != member_of(opened.name):
        raise Invalid("it belongs to another member than its name says")
    fingerprint, tokens = opened.integer("fingerprint", 0, FINGERPRINTS), opened.number("tokens", 0, 1e18)
    rows = opened.header["pieces"] if layout.cut else ()
    pieces = tuple(Piece(integer(size, "size", 1, PART), text(digest, "digest of a piece")) for size, digest in rows)
    if layout.cut and len(pieces) != len(layout.cuts):
        raise Invalid(f"it does not list the {len(layout.cuts)} pieces of the fragment")
    return Contribution(
        member, opened.digest, fingerprint, tokens, payloads=None,
        nbytes=len(body) + sum(piece.size for piece in pieces), lr=opened.number("lr", 0, LARGEST_LR), pieces=pieces,
        head=body if layout.cut else b"",
    )  # fmt: skip


@refuses
def read_delta(opened: Opened, fragment: int, index: int, layout: Layout) -> Contribution:
    """A delta that is one object. Size and checksum were checked before; this checks the round, the member, and that
    all values are finite. Raises Invalid."""
    head = read_head(opened, b"", fragment, index, layout)
    payload = _tensor(opened.payload) if layout.n else torch.empty(0, dtype=torch.uint8)
    check_finite(layout.codec, payload, layout.n)
    return replace(head, payloads=(payload,), nbytes=opened.nbytes)


@refuses
def read_piece(
    envelope: Envelope, layout: Layout, place: tuple[int, int], delta: Contribution, k: int, body: Answer
) -> Tensor:
    """The payload of a piece. Depends only on its bytes and on the head, so all members agree. Raises Invalid."""
    piece = delta.pieces[k]
    if not isinstance(body, bytes) or digest_of(body) != piece.digest:
        raise Invalid(f"piece {k} does not match the digest in its head")
    size = layout.codec.nbytes(layout.count(k))
    payload = _tensor(envelope.open(_piece_name(*place, delta.member, k), "piece", body, size).payload)
    check_finite(layout.codec, payload, layout.count(k))
    return payload


def _piece_name(fragment: int, index: int, member: str, k: int) -> str:
    """The signed name of a piece. The object that holds the piece has another name."""
    return f"{folder(fragment, index, PIECES)}{member}.{k}"


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# Records.


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
    voids: str = ""  # digest of an earlier record that it replaces, because that one does not count

    def sealed(self) -> tuple[dict[str, Any], bytes]:
        """Fields and payload of the object."""
        fields = {"fragment": self.fragment, "index": self.index, "fingerprint": self.fingerprint, "by": self.by,
                  "previous": self.previous, "heads": self.heads, "voids": self.voids}  # fmt: skip
        return fields, json.dumps([[e.member, e.digest, e.tokens, e.lr] for e in self.entries]).encode()

    @cached_property
    def shares(self) -> list[float]:
        """The weight of each delta, by its work."""
        total = sum(e.tokens for e in self.entries)
        return [e.tokens / total if total else 0.0 for e in self.entries]

    @cached_property
    def lr(self) -> float:
        """Mean over the members, weighted by their shares."""
        return sum(share * e.lr for e, share in zip(self.entries, self.shares, strict=True))

    @property
    def members(self) -> dict[str, float]:
        return {e.member: share for e, share in zip(self.entries, self.shares, strict=True)}


class Attempts(NamedTuple):
    """The attempts at a record that were read."""

    record: Record | None  # of the round
    free: int  # the first attempt that nobody has made
    branched: bool  # whether some record follows another one than the known one
    voids: str = ""  # digest of the void record that the next attempt must name; empty if there is none


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


def seal_heads(envelope: Envelope, record: Record, deltas: Sequence[Contribution]) -> Sealed:
    """The heads of all deltas of a record in one object. Compressed: digests are hexadecimal, and the rest of all heads
    is alike. It names the record that is replaced: otherwise the replacement would have the same name, and meet a
    damaged object again."""
    payload = zlib.compress(b"".join(_LENGTH.pack(len(delta.head)) + delta.head for delta in deltas))
    fields = {"fragment": record.fragment, "index": record.index} | ({"voids": record.voids} if record.voids else {})
    return envelope.seal(heads_name(record.fragment, record.index), "heads", fields, payload)


@refuses
def read_heads(heads: Opened, envelope: Envelope, record: Record, layout: Layout) -> dict[str, Contribution]:
    """The heads of all deltas of a record, by digest. Raises Invalid."""
    try:
        data = zlib.decompressobj().decompress(heads.payload, MOST * (PREFIX.size + HEADER // 8))
    except zlib.error:
        raise Invalid("its compression is damaged") from None
    contributions, at = {}, 0
    for entry in record.entries:
        if at + _LENGTH.size > len(data):
            raise Invalid("it ends before the last head")
        (length,) = _LENGTH.unpack_from(data, at)
        body = data[at + _LENGTH.size : at + _LENGTH.size + length]
        at += _LENGTH.size + length
        name = delta_name(record.fragment, record.index, entry.member, entry.digest)
        contribution = read_head(envelope.open(name, "delta", body, 0), body, record.fragment, record.index, layout)
        if contribution.fingerprint != record.fingerprint:
            raise Invalid("one of its deltas was trained from another state")
        contributions[entry.digest] = contribution
    return contributions
