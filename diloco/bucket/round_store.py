"""The rounds of one fragment as they lie in the store: reads deltas, reads and creates closing records. Timing is the
caller's decision."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import TypeVar

from torch import Tensor

from diloco.bucket.deltas import Layout, layout_of, places, read_delta, read_head, read_piece, sizes
from diloco.bucket.rounds import (
    Branched,
    Contribution,
    Link,
    Record,
    count_votes,
    folder,
    heads_name,
    member_of,
    pieces_name,
    place_of,
    read_record,
    record_name,
)
from diloco.bucket.shares import read_heads, seal_heads
from diloco.bucket.store.ahead import ReadAhead
from diloco.bucket.store.envelope import HEADER, PART, PREFIX, Answer, Envelope, Invalid, get, put, read_twice
from diloco.bucket.store.operations import All, List, Read, Size, Task, Work, create, together
from diloco.codec import Float32

T = TypeVar("T")
RECORD = PREFIX.size + HEADER + (1 << 20)
AT_ONCE = 16
"""Deltas, or slots, that are read together: what is not checked yet must not fill the memory."""
REMEMBERED = 10_000
"""Slots that hold garbage."""


class RoundStore:
    def __init__(
        self, fragment: int, layout: Layout, envelope: Envelope, reject: Callable[[str, Invalid], None]
    ) -> None:
        self.fragment, self.layout, self._envelope, self._reject = fragment, layout, envelope, reject
        self._ahead = ReadAhead()
        self.void: set[str] = set()  # digests of records that do not count, although they are well formed
        self._bad: dict[str, Invalid] = {}  # by name: slots that hold no record

    @classmethod
    def reader(cls, fragment: int, envelope: Envelope) -> "RoundStore":
        """What reads records only."""
        return cls(fragment, layout_of(Float32(), 0), envelope, lambda name, reason: None)

    def read_ahead(self, closed: Mapping[str, int]) -> Task[None]:
        """What lies in rounds that follow each other and are closed, by name with its size: many small objects at once,
        instead of one round after another."""
        yield from self._ahead.read(closed)

    def records_ahead(self, indices: Iterable[int]) -> Task[None]:
        """The same for the records of rounds alone, as far as they are there."""
        yield from self.read_ahead({record_name(self.fragment, index, 0): 0 for index in indices})

    def record(
        self, index: int, previous: Link | None, names: Collection[str] | None = None
    ) -> Task[tuple[Record | None, int, bool]]:
        """The record of a round, or None and the first empty slot; and whether some record follows another one than
        `previous`. A record behind an empty slot does not count: no member that follows the rules writes one there.
        `names`: what was listed in the round. Without it, the first slot is read, and only if that holds no record of
        the round, one listing finds those behind it."""
        slot, branched, counts = 0, False, None
        while slots := self._slots(index, slot, names):
            found = yield from self._ahead.serve(together([self._read_slot(index, k, previous) for k in slots]))
            for each in found:
                if each is None:
                    return counts, slot, branched
                good = isinstance(each, Record) and each.digest not in self.void
                if isinstance(each, Record) and (counts is not None or good):
                    branched |= counts is not None
                    counts = each if counts is None or each.voids == counts.digest else counts
                branched |= isinstance(each, Branched)
                slot += 1
            if names is None and counts is None:
                names = yield List(folder(self.fragment, index))
            elif names is None:
                break
        return counts, slot, branched

    def forget(self) -> None:
        """Read again what was found to be garbage: a reply may have been wrong."""
        self._bad.clear()

    def _slots(self, index: int, first: int, names: Collection[str] | None) -> list[int]:
        """The next slots to read, as far as they are listed."""
        if names is None:
            return [first]
        slots = range(first, min(first + AT_ONCE, len(names)))
        return list(takewhile(lambda slot: record_name(self.fragment, index, slot) in names, slots))

    def find(self, index: int, digest: str) -> Task[Record | None]:
        """The record with this digest."""
        slot, names = 0, None
        while slots := self._slots(index, slot, names):
            found = yield from self._ahead.serve(together([self._read_slot(index, k, None) for k in slots]))
            for each in found:
                if isinstance(each, Record) and each.digest == digest:
                    return each
            slot += len(slots)
            names = names if names is not None else (yield List(folder(self.fragment, index)))
        return None

    def close(self, record: Record, slot: int) -> Task[Record | None]:
        """Create the record in the first slot without a valid one. This is a single put, so no round is half closed.
        Returns the record of the round, which another member may have written; None if this one would not be valid, or
        the round has to be looked at again. A record that its own writer would not follow is never written."""
        fields, payload = record.sealed()
        while True:
            name = record_name(self.fragment, record.index, slot)
            sealed = self._envelope.seal(name, "record", fields, payload)
            try:
                opened = self._envelope.open(name, "record", sealed.body, None)
                read_record(opened, self.fragment, record.index, record.previous)
            except Invalid as reason:
                self._reject(name, reason)
                return None
            if sealed.digest in self.void:
                return None
            yield from create(name, sealed.body, RECORD)
            found = yield from self._read_slot(record.index, slot, record.previous)
            if isinstance(found, Record) and found.digest not in self.void:
                if found.voids == record.voids:
                    return found
                if not record.voids:
                    return None
            if found is not None:  # what lies behind it may be the record of the round
                names = yield List(folder(self.fragment, record.index))
                counts, free, _ = yield from self.record(record.index, record.previous, names)
                if counts is not None and counts.digest != record.voids:
                    return counts
                slot = max(slot + 1, free)

    def _read_slot(self, index: int, slot: int, previous: Link | None) -> Task[Record | Invalid | None]:
        """Garbage is read once, as anybody may put any amount of it."""
        name = record_name(self.fragment, index, slot)
        if name in self._bad:
            return self._bad[name]

        def opened(data: Answer) -> Task[Record]:
            found = self._envelope.open(name, "record", data, None)
            return (yield Work(lambda: read_record(found, self.fragment, index, previous)))

        found = yield from read_twice(Read(name, RECORD, patient=True), opened, self._reject)
        if isinstance(found, Invalid) and not isinstance(found, Branched):
            self._bad[name] = found
            if len(self._bad) > REMEMBERED:
                self._bad.pop(next(iter(self._bad)))
        return found

    def outvoted(self, record: Record) -> Task[bool]:
        """Whether more members have sent a delta for the round against one other state than against the one that its
        record says. At a tie the record stands."""
        names = yield List(folder(self.fragment, record.index))
        heads = yield from self.heads(sorted(filter(member_of, names)))
        mine, others = count_votes((head for head in heads if isinstance(head, Contribution)), record.fingerprint)
        return others > mine

    def reaches(self, index: int) -> Task[bool]:
        """Whether the round was closed, judged by its first slot alone."""
        return (yield Size(record_name(self.fragment, index, 0))) is not None

    def deltas(self, names: list[str]) -> Task[list[Contribution | Invalid | None]]:
        """Deltas, checked and decoded once; None where there is no such object, or a piece of it is missing."""
        return (yield from self._ahead.serve(_in_turn([self._delta(name) for name in names])))

    def heads(self, names: list[str]) -> Task[list[Contribution | Invalid | None]]:
        """The same without the values."""
        return (yield from _in_turn([self._head(name) for name in names]))

    def _head(self, name: str) -> Task[Contribution | Invalid | None]:
        place = place_of(name)
        assert place is not None
        try:
            cut = self.layout.cut
            data = yield Read(name, PREFIX.size + HEADER, first=None if cut else PREFIX.size + HEADER)
            if data is None:
                return None

            def read() -> Contribution:
                opened = self._envelope.open(name, "delta", data, 0 if cut else None, head=not cut)
                return read_head(opened, data, *place, self.layout)

            return (yield Work(read))
        except Invalid as reason:
            self._reject(name, reason)
            return reason

    def _delta(self, name: str) -> Task[Contribution | Invalid | None]:
        if self.layout.cut:
            head = yield from self._head(name)
            return (yield from self._whole(name, head)) if isinstance(head, Contribution) else head
        place = place_of(name)
        assert place is not None
        try:
            found = yield from get(self._envelope, name, "delta", self.layout.nbytes)
            if found is None:
                return None
            return (yield Work(lambda: read_delta(found, *place, self.layout)))
        except Invalid as reason:
            self._reject(name, reason)
            return reason

    def _whole(self, name: str, head: Contribution) -> Task[Contribution | Invalid | None]:
        """A delta with all its pieces."""
        place = place_of(name)
        assert place is not None
        objects = [pieces_name(*place, head.member, head.digest, k) for k in range(len(sizes(head.pieces)))]
        found = yield All([Read(each, size) for each, size in zip(objects, sizes(head.pieces), strict=True)])
        if any(data is None for data in found):
            return None

        def payloads() -> tuple[Tensor, ...]:
            out = []
            for k, (part, at) in enumerate(places(head.pieces)):
                whole = found[part] if isinstance(found[part], bytes) else b""
                body = whole[at : at + head.pieces[k].size]
                out.append(read_piece(self._envelope, self.layout, place, head, k, body))
            return tuple(out)

        try:
            return replace(head, payloads=(yield Work(payloads)))
        except Invalid as reason:
            self._reject(name, reason)
            return reason

    def put_heads(self, index: int, deltas: list[Contribution]) -> Task[str]:
        """Put the heads of the deltas that a record is going to name, together, so that nobody else has to read each of
        them. Returns the digest."""
        sealed = yield Work(lambda: seal_heads(self._envelope, self.fragment, index, deltas))
        yield from put(sealed)
        return sealed.digest

    def listed(self, record: Record) -> Task[Mapping[str, Contribution] | Invalid | None]:
        """The heads of all deltas of a record, by digest; None if they are gone."""
        return (yield from self._ahead.serve(self._listed(record)))

    def _listed(self, record: Record) -> Task[Mapping[str, Contribution] | Invalid | None]:
        name = heads_name(self.fragment, record.index, record.heads)

        def opened(data: Answer) -> Task[Mapping[str, Contribution]]:
            found = self._envelope.open(name, "heads", data, None)
            return (yield Work(lambda: read_heads(found, self._envelope, record, self.layout)))

        read = Read(name, PREFIX.size + HEADER + PART, patient=True)
        return (yield from read_twice(read, opened, self._reject))


def _in_turn(tasks: list[Task[T]]) -> Task[list[T]]:
    found = []
    for at in range(0, len(tasks), AT_ONCE):
        found += yield from together(tasks[at : at + AT_ONCE])
    return found
