"""One fragment of a member: performs what its state machine asks for, over the store.

The path of a delta into the store:
    Bucket.send → Fragment.send → Machine                                on the training thread, returns at once
    Fragment.tick → Layout.pack → Envelope.seal → Store → its backend    in the background: encoded, signed, put
Then the machine makes it part of the round: it is final.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from diloco.bucket import machine, rules
from diloco.bucket.machine import Averaged, Done, Effect, Event, HandOver, Inspected, Listed, Machine, Missing
from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import EncodedDelta, delta_fields, digests_of, folder, seal_delta, snapshot_index
from diloco.bucket.run import Session
from diloco.bucket.shares import Averaging, mean_in_parts
from diloco.bucket.snapshots import Snapshots
from diloco.bucket.store import List, Task, Work, together
from diloco.bucket.store.envelope import Invalid, put
from diloco.errors import DiLoCoError
from diloco.exchange.mean import Encoded
from diloco.exchange.reducer import Delta, Outcome, State, unchanged

log = logging.getLogger("diloco")


class Fragment:
    """Two sides share the machine under one lock. The training thread calls `should_send`, `send` and `poll`, and never
    waits; the background drives `tick`."""

    def __init__(
        self,
        number: int,
        rounds: RoundStore,
        snapshots: Snapshots,
        session: Session,
        advance: Callable[..., State],
    ) -> None:
        self.number, self.rounds, self.snapshots, self.session = number, rounds, snapshots, session
        self.machine = Machine(number, rounds.layout, session, rounds.void)
        self._layout, self._advance = rounds.layout, advance
        self._averaging: Averaging | None = None
        self._unit_agreed = False

    @property
    def pause(self) -> float:
        """Seconds until the next look: few while the round may be closed, more while it can only be called by
        others."""
        timing = self.session.timing
        return timing.idle if self.machine.is_quiet else timing.poll

    def should_send(self, steps: int, scheduled: bool) -> bool:
        return isinstance(self._handle(machine.Stepped(steps, scheduled)), machine.TakeDelta)

    def send(self, index: int, delta: Callable[[], Delta]) -> None:
        self._handle(machine.Sent(index, delta))

    def poll(self, index: int) -> Outcome | None:
        handed_over = self._handle(machine.Polled(index))
        if not isinstance(handed_over, HandOver):
            return None
        if handed_over.offer is not None:
            self._offer(handed_over.offer)
        return handed_over.outcome

    def give_up(self) -> None:
        self._handle(machine.GaveUp())

    def _offer(self, offer: machine.Offer) -> None:
        session, now, index = self.session, self.session.clock(), offer.state.index
        wanted = session.members.wanted(self.number, index, now)
        timeout = 0.0 if offer.record.by == session.name else session.straggler_timeout(index, now)
        self.snapshots.consider(offer.state, offer.link, len(offer.record.entries), wanted, now, timeout)

    def start(self, state: State) -> Task[State | None]:
        """Choose the state that this member starts with: None for its own, if that belongs to the run and is recent,
        otherwise the newest snapshot. From there it follows the rounds closed since."""
        link = yield from self._link_after(state)
        if link is not None:
            yield from self.snapshots.refresh()
            self.machine.start_from(state, link)
            return None
        loaded = yield from self.snapshots.load()
        if loaded is None:
            raise DiLoCoError(f"the bucket has no usable snapshot of fragment {self.number}: someone deleted them")
        self.machine.start_from(*loaded)
        return loaded[0]

    def _link_after(self, state: State) -> Task[str | None]:
        """What the record after a state must refer to; None if the state is too old or not of this run."""
        rounds, snapshots, fingerprint = self.rounds, self.snapshots, state.fingerprint()
        if (yield from rounds.reaches(rules.too_far(state.index))):
            return None
        for name in (yield from snapshots.list()):
            base: Any = snapshot_index(name)
            judged = (yield from snapshots.judge(name)) if base <= state.index else None
            if judged is not None:
                break
        else:
            return None
        head, link = judged
        if base == state.index and head.header["fingerprint"] != fingerprint:
            return None
        contested = yield from rounds.contested(range(base + 1, state.index + 2))
        for index in range(base + 1, state.index + 1):
            yield from rounds.records_ahead(range(index, state.index + 2))
            record = (yield from rounds.record(index, link, final=index in contested)).record
            if record is None:
                self.session.event("behind", fragment=self.number, index=state.index, closed=index - 1)
                log.warning("fragment %d: this member holds round %d, but the store ends at round %d: the store was "
                            "rolled back, or the checkpoint is from another run; continuing from the store",
                            self.number, state.index, index - 1)  # fmt: skip
                return None
            link = record.digest
        following = (yield from rounds.record(state.index + 1, link, final=state.index + 1 in contested)).record
        if following is None:  # only the others' deltas can tell whether a bit was flipped since the state was computed
            differs = yield from rounds.outvoted(state.index + 1, fingerprint)
        else:
            differs = following.fingerprint != fingerprint
        return None if differs else link

    def tick(self) -> Task[None]:
        """Do everything that the background has to do now."""
        effect = self._handle(machine.Look())
        while effect is not None:
            effect = self._handle(Done(effect, (yield from self._perform(effect))))
        yield from self.snapshots.tick(self.machine.frontier, self.session.clock(), self.session.somebody_joins)

    def _handle(self, event: Event) -> Effect | None:
        return self.machine.handle(event, self.session.clock())

    def _perform(self, effect: Effect) -> Task[Any]:
        rounds = self.rounds
        match effect:
            case machine.Encode(sent):
                return (yield from self._encode(sent))
            case machine.Deliver(index, delta):
                return (yield from self._deliver(index, delta))
            case machine.Inspect():
                return (yield from self._inspect(effect))
            case machine.ReadDeltas(names, values):
                read = yield from rounds.deltas([*names]) if values else rounds.heads([*names])
                return dict(zip(names, read, strict=True))
            case machine.Close(record, attempt, heads):
                if heads:
                    record = replace(record, heads=(yield from rounds.put_heads(record, [*heads])))
                return (yield from rounds.close(record, attempt))
            case machine.Average(record):
                return (yield from self._average(effect) if record.heads else self._average_all(effect))
            case machine.CountVotes(record):
                final = (yield from rounds.record(record.index, record.previous, final=True)).record
                if final is not None and final.digest != record.digest:
                    return True
                return (yield from rounds.outvoted(record.index, record.fingerprint))
            case machine.Recheck(links):
                return (yield from self._recheck(dict(links)))
            case machine.Load(target):
                return (yield from self.snapshots.load(target.least, target.before))
            case machine.SeeWhetherClosed(index):
                return (yield from rounds.reaches(index))
        raise TypeError(f"{effect} is not for the background")

    def _encode(self, sent: machine.Sent) -> Task[EncodedDelta | None]:
        delta: Delta = yield Work(sent.delta)
        if delta.weight and not self._unit_agreed:  # a delta without work has no unit
            yield from self.session.agree("tokens" if delta.tokens else "steps")
            self._unit_agreed = True
        return (yield Work(lambda: self._sealed(sent.index, delta)))

    def _sealed(self, index: int, delta: Delta) -> EncodedDelta | None:
        """The delta as objects, and as the others will read it. None if it has non-finite values."""
        payloads, finite = self._layout.pack(delta.unpacked())
        if not finite:
            return None
        fields = delta_fields(self.number, index, self.session.name, delta.fingerprint, delta.weight, delta.lr)
        return seal_delta(self.session.envelope, self._layout, fields, payloads, delta.needs_own)

    def _deliver(self, index: int, delta: EncodedDelta) -> Task[bool]:
        """Put the pieces first: once the head exists, all of the delta does."""

        def stale(failed: bool) -> bool:
            return self.machine.is_stale(index, failed)

        began = self.session.clock()
        self.session.carrier.offer(self.number, index, delta.payloads, own_delta=True)
        stored = all((yield from together([put(part, stale) for part in delta.objects])))
        stored = stored and (yield from put(delta.head, stale))
        # Note the time even if the round was closed meanwhile: then the others' straggler timeout was too short.
        self.session.timing.uploaded(self.number, self.session.clock() - began)
        return stored

    def _inspect(self, inspect: machine.Inspect) -> Task[Inspected]:
        """If this round and the next are closed, read the objects of both and of the following ones at once."""
        names: Collection[str] | None = None
        listing, place = self.session.listing, (self.number, inspect.index)
        if inspect.listed is Listed.NOW:
            names = yield List(folder(*place))
        elif inspect.listed is not Listed.NOT:
            age = self.session.timing.idle if inspect.listed is Listed.IDLE else None
            names = yield from listing.names(*place, age)
        yield from self.rounds.read_ahead(listing.closed(*place))
        return Inspected((yield from self.rounds.record(inspect.index, inspect.previous, names)), names)

    def _average_all(self, average: machine.Average) -> Task[Averaged]:
        record, deltas = average.record, average.deltas
        mean = yield Work(lambda: mean_in_parts(record, deltas, self._layout))
        digests = yield Work(lambda: digests_of([*deltas.values()], self._layout))
        received = sum(delta.nbytes for delta in deltas.values() if delta.member != self.session.name)
        return Averaged((yield from self._state_after(average, mean)), received, digests)

    def _average(self, average: machine.Average) -> Task[Averaged | Missing | Invalid | None]:
        averaging, record = self._averaging, average.record
        if averaging is None or averaging.record is not record:
            averaging = self._averaging = Averaging(record, self.rounds, self.session, average.deltas)
        try:
            mean = yield from averaging.tick()
        except (Missing, Invalid) as reason:
            self._averaging = None
            return reason
        if mean is None:
            return None
        self._averaging = None
        return Averaged((yield from self._state_after(average, mean)), averaging.received, {})

    def _state_after(self, average: machine.Average, mean: tuple[Encoded, ...]) -> Task[State]:
        def advance() -> State:
            if not any(average.record.members.values()):
                return unchanged(average.before)
            return self._advance(average.before, mean, lr=average.record.lr, last=False)

        return (yield Work(advance))

    def _recheck(self, links: dict[int, str]) -> Task[int | None]:
        self.rounds.forget()
        for index, link in sorted(links.items()):
            previous = links.get(index - 1)
            if previous is None:
                continue
            names = yield List(folder(self.number, index))
            record = (yield from self.rounds.record(index, previous, names)).record
            if record is not None and record.digest != link:
                return index
        return None
