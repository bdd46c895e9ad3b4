"""The rounds of one fragment as they stand in the store: deltas that are fetched and put, records that are found and
created. Knows nothing of when; that is the protocol's."""

from collections.abc import Callable

import torch
from torch import Tensor

from diloco.bucket.rounds import (
    Contribution,
    Record,
    delta_fields,
    delta_name,
    folder,
    mean_of,
    norm_of,
    read_delta,
    read_record,
    record_name,
)
from diloco.bucket.session import Session
from diloco.bucket.store.envelope import HEADER, PREFIX, Invalid, Sealed, attempt, get, put
from diloco.bucket.store.operations import List, Oversized, Read, Size, Task, Work, create, together
from diloco.codec import Codec, pack
from diloco.reduce import Delta

RECORD = PREFIX.size + HEADER


class RoundStore:
    def __init__(self, number: int, n: int, codec: Codec, session: Session) -> None:
        self.number, self.n, self.codec, self.session = number, n, codec, session

    def names(self, index: int) -> Task[dict[str, int]]:
        return (yield List(folder(self.number, index)))

    def record(self, index: int, previous: str, names: dict[str, int] | None = None) -> Task[tuple[Record | None, int]]:
        """The round's record, or None and the first slot that nothing is in. A record behind an empty slot is none:
        nobody writes one there who keeps to the rules."""
        slot = 0
        while names is None or record_name(self.number, index, slot) in names:
            found = yield from self._slot(index, slot, previous)
            if found is None:
                break
            if isinstance(found, Record):
                return found, slot
            slot += 1
        return None, slot

    def close(self, record: Record, slot: int) -> Task[Record]:
        """Create the record in the first slot without a valid one: one put, so that no round is half closed. Returns
        the round's record, which another member may have written."""
        while True:
            name = record_name(self.number, record.index, slot)
            body = self.session.envelope.seal(name, "record", record.fields()).body
            yield from create(name, body, RECORD)
            found = yield from self._slot(record.index, slot, record.previous)
            if isinstance(found, Record):
                return found
            slot += found is not None

    def _slot(self, index: int, slot: int, previous: str) -> Task[Record | Invalid | None]:
        """What is in a slot. A record that is judged invalid must be so for all, for ever: look twice, for a reply may
        have been cut off on its way."""
        name = record_name(self.number, index, slot)
        before: bytes | Oversized | None = None
        while True:
            data = yield Read(name, RECORD)
            if data is None:
                return None
            try:
                found = self.session.envelope.open(name, "record", data, 0)
                return read_record(found, self.number, index, previous)
            except Invalid as reason:
                if data == before:
                    self.session.reject(name, reason)
                    return reason
                before = data

    def reaches(self, index: int) -> Task[bool]:
        """Whether the round was closed, as far as a look at its first slot tells."""
        return (yield Size(record_name(self.number, index, 0))) is not None

    def fetch(self, names: list[str], index: int) -> Task[list[Contribution | Invalid | None]]:
        """Deltas, checked and decoded once; None where there is nothing."""
        return (yield from together([self._fetch(name, index) for name in names]))

    def _fetch(self, name: str, index: int) -> Task[Contribution | Invalid | None]:
        try:
            found = yield from get(self.session.envelope, name, "delta", self.codec.nbytes(self.n))
        except Invalid as reason:
            self.session.reject(name, reason)
            return reason
        if found is None:
            return None
        delta = yield Work(lambda: attempt(lambda: read_delta(found, self.number, index, self.codec, self.n)))
        if isinstance(delta, Invalid):
            self.session.reject(name, delta)
        return delta

    def encode(self, index: int, delta: Delta) -> Task[tuple[Sealed, Contribution]]:
        """The own delta as an object, and as the others will read it."""

        def encode() -> tuple[Sealed, Contribution]:
            payload = pack(self.codec, delta.values) if self.n else torch.empty(0, dtype=torch.uint8)
            me = self.session.me
            fields = delta_fields(self.number, index, me, delta.fingerprint, delta.weight)
            name = delta_name(self.number, index, me)
            sealed = self.session.envelope.seal(name, "delta", fields, payload.numpy().tobytes())
            norm = norm_of(self.codec, payload, self.n)
            return sealed, Contribution(
                me, sealed.digest, delta.fingerprint, delta.weight, norm, payload, sealed.nbytes
            )

        return (yield Work(encode))

    def put(self, sealed: Sealed, stale: Callable[[], bool]) -> Task[bool]:
        """Timed even if its round was closed meanwhile: that is where the others' grace was too short."""
        began = self.session.clock()
        there = yield from put(sealed, stale)
        self.session.uploaded(self.number, self.session.clock() - began)
        return there

    def mean(self, record: Record, payloads: dict[str, Tensor]) -> Task[Tensor]:
        return (yield Work(lambda: mean_of(record, payloads, self.codec, self.n)))
