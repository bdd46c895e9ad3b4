"""What a member offers for a fragment's next round: when it is due, and what has become of it."""

from collections.abc import Callable
from dataclasses import dataclass

from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import Contribution
from diloco.bucket.store.envelope import Sealed
from diloco.bucket.store.operations import Task, Work
from diloco.reduce import Delta


@dataclass(frozen=True)
class _Outgoing:
    index: int
    delta: Callable[[], Delta]


class Outbox:
    def __init__(self) -> None:
        self._outgoing: _Outgoing | None = None
        self._putting = False
        self.sent: Contribution | None = None  # acknowledged by the store
        self.own: dict[str, int] = {}  # digest: bytes sent, of all that was sent for this round
        self.began = 0.0
        self._steps_from: int | None = 0  # own steps count from there on
        self._never_sent = True
        self._agreed = False  # on what deltas weigh by

    @property
    def to_encode(self) -> bool:
        return self._outgoing is not None

    @property
    def under_way(self) -> bool:
        return self._outgoing is not None or self._putting or self.sent is not None

    def due(self, steps: int, scheduled: bool, sync_every: int, called: bool) -> bool:
        """`steps`: own, since the last send; they count from the last round if that went without us."""
        if self._steps_from is None:
            self._steps_from = steps
        own = steps - self._steps_from
        full = scheduled if self._never_sent else own >= sync_every
        if self.under_way:  # what was acknowledged stands; what was not is replaced by what has been trained since
            return full and self.sent is None
        return full or (own >= 1 and called)

    def begin(self, index: int, delta: Callable[[], Delta], now: float) -> None:
        self._never_sent, self._steps_from, self.began = False, 0, now
        self._outgoing = _Outgoing(index, delta)

    def end(self, counted: bool) -> None:
        """Its round is over, or is not waited for."""
        self._outgoing = None
        self.own.clear()
        self.sent = None
        if not counted:
            self._steps_from = None

    def encode(self, round_store: RoundStore) -> Task[tuple[int, Sealed, Contribution] | bool]:
        """(index, object, what others will read). False: it holds inf or nan. True: it was replaced or given up."""
        outgoing = self._outgoing
        assert outgoing is not None
        delta: Delta = yield Work(outgoing.delta)
        if delta.weight and not self._agreed:  # without work in it, it has no unit
            yield from round_store.session.agree("tokens" if delta.tokens else "steps")
            self._agreed = True
        encoded = None if delta.fault is not None else (yield from round_store.encode(outgoing.index, delta))
        if self._outgoing is not outgoing:
            return True
        self._outgoing = None
        if encoded is None:
            return False
        self.own[encoded[0].digest] = 0
        return outgoing.index, *encoded

    def put(self, round_store: RoundStore, sealed: Sealed, mine: Contribution) -> Task[bool]:
        """True once it is there and still of use."""
        self._putting = True
        there = yield from round_store.put(sealed, lambda: self._outgoing is not None)
        self._putting = False
        if not there or sealed.digest not in self.own:
            return False
        self.own[sealed.digest] = sealed.nbytes
        self.sent, self._outgoing = mine, None  # what was acknowledged stands, also if a fresh one was to replace it
        return True
