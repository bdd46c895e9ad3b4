"""A delta as stored: one object if it is small, otherwise a head, and pieces that can be read one by one.

The head names the state that the delta was trained from and its work, and lists size and digest of every piece.
The cut does not depend on the members, because nobody knows who will be in a round when a delta is put.
"""

import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from diloco.bucket.carriers import digest_of
from diloco.bucket.rounds import (
    FINGERPRINTS,
    LARGEST_LR,
    MOST,
    PIECES,
    Contribution,
    Piece,
    Record,
    delta_name,
    folder,
    heads_name,
    member_of,
    pieces_name,
)
from diloco.bucket.store.envelope import (
    HEADER,
    PART,
    PREFIX,
    Answer,
    Envelope,
    Invalid,
    Opened,
    Sealed,
    integer,
    refuses,
    text,
)
from diloco.codecs.codec import Codec, chunks, is_finite, pack_checked, unpack
from diloco.exchange.mean import codec_of_mean

SHARES, LEAST = 16, 16 << 10
"""Shares of a fragment, and the minimum bytes of one. A member reads every averaged share, and for each share that it
averages a piece of every delta. More shares mean more requests per round, whatever the number of members; fewer mean
that averaging members read more at once: members ÷ shares times the fragment."""
UNIT = 4096
"""Pieces are a multiple of this many values, which is a multiple of every codec's block."""
_LENGTH = struct.Struct("<I")


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
class SealedDelta:
    """The objects to put: first the pieces, packed into as few objects as possible, then the head."""

    head: Sealed
    objects: tuple[Sealed, ...]
    pieces: tuple[Piece, ...]

    @property
    def payloads(self) -> dict[str, memoryview]:
        """The pieces by digest."""
        bodies = [memoryview(sealed.body) for sealed in self.objects]
        cut = zip(self.pieces, places(self.pieces), strict=True)
        return {piece.digest: bodies[part][at : at + piece.size] for piece, (part, at) in cut}

    @property
    def nbytes(self) -> int:
        return self.head.nbytes + sum(sealed.nbytes for sealed in self.objects)


def seal_delta(envelope: Envelope, layout: Layout, fields: dict[str, Any], payloads: Sequence[Tensor]) -> SealedDelta:
    fragment, index, member = fields["fragment"], fields["index"], fields["member"]
    name, bodies = delta_name(fragment, index, member), [payload.numpy().tobytes() for payload in payloads]
    if not layout.cut:
        return SealedDelta(envelope.seal(name, "delta", fields, bodies[0]), (), ())
    bodies = [envelope.seal(_piece_name(fragment, index, member, k), "piece", {}, b).body for k, b in enumerate(bodies)]
    pieces = tuple(Piece(len(body), digest_of(body)) for body in bodies)
    rows = [[piece.size, piece.digest] for piece in pieces]
    head = envelope.seal(name, "delta", {**fields, "pieces": rows})
    parts: dict[int, list[bytes]] = {}
    for (part, _), body in zip(places(pieces), bodies, strict=True):
        parts.setdefault(part, []).append(body)
    names = [pieces_name(fragment, index, member, head.digest, part) for part in parts]
    objects = tuple(Sealed(name, "", b"".join(parts[part]), ()) for part, name in enumerate(names))
    return SealedDelta(head, objects, pieces)


@dataclass(frozen=True)
class EncodedDelta:
    """A member's delta, ready to be put, and as the others will read it. `needs_own`: its round must return it."""

    sealed: SealedDelta
    contribution: Contribution
    needs_own: bool


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


def seal_heads(envelope: Envelope, fragment: int, index: int, deltas: Sequence[Contribution]) -> Sealed:
    """The heads of all deltas of a record in one object. Compressed: digests are hexadecimal, and the rest of all heads
    is alike."""
    payload = zlib.compress(b"".join(_LENGTH.pack(len(delta.head)) + delta.head for delta in deltas))
    return envelope.seal(heads_name(fragment, index), "heads", {"fragment": fragment, "index": index}, payload)


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


def _piece_name(fragment: int, index: int, member: str, k: int) -> str:
    """The signed name of a piece. The object that holds the piece has another name."""
    return f"{folder(fragment, index, PIECES)}{member}.{k}"


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
