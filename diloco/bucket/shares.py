"""Averaged shares: which member averages which share of a closed round, and how a member collects all of them.

A share is a pure function of the record and its deltas. So every member would compute the same one, and a missing or
invalid share is averaged again as the next attempt.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from diloco.bucket.carriers import digest_of, shortened
from diloco.bucket.machine import Missing
from diloco.bucket.round_store import AT_ONCE, RoundStore
from diloco.bucket.rounds import Contribution, Layout, Record, check_finite, pieces_name, places, read_piece, share_name
from diloco.bucket.rules import is_truthful, turns
from diloco.bucket.run import Session
from diloco.bucket.store import Create, Read, Task, Work, in_batches, together, until_there
from diloco.bucket.store.envelope import HEADER, PREFIX, Answer, Envelope, Invalid, Opened, Sealed, read_twice, refuses
from diloco.codecs.codec import Codec, pack
from diloco.exchange.mean import Encoded

GROUP = 16
"""Deltas added up before the next ones are read: memory does not grow with the members."""
BEGINNING = 1024
"""Bytes of a new share that are read back: the header, with the checksum of the rest."""


def turns_to_average(record: Record, member: str, away: Collection[str]) -> Callable[[int], int]:
    """The member's turn for each share. It changes from round to round, to spread the work."""
    turn, start = turns([e.member for e in record.entries], member, away), int(record.digest[:8], 16)
    return lambda share: turn(start + share)


def mean_in_parts(record: Record, deltas: Mapping[str, Contribution], layout: Layout) -> tuple[Encoded, ...]:
    """Σ share · decoded delta, in the order of the record, piece by piece: every member computes it when there
    are too few to share the work."""
    parts = []
    for k, cut in enumerate(layout.cuts):
        payloads = [(deltas[e.digest].payloads or ())[k] for e in record.entries]
        parts.append(Encoded(cut.start, layout.count(k), layout.codec, payloads, record.shares))
    return tuple(parts)


def add_group(total: Tensor, codec: Codec, pieces: Sequence[Tensor | None], weights: Sequence[float]) -> None:
    """Add the pieces of some deltas to the sum of a share. Invalid ones (None) count as zeros."""
    valid = [(piece, weight) for piece, weight in zip(pieces, weights, strict=True) if piece is not None]
    if valid:
        payloads, factors = [piece for piece, _ in valid], [weight for _, weight in valid]
        total += Encoded(0, len(total), codec, payloads, factors).values()


def seal_share(envelope: Envelope, record: Record, share: int, attempt: int, payload: Tensor) -> Sealed:
    """A share names its record but not its writer: all members write the same."""
    fields = {"share": share, "record": record.digest}
    name = share_name(record.fragment, record.index, share, attempt)
    return envelope.seal(name, "share", fields, payload.numpy().tobytes())


@refuses
def read_share(opened: Opened, record: Record, share: int, layout: Layout) -> Encoded:
    """Raises Invalid. Depends only on the bytes and the record, so all members agree."""
    if (opened.header.get("share"), opened.header.get("record")) != (share, record.digest):
        raise Invalid("it is another share, or averaged for another record")
    payload = torch.frombuffer(bytearray(opened.payload), dtype=torch.uint8)
    check_finite(layout.mean_codec, payload, layout.count(share))
    return encoded_share(payload, share, layout)


def encoded_share(payload: Tensor, share: int, layout: Layout) -> Encoded:
    return Encoded(layout.cuts[share].start, layout.count(share), layout.mean_codec, [payload], [1.0])


