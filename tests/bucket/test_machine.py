"""The state machine of a fragment by itself: events in, effects out, without a store, a thread or a clock."""

from collections import deque
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco import Float32
from diloco.bucket.machine import (
    Average,
    Averaged,
    Close,
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
    Machine,
    Missing,
    Polled,
    ReadDeltas,
    Recheck,
    SeeWhetherClosed,
    Sent,
    Stepped,
    TakeDelta,
)
from diloco.bucket.members import Member, MemberOptions, Phase, Timing
from diloco.bucket.rounds import Attempts, Contribution, EncodedDelta, Entry, Record, delta_name, layout_of, record_name
from diloco.bucket.rules import BEHIND, VOID
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
    machine = Machine(number, layout_of(Float32(), 2), session, set())
    machine.start_from(state(0), "")
    return machine


def contribution(machine, member="a", digest=HEX, tokens=1.0, fingerprint=None):
    fingerprint = machine.fingerprint if fingerprint is None else fingerprint
    return Contribution(member, digest, fingerprint, tokens, (torch.zeros(8, dtype=torch.uint8),), 8)


def names(*deltas, index=1):
    return {delta_name(0, index, delta.member, delta.digest): delta for delta in deltas}


def encoded(machine, index=1, digest=HEX):
    head = Sealed(delta_name(0, index, "a", digest), digest, b"head", ())
    return EncodedDelta(contribution(machine, digest=digest), head)


def does(effect, kind):
    assert isinstance(effect, kind), effect
    return effect


def look(machine, kind=Inspect, now=0.0):
    """What the machine does next. `kind`: what that must be."""
    return does(machine.handle(Look(), now), kind)


def done(machine, effect, answer, kind=None, now=0.0):
    """The same after an effect was performed. `kind` None: nothing more."""
    following = machine.handle(Done(effect, answer), now)
    assert following is None if kind is None else isinstance(following, kind), following
    return following


def seen(record=None, deltas=(), branched=False):
    """An answer to a look at the open round."""
    attempts = Attempts(record, int(record is not None or branched), branched)
    return Inspected(attempts, names(*deltas, index=record.index if record else 1))


def sent(machine, digest=HEX, now=0.0):
    """Up to the put of this member's own delta."""
    index = machine.held + 1
    machine.handle(Sent(index, lambda: None), now)
    return done(machine, look(machine, Encode, now), encoded(machine, index, digest), Deliver, now)


def delivered(machine, now=0.0, digest=HEX):
    """Up to the look at the round with this member's own delta in it."""
    return done(machine, sent(machine, digest, now), True, Inspect, now)


def closed(machine, now=0.0):
    """Up to the mean of a round that this member closes alone."""
    close = done(machine, delivered(machine, now), seen(), Close, now)
    return done(machine, close, replace(close.record, digest="cd" * 32), Average, now)


def averaged(machine, value=1.0, now=0.0):
    average = closed(machine, now)
    return machine.handle(Done(average, Averaged(state(average.record.index, value), 0, {})), now)


def entry(delta):
    return Entry(delta.member, delta.digest, delta.tokens, delta.lr)


def record_of(machine, *deltas, index=1, fingerprint=None, heads=""):
    """The record of b."""
    fingerprint = machine.fingerprint if fingerprint is None else fingerprint
    return Record(0, index, machine.previous, fingerprint, "b", tuple(map(entry, deltas)), "cd" * 32, heads)


def closed_by_b(machine, inspect, index=1, fingerprint=None, now=0.0, delta=None):
    """Follow a round that b has closed."""
    delta = delta or contribution(machine, "b", "ef" * 32, fingerprint=fingerprint)
    record = record_of(machine, delta, index=index, fingerprint=delta.fingerprint)
    effect = does(machine.handle(Done(inspect, seen(record)), now), ReadDeltas | Average)
    if isinstance(effect, ReadDeltas):
        effect = done(machine, effect, names(delta, index=index), Average, now)
    return machine.handle(Done(effect, Averaged(state(index, float(index)), 0, {})), now)


def others(machine, *members):
    machine.session.members.update([Member(name, 0, joining=False) for name in members], 0.0)


def many(number=0):
    """A machine of one of four members that average shares. The next round begins with itself if `number` is 0."""
    machine = new(number=number)
    machine._layout = replace(machine._layout, cuts=(slice(0, 1), slice(1, 2)))
    others(machine, *"bcd")
    machine.seen.order = ("d", "a", "b", "c")
    return machine


