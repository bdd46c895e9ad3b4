"""Members that average shares for each other: who does it, what it costs, and what happens to what is not right."""

from dataclasses import replace

import pytest
import torch

from diloco import Float32
from diloco.bucket import Bucket, snapshots
from diloco.bucket import members as members_
from diloco.bucket.members import Phase
from diloco.bucket.rounds import delta_fields, folder, layout_of, places, seal_delta, share_name
from diloco.bucket.store import Create
from diloco.bucket.store.envelope import Envelope
from diloco.errors import ConfigError, Mismatch
from diloco.exchange.reducer import Jump
from tests.support.players import SYNC_EVERY, Player, World, mean_of
from tests.support.sharing import SHARES, crowd, rounds_of, small_pieces, together


@pytest.fixture(autouse=True)
def pieces(monkeypatch):
    small_pieces(monkeypatch)


def with_stranger(players, head, bodies, index):
    """A delta of a stranger lies in the next round; returns that round, once it is over."""
    players[0].world.objects |= bodies | {head.name: head.body}
    together(players, index + 1)
    return next(round for round in rounds_of(players[0]) if round.state.index == index)


def next_round(players):
    """The index of a round that is open, and whose deltas are against a state that is known."""
    world = players[0].world
    while (0, world.closed(0)) not in world.states:
        together(players, world.closed(0))
    return world.closed(0) + 1


def test_every_member_averages_a_share_and_all_hold_the_mean():
    """`World.holds` compares the bits of all. Steps of 1, 2, 3 and 4, of which the last counts
    as much as any other: the mean of a step is 2.5."""
    world = World(1, values=6)
    players = crowd(world)
    together(players, 3)
    assert {name.rpartition("/")[2] for name in world.objects if name.startswith(folder(0, 2) + "s")} == {
        f"s{k:04d}.0" for k in range(SHARES)
    }
    first = rounds_of(players[0])[0]
    assert set(first.members) == {"a", "b", "c", "d"}
    assert mean_of(players[0], 1).tolist() == [-2.5 * SYNC_EVERY] * 6


def test_few_members_read_all_deltas_as_before():
    world = World(1, values=6)
    players = crowd(world, 3, shares_from=4)
    together(players, 3)
    assert not any("/s0" in name or "/heads-" in name for name in world.objects)
    assert any(name.startswith("pieces/") for name in world.objects)
    players.append(Player(world, "d", shares_from=4))
    players[-1].turn()
    held = players[0].held[0]
    together(players, held + 8)
    assert share_name(0, players[0].held[0], 0, 0) in world.objects


def test_members_that_have_not_seen_each_other_do_not_average_in_place_of_the_others(monkeypatch):
    """Where members are many, it takes a while to see everybody."""
    monkeypatch.setattr(members_, "SAMPLE", 1)
    world, made = World(1, values=6), []
    players = [Player(world, name) for name in "abcdefgh"]
    for player in players:

        def perform(operation, fate, player=player, perform=player._perform):
            if isinstance(operation, Create) and "/s0" in operation.name:
                made.append((operation.name, player.name))
            return perform(operation, fate)

        player._perform = perform
        player.turn()
    together(players, 4)
    previous, crowds = "", 0
    for index in (1, 2, 3):
        record = world.record(0, index, previous)
        names, start, previous = [e.member for e in record.entries], int(record.digest[:8], 16), record.digest
        in_turn = [(share_name(0, index, k, 0), names[(start + k) % len(names)]) for k in range(SHARES)]
        assert sorted(each for each in made if each[0].startswith(folder(0, index))) in (in_turn, [])
        crowds += len(names) >= 4
    assert crowds and made


def test_a_share_of_a_member_that_died_is_made_by_the_next_one():
    world = World(1, values=6)
    players = crowd(world)
    together(players, 2)
    for player in players:
        player.step()
        player.step()
    dead = players[-1]
    for _ in range(40):  # it has delivered, and dies before it averages
        for player in players:
            while player.want(1) is not None:
                operation = player.want(1)
                if player is dead and isinstance(operation, Create) and "/s0" in operation.name:
                    break
                if not player.go(1):
                    break
        world.now += 0.2
        if world.closed(0) >= 3 and all(p.reduce._fragments[0].machine.phase is Phase.AVERAGING for p in players[:3]):
            break
    living, before = players[:3], world.now
    while min(player.reduce._fragments[0].machine.frontier for player in living) < 3:
        for player in living:
            player.turn()
        world.now += 0.2
        assert world.now - before < 30
    together(living, 3)
    assert "d" in rounds_of(living[0])[2].members


