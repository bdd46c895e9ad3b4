"""The rounds of one fragment in the store: reads deltas and records, creates commit records, and lists open rounds.
When to do so is the caller's decision."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from math import inf
from typing import Any

from torch import Tensor

from diloco.bucket import rules
from diloco.bucket.members import Timing
from diloco.bucket.rounds import (
    ROUNDS,
    THOUSAND,
    Attempts,
    Branched,
    Contribution,
    Layout,
    Record,
    folder,
    heads_name,
    is_record,
    layout_of,
    member_of,
    pieces_name,
    place_of,
    places,
    read_delta,
    read_head,
    read_heads,
    read_piece,
    read_record,
    record_name,
    round_prefix,
    seal_heads,
    sizes,
)
from diloco.bucket.store import All, Fetch, List, Read, Size, Task, Work, create, in_batches, together
from diloco.bucket.store.envelope import (
    HEADER,
    PART,
    PREFIX,
    Answer,
    Envelope,
    Invalid,
    Reject,
    get,
    put,
    read_twice,
    usable,
)
from diloco.codecs.codec import Float32

RECORD = PREFIX.size + HEADER + (1 << 20)
OBJECTS, SMALL = 64, 64 << 10
"""Objects read ahead at once, and the maximum bytes of one: beyond that, bytes cost more time than the request, and
unchecked data must not fill the memory."""
AT_ONCE = 16
"""Deltas or records read concurrently: unchecked data must not fill the memory."""
REMEMBERED = 10_000
"""Invalid records remembered."""
REACH = 8
"""How many rounds before the newest one a shared listing covers. A fragment that is further behind lists its own round
and, if that round is closed, once all that follow."""


Source = Callable[[str, str, int], Fetch | None]
"""How to get a payload from its owner: member, digest, bytes."""


class RoundStore:
    def __init__(
        self,
        fragment: int,
        layout: Layout,
        envelope: Envelope,
        reject: Reject,
        source: Source = lambda owner, digest, size: None,
    ) -> None:
        self.fragment, self.layout, self._envelope, self._reject = fragment, layout, envelope, reject
        self.source = source
        self.void: set[str] = set()  # digests of records that do not count, although they are well formed
        self._ahead = dict[str, bytes]()
        self._invalid: dict[str, Invalid] = {}  # by name: attempts that are not valid records

    @classmethod
    def reader(cls, fragment: int, envelope: Envelope, reject: Reject = lambda name, reason: None) -> "RoundStore":
        """Only reads records."""
        return cls(fragment, layout_of(Float32(), 0), envelope, reject)

    def read_ahead(self, sizes: Mapping[str, int]) -> Task[None]:
        """Read the small objects of consecutive closed rounds at once, instead of round by round. Objects never change,
        so it does not matter when they are read. Each answer is used once: an object that is rejected is read again
        from the store. Does nothing if the first object is still there."""
        names = [name for name, size in sizes.items() if size <= SMALL][:OBJECTS]
        if not names or names[0] in self._ahead:
            return
        answers = yield All([Read(name, SMALL) for name in names])
        # Missing or refused objects are read again later: they may be readable by then.
        self._ahead = {name: data for name, data in zip(names, answers, strict=True) if isinstance(data, bytes)}

    def records_ahead(self, indices: Iterable[int]) -> Task[None]:
        """The same for records alone, as far as they exist."""
        yield from self.read_ahead({record_name(self.fragment, index, 0): 0 for index in indices})

    def record(
        self, index: int, previous: str | None, names: Collection[str] | None = None, *, final: bool = False
    ) -> Task[Attempts]:
        """Look for the record of a round. A record after a gap does not count: a correct member never writes one there.

        Args:
            names: a listing of the round. Without it, read the first attempt, and list the others only if that one is
                not the round's record.
            final: list the others anyway, because one of them may replace the first.
        """
        void = self.void
        read = yield from self._read_attempts(
            index, previous, names, lambda read: not final and rules.record_of_round(read, void)[0] is not None
        )
        record, branched = rules.record_of_round(read, void)
        replaced, _ = rules.record_of_round(read, ())
        voids = replaced.digest if replaced is not None and replaced.digest in void else ""
        return Attempts(record, len(read), branched, voids)

    def contested(self, indices: Sequence[int]) -> Task[set[int]]:
        """The rounds that have a second attempt at a record."""
        sizes = yield All([Size(record_name(self.fragment, index, 1)) for index in indices])
        return {index for index, size in zip(indices, sizes, strict=True) if size is not None}

    def is_final(self, record: Record, contested: Collection[int]) -> Task[bool]:
        """Whether no later attempt replaces this record, or one that it follows. `contested`: the rounds to check."""
        lowest = min(contested, default=record.index + 1)
        while record.index >= lowest:
            if record.index in contested:
                final = (yield from self.record(record.index, record.previous, final=True)).record
                if final is None or final.digest != record.digest:
                    return False
            if record.index == lowest:
                break
            previous = yield from self.find(record.index - 1, record.previous)
            if previous is None:
                return False
            record = previous
        return True

    def find(self, index: int, digest: str) -> Task[Record | None]:
        """The record with this digest."""

        def matching(read: Sequence[Record | Invalid]) -> list[Record]:
            return [record for record in read if isinstance(record, Record) and record.digest == digest]

        read = yield from self._read_attempts(index, None, None, lambda read: bool(matching(read)))
        return next(iter(matching(read)), None)

    def _read_attempts(
        self,
        index: int,
        previous: str | None,
        names: Collection[str] | None,
        suffice: Callable[[Sequence[Record | Invalid]], bool],
    ) -> Task[list[Record | Invalid]]:
        """The attempts at a record, up to the first free one. Without a listing, and if the first one suffices, that
        one alone."""
        results = list[Record | Invalid]()
        while attempts := self._attempts(index, len(results), names):
            read = yield from together([self._read_attempt(index, k, previous) for k in attempts])
            results += filter(None, read[: read.index(None) if None in read else len(read)])
            if None in read or (names is None and suffice(results)):
                break
            if names is None:
                names = yield List(folder(self.fragment, index))
        return results

    def forget(self) -> None:
        """Read invalid records again: a reply may have been wrong."""
        self._invalid.clear()

    def _attempts(self, index: int, first: int, names: Collection[str] | None) -> list[int]:
        """The next attempts to read, as far as they are listed."""
        if names is None:
            return [first]
        attempts = range(first, min(first + AT_ONCE, len(names)))
        return list(takewhile(lambda attempt: record_name(self.fragment, index, attempt) in names, attempts))

    def close(self, record: Record, attempt: int) -> Task[Record | None]:
        """Create the record at the first free attempt. This is a single put, so no round is half closed. Returns the
        record of the round, which may be another member's; None if this record would be invalid, or if the round has
        to be looked at again. A member never writes a record that it would not follow itself."""
        fields, payload = record.sealed()
        while True:
            name = record_name(self.fragment, record.index, attempt)
            sealed = self._envelope.seal(name, "record", fields, payload)
            try:
                opened = self._envelope.open(name, "record", sealed.body, None)
                read_record(opened, self.fragment, record.index, record.previous)
            except Invalid as reason:
                self._reject(name, reason)
                return None
            if sealed.digest in self.void:
                return None
            data = yield from create(name, sealed.body, RECORD)
            if isinstance(data, bytes):
                self._ahead[name] = data
            stored = yield from self._read_attempt(record.index, attempt, record.previous)
            if isinstance(stored, Record) and stored.digest not in self.void:
                if stored.voids == record.voids:
                    return stored
                if not record.voids:
                    return None
            if stored is not None:  # a later attempt may be the record of the round
                names = yield List(folder(self.fragment, record.index))
                attempts = yield from self.record(record.index, record.previous, names)
                if attempts.record is not None and attempts.record.digest != record.voids:
                    return attempts.record
                attempt = max(attempt + 1, attempts.free)

    def _read_attempt(self, index: int, attempt: int, previous: str | None) -> Task[Record | Invalid | None]:
        """Invalid records are read once, because anybody may put any number of them."""
        name = record_name(self.fragment, index, attempt)
        if name in self._invalid:
            return self._invalid[name]

        def opened(data: Answer) -> Task[Record]:
            body = self._envelope.open(name, "record", data, None)
            return (yield Work(lambda: read_record(body, self.fragment, index, previous)))

        read = Read(name, RECORD, patient=True)
        result = yield from read_twice(read, opened, self._reject, self._ahead.pop(name, None))
        if isinstance(result, Invalid) and not isinstance(result, Branched):
            self._invalid[name] = result
            if len(self._invalid) > REMEMBERED:
                self._invalid.pop(next(iter(self._invalid)))
        return result

    def outvoted(self, index: int, fingerprint: int) -> Task[bool]:
        """Whether the deltas of a round in the store contradict the state before it."""
        names = yield List(folder(self.fragment, index))
        heads = yield from self.heads(sorted(filter(member_of, names)))
        return rules.is_outvoted(fingerprint, (head for head in heads if isinstance(head, Contribution)))

    def reaches(self, index: int) -> Task[bool]:
        """Whether the round was closed, judged by the first attempt alone."""
        return (yield Size(record_name(self.fragment, index, 0))) is not None

    def deltas(self, names: list[str]) -> Task[list[Contribution | Invalid | None]]:
        """Deltas, checked; None where the delta or one of its pieces is missing."""
        reading = [usable(name, self._delta(name), self._reject) for name in names]
        return (yield from in_batches(reading, AT_ONCE))

    def heads(self, names: list[str]) -> Task[list[Contribution | Invalid | None]]:
        """The same without the values."""
        return (yield from in_batches([usable(name, self._head(name), self._reject) for name in names], AT_ONCE))

    def _head(self, name: str) -> Task[Contribution | None]:
        place, cut = _place_of_delta(name), self.layout.cut
        data: Any = self._ahead.pop(name, None) if cut else None
        if data is None:
            data = yield Read(name, PREFIX.size + HEADER, first=None if cut else PREFIX.size + HEADER)
        if data is None:
            return None

        def read() -> Contribution:
            opened = self._envelope.open(name, "delta", data, 0 if cut else None, head=not cut)
            return read_head(opened, data, *place, self.layout)

        return (yield Work(read))

    def _delta(self, name: str) -> Task[Contribution | None]:
        if self.layout.cut:
            head = yield from self._head(name)
            return None if head is None else (yield from self._whole(name, head))
        opened = yield from get(self._envelope, name, "delta", self.layout.nbytes, self._ahead.pop(name, None))
        if opened is None:
            return None
        return (yield Work(lambda: read_delta(opened, *_place_of_delta(name), self.layout)))

    def _whole(self, name: str, head: Contribution) -> Task[Contribution | None]:
        """A delta with all its pieces: from its owner as far as possible, otherwise from the store."""
        place, at = _place_of_delta(name), places(head.pieces)
        pieces: list[bytes | None] = [None] * len(at)
        sources = [self.source(head.member, piece.digest, piece.size) for piece in head.pieces]
        if fetches := [source for source in sources if source is not None]:  # all of them, or none
            pieces = yield All(fetches)
        lacking = {part: 0 for (part, _), piece in zip(at, pieces, strict=True) if piece is None}
        whole = sizes(head.pieces)
        reads = [Read(pieces_name(*place, head.member, head.digest, part), whole[part]) for part in lacking]
        bodies = dict(zip(lacking, (yield All(reads)), strict=True)) if reads else {}
        if any(body is None for body in bodies.values()):
            return None

        def payloads() -> tuple[Tensor, ...]:
            out = []
            for k, (part, start) in enumerate(at):
                body, piece = bodies.get(part), pieces[k]
                if piece is None:
                    piece = body[start : start + head.pieces[k].size] if isinstance(body, bytes) else b""
                out.append(read_piece(self._envelope, self.layout, place, head, k, piece))
            return tuple(out)

        return replace(head, payloads=(yield Work(payloads)))

    def put_heads(self, record: Record, deltas: list[Contribution]) -> Task[str]:
        """Put the heads of a future record's deltas in one object, so that the other members need not read each of
        them. Returns its digest."""
        sealed = yield Work(lambda: seal_heads(self._envelope, record, deltas))
        yield from put(sealed)
        return sealed.digest

    def heads_of(self, record: Record) -> Task[Mapping[str, Contribution] | Invalid | None]:
        """The heads of all deltas of a record, by digest; None if they are missing."""
        name = heads_name(self.fragment, record.index, record.heads)

        def opened(data: Answer) -> Task[Mapping[str, Contribution]]:
            body = self._envelope.open(name, "heads", data, None)
            return (yield Work(lambda: read_heads(body, self._envelope, record, self.layout)))

        read = Read(name, PREFIX.size + HEADER + PART, patient=True)
        return (yield from read_twice(read, opened, self._reject, self._ahead.pop(name, None)))


def _place_of_delta(name: str) -> tuple[int, int]:
    place = place_of(name)
    assert place is not None
    return place


class Listing:
    """One listing of the open rounds for all fragments of a member. Each fragment uses a listing once: if it asks
    again, it wants to see what is new. A round that is known to be closed needs no new listing."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._newest = 0  # highest index requested
        self._requested: dict[int, int] = {}  # fragment: last index
        self._from = 0  # first index of the listing
        self._names: dict[tuple[int, int], dict[str, int]] = {}
        self._used: set[int] = set()  # fragments that have used the listing
        self._behind: dict[tuple[int, int], dict[str, int]] = {}  # closed rounds of fragments that are further behind
        self._closed: set[tuple[int, int]] = set()  # returned as closed; a fragment that asks again found it open
        self._at = -inf  # time of the listing

    def names(self, fragment: int, index: int, age: float | None = None) -> Task[dict[str, int]]:
        """The objects in a round, with sizes. `age`: accept a listing of up to this many seconds, even if used."""
        self._newest, self._requested[fragment] = max(self._newest, index), index
        names = self._known(fragment, index)
        if (fragment, index) not in self._closed and _is_closed(names):
            self._closed.add((fragment, index))
            return names
        if index < self._newest - REACH:
            return (yield from self._look_behind(fragment, index))
        old = self._timing.clock() - self._at > (self._timing.poll if age is None else age)
        if old or (age is None and fragment in self._used) or index < self._from:
            yield from self._look()
        self._used.add(fragment)
        return self._names.get((fragment, index), {})

    def closed(self, fragment: int, index: int) -> dict[str, int]:
        """The objects to read when following a fragment's known closed rounds from this index on. Empty if only the
        first one is known to be closed."""
        if not _is_closed(self._known(fragment, index + 1)):
            return {}
        objects: dict[str, int] = {}
        while len(objects) < OBJECTS and _is_closed(names := self._known(fragment, index)):
            heads = [name for name in names if "/heads-" in name]  # with heads, deltas are not read one by one
            reads = [*filter(is_record, names), *(heads or filter(member_of, names))]
            objects |= {name: names[name] for name in sorted(reads)}
            index += 1
        return objects

    def _known(self, fragment: int, index: int) -> dict[str, int]:
        return (self._names if index >= self._from else self._behind).get((fragment, index), {})

    def _look_behind(self, fragment: int, index: int) -> Task[dict[str, int]]:
        """A round far behind may be one that stays open, as those of buffers do. So list all that follow, possibly
        many, only if it is closed."""
        names = yield List(folder(fragment, index))
        if _is_closed(names):
            rounds = _by_place((yield List(ROUNDS, after=round_prefix(index))))
            self._behind |= {place: rounds[place] for place in rounds if place[0] == fragment}
            self._closed.add((fragment, index))
        return names

    def _look(self) -> Task[None]:
        first, now = min(i for i in self._requested.values() if i >= self._newest - REACH), self._timing.clock()
        names = yield List(ROUNDS, after=round_prefix(first))
        self._from, self._names, self._used, self._at = first, _by_place(names), set(), now
        self._closed = {place for place in self._closed if self._is_ahead(place)}
        self._behind = {place: names for place, names in self._behind.items() if self._is_ahead(place)}

    def _is_ahead(self, place: tuple[int, int]) -> bool:
        """Whether its fragment has not passed it yet."""
        return place[1] >= self._requested.get(place[0], 0)


def _is_closed(names: Iterable[str]) -> bool:
    return any("/closed." in name for name in names)


def _by_place(names: Mapping[str, int]) -> dict[tuple[int, int], dict[str, int]]:
    rounds: dict[tuple[int, int], dict[str, int]] = {}
    for name, size in names.items():
        if (place := _place(name)) is not None:
            rounds.setdefault(place, {})[name] = size
    return rounds


def _place(name: str) -> tuple[int, int] | None:
    """The round that any name belongs to, valid or not: invalid names are reported with the round."""
    parts = name.split("/")
    if len(parts) < 5 or not all(part.isascii() and part.isdigit() for part in parts[1:4]):
        return None
    return place_of(name) or (int(parts[3]), int(parts[1]) * THOUSAND + int(parts[2]))
