"""The state machine of a fragment by itself: events in, effects out, without a store, a thread or a clock."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco import Float32
from diloco.bucket.machine import (
    FOLLOWING,
    SENDING,
    Average,
    Averaged,
    Close,
    Collect,
    CountVotes,
    Deliver,
    Done,
    Encode,
    GaveUp,
    HandOver,
    Inspect,
    Inspected,
    Listed,
    Load,
    Look,
    LookFar,
    Machine,
    Missing,
    Polled,
    ReadDeltas,
    ReadHeads,
    Recheck,
    SeeWhetherFollowed,
    Sent,
    Stepped,
    TakeDelta,
)
from diloco.bucket.members import Member, MemberOptions, Phase, Timing
from diloco.bucket.rounds import (
    Attempts,
    Contribution,
    EncodedDelta,
    Entry,
    Record,
    SealedDelta,
    delta_name,
    layout_of,
    record_name,
)
from diloco.bucket.rules import VOID
from diloco.bucket.run import Session
from diloco.bucket.store.envelope import Envelope, Invalid, Sealed
from diloco.errors import Diverged
from diloco.exchange.reducer import Dropped, Jump, Round, State

NONE = Attempts(None, 0, False)
HEX = "ab" * 32


def state(index, value=0.0):
    return State(index, torch.full((2,), value), torch.zeros(0))


def new(rounds=None, number=0):
    session = Session(Envelope("r"), Member("a", 0), Timing(MemberOptions(), 2), rounds, float("inf"), 4)
    machine = Machine(number, layout_of(Float32(), 2), session)
    machine.start_from(state(0), "")
    return machine


def contribution(machine, member="a", digest=HEX, tokens=1.0, fingerprint=None):
    fingerprint = machine.fingerprint if fingerprint is None else fingerprint
    return Contribution(member, digest, fingerprint, tokens, (torch.zeros(8, dtype=torch.uint8),), 8)


def names(*deltas, index=1):
    return {delta_name(0, index, delta.member, delta.digest): delta for delta in deltas}


def encoded(machine, index=1, digest=HEX):
    head = Sealed(delta_name(0, index, "a", digest), digest, b"head", ())
    return EncodedDelta(SealedDelta(head, (), ()), contribution(machine, digest=digest), False)


def does(effect, kind):
    assert isinstance(effect, kind), effect
    return effect


def delivered(machine, now=0.0):
    """Up to the look at the round with this member's own delta in it."""
    machine.handle(Sent(machine.held + 1, lambda: None), now)
    encode = does(machine.handle(Look(), now), Encode)
    deliver = does(machine.handle(Done(encode, encoded(machine, machine.held + 1)), now), Deliver)
    return does(machine.handle(Done(deliver, True), now), Inspect)


def closed(machine, now=0.0):
    """Up to the mean of a round that this member closes alone."""
    close = does(machine.handle(Done(delivered(machine, now), Inspected(NONE, {})), now), Close)
    return does(machine.handle(Done(close, replace(close.record, digest="cd" * 32)), now), Average)


def averaged(machine, value=1.0, now=0.0):
    average = closed(machine, now)
    return machine.handle(Done(average, Averaged(state(average.record.index, value), 0, {})), now)