def test_a_newcomer_makes_what_is_missing_when_all_others_are_dead(monkeypatch):
    monkeypatch.setattr(snapshots, "EVERY", 1e9)  # it follows all rounds from the beginning
    world = World(1, values=6)
    players = crowd(world)
    together(players, 4)
    for share in range(SHARES):
        del world.objects[share_name(0, 3, share, 0)]
    world.now += 100.0
    newcomer = Player(world, "z", start=9.0)
    newcomer.turn()
    while newcomer.held[0] < 4:  # World.holds compares the bits of each round
        newcomer.turn()
        newcomer.step()
        world.now += 1.0
        assert world.now < 140
    assert share_name(0, 3, 0, 0) in world.objects


def test_one_who_returns_follows_the_shares():
    world = World(1, values=6)
    players = crowd(world)
    together(players, 2)
    saved = players[3].save()
    together(players[:3], 5)
    back = Player(world, "d", saved, rate=4.0)
    back.turn()
    together([*players[:3], back], 8)
    assert not any(isinstance(outcome, Jump) for _, outcome in back.reduce.outcomes)
    assert "d" in rounds_of(players[0])[-1].members


def strange_delta(world, index, broken=None, values=5.0):
    """A delta of member x against the last state. `broken`: which of its pieces is not what the head says."""
    layout, fingerprint = layout_of(Float32(), 6), world.states[0, index - 1]
    payloads, _ = layout.pack(torch.full((6,), values))
    fields = delta_fields(0, index, "x", fingerprint, 2.0, 2.0)
    sealed = seal_delta(Envelope(world.run), layout, fields, payloads)
    bodies = {each.name: each.body for each in sealed.objects}
    if broken is not None:
        part, at = places(sealed.contribution.pieces)[broken]
        name = sealed.objects[part].name
        at += sealed.contribution.pieces[broken].size - 1
        bodies[name] = bodies[name][:at] + bytes([bodies[name][at] ^ 1]) + bodies[name][at + 1 :]
    return sealed.head, bodies


@pytest.mark.parametrize("how", ["altered", "inf"])
def test_a_piece_that_is_not_what_its_head_says_counts_as_zeros(how):
    """Nobody reads a whole delta, so a record may name one that is broken. The averager leaves the piece out."""
    world = World(1, values=6)
    players = crowd(world)
    together(players, 2)
    index = next_round(players)
    head, bodies = strange_delta(world, index, **({"broken": 1} if how == "altered" else {"values": float("inf")}))
    round = with_stranger(players, head, bodies, index)
    assert "x" in round.members
    mean = mean_of(players[0], index)
    if how == "inf":
        assert torch.isfinite(mean).all() and mean[0] == mean[2] == mean[4]
    else:
        assert mean[0] == mean[4] != mean[2]
    invalid = [e for p in players for e in p.reduce.events() if e["event"] == "invalid"]
    assert invalid and all(e["object"] in bodies for e in invalid)


def test_a_record_that_lies_about_heads_does_not_count():
    """The closer says of a delta that it has done more work than its head says."""
    world = World(1, values=6)
    players = crowd(world)
    together(players, 2)
    liar = players[0].reduce._fragments[0]
    close = liar.rounds.close

    def lying(record, attempt):
        factor = 1 if attempt else 2  # it finds its own lie, too
        entries = tuple(replace(e, tokens=e.tokens * factor) if e.member == "a" else e for e in record.entries)
        return close(replace(record, entries=entries), attempt)

    liar.rounds.close = lying
    together(players, 12)
    lies = [e for p in players[1:] for e in p.reduce.events() if e["event"] == "lie"]
    assert lies and {e["by"] for e in lies} == {"a"}


@pytest.mark.parametrize("count", [1, -1])
def test_the_number_of_members_is_checked(count):
    with pytest.raises(ConfigError, match=f"shares_from={count}: use at least 2 members"):
        Bucket("memory://shares", "a", shares_from=count)


def test_all_members_share_from_the_same_number_on():
    world = World(1, values=6)
    Player(world, "a", shares_from=5).turn()
    with pytest.raises(Mismatch, match=r"each averages a share is 5 on the run, 6 on this member"):
        Player(world, "b", shares_from=6).turn()