def test_the_first_send_is_the_schedules_so_that_fragments_take_turns():
    machine = new()
    assert machine.handle(Stepped(9, False), 0.0) is None
    does(machine.handle(Stepped(1, True), 0.0), TakeDelta)


def test_a_round_waits_for_expected_members_and_closes_after_the_straggler_timeout():
    machine = new()
    others(machine, "b")
    done(machine, delivered(machine), seen())
    assert machine.phase is Phase.DELIVERED
    timeout = machine.session.straggler_timeout(1, 0.0)
    others(machine, "c")
    late = names(contribution(machine, "c", "ef" * 32))  # a later delta does not begin the timeout again
    read = done(machine, look(machine, now=timeout - 0.1), Inspected(NONE, late), ReadDeltas, timeout - 0.1)
    done(machine, read, late, now=timeout - 0.1)
    done(machine, look(machine, now=timeout), Inspected(NONE, late), Close, timeout)


def test_many_members_take_turns_to_list_and_to_close():
    assert delivered(many()).listed is Listed.NOW
    machine = many(number=1)
    assert look(machine).listed is Listed.IDLE
    inspect = delivered(machine)
    assert inspect.listed is Listed.NOT
    done(machine, inspect, Inspected(NONE, None), now=99.0)
    assert look(machine, now=3 * machine.session.timing.turn).listed is Listed.NOW


def test_another_members_delta_calls_once_and_completes_the_round():
    machine = new()
    others(machine, "b")
    deltas = names(contribution(machine, "b", "ef" * 32))
    done(machine, done(machine, look(machine), Inspected(NONE, deltas), ReadDeltas), deltas)
    assert machine.handle(Stepped(0, False), 0.0) is None
    does(machine.handle(Stepped(1, False), 0.0), TakeDelta)
    deliver = sent(machine)
    assert machine.handle(Stepped(1, False), 0.0) is None
    does(machine.handle(Stepped(2, False), 0.0), TakeDelta)  # not delivered yet, so that it may be replaced
    close = done(machine, done(machine, deliver, True, Inspect), Inspected(NONE, deltas), Close)
    assert [entry.member for entry in close.record.entries] == ["a", "b"]


def test_a_call_for_a_round_that_training_has_not_reached_is_not_answered():
    machine = new()
    inspect = does(closed_by_b(machine, look(machine)), Inspect)
    deltas = names(contribution(machine, "b", "ef" * 32), index=2)
    done(machine, done(machine, inspect, Inspected(NONE, deltas), ReadDeltas), deltas)
    machine.ready.clear()
    assert machine.handle(Stepped(1, False), 0.0) is None


def test_no_outcome_is_handed_over_before_it_is_known_whether_the_newest_delta_is_in_it():
    machine = new()
    done(machine, closed(machine), Averaged(state(1), 0, {}), Inspect)
    machine.handle(Sent(1, lambda: None), 0.0)
    assert machine.handle(Polled(1), 0.0) is None
    machine.handle(Done(look(machine, Encode), encoded(machine)), 0.0)
    assert isinstance(machine.handle(Polled(1), 0.0), HandOver)


def test_a_newer_delta_replaces_one_that_is_not_delivered_and_none_that_is():
    machine = new()
    machine.handle(Sent(1, lambda: None), 0.0)
    old = look(machine, Encode)
    does(machine.handle(Stepped(2, True), 0.0), TakeDelta)
    machine.handle(Sent(1, lambda: None), 0.0)
    encode = done(machine, old, encoded(machine), Encode)
    assert encode.sent is not old.sent
    deliver = done(machine, encode, encoded(machine), Deliver)
    machine.handle(Sent(1, lambda: None), 0.0)
    assert not machine.is_stale(1, failed=False)  # an upload may always take longer than training takes to send again
    assert machine.is_stale(1, failed=True)
    done(machine, deliver, False, Inspect)  # a slow uplink keeps nobody from following the rounds
    done(machine, done(machine, look(machine, Encode), encoded(machine), Deliver), True, Inspect)
    assert machine.phase is Phase.DELIVERED and machine.handle(Stepped(9, True), 0.0) is None


def test_training_may_send_once_more_and_the_newest_delta_counts():
    machine = new()
    delivered(machine)
    close = done(machine, delivered(machine, digest="12" * 32), seen(), Close)
    assert [entry.digest for entry in close.record.entries] == ["12" * 32]


