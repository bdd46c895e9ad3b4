"""Who waits for whom: members of unequal speed and uplink, each on its own clock."""

import warnings

import pytest

from diloco.bucket import rounds
from diloco.bucket.members import LONGEST_STRAGGLER_TIMEOUT
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


def test_pieces_that_take_longer_than_sync_every_steps_arrive(monkeypatch):
    monkeypatch.setattr(rounds, "LEAST", 64)
    monkeypatch.setattr(rounds, "UNIT", 256)
    world = World(1, values=2048)
    member = Paced(world, "a", 0.05, 1.5)
    live(world, (member,), 60.0)
    assert any(name.startswith("pieces/") for name in world.objects)
    assert len(member.rounds) > 5


def test_who_is_never_counted_is_named_once_a_spell():
    world = World(1)
    a, b = Paced(world, "a", 0.1, 0.0, straggler_timeout=0.1), Paced(world, "b", 0.1, 1.5, begins=1.0)
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
    assert a.player.reduce.session.straggler_timeout(4, world.now) == LONGEST_STRAGGLER_TIMEOUT


@pytest.mark.parametrize(("rates", "warned"), [((1.0, 1.0), 1), ((1.0, 2.0), 0)])
def test_members_on_the_same_data_are_named_once_by_each(rates, warned):
    """On one clock they take the same steps between rounds, so equal data means equal deltas."""
    world = World(1)
    members = [Paced(world, name, 0.1, rate=rate) for name, rate in zip("ab", rates, strict=True)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        live(world, members, 30.0)
    messages = [str(warning.message) for warning in caught if "same data" in str(warning.message)]
    assert len(messages) == warned * len(members)
    assert all("replicas a and b sent identical updates" in message for message in messages)
