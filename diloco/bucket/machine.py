"""The state machine of one fragment: all that a member decides about its rounds, in one place.

`Machine.handle` takes an event and returns the effect to perform, if any. It has no clock, no thread and no store: what
was read and the time come with the events, and `fragment.py` performs the effects.

Two things run concurrently, each with its own state:

    sending, this member's delta for the round after the held one
        IDLE → ENCODING → DELIVERING → DELIVERED → IDLE
    following, the round after the frontier
        OPEN → COMMITTED → AVERAGING → OPEN (of the next round), and JUDGING and JUMPING if this member differs

`held` is the last round that training has applied, `frontier` the last one that was followed here.
docs/bucket-protocol.md draws all transitions.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from math import inf
from typing import Any

from diloco.bucket import rules
from diloco.bucket.members import Phase
from diloco.bucket.rounds import Attempts, Contribution, EncodedDelta, Layout, Record, delta_name, member_of, place_of
from diloco.bucket.run import Session
from diloco.bucket.store.envelope import Invalid
from diloco.errors import Diverged
from diloco.exchange.reducer import Cost, Delta, Dropped, Jump, Outcome, Round, State

AHEAD = 2
"""Maximum rounds kept ready for training, each with its state."""
MISSED = 8
"""After this many deltas in a row that no record names, an event reports it."""


# Events of the training thread.


@dataclass(frozen=True)
class Stepped:
    """Training has made a step. `steps`: since the last send; `scheduled`: the schedule says to send."""

    steps: int
    scheduled: bool


@dataclass(frozen=True)
class Sent:
    """Training sends a delta."""

    index: int
    delta: Callable[[], Delta]


@dataclass(frozen=True)
class Polled:
    """Training asks for the outcome of a round."""

    index: int


@dataclass(frozen=True)
class GaveUp:
    """Training no longer waits for the last round."""


# Events of the background.


@dataclass(frozen=True)
class Look:
    """Time to look at the store."""


@dataclass(frozen=True)
class Done:
    """An effect was performed. Each effect below says what its answer is."""

    effect: "Effect"
    answer: Any


# Effects for the training thread.


@dataclass(frozen=True)
class TakeDelta:
    """Send now."""


@dataclass(frozen=True)
class Offer:
    """A state that may serve as a snapshot, because the next record has confirmed its bits. Otherwise a member with a
    flipped bit could spread it to all that join before the next round is closed."""

    state: State
    link: str  # digest of the record that led to the state
    record: Record  # the one that has confirmed it


@dataclass(frozen=True)
class HandOver:
    """Apply this outcome."""

    outcome: Outcome
    offer: Offer | None = None


# Effects for the background: this member's delta.


@dataclass(frozen=True)
class Encode:
    """→ EncodedDelta; None if some values are not finite"""

    sent: Sent


@dataclass(frozen=True)
class Deliver:
    """Put the delta. → whether the store has it"""

    index: int
    delta: EncodedDelta


# The open round.


class Listed(Enum):
    """How fresh a listing of the round must be."""

    NOT = "only look for the record"
    IDLE = "recent enough for a member that can only be called"
    SHARED = "one for all fragments, used once by each"
    NOW = "of this round alone"


@dataclass(frozen=True)
class Inspect:
    """Look what is in a round, and whether it is closed. → Inspected"""

    index: int
    previous: str
    listed: Listed


@dataclass(frozen=True)
class Inspected:
    attempts: Attempts
    names: Collection[str] | None  # None: they were not listed


@dataclass(frozen=True)
class Recheck:
    """Read the records of the last rounds again. → the first round that the store has closed differently; None if there
    is none"""

    links: Mapping[int, str]


@dataclass(frozen=True)
class ReadDeltas:
    """→ {name: Contribution, Invalid, or None if it is missing}

    Args:
        values: not only the heads.
        complete: these are all the deltas that the round needs before it can close.
    """

    names: Sequence[str]
    values: bool = True
    complete: bool = True


@dataclass(frozen=True)
class Close:
    """Create a record. → the one that the store now has; None: look at the round again. `heads`: deltas whose heads are
    put as one object first, because members will average shares of them."""

    record: Record
    attempt: int
    heads: Sequence[Contribution] = ()


# The closed round.


@dataclass(frozen=True)
class Average:
    """Compute the mean of a record's deltas, and the state after it; if members average shares, make those whose turn
    it is, and read the others. → Averaged; Missing; Invalid if the record misstates its deltas; None if some shares are
    not there yet"""

    record: Record
    deltas: Mapping[str, Contribution]  # by digest: all, or only this member's if members average shares
    before: State


@dataclass(frozen=True)
class Averaged:
    state: State  # after the round
    received: int  # bytes
    digests: Mapping[str, int]  # of the deltas, by member; empty if no member has read all of them


@dataclass(frozen=True)
class Followed:
    """A closed round, ready to be applied."""

    record: Record
    averaged: Averaged
    at: float  # by this member's clock


class Missing(Exception):
    """An object that a round needs is missing."""


# Leaving and finding the run.


@dataclass(frozen=True)
class CountVotes:
    """→ whether the deltas of the round contradict its record"""

    record: Record


@dataclass(frozen=True)
class Target:
    """A snapshot to take, of at least the index `least`. `until`: when to stop waiting for one and follow the rounds
    again. `before`: the first round whose state may be wrong, so that an earlier snapshot is taken."""

    least: int
    until: float = inf
    before: int | None = None


@dataclass(frozen=True)
class Load:
    """→ the newest snapshot's state, and what the next record must refer to; None if there is none"""

    target: Target