def test_a_delta_that_is_not_finite_is_dropped_and_resets():
    machine = new()
    machine.handle(Sent(1, lambda: None), 0.0)
    machine.handle(Done(look(machine, Encode), None), 0.0)
    assert machine.handle(Polled(1), 0.0) == HandOver(Dropped(reset=True, non_finite=True))
    assert machine.phase is Phase.IDLE
    assert [event["event"] for event in machine.session.drain_events()] == ["not finite"]


def test_an_answer_that_comes_too_late_changes_nothing():
    machine = new()
    average = closed(machine)
    once = Averaged(state(1), 0, {})
    machine.handle(Done(average, once), 0.0)
    before = machine.frontier, machine.phase, len(machine.ready)
    for effect, answer in ((average, once), (Load(None), (state(7), "")), (CountVotes(average.record), True)):
        machine.handle(Done(effect, answer), 0.0)
    assert (machine.frontier, machine.phase, len(machine.ready)) == before


@pytest.mark.parametrize(("sends", "followed"), [(True, True), (True, False), (False, None)])
def test_who_may_not_replace_a_record_goes_on_waiting_for_a_snapshot(sends, followed):
    """Others have followed it; or its own delta is lost, too; or it has sent none."""
    machine = new()
    record = record_of(machine, contribution(machine, "b", "ef" * 32))
    inspect = delivered(machine) if sends else look(machine)
    machine.seen.lacking_since, machine.seen.deltas = 0.0, {}
    read = done(machine, inspect, seen(record), ReadDeltas, VOID)
    effect = machine.handle(Done(read, dict.fromkeys(read.names)), VOID)
    if sends:
        effect = machine.handle(Done(does(effect, Inspect), seen(record if followed else None)), VOID)
    if sends and not followed:
        effect = machine.handle(Done(does(effect, Inspect), seen(record)), VOID)
    assert effect is None and machine.phase is Phase.JUMPING
    assert [e["event"] for e in machine.session.drain_events()].count("gone") == 0  # it was said before


def test_missing_shares_lead_to_a_snapshot_and_unfinished_ones_are_asked_for_again():
    machine = many()
    record = record_of(machine, heads="12" * 32)
    done(machine, done(machine, look(machine), seen(record), Average), None)
    assert machine.phase is Phase.AVERAGING
    done(machine, look(machine, Average), Missing())
    assert machine.phase is Phase.JUMPING


@pytest.mark.parametrize("how", ["tokens", "heads", "heads of a small fragment"])
def test_a_record_that_misstates_a_delta_is_void(how):
    machine = many() if how == "heads" else new()
    delta = contribution(machine, "b", "ef" * 32)
    lie = record_of(machine, delta, heads="" if how == "tokens" else "12" * 32)
    if how == "tokens":
        lie = replace(lie, entries=(replace(entry(delta), tokens=9.0),))
        done(machine, done(machine, look(machine), seen(lie), ReadDeltas), names(delta), Inspect)
    elif how == "heads":
        done(machine, done(machine, look(machine), seen(lie), Average), Invalid("x"), Inspect)
    else:
        done(machine, look(machine), seen(lie), Inspect)
    assert machine.void == {lie.digest} and machine.session.drain_events()[-1]["event"] == "lie"


@pytest.mark.parametrize("outvoted", [True, False])
def test_a_record_against_other_bits_is_judged_by_the_others_deltas(outvoted):
    machine = new()
    closed_by_b(machine, look(machine), fingerprint=99)
    digest = machine.ready[0].record.digest
    assert machine.handle(Polled(1), 0.0) is None and machine.phase is Phase.JUDGING
    done(machine, look(machine, CountVotes), outvoted, Inspect if outvoted else Load)
    assert (digest in machine.void) is outvoted


@pytest.mark.parametrize(("other", "closes_at_once"), [(-1, False), (1, True)])
def test_at_a_tie_the_side_with_the_smaller_fingerprint_closes_and_the_other_one_later(other, closes_at_once):
    machine = new()
    machine.start_from(state(0, 1.0), "")
    machine._differs = 1  # the state was computed anew
    deltas = names(contribution(machine, "b", "ef" * 32, fingerprint=machine.fingerprint + other))
    ttl = machine.session.options.ttl
    for now in (0.0, 2 * ttl, 2 * ttl + 1):
        inspect = look(machine, now=now) if now else delivered(machine)
        effect = machine.handle(Done(inspect, Inspected(NONE, deltas)), now)
        if isinstance(effect, ReadDeltas):
            effect = machine.handle(Done(effect, deltas), now)
        assert isinstance(effect, Close) is (closes_at_once or now > 2 * ttl)
        if effect is not None:
            break


