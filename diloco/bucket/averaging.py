"""The shares of one closed round, as one member reads them, and makes those that it has to."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from diloco.bucket.deltas import Layout, places, read_piece
from diloco.bucket.round_store import AT_ONCE
from diloco.bucket.rounds import Contribution, Record, pieces_name, share_name
from diloco.bucket.session import Session
from diloco.bucket.shares import Average, encoded_share, largest, read_share, seal_share, turns_to_average
from diloco.bucket.store.envelope import HEADER, PREFIX, Answer, Invalid, read_twice
from diloco.bucket.store.operations import Create, Read, Task, Work, together, until_there
from diloco.reduce.mean import Encoded

BEGINNING = 4096
"""Bytes of an own share that are read back: its header, which holds the checksum of the rest."""


class Gone(Exception):
    """Something that the round needs is not in the store."""


class Averaging:
    def __init__(
        self,
        record: Record,
        heads: Mapping[str, Contribution],
        layout: Layout,
        session: Session,
        own: Callable[[str], Contribution | None],
    ) -> None:
        """`own`: the delta of this member with a digest, if it is still at hand."""
        self.record, self._heads, self._layout, self._session, self._own = record, heads, layout, session, own
        self._envelope = session.envelope
        self._since = session.clock()
        self._found: dict[int, Encoded] = {}
        self._slots = [0] * len(self._layout.cuts)
        self.received = 0  # bytes

    def tick(self) -> Task[tuple[Encoded, ...] | None]:
        """The complete mean, once all shares are there. Raises Gone."""
        missing = self._missing()
        mine = self._mine(missing)
        first = [share for share in missing if share not in mine][:1]  # as long as it is not there, others are not
        yield from self._read([*mine, *first])
        for share in mine:
            if share not in self._found:
                yield from self._make(share)
        if not first or first[0] in self._found:
            yield from self._read(self._missing())
        if self._missing():
            return None
        self._session.timing.averaged(self.record.fragment, self._session.clock() - self._since)
        return tuple(self._found[share] for share in range(len(self._slots)))

    def _missing(self) -> list[int]:
        return [share for share in range(len(self._slots)) if share not in self._found]

    def _mine(self, shares: list[int]) -> list[int]:
        """Each member has its share; if that is late, the next one that lives makes it too, and so on."""
        session, now = self._session, self._session.clock()
        away = session.members.away((e.member for e in self.record.entries), now)
        before = turns_to_average(self.record, session.me, away)
        late = session.timing.late(self.record.fragment, len(self.record.entries) / len(self._slots))
        return [share for share in shares if now - self._since >= before(share) * late]

    def _read(self, shares: list[int]) -> Task[None]:
        for at in range(0, len(shares), AT_ONCE):
            some = shares[at : at + AT_ONCE]
            for share, found in zip(some, (yield from together([self._share(s) for s in some])), strict=True):
                if found is not None:
                    self._found[share] = found

    def _share(self, share: int) -> Task[Encoded | None]:
        """The valid share in the lowest slot, which is the one that counts, or None."""
        layout, record = self._layout, self.record
        size = layout.mean_codec.nbytes(layout.count(share))

        def opened(data: Answer) -> Task[Encoded]:
            most = largest(record, self._heads, share)
            found = yield Work(partial(self._envelope.open, name, "share", data, size))
            encoded = yield Work(partial(read_share, found, record, share, layout, most))
            self.received += found.nbytes
            return encoded

        while True:
            name = share_name(record.fragment, record.index, share, self._slots[share])
            read = Read(name, PREFIX.size + HEADER + size, patient=True)
            found = yield from read_twice(read, opened, self._session.reject)
            if not isinstance(found, Invalid):
                return found
            self._slots[share] += 1

    def _average(self, share: int) -> Task[Tensor]:
        """The payload of a share, from the deltas. Raises Gone."""
        average = Average(self.record, share, self._layout)
        for digests in average.groups():
            pieces = yield from together([self._piece(self._heads[digest], share) for digest in digests])
            group = dict(zip(digests, pieces, strict=True))
            yield Work(lambda group=group: average.add(group))
        return (yield Work(average.payload))

    def _make(self, share: int) -> Task[None]:
        """Average a share and put it."""
        payload = yield from self._average(share)
        sealed = yield Work(partial(seal_share, self._envelope, self.record, share, self._slots[share], payload))
        there = yield from until_there(Create(sealed.name, sealed.body), Read(sealed.name, 0, first=BEGINNING))
        if there == sealed.body[:BEGINNING]:
            self._found[share] = encoded_share(payload, share, self._layout)
            return
        yield from self._read([share])  # another one was there before

    def _piece(self, delta: Contribution, share: int) -> Task[Tensor | None]:
        """A piece of a delta; None if it is not what its head says. Raises Gone."""
        part, at = places(delta.pieces)[share]
        place = self.record.fragment, self.record.index
        name, size = pieces_name(*place, delta.member, delta.digest, part), delta.pieces[share].size
        own = self._own(delta.digest)
        if own is not None and own.payloads is not None:
            return own.payloads[share]

        def opened(data: Answer) -> Task[Tensor]:
            piece = yield Work(lambda: read_piece(self._envelope, self._layout, place, delta, share, data))
            self.received += len(data) if isinstance(data, bytes) else 0
            return piece

        found = yield from read_twice(Read(name, 0, first=size, patient=True, at=at), opened, self._session.reject)
        if found is None:
            raise Gone
        return None if isinstance(found, Invalid) else found