@dataclass(frozen=True)
class SeeWhetherClosed:
    """→ whether a round is closed, judged by the first attempt alone"""

    index: int


Event = Stepped | Sent | Polled | GaveUp | Look | Done
Effect = (
    TakeDelta | HandOver | Encode | Deliver | Inspect | Recheck | ReadDeltas | Close | Average
    | CountVotes | Load | SeeWhetherClosed
)  # fmt: skip


# The machine.

SENDING: Mapping[Phase, frozenset[Phase]] = {
    Phase.IDLE: frozenset({Phase.ENCODING}),
    Phase.ENCODING: frozenset({Phase.DELIVERING, Phase.IDLE}),
    Phase.DELIVERING: frozenset({Phase.DELIVERED, Phase.ENCODING, Phase.IDLE}),
    Phase.DELIVERED: frozenset({Phase.IDLE, Phase.ENCODING}),
}
FOLLOWING: Mapping[Phase, frozenset[Phase]] = {
    Phase.OPEN: frozenset({Phase.COMMITTED, Phase.JUMPING, Phase.JUDGING, Phase.ENDED}),
    Phase.COMMITTED: frozenset({Phase.AVERAGING, Phase.OPEN, Phase.JUMPING, Phase.JUDGING}),
    Phase.AVERAGING: frozenset({Phase.OPEN, Phase.JUMPING, Phase.JUDGING}),
    Phase.JUDGING: frozenset({Phase.OPEN, Phase.JUMPING}),
    Phase.JUMPING: frozenset({Phase.OPEN, Phase.JUDGING}),
    Phase.ENDED: frozenset({Phase.JUDGING}),
}
"""The transitions. Every change goes through `_send` or `_follow`, which check them."""


@dataclass
class OwnDelta:
    """This member's delta for the round after the held one. There may be several: an undelivered one is replaced."""

    waiting: Sent | None = None  # to be encoded
    sends: int = 0
    encoded: dict[str, Contribution] = field(default_factory=dict)  # by digest; only the last one has its values
    place: dict[str, int] = field(default_factory=dict)  # by digest: its number among the sends
    delivered: Contribution | None = None  # final: the store has confirmed it
    delivered_at: float = 0.0
    newest: str | None = None  # digest of the last one, once it is encoded, if its codec is coarse
    nbytes: int = 0  # sent


@dataclass
class Seen:
    """The round after the frontier, as far as this member has seen it."""

    index: int
    order: tuple[str, ...] = ()  # the members of the last round; empty if unknown
    deltas: dict[str, Contribution] = field(default_factory=dict)  # by name
    invalid: set[str] = field(default_factory=set)
    first_delta_at: float | None = None
    attempt: int = 0  # the next one at a record
    record: Record | None = None  # once the round is closed
    rechecked: bool = False  # the last rounds were not closed differently
    lacking_since: float | None = None  # when an object of the record was first missing
    void: Record | None = None  # the record to replace, because its deltas are lost
    voids: str = ""  # digest of a record of this round that does not count, so that everybody knows