def test_a_delta_goes_from_training_through_the_store_and_back():
    machine = new()
    seen = [machine.phase]
    assert machine.handle(Stepped(1, False), 0.0) is None
    does(machine.handle(Stepped(2, True), 0.0), TakeDelta)
    machine.handle(Sent(1, lambda: None), 0.0)
    seen.append(machine.phase)
    encode = does(machine.handle(Look(), 0.0), Encode)
    deliver = does(machine.handle(Done(encode, encoded(machine)), 0.0), Deliver)
    seen.append(machine.phase)
    inspect = does(machine.handle(Done(deliver, True), 0.0), Inspect)
    seen.append(machine.phase)
    close = does(machine.handle(Done(inspect, Inspected(NONE, {})), 0.0), Close)
    assert [entry.member for entry in close.record.entries] == ["a"]
    average = does(machine.handle(Done(close, close.record), 0.0), Average)
    seen.append(machine.phase)
    assert machine.handle(Polled(1), 0.0) is None
    following = does(machine.handle(Done(average, Averaged(state(1), 0, {})), 0.0), Inspect)
    seen.append(machine.phase)
    assert following.index == 2
    outcome = machine.handle(Polled(1), 0.0)
    assert isinstance(outcome, HandOver) and isinstance(outcome.outcome, Round) and outcome.outcome.counted
    assert outcome.outcome.own is None  # nobody asked for it
    assert [phase.name for phase in [*seen, machine.phase]] == [
        "IDLE", "ENCODING", "DELIVERING", "DELIVERED", "COMMITTED", "READY", "IDLE",
    ]  # fmt: skip


def test_a_round_waits_for_expected_members_and_closes_after_the_straggler_timeout():
    machine = new()
    machine.session.members.update([Member("b", 0, joining=False)], 0.0)
    inspect = delivered(machine)
    assert machine.handle(Done(inspect, Inspected(NONE, {})), 0.0) is None and machine.phase is Phase.DELIVERED
    timeout = machine.session.straggler_timeout(1, 0.0)
    inspect = does(machine.handle(Look(), timeout - 0.1), Inspect)
    assert machine.handle(Done(inspect, Inspected(NONE, {})), timeout - 0.1) is None
    inspect = does(machine.handle(Look(), timeout), Inspect)
    does(machine.handle(Done(inspect, Inspected(NONE, {})), timeout), Close)


def test_many_members_take_turns_to_list_and_to_close():
    machine = new()
    machine._layout = replace(machine._layout, cuts=(slice(0, 1), slice(1, 2)))
    names_of_others = ["b", "c", "d"]
    machine.session.members.update([Member(name, 0, joining=False) for name in names_of_others], 0.0)
    machine.seen.order = ("d", "a", "b", "c")  # round 1 begins with the second
    assert delivered(machine).listed is Listed.NOW
    machine = new(number=1)
    machine._layout = replace(machine._layout, cuts=(slice(0, 1), slice(1, 2)))
    machine.session.members.update([Member(name, 0, joining=False) for name in names_of_others], 0.0)
    machine.seen.order = ("d", "a", "b", "c")
    assert does(machine.handle(Look(), 0.0), Inspect).listed is Listed.IDLE
    inspect = delivered(machine)
    assert inspect.listed is Listed.NOT and machine.handle(Done(inspect, Inspected(NONE, None)), 99.0) is None
    assert does(machine.handle(Look(), 3 * machine.session.timing.turn), Inspect).listed is Listed.NOW


def test_another_members_delta_calls_and_completes_the_round():
    machine = new()
    machine.session.members.update([Member("b", 0, joining=False)], 0.0)
    deltas = names(contribution(machine, "b", "ef" * 32))
    inspect = does(machine.handle(Look(), 0.0), Inspect)
    read = does(machine.handle(Done(inspect, Inspected(NONE, deltas)), 0.0), ReadDeltas)
    assert machine.handle(Done(read, deltas), 0.0) is None
    assert machine.handle(Stepped(0, False), 0.0) is None
    does(machine.handle(Stepped(1, False), 0.0), TakeDelta)
    close = does(machine.handle(Done(delivered(machine), Inspected(NONE, deltas)), 0.0), Close)
    assert [entry.member for entry in close.record.entries] == ["a", "b"]


def test_a_call_is_answered_once():
    machine = new()
    deltas = names(contribution(machine, "b", "ef" * 32))
    inspect = does(machine.handle(Look(), 0.0), Inspect)
    machine.handle(Done(does(machine.handle(Done(inspect, Inspected(NONE, deltas)), 0.0), ReadDeltas), deltas), 0.0)
    does(machine.handle(Stepped(1, False), 0.0), TakeDelta)
    machine.handle(Sent(1, lambda: None), 0.0)
    assert machine.handle(Stepped(1, False), 0.0) is None
    does(machine.handle(Stepped(2, False), 0.0), TakeDelta)


