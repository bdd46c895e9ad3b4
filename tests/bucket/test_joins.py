"""How long who comes late waits for the store: counted in requests that wait for each other, whatever one takes."""

import pytest

from diloco.bucket import snapshots as snapshot
from tests.support.players import Player, World

ROUNDS = 60


@pytest.fixture(autouse=True)
def from_the_start(monkeypatch):
    """No snapshots but the first, so that there is much to follow."""
    monkeypatch.setattr(snapshot, "MOVED", 1 << 40)


def run(world):
    """A member that has closed all rounds alone."""
    a = Player(world, "a")
    while min(a.held, default=0) < ROUNDS:
        a.turn()
        a.step()
        world.now += 0.5
    a.turn()
    return a


def test_fragments_are_caught_up_side_by_side():
    """The core takes a round of each in turn: one that it does not take is not followed further."""
    world = World(3)
    run(world)
    b = Player(world, "b")
    for job in (-1, 1, 2, 3):
        b.finish_tick(job)
    b.step()
    assert [fragment for fragment, _ in b.reduce.outcomes] == [0, 1, 2, 0, 1, 2]
