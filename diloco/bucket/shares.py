"""Averaged shares: who averages which share of a round, what the average is, and when one that was read counts.

A share is a pure function of the record and of the deltas that it names. So whoever makes it makes the same, and one
that is missing, or does not pass its checks, is made again in the next slot.
"""

import struct
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from diloco.bucket.deltas import Layout, norm_of, read_head
from diloco.bucket.rounds import MOST, Contribution, Record, delta_name, heads_name, share_name
from diloco.bucket.store.envelope import HEADER, PREFIX, Envelope, Invalid, Opened, Sealed, refuses
from diloco.codec import pack
from diloco.reduce.mean import Encoded

LARGER = 4.0
"""How much larger a share may be than the deltas allow: encoding a mean again can enlarge it, E3M0 by a third."""
GROUP = 16
"""Deltas that are added up before the next are read: what is in memory does not grow with the members."""
_LENGTH = struct.Struct("<I")


def turns(order: Sequence[str], me: str, away: Collection[str]) -> Callable[[int], int]:
    """How many members come before this one, if the order begins at a given place, without those that are away; whoever
    is not in the order comes last."""
    before = [0, *accumulate(name not in away for name in order)]
    place = order.index(me) if me in order else None

    def turn(start: int) -> int:
        start %= len(order)
        if place is None:
            return before[-1]
        return before[place] - before[start] + (before[-1] if place < start else 0)

    return turn


def turns_to_average(record: Record, me: str, away: Collection[str]) -> Callable[[int], int]:
    """Whose turn it is to average a share. It changes from round to round, so that all do the same work in the end."""
    turn, start = turns([e.member for e in record.entries], me, away), int(record.digest[:8], 16)
    return lambda share: turn(start + share)


def seal_heads(envelope: Envelope, fragment: int, index: int, deltas: Sequence[Contribution]) -> Sealed:
    """Compressed: digests are hexadecimal, and the rest of all heads is alike."""
    payload = zlib.compress(b"".join(_LENGTH.pack(len(delta.head)) + delta.head for delta in deltas))
    return envelope.seal(heads_name(fragment, index), "heads", {"fragment": fragment, "index": index}, payload)


@refuses
def read_heads(found: Opened, envelope: Envelope, record: Record, layout: Layout) -> dict[str, Contribution]:
    """The heads of all deltas of a record, by digest. Raises Invalid."""
    unpacked = zlib.decompressobj()
    try:
        data = unpacked.decompress(found.payload, MOST * (PREFIX.size + HEADER // 8))
    except zlib.error:
        raise Invalid("it is not compressed as it should be") from None
    heads, at = {}, 0
    for entry in record.entries:
        if at + _LENGTH.size > len(data):
            raise Invalid("it ends before the last head")
        (length,) = _LENGTH.unpack_from(data, at)
        body = data[at + _LENGTH.size : at + _LENGTH.size + length]
        at += _LENGTH.size + length
        name = delta_name(record.fragment, record.index, entry.member, entry.digest)
        opened = envelope.open(name, "delta", body, 0)
        heads[entry.digest] = read_head(opened, body, record.fragment, record.index, layout)
        if heads[entry.digest].fingerprint != record.fingerprint:
            raise Invalid("one of its deltas is against another state")
    return heads


def mean_in_parts(record: Record, deltas: Mapping[str, Contribution], layout: Layout) -> tuple[Encoded, ...]:
    """Σ share · clip · decoded delta, in the order of the record and piece by piece: what every member computes where
    none averages for the others."""
    parts = []
    for k, cut in enumerate(layout.cuts):
        payloads = [(deltas[e.digest].payloads or ())[k] for e in record.entries]
        parts.append(Encoded(cut.start, layout.count(k), layout.codec, payloads, record.factors))
    return tuple(parts)


class Average:
    """The mean of one share, from pieces that come in groups, in the order of the record. A piece that is not what its
    head says counts as zeros. The groups are summed one after another, so the bits do not depend on who does it."""

    def __init__(self, record: Record, share: int, layout: Layout) -> None:
        self._record, self._layout, self._n = record, layout, layout.count(share)
        self._total = torch.zeros(self._n, dtype=torch.float32, device="cpu")
        self._factors = dict(zip((e.digest for e in record.entries), record.factors, strict=True))

    def groups(self) -> list[Sequence[str]]:
        """The digests of the deltas whose pieces are to be added together."""
        digests = [e.digest for e in self._record.entries]
        return [digests[at : at + GROUP] for at in range(0, len(digests), GROUP)]

    def add(self, pieces: Mapping[str, Tensor | None]) -> None:
        usable = {digest: piece for digest, piece in pieces.items() if piece is not None}
        if usable:
            weights = [self._factors[digest] for digest in usable]
            self._total += Encoded(0, self._n, self._layout.codec, list(usable.values()), weights).values()

    def payload(self) -> Tensor:
        """Encoded again."""
        return pack(self._layout.mean_codec, self._total)


def largest(record: Record, heads: Mapping[str, Contribution], share: int) -> float:
    """The norm that a share can have: no averager can do more harm than that."""
    norms = [heads[e.digest].pieces[share].norm for e in record.entries]
    return LARGER * sum(factor * norm for factor, norm in zip(record.factors, norms, strict=True))


def seal_share(envelope: Envelope, record: Record, share: int, slot: int, payload: Tensor) -> Sealed:
    """It names the record that it is made from, and not who made it: all make the same."""
    fields = {"share": share, "record": record.digest}
    name = share_name(record.fragment, record.index, share, slot)
    return envelope.seal(name, "share", fields, payload.numpy().tobytes())


@refuses
def read_share(found: Opened, record: Record, share: int, layout: Layout, most: float) -> Encoded:
    """Raises Invalid. Depends only on the bytes, the record and the heads, so all members agree."""
    if (found.header.get("share"), found.header.get("record")) != (share, record.digest):
        raise Invalid("it is another share, or made from another record")
    payload = torch.frombuffer(bytearray(found.payload), dtype=torch.uint8)
    if not norm_of(layout.mean_codec, payload, layout.count(share)) <= most:
        raise Invalid("it holds inf or nan, or is larger than the deltas allow")
    return encoded_share(payload, share, layout)


def encoded_share(payload: Tensor, share: int, layout: Layout) -> Encoded:
    return Encoded(layout.cuts[share].start, layout.count(share), layout.mean_codec, [payload], [1.0])