def test_no_outcome_is_handed_over_before_it_is_known_whether_the_newest_delta_is_in_it():
    machine = new()
    average = closed(machine)
    machine.handle(Done(average, Averaged(state(1), 0, {})), 0.0)
    machine.handle(Sent(1, lambda: None), 0.0)
    assert machine.handle(Polled(1), 0.0) is None
    encode = does(machine.handle(Look(), 0.0), Encode)
    machine.handle(Done(encode, encoded(machine)), 0.0)
    assert isinstance(machine.handle(Polled(1), 0.0), HandOver)


def test_a_newer_delta_replaces_one_that_is_not_delivered_and_none_that_is():
    machine = new()
    machine.handle(Sent(1, lambda: None), 0.0)
    old = does(machine.handle(Look(), 0.0), Encode)
    does(machine.handle(Stepped(2, True), 0.0), TakeDelta)
    machine.handle(Sent(1, lambda: None), 0.0)
    encode = does(machine.handle(Done(old, encoded(machine)), 0.0), Encode)
    assert encode.sent is not old.sent
    deliver = does(machine.handle(Done(encode, encoded(machine)), 0.0), Deliver)
    machine.handle(Sent(1, lambda: None), 0.0)
    assert machine.is_stale(1)
    does(machine.handle(Done(deliver, False), 0.0), Inspect)  # a slow uplink keeps nobody from following the rounds
    encode = does(machine.handle(Look(), 0.0), Encode)
    deliver = does(machine.handle(Done(encode, encoded(machine)), 0.0), Deliver)
    machine.handle(Done(deliver, True), 0.0)
    assert machine.phase is Phase.DELIVERED and machine.handle(Stepped(9, True), 0.0) is None


def test_training_may_send_once_more_and_the_newest_delta_counts():
    machine = new()
    delivered(machine)
    machine.handle(Sent(1, lambda: None), 0.0)
    encode = does(machine.handle(Look(), 0.0), Encode)
    deliver = does(machine.handle(Done(encode, encoded(machine, digest="12" * 32)), 0.0), Deliver)
    inspect = does(machine.handle(Done(deliver, True), 0.0), Inspect)
    close = does(machine.handle(Done(inspect, Inspected(NONE, {})), 0.0), Close)
    assert [entry.digest for entry in close.record.entries] == ["12" * 32]


def test_a_delta_that_is_not_finite_is_dropped_and_resets():
    machine = new()
    machine.handle(Sent(1, lambda: None), 0.0)
    encode = does(machine.handle(Look(), 0.0), Encode)
    machine.handle(Done(encode, None), 0.0)
    assert machine.handle(Polled(1), 0.0) == HandOver(Dropped(reset=True, non_finite=True))
    assert machine.phase is Phase.IDLE


def test_an_answer_that_comes_too_late_changes_nothing():
    machine = new()
    average = closed(machine)
    averaged_one = Averaged(state(1), 0, {})
    machine.handle(Done(average, averaged_one), 0.0)
    before = machine.frontier, machine.phase, len(machine.ready)
    machine.handle(Done(average, averaged_one), 0.0)
    machine.handle(Done(Load(None), (state(7), "")), 0.0)
    machine.handle(Done(CountVotes(average.record), True), 0.0)
    assert (machine.frontier, machine.phase, len(machine.ready)) == before


