"""Who waits for whom: members of unequal speed and uplink, each on its own clock, and strict pace."""

import threading

import pytest

from diloco.bucket.timing import LONGEST_GRACE
from tests.support.members import PATIENT, Member, agree, until
from tests.support.players import Paced, World, live


def together(member):
    return sum(len(round.members) == 2 for round in member.rounds) / len(member.rounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "uploads"),
    [((0.1, 0.1), (1.5, 1.5)), ((0.1, 0.1), (0.0, 1.5)), ((0.1, 1.0), (0.0, 0.0)), ((0.05, 0.05), (1.5, 1.5))],
    ids=["both upload for long", "one does", "one is ten times slower", "both for longer than sync_every steps"],
)
def test_a_round_waits_as_long_as_the_slowest_it_waits_for_needs(steps, uploads):
    world = World(1)
    a = Paced(world, "a", steps[0], uploads[0])
    b = Paced(world, "b", steps[1], uploads[1], begins=1.0)
    live(world, (a, b), 90.0)
    assert len(a.rounds) > 10
    assert together(a) > 0.6


def test_who_is_never_counted_is_named_once_a_spell():
    world = World(1)
    a, b = Paced(world, "a", 0.1, 0.0, grace=0.1), Paced(world, "b", 0.1, 1.5, begins=1.0)
    live(world, (a, b), 60.0)
    named = [event for event in b.player.reduce.events() if event["event"] == "not counted"]
    assert not any(round.counted for round in b.rounds[-8:])
    assert [(event["fragment"], event["rounds"]) for event in named] == [(0, 8)]
    assert not [event for event in a.player.reduce.events() if event["event"] == "not counted"]


def test_the_grace_is_capped_whatever_another_says():
    world = World(1)
    a, b = Paced(world, "a", 0.1, 0.0), Paced(world, "b", 0.1, 0.0)
    live(world, (a, b), 3.0)
    b.player.reduce.session.timing.uploaded(0, 1e9)
    for member in (b, a):
        member.player.finish_tick(0)
    assert a.player.reduce.session.grace(4) == LONGEST_GRACE


@pytest.mark.slow
@pytest.mark.parametrize("late", [3, 6, 9])
def test_in_strict_pace_one_that_joins_off_phase_is_in_all_rounds_from_then_on(late, tmp_path):
    """Each would wait for the other with another fragment."""
    reached, both = threading.Event(), threading.Event()

    def wait_for_b():
        reached.set()
        assert both.wait(PATIENT)

    a = Member(tmp_path, "a", 120, pace="strict", heartbeat=0.1, at={late: wait_for_b})
    assert reached.wait(PATIENT)
    b = Member(tmp_path, "b", 60, pace="strict", heartbeat=0.1)
    until(lambda: a.others and b.joined.is_set(), a, b)
    both.set()
    b.end()
    a.end()
    agree(a, b)
    assert {round.fragment for round in b.rounds if round.sent_step == 60} == {0, 1, 2}  # finish() waits for all
    assert len(b.rounds) >= 12 and all(round.members == 2 and round.counted for round in b.rounds[-9:])


@pytest.mark.slow
def test_in_strict_pace_members_in_phase_keep_to_the_schedule(tmp_path):
    """However unequal their speed: a call is answered only where they would wait for each other forever."""
    gate = threading.Barrier(2)
    members = [Member(tmp_path, name, 40, pace="strict", pause=0.02 * k, gate=gate) for k, name in enumerate("ab")]
    for member in members:
        member.end()
    schedule = members[0].diloco.schedule
    sent = {(round.fragment, round.sent_step) for member in members for round in member.rounds if round.sent_step < 40}
    assert len(sent) > 6 and all(schedule.sends_at(fragment, step) for fragment, step in sent)