def test_who_holds_other_bits_than_most_recomputes_its_state_and_closes_nothing():
    machine = new()
    deltas = names(*(contribution(machine, name, name * 64, fingerprint=99) for name in "bc"))
    read = done(machine, delivered(machine), Inspected(NONE, deltas), ReadDeltas)
    done(machine, read, deltas)
    assert machine.phase is Phase.JUMPING and look(machine, Load).target.before == 1  # what they put later is no help
    ttl, machine = machine.session.options.ttl, new()
    machine._differs = 1  # it has recomputed its state, and still differs
    read = done(machine, delivered(machine), Inspected(NONE, deltas), ReadDeltas)
    done(machine, read, deltas)
    done(machine, look(machine, now=ttl - 1.0), Inspected(NONE, deltas), now=ttl - 1.0)
    with pytest.raises(Diverged, match="computes other bits"):
        machine.handle(Done(look(machine, now=ttl), Inspected(NONE, deltas)), ttl)


def test_who_was_too_far_behind_gives_up_its_local_work_and_no_longer_asks_for_a_snapshot():
    machine = new()
    average = closed(machine)
    machine.ready.append(Jump(state(-9)))  # training has not taken it yet
    far = done(machine, average, Averaged(state(1), 0, {}), SeeWhetherClosed)
    assert far.index == -9 + BEHIND + 1
    done(machine, done(machine, far, True, Load), None)  # enough is ready
    machine.ready.clear()
    inspect = look(machine)
    assert machine.session._wants == {0: 10}
    done(machine, inspect, seen())
    assert machine.ready[-1] == Dropped(reset=True) and not machine.session._wants


def test_a_round_that_was_read_wrongly_leads_to_a_snapshot_of_before_and_a_second_one_stops():
    machine = new()
    done(machine, done(machine, look(machine), seen(branched=True), Recheck), 3)
    load = look(machine, Load)
    assert load.target.before == 3
    done(machine, load, (state(1), ""), Inspect)
    recheck = done(machine, look(machine), seen(branched=True), Recheck)
    assert dict(recheck.links) == {1: ""}  # only what was followed since
    with pytest.raises(Diverged, match="for the second time"):
        machine.handle(Done(recheck, 3), 0.0)
    machine = new()
    inspect = done(machine, done(machine, look(machine), seen(branched=True), Recheck), None, Inspect)
    done(machine, inspect, seen(branched=True))


def test_a_replaced_record_that_training_has_not_taken_is_judged_and_costs_nothing():
    machine = new()
    inspect = does(closed_by_b(machine, look(machine), fingerprint=99), Inspect)
    recheck = done(machine, inspect, seen(branched=True), Recheck)
    judging = does(machine.handle(Done(recheck, 1), 0.0), CountVotes)
    done(machine, judging, True, Inspect)
    assert (machine.held, machine.frontier, machine.ready) == (0, 0, deque()) and not machine._branches


def test_a_snapshot_to_recompute_a_state_from_may_be_unreadable_for_a_while():
    machine = new()
    done(machine, done(machine, look(machine), seen(branched=True), Recheck), 1)
    ttl = machine.session.options.ttl
    done(machine, look(machine, Load), None, now=ttl - 1)
    with pytest.raises(Diverged, match="no earlier snapshot is left"):
        machine.handle(Done(look(machine, Load), None), ttl)


def test_the_last_round_ends_the_fragment_and_a_later_delta_is_dropped():
    machine = new(rounds=1)
    assert averaged(machine) is None and machine.following is Phase.ENDED
    machine.handle(Polled(1), 0.0)
    assert machine.phase is Phase.ENDED and machine.handle(Stepped(5, True), 0.0) is None
    machine.handle(Sent(2, lambda: None), 0.0)
    assert machine.handle(Polled(2), 0.0) == HandOver(Dropped())


def test_who_gives_up_expects_nothing_and_forgets_what_arrives_in_the_store_later():
    machine = new()
    deliver = sent(machine)
    assert machine.expects_outcome
    machine.handle(GaveUp(), 0.0)
    assert not machine.expects_outcome
    machine.handle(Done(deliver, True), 0.0)
    assert machine.sending is Phase.IDLE and machine.own.delivered is None


