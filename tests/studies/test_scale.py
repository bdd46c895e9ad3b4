"""Members in virtual time follow the protocol, and their bytes are counted."""

import pytest

import diloco.bucket.rounds as rounds_
from studies.bucket import scale
from studies.bucket.virtual import Plan, crowd


@pytest.fixture(scope="module")
def worlds():
    """Four members and three rounds, with fragments as in the study."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_, "LEAST", scale.LEAST)
        yield [(world, world.members[0].count.copy()) for world in crowd(Plan(4, sync_every=20), 3)]


def test_all_members_are_in_every_round_and_move_little_more_than_the_deltas(worlds):
    (_, first), (world, last) = worlds[0], worlds[-1]
    rounds = [outcome for member in world.members for _, outcome in member.rounds]
    assert len(rounds) == 4 * 3 and all(len(outcome.members) == 4 and outcome.counted for outcome in rounds)
    for direction, least in zip(("up", "down"), scale.values_moved(scale.VALUES, 4), strict=True):
        moved = (last[direction, "values"] - first[direction, "values"]) / 2
        assert least < moved < 1.6 * least  # the first member averages more shares in some rounds
