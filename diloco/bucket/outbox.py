"""The own delta for a fragment's next round: when it is due, how it gets into the store, and what becomes of it."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from diloco.bucket.deltas import Layout, SealedDelta, delta_fields, seal_delta
from diloco.bucket.rounds import Contribution, Record
from diloco.bucket.session import Session
from diloco.bucket.store.envelope import put
from diloco.bucket.store.operations import Task, Work, together
from diloco.reduce import Delta, Next

MISSED = 8
"""Own deltas in a row that no record names: no longer an accident, and worth an event."""


@dataclass(frozen=True)
class Delivered:
    """The store has the delta, and its round is still open."""

    name: str
    delta: Contribution


class Undelivered(enum.Enum):
    """Why the store does not have the delta."""

    SPOILED = enum.auto()  # it holds inf or nan and is not sent
    ABANDONED = enum.auto()  # it was replaced by a newer one, or its round is over


@dataclass(frozen=True)
class Fate:
    """What became of the own deltas for a round, now that it is closed."""

    sent: int  # bytes
    seconds: float  # from when the last one was taken until the mean was known
    counted: Contribution | None  # the one that the record names
    own: Callable[[], Tensor] | None  # its values as the others decode them, if it is the last taken and they are asked


@dataclass(frozen=True)
class _Waiting:
    index: int
    delta: Callable[[], Delta]


class Outbox:
    def __init__(self, fragment: int, layout: Layout, session: Session) -> None:
        self._fragment, self._layout, self._session = fragment, layout, session
        self._waiting: _Waiting | None = None
        self._putting = False
        self.acknowledged: Contribution | None = None  # by the store
        self.acknowledged_at = 0.0
        self._own: dict[str, Contribution] = {}  # by digest: all that were encoded for this round
        self._next: tuple[int, Callable[[float], Next]] | None = (
            None  # index, and what makes the state after that round
        )
        self._newest: str | None = None  # digest of the delta taken last, once it is encoded, if its values are asked
        self._sent = 0  # bytes, for this round
        self._missed = 0  # own deltas in a row that were not counted
        self._began = 0.0
        self._steps_from: int | None = 0  # own steps count from here on
        self._never_sent = True
        self._unit_agreed = False

    @property
    def waiting(self) -> bool:
        """A delta is to be encoded."""
        return self._waiting is not None

    @property
    def under_way(self) -> bool:
        return self._waiting is not None or self._putting or self.acknowledged is not None

    def due(self, steps: int, scheduled: bool, called: bool) -> bool:
        """Whether to send. `steps`: own steps since the last send; they count from the last round if that one was
        closed without this member."""
        if self._steps_from is None:
            self._steps_from = steps
        own = steps - self._steps_from
        full = scheduled if self._never_sent else own >= self._session.timing.sync_every
        if self.under_way:  # an acknowledged delta stands; another is replaced by what has been trained since
            return full and self.acknowledged is None
        return full or (own >= 1 and called)

    def accept(self, index: int, delta: Callable[[], Delta]) -> None:
        """A delta was taken; the background encodes and puts it."""
        self._never_sent, self._steps_from, self._began = False, 0, self._session.clock()
        self._waiting, self._newest = _Waiting(index, delta), None

    def deliver(self, is_open: Callable[[int], bool]) -> Task[Delivered | Undelivered]:
        """Encode the waiting delta and put it. `is_open`: whether the round with this index still is."""
        waiting = self._waiting
        assert waiting is not None
        delta: Delta = yield Work(waiting.delta)
        if delta.weight and not self._unit_agreed:  # a delta without work has no unit
            yield from self._session.agree("tokens" if delta.tokens else "steps")
            self._unit_agreed = True
        encoded = yield Work(lambda: self._encode(waiting.index, delta))
        if self._waiting is not waiting:
            return Undelivered.ABANDONED
        self._waiting = None
        self._next = None if delta.next is None else (waiting.index, delta.next)
        if encoded is None:
            return Undelivered.SPOILED
        sealed, own = encoded
        self._own[own.digest] = own
        self._newest = own.digest if delta.feedback else None
        if not is_open(waiting.index):
            return Undelivered.ABANDONED  # it may still count: put in an earlier incarnation, it is the same object
        self._putting = True
        began = self._session.clock()
        there = yield from self._put(sealed, lambda: self._waiting is not None or not is_open(waiting.index))
        self._putting = False
        # Also if the round was closed meanwhile: that is when the grace of the others was too short.
        self._session.timing.uploaded(self._fragment, self._session.clock() - began)
        if not there or own.digest not in self._own:
            return Undelivered.ABANDONED
        self._sent += sealed.nbytes
        self.acknowledged, self._waiting = own, None  # it stands, even if a newer one was about to replace it
        self.acknowledged_at = self._session.clock()
        return Delivered(sealed.head.name, own)

    def _put(self, sealed: SealedDelta, stale: Callable[[], bool]) -> Task[bool]:
        """The pieces first: once the head is there, all of it is."""
        if not all((yield from together([put(each, stale) for each in sealed.pieces]))):
            return False
        return (yield from put(sealed.head, stale))

    def own(self, digest: str) -> Contribution | None:
        """An own delta for this round, by its digest."""
        return self._own.get(digest)

    def next(self, index: int, lr: float) -> Next | None:
        """What makes the state after round `index`, if a delta for it was taken against the state before it."""
        found = self._next  # once: the training thread may clear it meanwhile
        return found[1](lr) if found is not None and found[0] == index else None

    def _encode(self, index: int, delta: Delta) -> tuple[SealedDelta, Contribution] | None:
        """The delta as objects, and as the others will read it. None if it holds inf or nan."""
        me, layout = self._session.me, self._layout
        payloads, finite = layout.pack(delta.values)
        if not finite:
            return None
        fields = delta_fields(self._fragment, index, me, delta.fingerprint, delta.weight, delta.lr)
        norms = layout.norms(payloads)
        sealed = seal_delta(self._session.envelope, layout, fields, payloads, norms)
        norm = sum(norm**2 for norm in ([piece.norm for piece in sealed.listed] or norms)) ** 0.5
        own = me, sealed.head.digest, delta.fingerprint, delta.weight, norm, payloads, sealed.nbytes, delta.lr
        head = sealed.head.body if layout.cut else b""
        return sealed, Contribution(*own, sealed.listed, head)

    def fate(self, record: Record, closed_at: float) -> Fate:
        """`closed_at`: when its mean was known here."""
        counted = next((self._own[e.digest] for e in record.entries if e.digest in self._own), None)
        seconds = max(closed_at - self._began, 0.0) if self._own else 0.0
        last = counted is not None and counted.digest == self._newest
        own = partial(self._layout.unpack, counted.payloads or ()) if counted is not None and last else None
        self._missed = 0 if counted is not None else self._missed + bool(self._own)
        if self._own and self._missed == MISSED:
            self._session.event("not counted", fragment=self._fragment, index=record.index, rounds=MISSED)
        return Fate(self._sent, seconds, counted, own)

    def clear(self, counted: bool) -> None:
        """The round is over, or no longer waited for."""
        self._waiting = self.acknowledged = self._newest = self._next = None
        self._own.clear()
        self._sent = 0
        if not counted:
            self._steps_from = None
