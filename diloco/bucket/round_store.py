"""The rounds of one fragment as they lie in the store: reads deltas, reads and creates closing records. Timing is the
caller's decision."""

from collections.abc import Callable

from diloco.bucket.rounds import Contribution, Record, folder, read_delta, read_record, record_name
from diloco.bucket.store.envelope import HEADER, PREFIX, Answer, Envelope, Invalid, get
from diloco.bucket.store.operations import List, Read, Size, Task, Work, create, together
from diloco.codec import Codec

RECORD = PREFIX.size + HEADER


class RoundStore:
    def __init__(
        self, fragment: int, n: int, codec: Codec, envelope: Envelope, reject: Callable[[str, Invalid], None]
    ) -> None:
        self._fragment, self._n, self._codec, self._envelope, self._reject = fragment, n, codec, envelope, reject

    def names(self, index: int) -> Task[dict[str, int]]:
        return (yield List(folder(self._fragment, index)))

    def record(self, index: int, previous: str, names: dict[str, int] | None = None) -> Task[tuple[Record | None, int]]:
        """The record of a round, or None and the first empty slot. A record behind an empty slot does not count: no
        member that follows the rules writes one there."""
        slot = 0
        while names is None or record_name(self._fragment, index, slot) in names:
            found = yield from self._read_slot(index, slot, previous)
            if found is None:
                break
            if isinstance(found, Record):
                return found, slot
            slot += 1
        return None, slot

    def close(self, record: Record, slot: int) -> Task[Record]:
        """Create the record in the first slot without a valid one. This is a single put, so no round is half closed.
        Returns the record of the round, which another member may have written."""
        while True:
            name = record_name(self._fragment, record.index, slot)
            body = self._envelope.seal(name, "record", record.fields()).body
            yield from create(name, body, RECORD)
            found = yield from self._read_slot(record.index, slot, record.previous)
            if isinstance(found, Record):
                return found
            slot += found is not None

    def _read_slot(self, index: int, slot: int, previous: str) -> Task[Record | Invalid | None]:
        """The content of a slot. A record judged invalid must be invalid for all members, forever. So look twice: a
        reply may have been cut off on its way."""
        name = record_name(self._fragment, index, slot)
        before: Answer | None = None
        while True:
            data = yield Read(name, RECORD, patient=True)
            if data is None:
                return None
            try:
                found = self._envelope.open(name, "record", data, 0)
                return read_record(found, self._fragment, index, previous)
            except Invalid as reason:
                if data == before:
                    self._reject(name, reason)
                    return reason
                before = data

    def reaches(self, index: int) -> Task[bool]:
        """Whether the round was closed, judged by its first slot alone."""
        return (yield Size(record_name(self._fragment, index, 0))) is not None

    def deltas(self, names: list[str], index: int) -> Task[list[Contribution | Invalid | None]]:
        """Deltas, checked and decoded once; None where there is no such object."""
        return (yield from together([self._delta(name, index) for name in names]))

    def _delta(self, name: str, index: int) -> Task[Contribution | Invalid | None]:
        try:
            found = yield from get(self._envelope, name, "delta", self._codec.nbytes(self._n))
            if found is None:
                return None
            return (yield Work(lambda: read_delta(found, self._fragment, index, self._codec, self._n)))
        except Invalid as reason:
            self._reject(name, reason)
            return reason
