"""A delta as it lies in the store: one object if it is small, otherwise a head and pieces that can be read one by one.

The head says what the delta is against and what it weighs, and lists size, digest and norm of every piece. How a delta
is cut does not depend on the members, because nobody knows who will be in a round when a delta is put.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.bucket.rounds import (
    FINGERPRINTS,
    LARGEST_LR,
    PIECES,
    Contribution,
    Piece,
    delta_name,
    folder,
    member_of,
    pieces_name,
)
from diloco.bucket.store.envelope import PART, Answer, Envelope, Invalid, Opened, Sealed, integer, number, refuses, text
from diloco.codec import Codec, chunks, is_sparse, pack_checked, unpack
from diloco.reduce.mean import codec_of_mean

SHARES, LEAST = 16, 16 << 10
"""Shares of a fragment, and the fewest bytes of one. A member reads every averaged share, and of each share that it
averages itself a piece of every delta. So with more shares a round has more requests, whatever the number of members;
with fewer, members that average have to read more at a time: members ÷ shares times the fragment."""
UNIT = 4096
"""Values: pieces are multiples of it, which is one of the blocks of every codec."""
DIGITS = 32
"""Hexadecimal digits of the digest of a piece: only the member that has put it could look for a collision."""


@dataclass(frozen=True)
class Layout:
    """How the deltas of a fragment are encoded and cut; the same on all members. Each piece is a share that one member
    averages, if there are enough members."""

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

    def norms(self, payloads: Sequence[Tensor]) -> list[float]:
        return [norm_of(self.codec, payload, self.count(k)) for k, payload in enumerate(payloads)]


def layout_of(codec: Codec, n: int) -> Layout:
    """Sparse deltas are never cut: their mean is not sparse, and encoded again it would lose what only one member has
    sent."""
    whole = Layout(n, codec, (slice(0, n),))
    nbytes = codec.nbytes(n) if n else 0
    count = max(min(SHARES, nbytes // LEAST), -(-nbytes // (PART // 2)))
    if is_sparse(codec) or count < 2:
        return whole
    size = -(-n // (count * UNIT)) * UNIT
    return Layout(n, codec, tuple(slice(at, min(at + size, n)) for at in range(0, n, size)))


def norm_of(codec: Codec, payload: Tensor, n: int) -> float:
    """The norm of the decoded values; inf or nan if one of them is."""
    total = 0.0
    for values, data in chunks(codec, n):
        total += float(codec.decode(payload[data], values.stop - values.start).double().square_().sum())
    return total**0.5


def delta_fields(
    fragment: int, index: int, member: str, fingerprint: int, tokens: float, lr: float = 0.0
) -> dict[str, Any]:
    """The header of a delta. It says nothing about the process: sent again after a restart, the object is the same."""
    return {"fragment": fragment, "index": index, "member": member, "fingerprint": fingerprint, "tokens": tokens,
            "lr": lr}  # fmt: skip


@dataclass(frozen=True)
class SealedDelta:
    """What has to be put: first the pieces, which lie in as few objects as their size allows, then the head."""

    head: Sealed
    pieces: tuple[Sealed, ...]
    listed: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return self.head.nbytes + sum(each.nbytes for each in self.pieces)


def seal_delta(
    envelope: Envelope, layout: Layout, fields: dict[str, Any], payloads: Sequence[Tensor], norms: Sequence[float]
) -> SealedDelta:
    fragment, index, member = fields["fragment"], fields["index"], fields["member"]
    name, bodies = delta_name(fragment, index, member), [payload.numpy().tobytes() for payload in payloads]
    if not layout.cut:
        return SealedDelta(envelope.seal(name, "delta", fields, bodies[0]), (), ())
    bodies = [envelope.seal(_piece_name(fragment, index, member, k), "piece", {}, b).body for k, b in enumerate(bodies)]
    listed = tuple(Piece(len(b), _digest(b), _rounded(norm)) for b, norm in zip(bodies, norms, strict=True))
    lines = [[piece.size, piece.digest, piece.norm] for piece in listed]
    head = envelope.seal(name, "delta", {**fields, "pieces": lines})
    parts: dict[int, list[bytes]] = {}
    for (part, _), body in zip(places(listed), bodies, strict=True):
        parts.setdefault(part, []).append(body)
    names = [pieces_name(fragment, index, member, head.digest, part) for part in parts]
    put = tuple(Sealed(name, "", b"".join(parts[part]), ()) for part, name in enumerate(names))
    return SealedDelta(head, put, listed)


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
def read_head(found: Opened, body: bytes, fragment: int, index: int, layout: Layout) -> Contribution:
    """What a delta says of itself, without its values. Raises Invalid."""
    if (found.header.get("fragment"), found.header.get("index")) != (fragment, index):
        raise Invalid("it belongs to another round")
    member = found.text("member")
    if member != member_of(found.name):
        raise Invalid("it belongs to another member than its name says")
    fingerprint, tokens = found.integer("fingerprint", 0, FINGERPRINTS), found.number("tokens", 0, 1e18)
    lr = found.number("lr", 0, LARGEST_LR)
    pieces = _read_pieces(found.header.get("pieces"), layout) if layout.cut else ()
    norm = sum(piece.norm**2 for piece in pieces) ** 0.5
    nbytes = len(body) + sum(piece.size for piece in pieces)
    head = body if layout.cut else b""
    return Contribution(member, found.digest, fingerprint, tokens, norm, None, nbytes, lr, pieces, head)


def _read_pieces(listed: object, layout: Layout) -> tuple[Piece, ...]:
    if not isinstance(listed, list) or len(listed) != len(layout.cuts):
        raise Invalid(f"it does not list the {len(layout.cuts)} pieces of the fragment")
    pieces = []
    for line in listed:
        if not isinstance(line, list) or len(line) != 3:
            raise Invalid("its list of pieces has something else in it")
        digest = text(line[1], "digest of a piece")
        pieces.append(Piece(integer(line[0], "size", 1, PART), digest, number(line[2], "norm", 0, 1e300)))
    return tuple(pieces)


@refuses
def read_delta(found: Opened, fragment: int, index: int, layout: Layout) -> Contribution:
    """A delta that is one object. Raises Invalid. Size and checksum have been checked; this checks the round, the
    member, and that all values are finite."""
    head = read_head(found, b"", fragment, index, layout)
    payload = _tensor(found.payload) if layout.n else torch.empty(0, dtype=torch.uint8)
    norm = norm_of(layout.codec, payload, layout.n)
    if not norm < float("inf"):
        raise Invalid("it holds inf or nan")
    return Contribution(head.member, head.digest, head.fingerprint, head.tokens, norm, (payload,), found.nbytes,
                        head.lr)  # fmt: skip


@refuses
def read_piece(
    envelope: Envelope, layout: Layout, place: tuple[int, int], delta: Contribution, k: int, body: Answer
) -> Tensor:
    """The payload of a piece. Raises Invalid; depends only on its bytes and on the head, so all members agree."""
    piece = delta.pieces[k]
    if not isinstance(body, bytes) or _digest(body) != piece.digest:
        raise Invalid(f"piece {k} is not the one that its head lists")
    size = layout.codec.nbytes(layout.count(k))
    payload = _tensor(envelope.open(_piece_name(*place, delta.member, k), "piece", body, size).payload)
    if not norm_of(layout.codec, payload, layout.count(k)) <= piece.norm * (1 + 1e-5):
        raise Invalid(f"piece {k} holds inf or nan, or is larger than its head says")
    return payload


def _piece_name(fragment: int, index: int, member: str, k: int) -> str:
    """What is signed. The object that holds the piece has another name."""
    return f"{folder(fragment, index, PIECES)}{member}.{k}"


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:DIGITS]


def _rounded(norm: float) -> float:
    return float(f"{norm:.7g}")


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