class Machine:
    def __init__(self, number: int, layout: Layout, session: Session, void: set[str]) -> None:
        """`void`: digests of records that do not count, although they are well formed."""
        self.number, self.session, self._layout = number, session, layout
        self.sending, self.following = Phase.IDLE, Phase.OPEN
        self.held = self.frontier = 0
        self.fingerprint = 0  # of the held state
        self.previous = ""  # what the next record must refer to
        self.own, self.seen = OwnDelta(), Seen(1)
        self.ready: deque[Followed | Jump | Dropped] = deque()
        self.void = void
        self.caught_up = False  # the round after the frontier was seen open
        self._links: dict[int, str] = {}  # of the last rounds followed
        self._late = False  # too far behind: discard the local work at the frontier
        self._target = Target(0)  # while JUMPING
        self._against: Record | None = None  # while JUDGING: a record closed against other bits than this member's
        self._differs: int | None = None  # other bits were seen; forgotten once the record of this index agrees
        self._differs_since: float | None = None  # when bits were found to differ for the second time
        self._branches = 0  # how often the store's rounds differed from those followed
        self._steps_from: int | None = 0  # steps count from here on
        self._never_sent, self._given_up = True, False
        self._missed = 0  # deltas in a row that did not count
        self._sent_at = 0.0

    @property
    def phase(self) -> Phase:
        """A single name for the state, to show."""
        if self.ready:
            return Phase.READY
        return self.sending if self.following is Phase.OPEN else self.following

    @property
    def is_quiet(self) -> bool:
        """Whether only steps or a call by another member can change anything."""
        return self.caught_up and not self._late and self.phase is Phase.IDLE

    @property
    def is_awaited(self) -> bool:
        """Whether another member waits for a delta of this one, which has none in flight."""
        return self.sending is Phase.IDLE and self.held == self.frontier and self._is_called()

    @property
    def expects_outcome(self) -> bool:
        """Whether a delta was sent whose outcome training has not got."""
        return self.own.waiting is not None or bool(self.own.encoded) or self.sending is not Phase.IDLE

    def start_from(self, state: State, previous: str) -> None:
        """Begin with a state of the run. `previous`: what the next record must refer to."""
        self._advance(state, previous)
        self._hold(state)

    def handle(self, event: Event, now: float) -> Effect | None:
        match event:
            case Stepped():
                return self._stepped(event)
            case Sent():
                return self._sent(event, now)
            case Polled(index):
                return self._polled(index)
            case GaveUp():
                self._given_up = True
                self._clear(counted=False)
                return None
            case Look():
                self.seen.void = None
                return Encode(self.own.waiting) if self.own.waiting else self._next(now)
            case Done(effect, answer):
                return self._done(effect, answer, now)

    def _done(self, effect: Effect, answer: Any, now: float) -> Effect | None:
        """Go on with the answer to an effect, if it still fits: training may have changed the state meanwhile."""
        match effect, self.following:
            case Encode(), _:
                return self._encoded(effect, answer, now)
            case Deliver(), _:
                self._delivered(effect, answer, now)
            case Inspect(), Phase.OPEN:
                return self._inspected(answer, now)
            case Recheck(), Phase.OPEN:
                return self._next(now) if answer is None else self._left_the_run(answer, now)
            case ReadDeltas(), Phase.OPEN:
                self._note_deltas(answer, now)
                return self._considered(effect.complete, now)
            case ReadDeltas(), Phase.COMMITTED:
                return self._average(answer, now)
            case Close(), Phase.OPEN:
                return self._closed(answer, now)
            case Average(record), Phase.COMMITTED | Phase.AVERAGING:
                return self._averaged(record, answer, now)
            case Inspect(), Phase.COMMITTED | Phase.AVERAGING if self.seen.record is not None:
                return self._replace(self.seen.record, answer.attempts.record is not None, now)
            case CountVotes(record), Phase.JUDGING if record is self._against:
                return self._judged(record, answer, now)
            case Load(target), Phase.JUMPING if target is self._target:
                return self._loaded(target, answer, now)
            case SeeWhetherClosed(), Phase.OPEN if answer:
                return self._leap(now)
            case _:
                pass
        return self._next(now)

    def _next(self, now: float) -> Effect | None:
        """What to do for the round after the frontier, if anything."""
        if self.following is Phase.JUDGING and self._against is not None:
            return CountVotes(self._against)
        if self.following is Phase.JUMPING:
            return Load(self._target)
        if self._is_over(self.seen.index):
            self.caught_up = True
            if self.following is Phase.OPEN:
                self._follow(Phase.ENDED)
        if self.following is Phase.ENDED or len(self.ready) >= AHEAD:
            return None
        if self.following is Phase.AVERAGING and self.seen.record is not None:
            return Average(self.seen.record, self.own.encoded, self._frontier_state)
        return Inspect(self.seen.index, self.previous, self._listed(now))

    # This member's delta.

    def _stepped(self, event: Stepped) -> Effect | None:
        """Send after sync_every steps, or when another member has sent: without answering such calls, two members that
        are out of phase would close all rounds alone."""
        if self._steps_from is None:
            self._steps_from = event.steps
        count = event.steps - self._steps_from
        if self.sending is Phase.DELIVERED or self.ready or self._is_over(self.held + 1):
            return None  # a delivered delta is final; a newer one replaces any other
        if event.scheduled if self._never_sent else count >= self.session.timing.sync_every:
            return TakeDelta()
        return TakeDelta() if count >= 1 and self.is_awaited else None

    def _sent(self, sent: Sent, now: float) -> Effect | None:
        if self._is_over(sent.index):
            self.ready.append(Dropped())
            return None
        self.own.waiting, self.own.newest, self.own.sends = sent, None, self.own.sends + 1
        self._never_sent, self._steps_from, self._sent_at = False, 0, now
        if self.sending in (Phase.IDLE, Phase.DELIVERED):
            self._send(Phase.ENCODING)
        return None

    def _encoded(self, effect: Encode, encoded: EncodedDelta | None, now: float) -> Effect | None:
        index = effect.sent.index
        if self.own.waiting is not effect.sent:  # a newer one has replaced it
            return Encode(self.own.waiting) if self.own.waiting else self._next(now)
        self.own.waiting = None
        if encoded is None:
            self._send(Phase.IDLE)
            self.session.event("not finite", fragment=self.number, index=self.held + 1)
            self.ready.append(Dropped(reset=True, non_finite=True))
            return self._next(now)
        digest = encoded.contribution.digest
        older = {key: replace(contribution, payloads=None) for key, contribution in self.own.encoded.items()}
        self.own.encoded, self.own.place[digest] = {**older, digest: encoded.contribution}, self.own.sends
        self.own.newest = digest if encoded.needs_own else None
        if not self._is_open(index):  # it may still count: an earlier life may have put the same object
            self._send(Phase.IDLE)
            return self._next(now)
        self._send(Phase.DELIVERING)
        return Deliver(index, encoded)

    def is_stale(self, index: int, failed: bool) -> bool:
        """Whether to stop delivering a delta for this round: the round is over, or an attempt has failed and a newer
        delta waits. Otherwise keep going: over an uplink that takes longer than `sync_every` steps for each delta,
        none would ever arrive if the next one replaced it."""
        return not self._is_open(index) or (failed and self.own.waiting is not None)

    def _is_open(self, index: int) -> bool:
        """Also if it was closed against other bits than this member's: then its delta is a vote."""
        if index == self.seen.index:
            return True
        first = self.ready[0] if self.ready else None
        record = first.record if isinstance(first, Followed) else None
        if self.following is Phase.JUDGING:
            record = self._against
        return record is not None and record.index == index == self.held + 1 and record.fingerprint != self.fingerprint

    def _delivered(self, effect: Deliver, stored: bool, now: float) -> None:
        contribution = effect.delta.contribution
        if contribution.digest not in self.own.encoded:
            return  # training has already got the outcome of its round
        if not stored:
            self._send(Phase.ENCODING if self.own.waiting else Phase.IDLE)
            return
        self._send(Phase.DELIVERED)  # even if a newer one was about to replace it
        self.own.delivered, self.own.delivered_at, self.own.waiting = contribution, now, None
        self.own.nbytes += contribution.nbytes
        if effect.index == self.seen.index:
            self._note_deltas({effect.delta.head.name: contribution}, now)

    def _clear(self, counted: bool) -> None:
        """The round is over, or no longer waited for."""
        self.own = OwnDelta()
        if self.sending is not Phase.IDLE:
            self._send(Phase.IDLE)
        if not counted:
            self._steps_from = None

    # Outcomes.

    def _polled(self, index: int) -> Effect | None:
        """The next outcome, in order. Not before this member's delta is encoded: its digest tells whether it counts."""
        if self.own.waiting is not None or not self.ready:
            return None
        if self._given_up:  # a record may still name a delta that was given up: the member finds out when it returns
            return None
        outcome = self.ready[0]
        if isinstance(outcome, Followed) and outcome.record.fingerprint != self.fingerprint:
            self._against = outcome.record
            self._diverged(outcome.record.index, Phase.JUDGING)
            return None
        self.ready.popleft()
        if isinstance(outcome, Followed):
            return self._handed_over(outcome, index)
        if isinstance(outcome, Jump):
            if self._differs is not None:  # the record after the next is the first to judge this member's bits
                self._differs = max(self._differs, outcome.state.index + 2)
            self._hold(outcome.state)
        self._clear(counted=False)
        return HandOver(outcome)

    def _handed_over(self, followed: Followed, index: int) -> Effect | None:
        record, averaged, own = followed.record, followed.averaged, self.own
        assert record.index == index
        if self._differs is not None and index >= self._differs:
            self._differs = self._differs_since = None
        delta = next((own.encoded[e.digest] for e in record.entries if e.digest in own.encoded), None)
        newer = 0 if delta is None else own.sends - own.place[delta.digest]
        values = None
        if delta is not None and delta.payloads is not None and (newer or delta.digest == own.newest):
            values = partial(self._layout.unpack, delta.payloads)
        self._missed = 0 if delta is not None else self._missed + bool(own.encoded)
        if own.encoded and self._missed == MISSED:
            self.session.event("not counted", fragment=self.number, index=index, rounds=MISSED)
        seconds = max(followed.at - self._sent_at, 0.0) if own.encoded else 0.0
        cost = Cost(bytes_sent=own.nbytes, bytes_received=averaged.received, seconds=seconds)
        self._clear(counted=delta is not None)
        self.session.compare(averaged.digests)
        confirmed, link = self._held_state, self._links.get(self.held)
        self._hold(averaged.state)
        earlier = delta is None and self.session.name in record.members
        counted = delta is not None
        outcome = Round(averaged.state, record.members, counted, earlier=earlier, own=values, cost=cost, newer=newer)
        if self.held != self.frontier or link is None:
            return HandOver(outcome)  # catching up: a newer state follows at once
        return HandOver(outcome, Offer(confirmed, link, record))

    # The open round.

    def _listed(self, now: float) -> Listed:
        """With few members, each lists the round and reads every delta as it arrives; the one that sees the last delta
        closes the round. With many members that would be O(members²) requests, so they take turns: one lists the round
        and reads the heads, and the others only check whether it is closed."""
        if self.seen.lacking_since is not None:
            return Listed.NOW  # another record may have replaced its record by now
        if not self._is_crowded(now):
            return Listed.SHARED
        if self.sending is Phase.IDLE:
            return Listed.IDLE
        return Listed.NOW if self._has_turn(now) else Listed.NOT

    def _is_crowded(self, now: float) -> bool:
        return self._layout.cut and self.session.crowded(now)

    def _has_turn(self, now: float) -> bool:
        """Whether it is this member's turn to list the round, and to close it if it is complete. If the members before
        it are away, its turn comes a little later."""
        if self.sending is not Phase.DELIVERED:
            return False
        session = self.session
        order = self.seen.order or sorted([session.name, *session.members.alive(now)])
        before = rules.turns(order, session.name, session.members.away(order, now))(self.number + self.seen.index)
        return now - self.own.delivered_at >= before * session.timing.turn

    def _inspected(self, inspected: Inspected, now: float) -> Effect | None:
        record, seen = inspected.attempts.record, self.seen
        seen.attempt, seen.voids = inspected.attempts.free, inspected.attempts.voids
        if inspected.attempts.branched and not seen.rechecked:
            seen.rechecked = True
            return Recheck(self._links)
        if record is not None and not (seen.void and seen.void.digest == record.digest):
            return self._committed(record, now)
        if inspected.names is None:
            return self._considered(False, now)
        names = [name for name in sorted(inspected.names) if name not in seen.deltas and name not in seen.invalid]
        for name in names:
            if place_of(name) is None:
                self.session.reject(name, Invalid("it does not have the name of an object of a round"))
        new = [name for name in names if member_of(name)]
        if not self._is_crowded(now) or seen.void:
            return ReadDeltas(new) if new else self._considered(True, now)
        present = {str(member_of(name)) for name in (*new, *seen.deltas)}
        for member in present:
            self._note_member(member, now)
        if self._may_close(present, now):
            return ReadDeltas(new, values=False) if new else self._considered(True, now)
        if new and not self._is_called():
            return ReadDeltas(new[:1], values=False, complete=False)
        return self._considered(False, now)

    def _note_deltas(self, deltas: Mapping[str, Contribution | Invalid | None], now: float) -> None:
        for name, delta in deltas.items():
            if isinstance(delta, Contribution):
                self.seen.deltas[name] = delta
                self._note_member(delta.member, now)
            elif delta is not None:
                self.seen.invalid.add(name)

    def _note_member(self, member: str, now: float) -> None:
        self.seen.first_delta_at = now if self.seen.first_delta_at is None else self.seen.first_delta_at
        self.session.members.delivered(member)

    def _is_called(self) -> bool:
        """Whether another member has sent a delta trained from the held state."""
        deltas = self.seen.deltas.values()
        return any(d.fingerprint == self.fingerprint and d.member != self.session.name for d in deltas)

    def _may_close(self, present: set[str], now: float) -> bool:
        session, index = self.session, self.seen.index
        if len(present) < session.options.quorum:  # a cheap test first: an idle member asks all the time
            return False
        waited = now - (now if self.seen.first_delta_at is None else self.seen.first_delta_at)
        timeout = session.straggler_timeout(index, now)
        return rules.may_close(present, session.awaited(index, now), waited, timeout, session.options.quorum)

    def _considered(self, complete: bool, now: float) -> Effect | None:
        """The round is open. `complete`: all its deltas are known, so that it may be closed."""
        self.caught_up = True
        if self._late:
            self._late = False
            self.ready.append(Dropped(reset=True))
            self.session.want(self.number, None)
        closing = self._close(now) if complete else None
        if closing is None and self.seen.void is not None and self.following is Phase.OPEN:
            return self._wait_for_snapshot(now)
        return closing

    def _close(self, now: float) -> Effect | None:
        own, seen, session = self.own.delivered, self.seen, self.session
        if own is None:
            return None
        deltas = rules.one_per_member(seen.deltas.values(), self.fingerprint, own.digest)
        digests = {delta.digest for delta in deltas}
        if own.digest not in digests or not self._may_close({delta.member for delta in deltas}, now):
            return None
        unread = [name for name, delta in seen.deltas.items() if delta.payloads is None]
        by_shares = self._layout.cut and len(deltas) >= session.shares_from
        if unread and not by_shares:
            seen.deltas = {name: delta for name, delta in seen.deltas.items() if name not in unread}
            return ReadDeltas(sorted(unread), complete=False)
        if not self._agrees(now):
            return None
        entries = rules.entries_of(deltas, session.max_work, own.digest)
        voids = seen.void.digest if seen.void else seen.voids
        record = Record(self.number, seen.index, self.previous, self.fingerprint, session.name, entries, voids=voids)
        named = {entry.digest for entry in entries}
        heads = [delta for delta in deltas if delta.digest in named] if by_shares else ()
        return Close(record, seen.attempt, heads)

    def _agrees(self, now: float) -> bool:
        """Whether this member's bits are those of the run. Not if at least as many members agree on other bits: then
        recompute the state. If there is still a tie, those with the smaller fingerprint close the round, and the others
        only if these have not for a while."""
        deltas = self.seen.deltas.values()
        agree, differ = rules.count_votes(deltas, self.fingerprint)
        if differ < agree:
            return True
        if self._differs is None or differ > agree:
            if self._may_be_wrong(self.seen.index, now):
                self._target = self._before_state(self.seen.index - 1, now)
                self._diverged(self.seen.index, Phase.JUMPING)
            return False
        waited = now - (self.seen.first_delta_at or 0.0)
        return self.fingerprint == min(d.fingerprint for d in deltas) or waited > 2 * self.session.options.ttl

    def _closed(self, record: Record | None, now: float) -> Effect | None:
        if record is None:
            return None
        if self.seen.void and record.voids == self.seen.void.digest:
            self.session.event("void", fragment=self.number, index=record.index, by=self.seen.void.by)
        return self._committed(record, now)

    # The closed round.

    def _committed(self, record: Record, now: float) -> Effect | None:
        self._follow(Phase.COMMITTED)
        self.seen.record = record
        if record.heads and not self._layout.cut:
            return self._discard(record, now)
        if record.heads:
            self._follow(Phase.AVERAGING)
            return self._next(now)
        known = {name for name, delta in self.seen.deltas.items() if delta.payloads is not None}
        missing = [name for name in _names(record) if name not in known]
        return ReadDeltas(missing) if missing else self._average({}, now)

    def _average(self, read: Mapping[str, Contribution | Invalid | None], now: float) -> Effect | None:
        record = self.seen.record
        assert record is not None
        known = {name: delta for name, delta in self.seen.deltas.items() if delta.payloads is not None}
        results = [known.get(name) or read.get(name) for name in _names(record)]
        deltas = {delta.digest: delta for delta in results if isinstance(delta, Contribution)}
        if set(deltas) != {e.digest for e in record.entries}:
            return self._lacks(record, now)
        if not rules.is_truthful(record, deltas, self.session.max_work):
            return self._discard(record, now)
        return Average(record, deltas, self._frontier_state)

    def _discard(self, record: Record, now: float) -> Effect | None:
        """The record misstates its deltas."""
        self.void.add(record.digest)
        self.session.event("lie", fragment=self.number, index=record.index, by=record.by)
        self._follow(Phase.OPEN)
        return self._next(now)

    def _averaged(self, record: Record, average: Averaged | Missing | Invalid | None, now: float) -> Effect | None:
        if average is None:
            return None  # some shares are not there yet
        if isinstance(average, Missing):
            return self._lacks(record, now)
        if isinstance(average, Invalid):
            return self._discard(record, now)
        self._follow(Phase.OPEN)
        self.ready.append(Followed(record, average, now))
        self.session.members.closed(record.members)
        self._advance(average.state, record.digest, record.members)
        recomputes = self._differs is not None  # and must not take a state that somebody else has computed
        behind = self.frontier - self._reached > 1 and not recomputes
        if behind and not self._late:
            return SeeWhetherClosed(rules.too_far(self._reached))
        if behind and self.frontier % (2 * rules.BEHIND) == 0:
            return self._leap(now)  # it has asked for a snapshot: an occasional look is enough
        return self._next(now)

    def _lacks(self, record: Record, now: float) -> Effect | None:
        """An object is missing: report it, once. Wait for a snapshot, and look again later: it may come back. After a
        long time, replace the record."""
        seen = self.seen
        if seen.lacking_since is None:
            seen.lacking_since = now
            self.session.event("gone", fragment=self.number, index=seen.index)
        sends = self.own.delivered is not None and self.held == self.frontier
        if sends and rules.may_replace(now - seen.lacking_since, followed=False):
            return Inspect(record.index + 1, record.digest, Listed.NOT)  # has anybody followed it?
        return self._wait_for_snapshot(now)

    def _wait_for_snapshot(self, now: float) -> Effect | None:
        self._target = Target(self.frontier + 1, until=now + self.session.options.ttl)
        self._follow(Phase.JUMPING)
        return None

    def _replace(self, record: Record, followed: bool, now: float) -> Effect | None:
        """Close the round of a void record again, with the deltas that are complete."""
        if followed:
            return self._wait_for_snapshot(now)
        self.seen.void = record
        self.seen.deltas.clear()
        self._follow(Phase.OPEN)
        return self._next(now)

    # Where this member stands in the run.

    @property
    def _reached(self) -> int:
        """The held round, or that of a jump that training has not taken yet."""
        first = self.ready[0] if self.ready else None
        return first.state.index if isinstance(first, Jump) else self.held

    def _leap(self, now: float) -> Effect | None:
        """This member is far behind: take a snapshot that is far ahead, or ask the others for one and follow the rounds
        meanwhile. At the frontier this member discards its local work, which belongs to an old anchor."""
        self._late = True
        self._target = Target(rules.too_far(self.frontier), until=-inf)
        self._follow(Phase.JUMPING)
        return self._next(now)

    def _loaded(self, target: Target, snapshot: tuple[State, str] | None, now: float) -> Effect | None:
        """Jump to a snapshot; if there is none yet, ask the others for one."""
        if snapshot is None and target.before is not None:
            if now < target.until:
                return None  # it may be readable again soon
            raise Diverged(f"fragment {self.number}: the others hold other bits than this member from round "
                           f"{target.before} on, and no earlier snapshot is left: restart this member")  # fmt: skip
        if snapshot is None:
            self.session.want(self.number, target.least)
            if now < target.until:
                return None
            if target.until > -inf:  # an object is missing, and only a member that sends may replace its record
                self.caught_up = True
            self._follow(Phase.OPEN)
            return self._next(now)
        state, link = snapshot
        self._follow(Phase.OPEN)
        self._late = False
        self.ready.clear()
        self.ready.append(Jump(state))
        self._links.clear()
        self._advance(state, link)
        self.session.event("jump", fragment=self.number, index=state.index)
        return self._next(now)

    def _left_the_run(self, index: int, now: float) -> Effect | None:
        """The store has closed a round differently than this member read it: a reply was wrong, or the record was
        replaced. Go back to an earlier snapshot."""
        first = self.ready[0] if self.ready else None
        if isinstance(first, Followed) and first.record.index == index and first.record.fingerprint != self.fingerprint:
            self._against = first.record  # training has not taken it
            self._diverged(index, Phase.JUDGING)
            return self._next(now)
        self._branches += 1
        if self._branches > 1:
            raise Diverged(f"fragment {self.number}: this member read round {index} differently than the others, for "
                           "the second time: check the path to the store for a proxy or a cache")  # fmt: skip
        self._target = self._before_state(index, now)
        self._diverged(index, Phase.JUMPING)
        return None

    def _judged(self, record: Record, outvoted: bool, now: float) -> Effect | None:
        """The majority of the members that sent a delta for the round decides: either the record is void, or this
        member may be wrong."""
        if outvoted:
            self.void.add(record.digest)
            self.session.event("outvoted", fragment=self.number, index=record.index, by=record.by)
            self._follow(Phase.OPEN)
            self._late = False
            self._advance(self._held_state, self._links[self.held])
        elif self._may_be_wrong(record.index, now):
            self._target = self._before_state(record.index - 1, now)
            self._follow(Phase.JUMPING)
        else:
            return None
        return self._next(now)

    def _may_be_wrong(self, index: int, now: float) -> bool:
        """The others hold other bits before this round. The first time, this member recomputes its state; if it still
        differs, it stops, once the others have had time to send their deltas."""
        if self._differs is None:
            self._differs = index
            return True
        self._differs_since = now if self._differs_since is None else self._differs_since
        if now - self._differs_since >= self.session.options.ttl:
            raise Diverged(
                f"fragment {self.number}: anchor or outer state after round {index - 1} differ from the other "
                "members', even after recomputing them from the store. This machine computes other bits: check its "
                "memory and its versions of torch and diloco. With two members, either one may be wrong."
            )
        return False

    def _before_state(self, index: int, now: float) -> Target:
        """A snapshot from which to recompute a state that the others hold with other bits. Not one of that state:
        whoever is wrong may have put it."""
        return Target(0, until=now + self.session.options.ttl, before=max(index, 1))

    def _diverged(self, index: int, phase: Phase) -> None:
        """The run has other bits, or other records, than this member."""
        self.session.event("diverged", fragment=self.number, index=index)
        self.ready.clear()
        self._late = False
        self._follow(phase)

    def _advance(self, state: State, link: str, members: Iterable[str] = ()) -> None:
        """`state` is the newest computed here; training may still hold an older one."""
        self._frontier_state, self.frontier, self.previous = state, state.index, link
        self.seen = Seen(state.index + 1, tuple(members))
        kept = range(state.index - rules.LINKS + 1, state.index)
        self._links = {index: link for index, link in self._links.items() if index in kept}
        self._links[state.index] = link

    def _hold(self, state: State) -> None:
        self.held, self.fingerprint = state.index, state.fingerprint()
        self._held_state = replace(state, cached_fingerprint=self.fingerprint)  # of now, whatever its memory becomes
        self.session.holds(self.number, self.held)

    def _is_over(self, index: int) -> bool:
        return self.session.rounds is not None and index > self.session.rounds

    def _send(self, phase: Phase) -> None:
        assert phase in SENDING[self.sending], (self.sending, phase)
        self.sending = phase

    def _follow(self, phase: Phase) -> None:
        assert phase in FOLLOWING[self.following], (self.following, phase)
        self.following = phase


def _names(record: Record) -> list[str]:
    return [delta_name(record.fragment, record.index, e.member, e.digest) for e in record.entries]