def test_what_a_record_lacks_is_waited_for_then_looked_for_again_and_in_the_end_replaced():
    machine = new()
    other = contribution(machine, "b", "ef" * 32)
    record = Record(0, 1, "", machine.fingerprint, "b", (entry(other),), digest="cd" * 32)
    inspect = delivered(machine)
    read = does(machine.handle(Done(inspect, Inspected(Attempts(record, 1, False), {})), 0.0), ReadDeltas)
    assert machine.handle(Done(read, dict.fromkeys(read.names)), 0.0) is None
    assert machine.phase is Phase.JUMPING
    load = does(machine.handle(Look(), 1.0), Load)
    assert load.target.least == 1 and machine.handle(Done(load, None), 1.0) is None
    later = VOID + 1.0
    load = does(machine.handle(Look(), later), Load)
    inspect = does(machine.handle(Done(load, None), later), Inspect)
    read = does(machine.handle(Done(inspect, Inspected(Attempts(record, 1, False), {})), later), ReadDeltas)
    asks = does(machine.handle(Done(read, dict.fromkeys(read.names)), later), SeeWhetherFollowed)
    inspect = does(machine.handle(Done(asks, False), later), Inspect)
    own = names(contribution(machine))
    read = does(machine.handle(Done(inspect, Inspected(Attempts(record, 1, False), own)), later), ReadDeltas)
    close = does(machine.handle(Done(read, own), later), Close)
    assert close.record.voids == record.digest and close.attempt == 1


def entry(delta):
    return Entry(delta.member, delta.digest, delta.tokens, delta.lr)


def test_a_record_that_others_have_followed_is_not_replaced():
    machine = new()
    record = Record(0, 1, "", machine.fingerprint, "b", (entry(contribution(machine, "b", "ef" * 32)),), "cd" * 32)
    inspect = delivered(machine)
    machine.seen.lacking_since = 0.0
    read = does(machine.handle(Done(inspect, Inspected(Attempts(record, 1, False), {})), VOID), ReadDeltas)
    asks = does(machine.handle(Done(read, dict.fromkeys(read.names)), VOID), SeeWhetherFollowed)
    assert machine.handle(Done(asks, True), VOID) is None and machine.phase is Phase.JUMPING


def test_who_cannot_replace_a_record_goes_on_waiting_for_a_snapshot():
    for sends in (True, False):
        machine = new()
        record = Record(0, 1, "", machine.fingerprint, "b", (entry(contribution(machine, "b")),), "cd" * 32)
        seen = Inspected(Attempts(record, 1, False), {})
        inspect = delivered(machine) if sends else does(machine.handle(Look(), 0.0), Inspect)
        machine.seen.lacking_since, machine.seen.deltas = 0.0, {}
        read = does(machine.handle(Done(inspect, seen), VOID), ReadDeltas)
        effect = machine.handle(Done(read, dict.fromkeys(read.names)), VOID)
        if sends:  # but its own delta is lost, too
            inspect = does(machine.handle(Done(does(effect, SeeWhetherFollowed), False), VOID), Inspect)
            effect = machine.handle(Done(inspect, seen), VOID)
        assert effect is None and machine.phase is Phase.JUMPING


def test_missing_shares_lead_to_a_snapshot_and_unfinished_ones_are_asked_for_again():
    machine = new()
    record = Record(0, 1, "", machine.fingerprint, "b", (), "cd" * 32, "12" * 32)
    machine._layout = replace(machine._layout, cuts=(slice(0, 1), slice(1, 2)))
    inspect = does(machine.handle(Look(), 0.0), Inspect)
    heads = does(machine.handle(Done(inspect, Inspected(Attempts(record, 1, False), {})), 0.0), ReadHeads)
    collect = does(machine.handle(Done(heads, {}), 0.0), Collect)
    assert machine.handle(Done(collect, None), 0.0) is None and machine.phase is Phase.AVERAGING
    collect = does(machine.handle(Look(), 0.0), Collect)
    assert machine.handle(Done(collect, Missing()), 0.0) is None and machine.phase is Phase.JUMPING