def test_no_object_of_another_place_is_taken_for_a_delta():
    machine = new()
    listed = [record_name(0, 1, 0), "rounds/00000/001/0000/closed.x", "rounds/00000/001/0000/d-b-zz"]
    done(machine, look(machine), Inspected(NONE, listed))
    assert {e["object"] for e in machine.session.drain_events()} == set(listed[1:])


def test_a_member_that_missed_a_round_is_awaited_again_in_each_fourth():
    machine = new()
    others(machine, "b")
    inspect, timeout = delivered(machine), machine.session.straggler_timeout(1, 0.0)
    done(machine, inspect, seen())
    close = done(machine, inspect, seen(), Close, timeout)
    average = done(machine, close, replace(close.record, digest="cd" * 32), Average, timeout)
    done(machine, average, Averaged(state(1), 0, {}), Inspect, timeout)
    assert [set(machine.session.awaited(index, timeout)) for index in (2, 4)] == [set(), {"b"}]


def test_after_a_round_without_its_delta_a_member_makes_all_steps_before_the_next_one():
    machine = new()
    closed_by_b(machine, delivered(machine))
    assert not machine.handle(Polled(1), 0.0).outcome.counted
    assert [bool(machine.handle(Stepped(steps, False), 0.0)) for steps in (5, 6, 7)] == [False, False, True]


@pytest.mark.parametrize(
    ("member", "digest", "counted", "earlier"),
    [("b", "ef" * 32, False, False), ("a", "ef" * 32, False, True), ("a", HEX, True, False)],
)
def test_a_record_that_names_a_delta_of_an_earlier_life_is_told_from_one_without_this_member(
    member, digest, counted, earlier
):
    machine = new()
    closed_by_b(machine, delivered(machine), delta=contribution(machine, member, digest))
    outcome = machine.handle(Polled(1), 0.0).outcome
    assert (outcome.counted, outcome.earlier) == (counted, earlier)


def test_nobody_closes_a_round_that_its_own_delta_is_not_in():
    """Its own delta is one for the round before, which training has not applied yet."""
    machine = new()
    inspect = does(averaged(machine), Inspect)
    deltas = names(contribution(machine, "b", digest="ef" * 32), index=2)
    done(machine, done(machine, inspect, Inspected(NONE, deltas), ReadDeltas), deltas, now=999.0)


def test_a_member_with_other_bits_for_the_second_time_stops_once_the_others_have_had_time_to_vote():
    machine = new()
    closed_by_b(machine, look(machine), fingerprint=99)
    machine.handle(Polled(1), 0.0)
    machine._differs = 1  # it has recomputed its state
    ttl = machine.session.options.ttl
    for now in (0.0, ttl - 1.0):
        done(machine, look(machine, CountVotes, now), False, now=now)
        assert machine.phase is Phase.JUDGING
    with pytest.raises(Diverged, match="computes other bits"):
        machine.handle(Done(look(machine, CountVotes, ttl), False), ttl)


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
            case Average(record):
                average = Averaged(state(effect.before.index + 1, self.chance.random()), 0, {})
                return self.maybe(None, Missing(), Invalid("x"), average) if record.heads else average
            case Load(target):
                least = max(target.least, 0)
                before = least + 3 if target.before is None else target.before
                return self.maybe(None, (state(self.chance.randint(least, max(before, least))), ""))
            case Recheck():
                return self.maybe(None, None, None, index - 1)
            case _:  # Deliver, SeeWhetherClosed, CountVotes
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


def test_only_the_last_of_the_deltas_that_could_not_be_delivered_keeps_its_values():
    machine = new()
    for number in range(5):
        deliver = sent(machine, f"{number:02d}" * 32)
        machine.handle(Done(deliver, False), 0.0)
    assert [delta.payloads is not None for delta in machine.own.encoded.values()] == [False] * 4 + [True]


def test_what_followed_a_record_that_was_outvoted_is_forgotten():
    machine = new()
    again = closed_by_b(machine, look(machine), fingerprint=99)
    closed_by_b(machine, again, index=2)
    assert machine.frontier == 2
    machine.handle(Polled(1), 0.0)
    done(machine, look(machine, CountVotes), True, Inspect)
    assert set(machine._links) == {0}
