"""The own delta: what it costs, how long it takes, and which of several counts."""

import pytest
import torch

from diloco import TwoBit
from diloco.bucket.rounds import folder
from diloco.bucket.store import All, Create
from diloco.exchange.reducer import Round
from tests.support.players import SETTINGS, SYNC_EVERY, Player, World, meet, one_member, train


def rounds(player):
    return [outcome for _, outcome in player.reduce.outcomes if isinstance(outcome, Round)]


def test_a_round_tells_the_bytes_of_its_own_delta_and_the_seconds_until_its_mean_was_known():
    world, a = one_member(1)
    for closed in range(1, 4):
        while not a.reduce._fragments[0].machine.own.waiting:
            a.step()
        world.now += 1.5
        a.turn()
        world.now += 1.0
        a.step()
        round = rounds(a)[-1]
        own = [len(data) for name, data in world.objects.items() if name.startswith(folder(0, closed) + "d-a-")]
        assert len(own) == 1
        assert (round.state.index, round.cost.bytes_sent, round.cost.seconds) == (closed, sum(own), 1.5)


def test_a_round_tells_the_bytes_of_the_others_deltas_alone():
    world = World(1)
    a, b = Player(world, "a"), Player(world, "b")
    meet(a, b)
    train(world, (a, b), 20)
    together = [round for round in rounds(a) if {"a", "b"} <= round.members.keys()]
    assert len(together) > 2
    for round in together:
        theirs = [
            len(data) for name, data in world.objects.items() if name.startswith(folder(0, round.state.index) + "d-b-")
        ]
        assert round.cost.bytes_received in theirs


def test_a_delta_without_work_does_not_decide_the_unit():
    """A member that finishes before its first step cannot have counted, whatever the others count."""
    world = World(1)
    idle, counting = Player(world, "idle"), Player(world, "counting")
    idle.turn()
    fragment = idle.diloco._fragments[0]
    fragment.send(idle.diloco.replica.work)  # as finish() does
    idle.turn()
    assert any("/d-idle-" in name for name in world.objects) and "unit" not in world.objects
    counting.turn()
    for _ in range(2 * SYNC_EVERY):
        counting.diloco.count(5)
        counting.step()
        counting.turn()
        world.now += 1.0
    assert b"tokens" in world.objects["unit"]


@pytest.mark.parametrize("known", [False, True])
def test_when_an_older_delta_counts_instead_of_the_newest_the_steps_since_are_kept_or_said_to_be_lost(known):
    """The first delta of a arrives only after a has replaced it, or while the replacement waits. b closes the round."""
    world, settings = World(1), SETTINGS | {"codec": TwoBit()}
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    a = Player(world, "a", model=model, settings=settings)
    b = Player(world, "b", model=torch.nn.Linear(8, 1, bias=False), settings=settings)
    a.rate = b.rate = torch.arange(1.0, 9.0)
    meet(a, b)
    machine = a.reduce._fragments[0].machine
    while not machine.own.waiting or not rounds(a):
        for player in (b, a):
            player.turn()
            player.step()
        world.now += 0.5
    before = len(rounds(a))
    assert rounds(a)[-1].own is not None
    while not isinstance(a.want(1), All) or not isinstance(a.want(1).operations[0], Create):
        a.go(1)
    if not known:
        a.go(1, "slow")
    while not machine.own.waiting:
        a.step()
    if not known:
        a.go(1, "refused")
    a.finish_tick(1)
    for put in world.limbo:
        world.attempt(put)
    closed = world.closed(0)
    while world.closed(0) == closed:
        b.step()
        b.turn()
        world.now += 0.5
    fragment = a.diloco._fragments[0]
    older, rate = fragment._replaced[-1].steps, a.rate
    a.turn()
    a.rate = 0.0
    a.step()
    outcome, since = rounds(a)[-1], a.diloco.step_count - older - 1
    assert len(rounds(a)) == before + 1 and outcome.counted and outcome.newer == 1 and since >= SYNC_EVERY
    assert (outcome.own is not None) is known
    trained = a.model.weight.detach().flatten() - fragment.state.anchor
    if known:  # with what the codec lost of the older one
        assert fragment.counted.steps == older and (trained - since * rate).abs().max() < SYNC_EVERY * rate.max()
    else:
        assert fragment.lost == (older, older + since + 1) and not trained.any()
