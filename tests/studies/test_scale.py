"""The study of many members: its world is the protocol's, and its page shows what was measured."""

import pytest

from diloco.bucket import deltas
from studies.bucket import scale
from studies.bucket.virtual import Plan, crowd


@pytest.fixture(scope="module")
def worlds():
    """Four members and three rounds, with the pieces that the study has."""
    before, deltas.LEAST = deltas.LEAST, scale.LEAST
    try:
        yield [(world, world.members[0].count.copy()) for world in crowd(Plan(4, sync_every=20), 3)]
    finally:
        deltas.LEAST = before


def test_in_virtual_time_all_members_are_in_every_round(worlds):
    world = worlds[-1][0]
    taken = [outcome for member in world.members for _, outcome in member.rounds]
    assert len(taken) == 4 * 3 and all(len(outcome.members) == 4 and outcome.counted for outcome in taken)


def test_the_bytes_that_are_counted_are_those_of_the_layout_and_little_else(worlds):
    (_, first), (_, last) = worlds[0], worlds[-1]
    up, down = scale.values_moved(scale.VALUES, 4)
    for what, predicted in (("up", up), ("down", down)):
        found = (last[what, "values"] - first[what, "values"]) / 2
        assert predicted < found < 1.6 * predicted  # of the first member, which averages more shares in some rounds


@pytest.mark.parametrize("members", [4, 64, 1024])
def test_a_large_fragment_costs_what_an_all_reduce_costs_and_what_was_counted_beside_it(members):
    up, down = scale.values_moved(scale.VALUES, members)
    row = {"members": members, "values": scale.VALUES, "up values": up + 10, "down values": down + 20, "up beside": 1.0,
           "down beside": 2.0, "listed beside": 3.0}  # fmt: skip
    large = scale.values_moved(scale.LARGE, members)
    moved, kept = scale.moved(row, scale.LARGE, outer=0), scale.snapshots(scale.LARGE, 0, members)
    assert moved == pytest.approx((large[0] + kept + 11, large[1] + 25))
    assert 1 < max(moved) / scale.bound(scale.LARGE, members) < 1.3