class Averaging:
    """Collects the shares of one closed round, and averages those that are this member's turn."""

    def __init__(
        self,
        record: Record,
        rounds: RoundStore,
        session: Session,
        own: Mapping[str, Contribution],
    ) -> None:
        """`own`: this member's deltas that are still in memory, by digest."""
        self.record, self._rounds, self._layout, self._session = record, rounds, rounds.layout, session
        self._own, self._envelope = own, session.envelope
        self._heads: Mapping[str, Contribution] | None = None  # of the record's deltas, by digest
        self._since = session.clock()
        self._shares: dict[int, Encoded] = {}
        self._attempts = [0] * len(self._layout.cuts)
        self.received = 0  # bytes

    def tick(self) -> Task[tuple[Encoded, ...] | None]:
        """The complete mean, once all shares exist. Raises Missing; Invalid if the record does not count."""
        if self._heads is None:
            heads = yield from self._rounds.heads_of(self.record)
            if heads is None or isinstance(heads, Invalid):  # perhaps only as this member reads them
                raise Missing
            if not is_truthful(self.record, heads, self._session.max_work):
                raise Invalid("it misstates its deltas")
            self._heads = heads
        missing = self._missing()
        due = self._due(missing)
        first = [share for share in missing if share not in due][:1]  # until it exists, do not ask for the others
        yield from self._read([*due, *first])
        for share in due:
            if share not in self._shares:
                yield from self._make(share)
        if not first or first[0] in self._shares:
            yield from self._read(self._missing())
        if self._missing():
            return None
        self._session.timing.averaged(self.record.fragment, self._session.clock() - self._since)
        return tuple(self._shares[share] for share in range(len(self._attempts)))

    def _missing(self) -> list[int]:
        return [share for share in range(len(self._attempts)) if share not in self._shares]

    def _due(self, shares: list[int]) -> list[int]:
        """The shares that this member should average now. If a share is late, the next living member averages it too,
        and so on."""
        session, now = self._session, self._session.clock()
        away = session.members.away((e.member for e in self.record.entries), now)
        turn = turns_to_average(self.record, session.name, away)
        late = session.timing.late(self.record.fragment, len(self.record.entries) / len(self._attempts))
        return [share for share in shares if now - self._since >= turn(share) * late]

    def _read(self, shares: list[int]) -> Task[None]:
        results = yield from in_batches([self._share(share) for share in shares], AT_ONCE)
        self._shares |= {share: result for share, result in zip(shares, results, strict=True) if result is not None}

    def _share(self, share: int) -> Task[Encoded | None]:
        """The share's first valid attempt, which is the one that counts, or None."""
        layout, record = self._layout, self.record
        size = layout.mean_codec.nbytes(layout.count(share))

        def opened(data: Answer) -> Task[Encoded]:
            body = yield Work(partial(self._envelope.open, name, "share", data, size))
            encoded = yield Work(partial(read_share, body, record, share, layout))
            self.received += body.nbytes
            return encoded

        name = share_name(record.fragment, record.index, share, self._attempts[share])
        data = yield from self._from_maker(name, share, size)
        if data is not None:
            with suppress(Invalid):
                return (yield from opened(data))
        while True:
            name = share_name(record.fragment, record.index, share, self._attempts[share])
            read = Read(name, PREFIX.size + HEADER + size, patient=True)
            result = yield from read_twice(read, opened, self._session.reject)
            if not isinstance(result, Invalid):
                return result
            self._attempts[share] += 1

    def _from_maker(self, name: str, share: int, size: int) -> Task[bytes | None]:
        """A share whose header is in the store and whose values come from the member that should have averaged it."""
        session, members = self._session, [e.member for e in self.record.entries]
        away = session.members.away(members, session.clock()) - {session.name}
        start = (int(self.record.digest[:8], 16) + share) % len(members)
        maker = next((member for member in members[start:] + members[:start] if member not in away), session.name)
        if session.source(maker, "", size) is None:
            return None
        begin = yield Read(name, 0, first=BEGINNING, patient=True)
        if not isinstance(begin, bytes):
            return None
        try:
            header, digest = self._envelope.header_of(name, "share", begin, size)
        except Invalid:
            return None  # whoever reads all of it says so
        source = session.source(maker, shortened(digest), size)
        values = (yield source) if source is not None else None
        if values is None:
            return None
        return header + values

    def _average(self, share: int) -> Task[Tensor]:
        """The payload of a share, from the deltas in the order of the record. Groups are added one after another, so
        every member gets the same bits. Raises Missing."""
        assert self._heads is not None
        heads, codec, weights = self._heads, self._layout.codec, self.record.shares
        total = torch.zeros(self._layout.count(share), dtype=torch.float32, device="cpu")
        for at in range(0, len(weights), GROUP):
            entries = self.record.entries[at : at + GROUP]
            pieces = yield from together([self._piece(heads[entry.digest], share) for entry in entries])
            yield Work(partial(add_group, total, codec, pieces, weights[at : at + GROUP]))
        return (yield Work(lambda: pack(self._layout.mean_codec, total)))

    def _make(self, share: int) -> Task[None]:
        """Average a share and put it."""
        payload = yield from self._average(share)
        sealed = yield Work(partial(seal_share, self._envelope, self.record, share, self._attempts[share], payload))
        data = payload.numpy().tobytes()  # offered first: others ask for it as soon as they see it in the store
        self._session.carrier.offer(self.record.fragment, self.record.index, {digest_of(data): data})
        stored = yield from until_there(Create(sealed.name, sealed.body), Read(sealed.name, 0, first=BEGINNING))
        if stored == sealed.body[:BEGINNING]:
            self._shares[share] = encoded_share(payload, share, self._layout)
            return
        yield from self._read([share])  # another one was put first

    def _piece(self, delta: Contribution, share: int) -> Task[Tensor | None]:
        """A piece of a delta; None if it does not match its head. Raises Missing."""
        part, at = places(delta.pieces)[share]
        place = self.record.fragment, self.record.index
        name, size = pieces_name(*place, delta.member, delta.digest, part), delta.pieces[share].size
        own = self._own.get(delta.digest)
        if own is not None and own.payloads is not None:
            return own.payloads[share]

        def opened(data: Answer) -> Task[Tensor]:
            piece = yield Work(lambda: read_piece(self._envelope, self._layout, place, delta, share, data))
            self.received += len(data) if isinstance(data, bytes) else 0
            return piece

        source = self._session.source(delta.member, delta.pieces[share].digest, size)
        data = (yield source) if source is not None else None
        if data is not None:
            with suppress(Invalid):
                return (yield from opened(data))
        result = yield from read_twice(Read(name, 0, first=size, patient=True, at=at), opened, self._session.reject)
        if result is None:
            raise Missing
        return None if isinstance(result, Invalid) else result