def test_a_record_that_misstates_a_delta_is_void():
    machine = new()
    delta = contribution(machine, "b", "ef" * 32)
    lie = Record(0, 1, "", machine.fingerprint, "b", (replace(entry(delta), tokens=9.0),), "cd" * 32)
    inspect = does(machine.handle(Look(), 0.0), Inspect)
    read = does(machine.handle(Done(inspect, Inspected(Attempts(lie, 1, False), {})), 0.0), ReadDeltas)
    does(machine.handle(Done(read, names(delta)), 0.0), Inspect)
    assert machine.void == {lie.digest} and machine.session.drain_events()[-1]["event"] == "lie"


def test_a_record_against_other_bits_is_judged_by_the_others_deltas():
    for outvoted in (True, False):
        machine = new()
        record = Record(0, 1, "", 99, "b", (entry(contribution(machine, "b")),), "cd" * 32)
        inspect = does(machine.handle(Look(), 0.0), Inspect)
        read = does(machine.handle(Done(inspect, Inspected(Attempts(record, 1, False), {})), 0.0), ReadDeltas)
        average = does(machine.handle(Done(read, names(contribution(machine, "b"))), 0.0), Average)
        machine.handle(Done(average, Averaged(state(1), 0, {})), 0.0)
        assert machine.handle(Polled(1), 0.0) is None and machine.phase is Phase.JUDGING
        votes = does(machine.handle(Look(), 0.0), CountVotes)
        effect = machine.handle(Done(votes, outvoted), 0.0)
        assert isinstance(effect, Inspect if outvoted else Load) and (record.digest in machine.void) is outvoted


@pytest.mark.parametrize(("other", "closes_at_once"), [(-1, False), (1, True)])
def test_at_a_tie_the_side_with_the_smaller_fingerprint_closes_and_the_other_one_later(other, closes_at_once):
    machine = new()
    machine.start_from(state(0, 1.0), "")
    machine._differs = 1  # the state was computed anew
    deltas = names(contribution(machine, "b", "ef" * 32, fingerprint=machine.fingerprint + other))
    ttl = machine.session.options.ttl
    for now in (0.0, 2 * ttl, 2 * ttl + 1):
        inspect = does(machine.handle(Look(), now), Inspect) if now else delivered(machine)
        effect = machine.handle(Done(inspect, Inspected(NONE, deltas)), now)
        if isinstance(effect, ReadDeltas):
            effect = machine.handle(Done(effect, deltas), now)
        assert isinstance(effect, Close) is (closes_at_once or now > 2 * ttl)
        if effect is not None:
            break


def test_who_was_too_far_behind_gives_up_its_local_work_and_no_longer_asks_for_a_snapshot():
    machine = new()
    average = closed(machine)
    machine.ready.append(Jump(state(-9)))  # training has not taken it yet
    far = does(machine.handle(Done(average, Averaged(state(1), 0, {})), 0.0), LookFar)
    assert machine.handle(Done(far, 0), 0.0) is None  # enough is ready
    machine.ready.clear()
    inspect = does(machine.handle(Look(), 0.0), Inspect)
    assert machine.session._wants == {0: 10}
    machine.handle(Done(inspect, Inspected(NONE, {})), 0.0)
    assert machine.ready[-1] == Dropped(reset=True) and not machine.session._wants


def test_a_jump_covers_all_rounds_up_to_it():
    machine = new()
    averaged(machine)
    machine._follow(Phase.JUMPING)
    load = does(machine.handle(Look(), 0.0), Load)
    inspect = does(machine.handle(Done(load, (state(9), "12" * 32)), 0.0), Inspect)
    assert (inspect.index, inspect.previous) == (10, "12" * 32)
    handed = machine.handle(Polled(1), 0.0)
    assert isinstance(handed.outcome, Jump) and machine.held == 9 and not machine.ready


