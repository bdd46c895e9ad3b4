"""One fragment of a member: performs what its state machine asks for, over the store.

The path of a delta into the store:
    Bucket.send → Fragment.send → Machine                                on the training thread, returns at once
    Fragment.tick → Layout.pack → Envelope.seal → Store → its backend    in the background: encoded, signed, put
Then the machine makes it part of the round: it is final.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from diloco.bucket.deltas import EncodedDelta, Layout, delta_fields, seal_delta
from diloco.bucket.effects import (
    Average,
    Averaged,
    Close,
    Collect,
    CountVotes,
    Deliver,
    Done,
    Effect,
    Effects,
    Encode,
    Event,
    GaveUp,
    HandOver,
    Inspect,
    Inspected,
    Listed,
    Load,
    Look,
    LookFar,
    Missing,
    Offer,
    Polled,
    ReadDeltas,
    ReadHeads,
    Recheck,
    SeeWhetherFollowed,
    Sent,
    Stepped,
    TakeDelta,
)
from diloco.bucket.machine import Machine
from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import Contribution, Link, Record, folder
from diloco.bucket.session import Session
from diloco.bucket.shares import Averaging, mean_in_parts
from diloco.bucket.snapshots import Snapshots
from diloco.bucket.store.envelope import put
from diloco.bucket.store.operations import List, Task, Work, together
from diloco.exchange.mean import Encoded
from diloco.exchange.reducer import Delta, Outcome, State, unchanged


class Fragment:
    """Two sides share the machine under one lock. The training thread calls `should_send`, `send` and `poll`, and never
    waits; the background drives `tick`."""

    def __init__(
        self,
        number: int,
        layout: Layout,
        rounds: RoundStore,
        snapshots: Snapshots,
        session: Session,
        advance: Callable[..., State],
    ) -> None:
        self.number, self.rounds, self.snapshots, self.session = number, rounds, snapshots, session
        self.machine = Machine(number, layout, session)
        rounds.void = self.machine.void
        self._layout, self._advance = layout, advance
        self._averaging: Averaging | None = None
        self._unit_agreed = False

    @property
    def pause(self) -> float:
        """Seconds until the next look: few while the round may be closed, more while it can only be called by
        others."""
        timing = self.session.timing
        return timing.idle if self.machine.is_quiet else timing.poll

    def should_send(self, steps: int, scheduled: bool) -> bool:
        return any(isinstance(effect, TakeDelta) for effect in self._handle(Stepped(steps, scheduled)))

    def send(self, index: int, delta: Callable[[], Delta]) -> None:
        self._handle(Sent(index, delta))

    def poll(self, index: int) -> Outcome | None:
        outcome = None
        for effect in self._handle(Polled(index)):
            if isinstance(effect, HandOver):
                outcome = effect.outcome
            elif isinstance(effect, Offer):
                self._offer(effect)
        return outcome

    def give_up(self) -> None:
        self._handle(GaveUp())

    def _offer(self, offer: Offer) -> None:
        session, now, index = self.session, self.session.clock(), offer.state.index
        wanted = session.members.wanted(self.number, index, now)
        timeout = session.straggler_timeout(index, now)
        self.snapshots.consider(offer.state, offer.record, wanted, offer.first, now, timeout)

    def tick(self) -> Task[None]:
        """Do everything that the background has to do now."""
        effects = self._handle(Look())
        while effects:
            (effect,) = effects
            effects = self._handle(Done(effect, (yield from self._perform(effect))))
        yield from self.snapshots.tick(self.machine.frontier, self.session.clock(), self.session.somebody_joins)

    def _handle(self, event: Event) -> Effects:
        return self.machine.handle(event, self.session.clock())

    def _perform(self, effect: Effect) -> Task[Any]:
        rounds = self.rounds
        match effect:
            case Encode(sent):
                return (yield from self._encode(sent))
            case Deliver(index, delta):
                return (yield from self._deliver(index, delta))
            case Inspect():
                return (yield from self._inspect(effect))
            case ReadDeltas(names, values):
                read = yield from rounds.deltas([*names]) if values else rounds.heads([*names])
                return dict(zip(names, read, strict=True))
            case Close(record, attempt, heads):
                if heads:
                    record = replace(record, heads=(yield from rounds.put_heads(record.index, [*heads])))
                return (yield from rounds.close(record, attempt))
            case ReadHeads(record):
                return (yield from rounds.heads_of(record))
            case Average(record, deltas, before):
                mean = yield Work(lambda: mean_in_parts(record, deltas, self._layout))
                received = sum(delta.nbytes for delta in deltas.values() if delta.member != self.session.name)
                return (yield from self._averaged(record, mean, before, received))
            case Collect():
                return (yield from self._collect(effect))
            case SeeWhetherFollowed(record):
                return (yield from rounds.record(record.index + 1, record.link)).record is not None
            case CountVotes(record):
                return (yield from rounds.outvoted(record))
            case Recheck(links):
                return (yield from self._recheck(dict(links)))
            case Load(target):
                return (yield from self.snapshots.load(target.least, target.before))
            case LookFar(closed):
                if closed is not None and not (yield from rounds.reaches(closed)):
                    return None
                yield from self.snapshots.refresh()
                return self.snapshots.newest
        raise TypeError(f"{effect} is not for the background")

    def _encode(self, sent: Sent) -> Task[EncodedDelta | None]:
        delta: Delta = yield Work(sent.delta)
        if delta.weight and not self._unit_agreed:  # a delta without work has no unit
            yield from self.session.agree("tokens" if delta.tokens else "steps")
            self._unit_agreed = True
        return (yield Work(lambda: self._sealed(sent.index, delta)))

    def _sealed(self, index: int, delta: Delta) -> EncodedDelta | None:
        """The delta as objects, and as the others will read it. None if it has non-finite values."""
        name, layout = self.session.name, self._layout
        payloads, finite = layout.pack(delta.unpacked())
        if not finite:
            return None
        fields = delta_fields(self.number, index, name, delta.fingerprint, delta.weight, delta.lr)
        norms = layout.norms(payloads)
        sealed = seal_delta(self.session.envelope, layout, fields, payloads, norms)
        norm = sum(norm**2 for norm in ([piece.norm for piece in sealed.pieces] or norms)) ** 0.5
        contribution = Contribution(
            name, sealed.head.digest, delta.fingerprint, delta.weight, norm, payloads, sealed.nbytes, delta.lr,
            pieces=sealed.pieces, head=sealed.head.body if layout.cut else b"",
        )  # fmt: skip
        return EncodedDelta(sealed, contribution, delta.needs_own)

    def _deliver(self, index: int, delta: EncodedDelta) -> Task[bool]:
        """Put the pieces first: once the head exists, all of the delta does."""

        def stale() -> bool:
            return self.machine.is_stale(index)

        began = self.session.clock()
        stored = all((yield from together([put(part, stale) for part in delta.sealed.objects])))
        stored = stored and (yield from put(delta.sealed.head, stale))
        # Note the time even if the round was closed meanwhile: then the others' straggler timeout was too short.
        self.session.timing.uploaded(self.number, self.session.clock() - began)
        return stored

    def _inspect(self, inspect: Inspect) -> Task[Inspected]:
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

    def _collect(self, collect: Collect) -> Task[Averaged | Missing | None]:
        averaging, record = self._averaging, collect.record
        if averaging is None or averaging.record is not record:
            averaging = self._averaging = Averaging(record, collect.heads, self._layout, self.session, collect.own)
        try:
            mean = yield from averaging.tick()
        except Missing as missing:
            self._averaging = None
            return missing
        if mean is None:
            return None
        return (yield from self._averaged(record, mean, collect.before, averaging.received))

    def _averaged(self, record: Record, mean: tuple[Encoded, ...], before: State, received: int) -> Task[Averaged]:
        def advance() -> State:
            if not any(record.members.values()):
                return unchanged(before)
            return self._advance(before, mean, lr=record.lr, last=False)

        state = yield Work(advance)
        self.snapshots.followed(record)
        return Averaged(mean, state, received)

    def _recheck(self, links: dict[int, Link]) -> Task[int | None]:
        self.rounds.forget()
        for index, link in sorted(links.items()):
            previous = links.get(index - 1)
            if previous is None:
                continue
            names = yield List(folder(self.number, index))
            record = (yield from self.rounds.record(index, previous, names)).record
            if record is not None and record.link != link:
                return index
        return None
