"""The protocol of one fragment: its rounds, one after another, as one member takes part in them.

Two sides share it under one lock. The training thread calls `due`, `send`, `take` and `applied`, and never waits; the
background drives `tick`, which delivers the own delta, closes rounds and follows the closed ones. `held` is the last
round that the core has applied, `frontier` the last one that the background has followed.

The way of a delta into the store, six changes of object:
    Bucket.send → FragmentProtocol.send → Outbox.accept                    on the training thread, returns at once
    Outbox.deliver → Layout.pack → Envelope.seal → Store → its backend     in the background: encoded, signed, put
Then `OpenRound.saw` is told: from now on it stands.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from zlib import crc32

from diloco.bucket.averaging import Averaging, Gone
from diloco.bucket.chain import Chain
from diloco.bucket.deltas import Layout
from diloco.bucket.open_round import OpenRound
from diloco.bucket.outbox import Delivered, Outbox, Undelivered
from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import Contribution, Followed, Link, Record, delta_name, place_of, truthful
from diloco.bucket.session import Session
from diloco.bucket.shares import mean_in_parts
from diloco.bucket.snapshots import Snapshots
from diloco.bucket.store.envelope import Invalid
from diloco.bucket.store.operations import Task, Work
from diloco.errors import Diverged
from diloco.reduce import Delta, Dropped, Jump, Round, State
from diloco.reduce.mean import Encoded, decode, exact

BEHIND = 8
"""Rounds by which a member may be behind and still keep its local work. If it is further behind, it starts from the
anchor."""
AHEAD = 2
"""Rounds that are kept ready for the core: the deltas of each."""
VOID = 900.0
"""Seconds for which a delta that a record names must be missing before another record may stand in for it."""


@dataclass(frozen=True)
class _Following:
    """Every closed round is followed. `late`: from too far behind; at the frontier, local work is given up. Meanwhile
    the others are asked for a snapshot, and one that is far ahead is taken."""

    late: bool = False


@dataclass(frozen=True)
class _Jumping:
    """A snapshot of at least this index is taken. `until`: how long it is waited for; then the rounds are followed
    again, `late` or not. `before`: the first round that was read wrongly, so that a snapshot of before is taken.
    `against`: a record that was closed against other bits than those held here: first it is judged."""

    least: int
    until: float = inf
    late: bool = False
    before: int | None = None
    against: Record | None = None


class FragmentProtocol:
    def __init__(self, number: int, layout: Layout, rounds: RoundStore, snapshots: Snapshots, session: Session) -> None:
        self.number, self.round_store, self.snapshots, self.session = number, rounds, snapshots, session
        self._layout = layout
        self.outbox = Outbox(number, layout, session)  # for the round after the one held
        self.held = self.frontier = 0
        self.fingerprint = 0  # of the state held
        self.previous = Link()  # what the next record has to follow
        self._chain = Chain(rounds)  # of the last records
        self.caught_up = False  # the round after the frontier was seen to be open
        self.answer_call = False  # in strict pace: members would wait for each other crosswise
        self._given_up = False  # the last round
        self._round = OpenRound(number, 1, session, rounds, ())
        self._mode: _Following | _Jumping = _Following()
        self._ready: deque[Followed | Jump | Dropped] = deque()
        self._differs: int | None = None  # other bits were found; forgotten once the record of this index agrees
        self._odd_since: float | None = None  # when bits were found to differ for the second time
        self._branches = 0  # how often the run was found to have gone another way
        self._closer = ""

    def start_from(self, state: State, previous: Link) -> None:
        """Begin with a state of the run. `previous`: what the next record has to follow."""
        self._advance(state.index, previous)
        self._hold(state)

    def _hold(self, state: State) -> None:
        self.held, self.fingerprint = state.index, state.fingerprint()
        self.session.holds(self.number, self.held)

    def due(self, steps: int, scheduled: bool) -> bool:
        """Whether to send. `steps`: own steps since the last send."""
        called = self._called() and (self.answer_call or not self.session.options.strict)
        due = self.outbox.due(steps, scheduled, called)
        return due and not self._ready and not self._ended(self.held + 1)

    def _called(self) -> bool:
        """Whether another member has sent for the next round. Without answering such calls, two members that are out of
        phase would close all rounds alone."""
        return self.held == self.frontier and self._round.called(self.fingerprint)

    @property
    def called_since(self) -> float:
        """When the call came that is not answered yet; inf if there is none."""
        if self._round.first_seen is None or self.outbox.under_way or self._ready or not self._called():
            return inf
        return self._round.first_seen

    @property
    def open_at(self) -> float:
        """When the next round was last seen to be open."""
        return self._round.open_at

    def _ended(self, index: int) -> bool:
        return self.session.rounds is not None and index > self.session.rounds

    def send(self, index: int, delta: Callable[[], Delta]) -> None:
        if self._ended(index):
            self._ready.append(Dropped())
            return
        self.answer_call = False
        self.outbox.accept(index, delta)

    def take(self, index: int) -> Round | Jump | Dropped | None:
        """What happened, in order. Not before the own delta is encoded, because its digest tells whether it counts."""
        if self.outbox.waiting or not self._ready:
            return None
        outcome = self._ready[0]
        if isinstance(outcome, Followed) and outcome.record.fingerprint != self.fingerprint:
            self._diverged(outcome.record)
            return None
        self._ready.popleft()
        if isinstance(outcome, Followed):
            return self._counted(outcome, index)
        if isinstance(outcome, Jump):
            if self._differs is not None:  # the record after the next is the first to judge what is computed here
                self._differs = max(self._differs, outcome.state.index + 2)
            self._hold(outcome.state)
        self.outbox.clear(counted=False)
        return outcome

    def _counted(self, followed: Followed, index: int) -> Round:
        """The round as the core applies it."""
        record = followed.record
        assert record.index == index
        if self._differs is not None and index >= self._differs:
            self._differs = self._odd_since = None
        fate = self.outbox.fate(record, followed.at)
        counted = fate.counted is not None
        self.outbox.clear(counted)
        self._closer = record.by
        self.session.compare(_digests(followed))
        return Round(
            index=index, encoded=followed.mean, members=record.members, lr=record.lr, counted=counted,
            sent=fate.sent,
            received=followed.received, seconds=fate.seconds, own=fate.own, state=followed.state,
        )  # fmt: skip

    @property
    def expects_outcome(self) -> bool:
        """A delta is under way, and its outcome is worth waiting for."""
        return self.outbox.under_way and not self._given_up

    @property
    def pause(self) -> float:
        """Seconds until the next look: few while a round may be closed, more while it can only be called by others."""
        timing = self.session.timing
        waits = self.caught_up and not self.outbox.under_way and self._round.averaging is None
        return timing.idle if waits and self._mode == _Following() and not self._ready else timing.poll

    def give_up(self) -> None:
        """The last round is no longer waited for."""
        self._given_up = True
        self.outbox.clear(counted=False)

    def _diverged(self, record: Record) -> None:
        """A record was closed against other bits than those held here."""
        self.session.event("diverged", fragment=self.number, index=record.index)
        self._ready.clear()
        self._mode = _Jumping(0, against=record)

    def _judge(self, record: Record) -> Task[bool]:
        """Whether this member, rather than a record that was closed against other bits, may be wrong. Most of the
        members that have sent a delta for the round decide. Raises Diverged if it is wrong again after it has computed
        its state anew."""
        if not (yield from self.round_store.outvoted(record)):
            return self._may_be_wrong(record.index)
        self.round_store.void.add(record.digest)
        self.session.event("outvoted", fragment=self.number, index=record.index, by=record.by)
        self._advance(self.held, self._chain.links[self.held])
        self._mode = _Following()
        return False

    def _may_be_wrong(self, index: int) -> bool:
        """The others hold other bits before this round. The first time this member computes its state anew; if it then
        still differs, it stops, after the others had the time to send their deltas."""
        now = self.session.clock()
        if self._differs is None:
            self._differs = index
            return True
        self._odd_since = now if self._odd_since is None else self._odd_since
        if now - self._odd_since >= self.session.options.ttl:
            raise Diverged(
                f"fragment {self.number}: anchor or outer state after round {index - 1} differ from those of the other "
                "members, also after they were computed again from the store. This machine computes other bits: check "
                "its memory and its versions of torch and diloco. With two members nobody can tell which one is wrong."
            )
        return False

    def applied(self, state: State) -> None:
        self._hold(state)
        if self.held != self.frontier:
            return  # catching up: the digest at hand is no longer the one that a snapshot needs
        session, now = self.session, self.session.clock()
        wanted = session.members.wanted(self.number, state.index, now)
        first = self._closer == session.me
        self.snapshots.consider(state, self.previous.digest, wanted, first, now, session.grace(self.held))

    def tick(self) -> Task[None]:
        """Everything that the background has to do now."""
        if self.outbox.waiting:
            yield from self._deliver()
        if isinstance(self._mode, _Jumping):
            yield from self._load(self._mode)
        while (yield from self._follow()):
            pass
        yield from self.snapshots.tick(self.frontier, self.session.clock(), self.session.somebody_joins)

    def _deliver(self) -> Task[None]:
        match (yield from self.outbox.deliver(lambda index: index == self.frontier + 1 or self._contradicts(index))):
            case Delivered(name, delta):
                if place_of(name) == (self.number, self.frontier + 1):
                    self._round.saw(name, delta)
            case Undelivered.SPOILED:
                self.session.event("not finite", fragment=self.number, index=self.held + 1)
                self._ready.append(Dropped(reset=True, spoiled=True))
            case Undelivered.ABANDONED:
                pass

    def _contradicts(self, index: int) -> bool:
        """Whether a round was closed against other bits than those held here, so that the own delta is a vote."""
        first = self._ready[0] if self._ready else None
        record = first.record if isinstance(first, Followed) else None
        if isinstance(self._mode, _Jumping):
            record = self._mode.against
        return record is not None and record.index == index == self.held + 1 and record.fingerprint != self.fingerprint

    def _follow(self) -> Task[bool]:
        """Look once at the round after the frontier. True if it is closed: then look at the next one."""
        index = self.frontier + 1
        if self._ended(index):
            self.caught_up = True
            return False
        if isinstance(self._mode, _Jumping) or len(self._ready) >= AHEAD:
            return False
        if self._round.averaging is not None:
            return (yield from self._await_shares(self._round.averaging))
        looked = self.session.clock()
        names = yield from self._round.names(self.outbox)
        record, slot, branched = yield from self.round_store.record(index, self.previous, names)
        if branched and not self._round.checked and (yield from self._off_the_run()):
            return False
        if record is None:
            known = names is not None and (yield from self._round.gather(names, self.fingerprint))
            self.caught_up, self._round.open_at = True, looked
            if self._mode == _Following(late=True):
                self._mode = _Following()
                self._ready.append(Dropped(reset=True))
                self.session.want(self.number, None)
            own = self.outbox.acknowledged
            if not known or own is None or self.held != self.frontier:
                return False
            proposal = yield from self._round.propose(self.previous, self.fingerprint, own)
            if proposal is None or not self._may_close(index):
                return False
            record = yield from self.round_store.close(proposal, slot)
            if record is None:
                return False
        return (yield from self._average(record))

    def _may_close(self, index: int) -> bool:
        """Not if as many members as those that hold these bits, or more, hold the same other ones: then this member
        computes its state anew. If as many still do, those with the smaller fingerprint close the round, and the others
        only if these have not for a while."""
        mine, others = self._round.votes(self.fingerprint)
        if others < mine:
            return True
        if self._differs is None or others > mine:
            if self._may_be_wrong(index):
                self.session.event("diverged", fragment=self.number, index=index)
                self._ready.clear()
                self._mode = _Jumping(0)
            return False
        smallest = min(delta.fingerprint for delta in self._round.deltas.values())
        waited = self.session.clock() - (self._round.first_seen or 0.0)
        return self.fingerprint == smallest or waited > 2 * self.session.options.ttl

    def _off_the_run(self) -> Task[bool]:
        """Some record of the next round follows another one than that known here. If a round is closed differently
        from what was read here, a reply was wrong: go back to a snapshot of before."""
        self._round.checked = True
        index = yield from self._chain.differs_at()
        if index is None:
            return False
        self.session.event("diverged", fragment=self.number, index=index)
        self._branches += 1
        if self._branches > 1:
            raise Diverged(f"fragment {self.number}: round {index} was read differently from the others, for the "
                           "second time: check what lies between this machine and the store (a proxy or a "
                           "cache)")  # fmt: skip
        self._ready.clear()
        self._mode = _Jumping(0, before=index)
        return True

    def _average(self, record: Record) -> Task[bool]:
        """Read the deltas that the record names, and compute their mean; or its shares, if members average them."""
        if record.heads:
            return (yield from self._begin_averaging(record))
        names = [delta_name(self.number, record.index, e.member, e.digest) for e in record.entries]
        known = {name: delta for name, delta in self._round.deltas.items() if delta.payloads is not None}
        missing = [name for name in names if name not in known]
        fetched = dict(zip(missing, (yield from self.round_store.deltas(missing)), strict=True))
        found = [known.get(name) or fetched.get(name) for name in names]
        deltas = {delta.digest: delta for delta in found if isinstance(delta, Contribution)}
        if set(deltas) != {e.digest for e in record.entries}:
            return (yield from self._gone(record))
        if not truthful(record, deltas, self.session.max_work):
            return self._lie(record)
        mean = yield Work(lambda: mean_in_parts(record, deltas, self._layout))
        received = sum(delta.nbytes for delta in deltas.values() if delta.member != self.session.me)
        return (yield from self._followed(record, mean, received))

    def _begin_averaging(self, record: Record) -> Task[bool]:
        heads = yield from self.round_store.listed(record)
        if heads is None:
            return (yield from self._gone(record))
        if isinstance(heads, Invalid) or not self._layout.cut or not truthful(record, heads, self.session.max_work):
            return self._lie(record)
        self._round.averaging = Averaging(record, heads, self._layout, self.session, self.outbox.own)
        return (yield from self._await_shares(self._round.averaging))

    def _await_shares(self, averaging: Averaging) -> Task[bool]:
        try:
            mean = yield from averaging.tick()
        except Gone:
            return (yield from self._gone(averaging.record))
        if mean is None:
            return False
        return (yield from self._followed(averaging.record, mean, averaging.received))

    def _gone(self, record: Record) -> Task[bool]:
        """Wait for a snapshot, and look again later: what is gone may only be away."""
        if isinstance(self._mode, _Jumping):
            return False  # meanwhile the core found that it holds other bits
        self._round.lacks()
        self._round.averaging = None
        lacking = self.session.clock() - (self._round.lacking_since or 0.0)
        if lacking >= VOID and (yield from self._replace(record)):
            return True
        until, late = self.session.clock() + self.session.options.ttl, self._mode == _Following(late=True)
        self._mode = _Jumping(self.frontier + 1, until, late)
        return False

    def _replace(self, record: Record) -> Task[bool]:
        """Put another record in the place of one whose deltas are lost, unless some member has followed it."""
        own = self.outbox.acknowledged
        following, _, _ = yield from self.round_store.record(record.index + 1, record.link)
        if following is not None or own is None or self.held != self.frontier:
            return False
        yield from self._round.reread()
        proposal = yield from self._round.propose(self.previous, self.fingerprint, own)
        if proposal is None:
            return False
        replaced = yield from self.round_store.close(replace(proposal, voids=record.digest), 1)
        if replaced is not None:
            self.session.event("void", fragment=self.number, index=record.index, by=record.by)
        return replaced is not None

    def _lie(self, record: Record) -> bool:
        self.round_store.void.add(record.digest)
        self.session.event("lie", fragment=self.number, index=record.index, by=record.by)
        return True

    def _followed(self, record: Record, mean: Sequence[Encoded], received: int) -> Task[bool]:
        applied, state = yield Work(lambda: self._next(record, mean))
        if isinstance(self._mode, _Jumping):
            return False  # meanwhile the core found that it holds other bits
        self._ready.append(Followed(record, applied, received, self.session.clock(), state))
        self.snapshots.followed(record)
        self.session.members.closed(record.members)
        self._advance(record.index, record.link, list(record.members))
        if self.frontier - self._reached > 1:
            yield from self._look_far()
        return True

    def _next(self, record: Record, mean: Sequence[Encoded]) -> tuple[tuple[Encoded, ...], State | None]:
        """The mean, and the state after the round: the core makes it if no delta of this member was taken for it."""
        if (next := self.outbox.next(record.index, record.lr)) is None:
            return exact(decode(mean)), None
        for part in mean:
            next.add(part)
        return tuple(mean), next.state(record.index)

    def _advance(self, frontier: int, link: Link, members: Sequence[str] = ()) -> None:
        self.frontier, self.previous = frontier, link
        self._round = OpenRound(self.number, frontier + 1, self.session, self.round_store, members)
        self._chain.add(frontier, link)

    @property
    def _reached(self) -> int:
        """The round held, or that of a jump that the core has not taken yet."""
        first = self._ready[0] if self._ready else None
        return first.state.index if isinstance(first, Jump) else self.held

    def _look_far(self) -> Task[None]:
        """If this member is far behind, ask the others for a snapshot and follow the rounds meanwhile; take a snapshot
        that is far ahead. At the frontier the local work is given up, which is against an anchor of long ago."""
        if self._mode == _Following():
            if not (yield from self.round_store.reaches(self._reached + BEHIND + 1)):
                return
        elif self.frontier % (2 * BEHIND):
            return  # it has asked: now and then is often enough to look
        yield from self.snapshots.refresh()
        if isinstance(self._mode, _Jumping):
            return  # meanwhile the core found that it holds other bits
        self._mode = _Following(late=True)
        if self.snapshots.newest > self.frontier + BEHIND:
            self._mode = _Jumping(self.frontier + 1, until=-inf, late=True)
        else:
            self.session.want(self.number, self.frontier + BEHIND + 1)

    def _load(self, jumping: _Jumping) -> Task[None]:
        """Jump to the newest snapshot; if there is none yet, ask the others for one."""
        if jumping.against is not None:
            if not (yield from self._judge(jumping.against)):
                return
            self._mode = jumping = _Jumping(0)
        loaded = yield from self.snapshots.load(jumping.least, jumping.before)
        if loaded is None and jumping.before is not None:
            raise Diverged(f"fragment {self.number}: round {jumping.before} was read differently from the "
                           "others, and no snapshot of before is left: start this member again")  # fmt: skip
        if loaded is None:
            self.session.want(self.number, jumping.least)
            if self._mode is jumping and self.session.clock() >= jumping.until:
                self._mode = _Following(jumping.late)
            return
        state, link = loaded
        self._ready.clear()
        self._ready.append(Jump(state))
        self._mode = _Following()
        self._chain.begin()
        self._advance(state.index, link)
        self.session.event("jump", fragment=self.number, index=state.index)


def _digests(followed: Followed) -> dict[str, int]:
    """Of the deltas of a round, by member; none if each member averaged a share: then nobody has read them all. A delta
    whose norm no other has is known by it."""
    entries, mean = followed.record.entries, followed.mean
    if any(len(part.payloads) != len(entries) for part in mean):
        return {}
    norms = Counter(e.norm for e in entries)
    payloads = [
        [crc32(part.payloads[i].numpy().data) for part in mean if norms[e.norm] > 1] for i, e in enumerate(entries)
    ]
    return {e.member: hash((e.norm, *payloads[i])) if e.norm else 0 for i, e in enumerate(entries)}