def test_a_round_that_was_read_wrongly_leads_to_a_snapshot_of_before_and_a_second_one_stops():
    machine = new()
    for _ in range(2):
        inspect = does(machine.handle(Look(), 0.0), Inspect)
        recheck = does(machine.handle(Done(inspect, Inspected(Attempts(None, 1, True), {})), 0.0), Recheck)
        if machine._branches:
            with pytest.raises(Diverged, match="for the second time"):
                machine.handle(Done(recheck, 3), 0.0)
            break
        machine.handle(Done(recheck, 3), 0.0)
        load = does(machine.handle(Look(), 0.0), Load)
        assert load.target.before == 3
        machine.handle(Done(load, (state(1), "")), 0.0)
    machine = new()
    inspect = does(machine.handle(Look(), 0.0), Inspect)
    recheck = does(machine.handle(Done(inspect, Inspected(Attempts(None, 1, True), {})), 0.0), Recheck)
    inspect = does(machine.handle(Done(recheck, None), 0.0), Inspect)
    assert machine.handle(Done(inspect, Inspected(Attempts(None, 1, True), {})), 0.0) is None


def test_the_last_round_ends_the_fragment_and_a_later_delta_is_dropped():
    machine = new(rounds=1)
    assert averaged(machine) is None and machine.following is Phase.ENDED
    machine.handle(Polled(1), 0.0)
    assert machine.phase is Phase.ENDED and machine.handle(Stepped(5, True), 0.0) is None
    machine.handle(Sent(2, lambda: None), 0.0)
    assert machine.handle(Polled(2), 0.0) == HandOver(Dropped())


def test_who_gives_up_expects_nothing():
    machine = new()
    delivered(machine)
    assert machine.expects_outcome
    machine.handle(GaveUp(), 0.0)
    assert not machine.expects_outcome and machine.sending is Phase.IDLE


def test_what_arrives_in_the_store_after_its_outcome_is_known_is_forgotten():
    machine = new()
    machine.handle(Sent(1, lambda: None), 0.0)
    encode = does(machine.handle(Look(), 0.0), Encode)
    deliver = does(machine.handle(Done(encode, encoded(machine)), 0.0), Deliver)
    machine.handle(GaveUp(), 0.0)
    machine.handle(Done(deliver, True), 0.0)
    assert machine.sending is Phase.IDLE and machine.own.delivered is None


def test_no_object_of_another_place_is_taken_for_a_delta():
    machine = new()
    inspect = does(machine.handle(Look(), 0.0), Inspect)
    listed = [record_name(0, 1, 0), "rounds/00000/001/0000/closed.x", "rounds/00000/001/0000/d-b-zz"]
    assert machine.handle(Done(inspect, Inspected(NONE, listed)), 0.0) is None
    assert {e["object"] for e in machine.session.drain_events()} == set(listed[1:])


@pytest.mark.parametrize(("table", "attribute"), [(SENDING, "_send"), (FOLLOWING, "_follow")])
def test_there_is_no_other_transition_than_those_in_the_table(table, attribute):
    for before in table:
        for after in Phase:
            machine = new()
            setattr(machine, {"_send": "sending", "_follow": "following"}[attribute], before)
            if after in table[before]:
                getattr(machine, attribute)(after)
            else:
                with pytest.raises(AssertionError):
                    getattr(machine, attribute)(after)


