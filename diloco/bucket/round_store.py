"""The rounds of one fragment as they lie in the store: reads deltas, reads and creates closing records. Timing is the
caller's decision."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from diloco.bucket.deltas import Layout, layout_of, places, read_delta, read_head, read_piece, sizes
from diloco.bucket.rounds import (
    PIECES,
    Branched,
    Contribution,
    Link,
    Record,
    folder,
    heads_name,
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
"""Deltas that are read together: what is not checked yet must not fill the memory."""


class RoundStore:
    def __init__(
        self, fragment: int, layout: Layout, envelope: Envelope, reject: Callable[[str, Invalid], None]
    ) -> None:
        self._fragment, self.layout, self._envelope, self._reject = fragment, layout, envelope, reject
        self._ahead = ReadAhead()

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
        yield from self.read_ahead({record_name(self._fragment, index, 0): 0 for index in indices})

    def record(
        self, index: int, previous: Link | None, names: Collection[str] | None = None, lies: Collection[str] = ()
    ) -> Task[tuple[Record | None, int, bool]]:
        """The record of a round, or None and the first empty slot; and whether some record follows another one than
        `previous`. A record behind an empty slot does not count: no member that follows the rules writes one there.
        `lies`: digests of records that do not count."""
        slot, branched = 0, False
        while names is None or record_name(self._fragment, index, slot) in names:
            found = yield from self._ahead.serve(self._read_slot(index, slot, previous))
            if found is None:
                break
            if isinstance(found, Record) and found.digest not in lies:
                branched |= names is not None and record_name(self._fragment, index, slot + 1) in names
                return found, slot, branched
            branched |= isinstance(found, Branched)
            slot += 1
        return None, slot, branched

    def find(self, index: int, digest: str, slots: int = AT_ONCE) -> Task[Record | None]:
        """The record with this digest, if it is in the first slots of the round."""
        for slot in range(slots):
            found = yield from self._ahead.serve(self._read_slot(index, slot, None))
            if found is None or (isinstance(found, Record) and found.digest == digest):
                return found if isinstance(found, Record) else None
        return None

    def close(self, record: Record, slot: int, lies: Collection[str] = ()) -> Task[Record]:
        """Create the record in the first slot without a valid one. This is a single put, so no round is half closed.
        Returns the record of the round, which another member may have written."""
        fields, payload = record.sealed()
        while True:
            name = record_name(self._fragment, record.index, slot)
            yield from create(name, self._envelope.seal(name, "record", fields, payload).body, RECORD)
            found = yield from self._read_slot(record.index, slot, record.previous)
            if isinstance(found, Record) and found.digest not in lies:
                return found
            slot += found is not None

    def _read_slot(self, index: int, slot: int, previous: Link | None) -> Task[Record | Invalid | None]:
        name = record_name(self._fragment, index, slot)

        def opened(data: Answer) -> Task[Record]:
            found = self._envelope.open(name, "record", data, None)
            return (yield Work(lambda: read_record(found, self._fragment, index, previous)))

        return (yield from read_twice(Read(name, RECORD, patient=True), opened, self._reject))

    def reaches(self, index: int) -> Task[bool]:
        """Whether the round was closed, judged by its first slot alone."""
        return (yield Size(record_name(self._fragment, index, 0))) is not None

    def deltas(self, names: list[str]) -> Task[list[Contribution | Invalid | None]]:
        """Deltas, checked and decoded once; None where there is no such object, or a piece of it is missing."""
        return (yield from self._ahead.serve(_in_turn([self._delta(name) for name in names])))

    def heads(self, names: list[str]) -> Task[list[Contribution | Invalid | None]]:
        """The same without the values, where deltas are in pieces."""
        return (yield from _in_turn([self._head(name) for name in names]))

    def _head(self, name: str) -> Task[Contribution | Invalid | None]:
        place = place_of(name)
        assert place is not None
        try:
            data = yield Read(name, PREFIX.size + HEADER)
            if data is None:
                return None
            return (
                yield Work(lambda: read_head(self._envelope.open(name, "delta", data, 0), data, *place, self.layout))
            )
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

    def complete(self, index: int, deltas: list[Contribution]) -> Task[list[Contribution]]:
        """Those of which all pieces are there."""
        names = yield List(folder(self._fragment, index, PIECES))

        def there(delta: Contribution) -> bool:
            wanted = sizes(delta.pieces)
            each = [pieces_name(self._fragment, index, delta.member, delta.digest, k) for k in range(len(wanted))]
            return [names.get(name) for name in each] == wanted

        return [delta for delta in deltas if there(delta)]

    def put_heads(self, index: int, deltas: list[Contribution]) -> Task[str]:
        """Put the heads of the deltas that a record is going to name, together, so that nobody else has to read each of
        them. Returns the digest."""
        sealed = yield Work(lambda: seal_heads(self._envelope, self._fragment, index, deltas))
        yield from put(sealed)
        return sealed.digest

    def listed(self, record: Record) -> Task[Mapping[str, Contribution] | Invalid | None]:
        """The heads of all deltas of a record, by digest; None if they are gone."""
        return (yield from self._ahead.serve(self._listed(record)))

    def _listed(self, record: Record) -> Task[Mapping[str, Contribution] | Invalid | None]:
        name = heads_name(self._fragment, record.index, record.heads)

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
