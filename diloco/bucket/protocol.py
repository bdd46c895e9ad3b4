"""The protocol of one fragment: its rounds, one after another, as one member takes part in them.

Two sides share it under one lock. The training thread asks (`due`, `send`, `take`, `applied`) and never waits; the
background drives `tick`, which offers the own delta, closes rounds and follows the closed ones. `frontier` is the last
round that the background has followed, `held` the last that the core has applied.
"""

from collections import deque
from collections.abc import Callable
from math import inf

from diloco.bucket.outbox import Outbox
from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import (
    NORMS,
    Contribution,
    Followed,
    Record,
    delta_name,
    entries_of,
    may_close,
    member_of,
    one_per_member,
)
from diloco.bucket.session import Session
from diloco.bucket.snapshots import Snapshots
from diloco.bucket.store.operations import Task
from diloco.codec import Codec
from diloco.errors import Diverged
from diloco.reduce import Delta, Dropped, Jump, Round, State

BEHIND = 8
"""Rounds by which a member may be behind and still keep its local work; more, and it starts from the anchor."""
MISSED = 8
"""Own deltas running that were in no record: no accident any more, and worth a word."""
AHEAD = 2
"""Means that are kept ready for the core, 4 bytes a value each."""


class FragmentProtocol:
    def __init__(self, number: int, n: int, codec: Codec, snapshots: Snapshots, session: Session) -> None:
        self.number, self.snapshots, self.session = number, snapshots, session
        self.round_store = RoundStore(number, n, codec, session)
        self.held = self.frontier = 0
        self.fingerprint = 0  # of the state held
        self.previous = ""  # digest of the record of the frontier
        self.outbox = Outbox()  # for the round after the one held
        self._deltas: dict[str, Contribution] = {}  # of the round after the frontier, by name
        self._unusable: set[str] = set()
        self._first_seen: float | None = None
        self.open_at = -inf  # when the round after the frontier was last seen to be open
        self.answer_call = False  # a call, in strict pace: where members would wait for each other crosswise
        self._ready: deque[Followed | Jump | Dropped] = deque()
        self._jump: int | None = None  # the least index that a snapshot must have, to jump to it
        self._late = False  # more than BEHIND: when all is followed, local work is given up
        self._differs: int | None = None  # other bits were found; the record that must agree for it to be forgotten
        self._norms: deque[list[float]] = deque(maxlen=NORMS)
        self._closer = ""
        self._missed = 0  # own deltas running that were not counted
        self.caught_up = False  # the round after the frontier was seen to be open
        self._patient_until: float | None = None
        self.given_up = False

    def start_from(self, state: State, previous: str) -> None:
        """Begin from a state that is the run's. `previous`: digest of the record that led to it."""
        self.held = self.frontier = state.index
        self.fingerprint, self.previous = state.fingerprint(), previous
        self.session.holds(self.number, self.held)

    # What the training thread asks.

    def due(self, steps: int, scheduled: bool) -> bool:
        """Whether to send. `steps`: own, since the last send."""
        called = self._called() and (self.answer_call or not self.session.options.strict)
        due = self.outbox.due(steps, scheduled, self.session.sync_every, called)
        return due and not self._ready and not self._ended(self.held + 1)

    def _called(self) -> bool:
        """Another member has sent for the next round: two that are out of phase would else close all rounds alone."""
        if self.held != self.frontier:
            return False
        return any(d.fingerprint == self.fingerprint and d.member != self.session.me for d in self._deltas.values())

    @property
    def called_since(self) -> float:
        """When a call came that was not answered yet; inf if none."""
        if self._first_seen is None or self.outbox.under_way or self._ready or not self._called():
            return inf
        return self._first_seen

    def _ended(self, index: int) -> bool:
        return self.session.rounds is not None and index > self.session.rounds

    def send(self, index: int, delta: Callable[[], Delta]) -> None:
        if self._ended(index):
            self._ready.append(Dropped())
            return
        self.answer_call = False
        self.outbox.begin(index, delta, self.session.clock())

    def take(self, index: int) -> Round | Jump | Dropped | None:
        """What happened, in order. Not before the own delta is encoded: whether it counts is told by its digest."""
        if self.outbox.to_encode or not self._ready:
            return None
        outcome = self._ready[0]
        if isinstance(outcome, Followed) and outcome.record.fingerprint != self.fingerprint:
            self._diverged(outcome.record)
            return None
        self._ready.popleft()
        match outcome:
            case Jump(state):
                if self._differs is not None:  # the record after the next is the first to judge what is computed here
                    self._differs = max(self._differs, state.index + 2)
                self.held, self.fingerprint = state.index, state.fingerprint()
                self.session.holds(self.number, self.held)
                self.outbox.end(counted=False)
            case Dropped():
                self.outbox.end(counted=False)
            case Followed(record, mean, received):
                assert record.index == index
                if self._differs is not None and index >= self._differs:
                    self._differs = None
                own = self.outbox.own
                counted, sent = any(e.digest in own for e in record.entries), sum(own.values())
                seconds = self.session.clock() - self.outbox.began if own else 0.0
                self._missed = 0 if counted else self._missed + bool(own)
                if own and self._missed == MISSED:
                    self.session.event("not counted", fragment=self.number, index=index, rounds=MISSED)
                self.outbox.end(counted)
                self._closer = record.by
                return Round(index, mean, record.members, counted, sent=sent, received=received, seconds=seconds)
        return outcome

    def give_up(self) -> None:
        """The last round is not waited for any longer."""
        self.given_up = True
        self.outbox.end(counted=False)

    def _diverged(self, record: Record) -> None:
        """The run goes on from other bits than those held here."""
        self.session.event("diverged", fragment=self.number, index=record.index)
        if self._differs is not None:
            raise Diverged(
                f"fragment {self.number}: anchor or outer state after round {record.index - 1} are not those of the "
                "run, for the second time running. This machine computes other bits than the others: check its memory "
                "and its versions of torch and diloco."
            )
        self._differs = record.index
        self._ready.clear()
        self._jump = 0

    def applied(self, state: State) -> None:
        self.held, self.fingerprint = state.index, state.fingerprint()
        self.session.holds(self.number, self.held)
        if self.held != self.frontier:
            return  # catching up: the digest that a snapshot needs is no longer the one at hand
        wanted = self.session.members.wanted(self.number, self.session.clock())
        first = self._closer == self.session.me
        self.snapshots.consider(
            state, self.previous, wanted, first, self.session.clock(), self.session.grace(self.held)
        )

    # What the background does.

    def tick(self) -> Task[None]:
        if self._jump is not None:
            yield from self._load()
        if self.outbox.to_encode:
            yield from self._send_delta()
        while (yield from self._follow()):
            pass
        yield from self.snapshots.tick()

    def _send_delta(self) -> Task[None]:
        """Encode the own delta and put it."""
        encoded = yield from self.outbox.encode(self.round_store)
        if encoded is True:
            return
        if encoded is False:
            self.session.event("not finite", fragment=self.number, index=self.held + 1)
            self._ready.append(Dropped(reset=True))
            return
        index, sealed, mine = encoded
        if index != self.frontier + 1:
            return  # closed already; whether with this very delta, sent in an earlier life, the record tells
        if (yield from self.outbox.put(self.round_store, sealed, mine)):
            self._saw(sealed.name, mine)

    def _saw(self, name: str, delta: Contribution) -> None:
        if self._first_seen is None:
            self._first_seen = self.session.clock()
        self._deltas[name] = delta
        self.session.members.delivered(delta.member)

    def _follow(self) -> Task[bool]:
        """One look at the round after the frontier. True: it is closed, look at the next one."""
        index = self.frontier + 1
        if self._ended(index):
            self.caught_up = True
            return False
        if self._jump is not None or len(self._ready) >= AHEAD:
            return False
        looked = self.session.clock()
        names = yield from self.round_store.names(index)
        record, slot = yield from self.round_store.record(index, self.previous, names)
        if record is None:
            yield from self._gather(index, names)
            self.caught_up, self.open_at = True, looked
            if self._late:
                self._late = False
                self._ready.append(Dropped(reset=True))
            proposal = self._compose(index)
            if proposal is None:
                return False
            record = yield from self.round_store.close(proposal, slot)
        return (yield from self._complete(record))

    def _gather(self, index: int, names: dict[str, int]) -> Task[None]:
        """Fetch the deltas that are new."""
        new = [n for n in sorted(names) if member_of(n) and n not in self._deltas and n not in self._unusable]
        for name, delta in zip(new, (yield from self.round_store.fetch(new, index)), strict=True):
            if isinstance(delta, Contribution):
                self._saw(name, delta)
            elif delta is not None:
                self._unusable.add(name)

    def _compose(self, index: int) -> Record | None:
        """The record that may close the round now, if it may be closed."""
        sent = self.outbox.sent
        if sent is None or self.held != self.frontier or self._first_seen is None:
            return None
        deltas = one_per_member(self._deltas.values(), self.fingerprint, sent.digest)
        session, waited = self.session, self.session.clock() - self._first_seen
        present = {delta.member for delta in deltas}
        if not may_close(present, session.awaited(index), waited, session.grace(index), session.options.quorum):
            return None
        entries = entries_of(deltas, self._norms, session.max_work)
        return Record(self.number, index, self.previous, self.fingerprint, session.me, entries)

    def _complete(self, record: Record) -> Task[bool]:
        """Fetch what the record names, and compute the mean."""
        names = [delta_name(self.number, record.index, e.member, e.digest) for e in record.entries]
        missing = [name for name in names if name not in self._deltas]
        fetched = dict(zip(missing, (yield from self.round_store.fetch(missing, record.index)), strict=True))
        found = [self._deltas.get(name) or fetched.get(name) for name in names]
        deltas = {delta.digest: delta for delta in found if isinstance(delta, Contribution)}
        if set(deltas) != {e.digest for e in record.entries}:
            self.session.event("gone", fragment=self.number, index=record.index)
            self._jump = self.frontier + 1
            return False
        mean = yield from self.round_store.mean(record, {digest: delta.payload for digest, delta in deltas.items()})
        if self._jump is not None:
            return False  # the core has found that it holds other bits
        received = sum(delta.nbytes for delta in deltas.values() if delta.member != self.session.me)
        self._ready.append(Followed(record, mean, received))
        self._norms.append([e.norm for e in record.entries])
        self.session.members.closed(record.members)
        self._pass(record.index, record.digest)
        if self.frontier - self._reached > 1 and not self._late:
            yield from self._look_far()
        return True

    def _pass(self, index: int, digest: str) -> None:
        self.frontier, self.previous = index, digest
        self._deltas.clear()
        self._unusable.clear()
        self._first_seen, self.open_at = None, -inf

    @property
    def _reached(self) -> int:
        """The round held, or the one of a jump that the core has not taken yet."""
        first = self._ready[0] if self._ready else None
        return first.state.index if isinstance(first, Jump) else self.held

    def _look_far(self) -> Task[None]:
        """Behind by more than a few rounds: jump to a snapshot, if there is one ahead or somebody who can make one. If
        none comes, follow all rounds and then give up what was trained, which is against an anchor of long ago."""
        self._late = yield from self.round_store.reaches(self._reached + BEHIND + 1)
        if self._late:
            yield from self.snapshots.refresh()
            living = self.session.members.alive(self.session.clock())
            if self.snapshots.newest > self.frontier or living:
                self._jump = self.frontier + 1
                self._patient_until = self.session.clock() + self.session.patience()

    def _load(self) -> Task[None]:
        """Jump to the newest snapshot; if there is none yet, ask the others for one."""
        assert self._jump is not None
        loaded = yield from self.snapshots.load(self._jump)
        if loaded is None:
            self.session.want(self.number, self._jump)
            if self._patient_until is not None and self.session.clock() > self._patient_until:
                self._jump = self._patient_until = None
            return
        state, record = loaded
        self._ready.clear()
        self._ready.append(Jump(state))
        self._jump, self._patient_until, self._late = None, None, False
        self._pass(state.index, record)
        self.session.event("jump", fragment=self.number, index=state.index)