class Fate:
    """Answers effects as a store could, by chance, while training does what it may."""

    def __init__(self, chance, shared):
        self.chance, self.machine, self.now, self.sends = chance, new(rounds=chance.choice([None, 6])), 0.0, 0
        if shared:
            self.machine._layout = replace(self.machine._layout, cuts=(slice(0, 1), slice(1, 2)))
        self.machine.session.members.update([Member(name, 0, joining=False) for name in "bcd"], 0.0)
        self.shared = shared

    def maybe(self, *choices):
        return self.chance.choice(choices)

    def delta(self, member):
        fingerprint = self.maybe(None, None, None, 99, 98)
        return contribution(self.machine, member, f"{self.chance.randrange(3):064x}", 1.0, fingerprint)

    def record(self, index):
        deltas = [self.delta(member) for member in self.maybe("b", "ab", "bcd")]
        fingerprint, digest = self.maybe(self.machine.fingerprint, 99), f"{self.chance.randrange(1 << 60):064x}"
        heads = HEX if self.shared and self.maybe(True, False) else ""
        return Record(0, index, self.machine.previous, fingerprint, "b", tuple(map(entry, deltas)), digest, heads)

    def answer(self, effect):
        index = self.machine.frontier + 1
        match effect:
            case Encode(sent):
                self.sends += 1
                return self.maybe(None, *[encoded(self.machine, sent.index, f"{self.sends % 3:064x}")] * 4)
            case Inspect():
                record = self.maybe(None, None, self.record(index))
                seen = names(*(self.delta(m) for m in self.maybe("", "b", "bc", "bcd")), index=index)
                return Inspected(Attempts(record, 1, self.maybe(False, False, True)), self.maybe(None, seen, seen))
            case ReadDeltas(wanted):
                return {name: self.maybe(None, Invalid("x"), self.delta("b")) for name in wanted}
            case Close(record):
                return self.maybe(None, record, replace(record, digest="cd" * 32), self.record(index))
            case ReadHeads(record):
                heads = {e.digest: replace(self.delta(e.member), digest=e.digest) for e in record.entries}
                return self.maybe(None, Invalid("x"), heads)
            case Average() | Collect():
                done = Averaged(state(effect.before.index + 1, self.chance.random()), 0, {})
                return done if isinstance(effect, Average) else self.maybe(None, Missing(), done)
            case Load(target):
                least = max(target.least, 0)
                before = least + 3 if target.before is None else target.before
                return self.maybe(None, (state(self.chance.randint(least, max(before, least))), ""))
            case LookFar():
                return self.maybe(None, self.machine.frontier + self.chance.randrange(30))
            case Recheck():
                return self.maybe(None, None, None, index - 1)
            case _:  # Deliver, SeeWhetherFollowed, CountVotes
                return self.maybe(True, False)

    def train(self):
        machine = self.machine
        machine.session.compare = lambda digests: None  # these deltas are alike
        effect = machine.handle(Stepped(self.chance.randrange(4), self.maybe(True, False)), self.now)
        if effect is not None:
            assert isinstance(effect, TakeDelta) and machine.sending is not Phase.DELIVERED
            machine.handle(Sent(machine.held + 1, lambda: None), self.now)
        held = machine.held
        effect = machine.handle(Polled(held + 1), self.now)
        if isinstance(effect, HandOver) and isinstance(effect.outcome, Round):
            assert effect.outcome.state.index == machine.held == held + 1
        if isinstance(effect, HandOver) and isinstance(effect.outcome, Jump):
            assert effect.outcome.state.index == machine.held
        if self.chance.random() < 0.01:
            machine.handle(GaveUp(), self.now)

    def look(self):
        effect = self.machine.handle(Look(), self.now)
        for _ in range(200):
            if effect is None:
                return
            answer = self.answer(effect)
            for _ in range(self.maybe(0, 0, 1, 2)):
                self.train()
            self.now += self.maybe(0.0, 0.1, 30.0, VOID)
            effect = self.machine.handle(Done(effect, answer), self.now)
        raise AssertionError(f"a look does not end: {effect}")


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(chance=st.randoms(use_true_random=False), shared=st.booleans())
def test_whatever_the_store_answers_only_transitions_of_the_table_follow_and_rounds_come_in_order(chance, shared):
    fate = Fate(chance, shared)
    with suppress(Diverged):
        for _ in range(60):
            fate.look()
            fate.train()
            assert fate.machine.frontier >= fate.machine._reached or fate.machine.following is Phase.JUMPING
            assert len(fate.machine.ready) <= 4


def closed_by_b(machine, inspect, index=1, fingerprint=None, now=0.0):
    """Follow a round that b has closed alone."""
    delta = contribution(machine, "b", digest="ef" * 32, fingerprint=fingerprint)
    record = Record(0, index, machine.previous, delta.fingerprint, "b", (entry(delta),), "cd" * 32)
    read = does(machine.handle(Done(inspect, Inspected(Attempts(record, 1, False), {})), now), ReadDeltas)
    average = does(machine.handle(Done(read, names(delta, index=index)), now), Average)
    return machine.handle(Done(average, Averaged(state(index, float(index)), 0, {})), now)


