"""How long who comes late waits for the store: counted in requests that wait for each other, whatever one takes."""

import pytest

from diloco.bucket import machine
from diloco.bucket import snapshots as snapshot
from diloco.bucket.round_store import REACH, SMALL
from diloco.bucket.store import All, Pause, Read, Work
from diloco.bucket.store.store import CONNECTIONS
from tests.support.players import Player, World, complete

ROUNDS = 60


@pytest.fixture(autouse=True)
def from_the_start(monkeypatch):
    """No snapshots but the first, so that there is much to follow."""
    monkeypatch.setattr(snapshot, "EVERY", 1 << 40)


def run(world):
    """A member that has closed all rounds alone."""
    a = Player(world, "a")
    while min(a.held, default=0) < ROUNDS:
        a.turn()
        a.step()
        world.now += 0.5
    a.turn()
    return a


def depth(player, job):
    """Let a job end. Returns the requests of which each had to wait for the one before."""
    waits = 0
    while True:
        operation = player.want(job)
        each = operation.operations if isinstance(operation, All) else [operation]
        requests = sum(not isinstance(o, (Work, Pause, type(None))) for o in each)
        waits += -(-requests // CONNECTIONS)
        if not player.go(job):
            return waits


def follows_everything(monkeypatch):
    """Without waiting for the core to take what was followed."""
    monkeypatch.setattr(machine, "AHEAD", 1 << 20)


def frontiers(player):
    return [each.machine.frontier for each in player.reduce._fragments]


def test_rounds_that_were_closed_before_are_read_many_at_once(monkeypatch):
    world = World(2)
    a = run(world)
    follows_everything(monkeypatch)
    b = Player(world, "b")
    assert depth(b, -1) < 25
    assert max(depth(b, 1), depth(b, 2)) < ROUNDS
    assert frontiers(b) == frontiers(a)
    for _ in range(ROUNDS):
        b.step()
    assert b.held == frontiers(a)  # and the bits are the same, or the world would have raised


def test_so_are_the_records_that_lead_to_a_checkpoint():
    world = World(2)
    again = Player(world, "a", checkpoint=run(world).save())
    assert depth(again, -1) < ROUNDS
    assert again.reduce.entered == [None, None] and min(again.held) >= ROUNDS  # it keeps what it has brought


def test_a_fragment_that_is_far_behind_the_others_is_no_slower(monkeypatch):
    """Its rounds are not in the listing that the others share."""
    world = World(2)
    a = run(world)
    ahead, state = a.reduce._fragments[0], a.diloco._fragments[0].state
    complete(world, ahead.snapshots.store(state, world.records[0, state.index]))
    follows_everything(monkeypatch)
    b = Player(world, "b")
    depth(b, -1)
    assert frontiers(b)[0] > frontiers(b)[1] + REACH
    depth(b, 1)
    assert depth(b, 2) < ROUNDS and frontiers(b) == frontiers(a)


def test_fragments_are_caught_up_side_by_side():
    """The core takes a round of each in turn: one that it does not take is not followed further."""
    world = World(3)
    run(world)
    b = Player(world, "b")
    for job in (-1, 1, 2, 3):
        b.finish_tick(job)
    b.step()
    assert [fragment for fragment, _ in b.reduce.outcomes] == [0, 1, 2, 0, 1, 2]


class Cut(World):
    """Cuts off records that are read ahead."""

    cuts = False

    def attempt(self, operation):
        answer = super().attempt(operation)
        if self.cuts and isinstance(operation, Read) and operation.limit == SMALL and "/closed." in operation.name:
            return answer and answer[: len(answer) // 2]
        return answer


def test_a_record_that_was_read_ahead_and_is_bad_is_read_again(monkeypatch):
    """A record that is judged to be bad must be so for all members."""
    world = Cut(1)
    a = run(world)
    world.cuts = True
    follows_everything(monkeypatch)
    b = Player(world, "b")
    b.turn()
    assert frontiers(b) == frontiers(a) and b.reduce.session.rejected == 0
