"""The rounds of one fragment as they lie in the store: reads deltas, reads and creates closing records. Timing is the
caller's decision."""

from collections.abc import Callable, Collection

from diloco.bucket.rounds import Branched, Contribution, Link, Record, place_of, read_delta, read_record, record_name
from diloco.bucket.store.envelope import HEADER, PREFIX, Answer, Envelope, Invalid, get
from diloco.bucket.store.operations import Read, Size, Task, Work, create, together
from diloco.codec import Codec

RECORD = PREFIX.size + HEADER + (1 << 20)
AT_ONCE = 16
"""Deltas that are read together: what is not checked yet must not fill the memory."""


class RoundStore:
    def __init__(
        self, fragment: int, n: int, codec: Codec, envelope: Envelope, reject: Callable[[str, Invalid], None]
    ) -> None:
        self._fragment, self._n, self._codec, self._envelope, self._reject = fragment, n, codec, envelope, reject

    def record(
        self, index: int, previous: Link | None, names: Collection[str] | None = None, lies: Collection[str] = ()
    ) -> Task[tuple[Record | None, int, bool]]:
        """The record of a round, or None and the first empty slot; and whether some record follows another one than
        `previous`. A record behind an empty slot does not count: no member that follows the rules writes one there.
        `lies`: digests of records that do not count."""
        slot, branched = 0, False
        while names is None or record_name(self._fragment, index, slot) in names:
            found = yield from self._read_slot(index, slot, previous)
            if found is None:
                break
            if isinstance(found, Record) and found.digest not in lies:
                branched |= names is not None and record_name(self._fragment, index, slot + 1) in names
                return found, slot, branched
            branched |= isinstance(found, Branched)
            slot += 1
        return None, slot, branched

    def find(self, index: int, digest: str) -> Task[Record | None]:
        """The record with this digest, if it is in the first slots of the round."""
        for slot in range(AT_ONCE):
            found = yield from self._read_slot(index, slot, None)
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
        """The content of a slot. A record judged invalid must be invalid for all members, forever. So look twice: a
        reply may have been cut off on its way."""
        name = record_name(self._fragment, index, slot)
        before: Answer | None = None
        while True:
            data = yield Read(name, RECORD, patient=True)
            if data is None:
                return None
            try:
                found = self._envelope.open(name, "record", data, None)
                return read_record(found, self._fragment, index, previous)
            except Invalid as reason:
                if data == before:
                    self._reject(name, reason)
                    return reason
                before = data

    def reaches(self, index: int) -> Task[bool]:
        """Whether the round was closed, judged by its first slot alone."""
        return (yield Size(record_name(self._fragment, index, 0))) is not None

    def deltas(self, names: list[str]) -> Task[list[Contribution | Invalid | None]]:
        """Deltas, checked and decoded once; None where there is no such object."""
        found = []
        for at in range(0, len(names), AT_ONCE):
            found += yield from together([self._delta(name) for name in names[at : at + AT_ONCE]])
        return found

    def _delta(self, name: str) -> Task[Contribution | Invalid | None]:
        try:
            found = yield from get(self._envelope, name, "delta", self._codec.nbytes(self._n))
            if found is None:
                return None
            place = place_of(name)
            assert place is not None
            return (yield Work(lambda: read_delta(found, *place, self._codec, self._n)))
        except Invalid as reason:
            self._reject(name, reason)
            return reason