def test_a_member_that_missed_a_round_is_awaited_again_in_each_fourth():
    machine = new()
    machine.session.members.update([Member("b", 0, joining=False)], 0.0)
    inspect, timeout = delivered(machine), machine.session.straggler_timeout(1, 0.0)
    assert machine.handle(Done(inspect, Inspected(NONE, {})), 0.0) is None
    close = does(machine.handle(Done(inspect, Inspected(NONE, {})), timeout), Close)
    average = does(machine.handle(Done(close, replace(close.record, digest="cd" * 32)), timeout), Average)
    machine.handle(Done(average, Averaged(state(1), 0, {})), timeout)
    assert [set(machine.session.awaited(index, timeout)) for index in (2, 4)] == [set(), {"b"}]


def test_after_a_round_without_its_delta_a_member_makes_all_steps_before_the_next_one():
    machine = new()
    closed_by_b(machine, delivered(machine))
    handed_over = machine.handle(Polled(1), 0.0)
    assert not handed_over.outcome.counted
    assert [bool(machine.handle(Stepped(steps, False), 0.0)) for steps in (5, 6, 7)] == [False, False, True]


def test_a_record_that_names_a_delta_of_an_earlier_life_is_told_from_one_without_this_member():
    for member, digest, counted, earlier in (
        ("b", "ef" * 32, False, False),
        ("a", "ef" * 32, False, True),
        ("a", HEX, True, False),
    ):
        machine = new()
        inspect = delivered(machine)
        delta = contribution(machine, member, digest)
        record = Record(0, 1, "", machine.fingerprint, "b", (entry(delta),), "cd" * 32)
        effect = machine.handle(Done(inspect, Inspected(Attempts(record, 1, False), {})), 0.0)
        if isinstance(effect, ReadDeltas):
            effect = machine.handle(Done(effect, names(delta)), 0.0)
        machine.handle(Done(does(effect, Average), Averaged(state(1), 0, {})), 0.0)
        outcome = machine.handle(Polled(1), 0.0).outcome
        assert (outcome.counted, outcome.earlier) == (counted, earlier)


def test_a_state_is_offered_as_a_snapshot_once_no_newer_one_is_ready():
    machine = new()
    following = does(closed_by_b(machine, delivered(machine)), Inspect)
    closed_by_b(machine, following, 2, fingerprint=state(1, 1.0).fingerprint())
    first, second = (machine.handle(Polled(index), 0.0) for index in (1, 2))
    assert first.offer is None and second.offer.state.index == 2


def test_nobody_closes_a_round_that_its_own_delta_is_not_in():
    """Its own delta is one for the round before, which training has not applied yet."""
    machine = new()
    inspect = does(averaged(machine), Inspect)
    others = names(contribution(machine, "b", digest="ef" * 32), index=2)
    read = does(machine.handle(Done(inspect, Inspected(NONE, others)), 0.0), ReadDeltas)
    assert machine.handle(Done(read, others), 999.0) is None


def test_a_member_with_other_bits_for_the_second_time_stops_once_the_others_have_had_time_to_vote():
    machine = new()
    closed_by_b(machine, does(machine.handle(Look(), 0.0), Inspect), fingerprint=99)
    machine.handle(Polled(1), 0.0)
    machine._differs = 1  # it has recomputed its state
    ttl = machine.session.options.ttl
    for now in (0.0, ttl - 1.0):
        votes = does(machine.handle(Look(), now), CountVotes)
        assert machine.handle(Done(votes, False), now) is None and machine.phase is Phase.JUDGING
    votes = does(machine.handle(Look(), ttl), CountVotes)
    with pytest.raises(Diverged, match="computes other bits"):
        machine.handle(Done(votes, False), ttl)
