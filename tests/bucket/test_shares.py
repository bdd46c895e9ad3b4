"""Members that average shares for each other: who does it, what it costs, and what happens to what is not right."""

import threading
from dataclasses import replace

import pytest
import torch

from diloco import E3M0, Float32, TopK, TwoBit
from diloco.bucket import Bucket, averaging, deltas, snapshots
from diloco.bucket.averaging import BEGINNING
from diloco.bucket.deltas import Layout, delta_fields, layout_of, places, seal_delta, sizes
from diloco.bucket.rounds import (
    Entry,
    Link,
    Record,
    delta_name,
    folder,
    member_of,
    pieces_name,
    record_name,
    share_name,
)
from diloco.bucket.shares import (
    GROUP,
    Average,
    encoded_share,
    largest,
    mean_in_parts,
    read_share,
    seal_share,
    turn,
    turn_to_average,
)
from diloco.bucket.store.backend import open_store
from diloco.bucket.store.envelope import PART, Envelope, Invalid
from diloco.bucket.store.operations import Create, List
from diloco.codec import pack
from diloco.errors import ConfigError, Mismatch
from diloco.reduce import Jump, Round
from tests.support.members import PATIENT, Member, agree
from tests.support.players import SYNC_EVERY, Player, World

KEY = b"k" * 32
SHARES = 3


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Fragments of 6 values in pieces of 2."""
    monkeypatch.setattr(deltas, "LEAST", 4)
    monkeypatch.setattr(deltas, "UNIT", 2)


def crowd(world, count=4, **options):
    """Members that know each other."""
    players = [Player(world, "abcdefgh"[k], rate=float(1 + k), **options) for k in range(count)]
    for player in (*players, *players):
        player.turn()
    return players


def together(players, rounds, seconds=0.2, most=200):
    """Train in step until all hold so many rounds of the first fragment."""
    world = players[0].world
    for _ in range(most):
        for player in players:
            player.step()
            player.turn()
        world.now += seconds
        if min(player.held[0] for player in players) >= rounds:
            return
    raise AssertionError([player.held for player in players])


def with_stranger(players, head, bodies, index):
    """A delta of a stranger lies in the next round; returns that round, once it is over."""
    players[0].world.objects |= bodies | {head.name: head.body}
    together(players, index + 1)
    return next(round for round in rounds_of(players[0]) if round.index == index)


def next_round(players):
    """The index of a round that is open, and whose deltas are against a state that is known."""
    world = players[0].world
    while (0, world.closed(0)) not in world.states:
        together(players, world.closed(0))
    return world.closed(0) + 1


def rounds_of(player, fragment=0):
    return [o for f, o in player.reduce.outcomes if f == fragment and isinstance(o, Round)]


def test_every_member_averages_a_share_and_all_hold_the_mean():
    """`World.holds` compares the bits of all. Steps of 1, 2, 3 and 4, of which the last counts
    as the usual 3: the mean of a step is 2.25."""
    world = World(1, values=6)
    players = crowd(world)
    together(players, 3)
    assert {name.rpartition("/")[2] for name in world.objects if name.startswith(folder(0, 2) + "s")} == {
        f"s{k:04d}.0" for k in range(SHARES)
    }
    first = rounds_of(players[0])[0]
    assert set(first.members) == {"a", "b", "c", "d"} and len(first.encoded) == SHARES
    assert first.mean.tolist() == [-2.25 * SYNC_EVERY] * 6


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
                wanted = player.want(1)
                if player is dead and isinstance(wanted, Create) and "/s0" in wanted.name:
                    break
                if not player.go(1):
                    break
        world.now += 0.2
        if world.closed(0) >= 3 and all(p.reduce._protocols[0]._round.averaging for p in players[:3]):
            break
    living, before = players[:3], world.now
    while min(player.reduce._protocols[0].frontier for player in living) < 3:
        for player in living:
            player.turn()
        world.now += 0.2
        assert world.now - before < 30
    together(living, 3)
    assert "d" in rounds_of(living[0])[2].members


def test_a_bad_share_is_passed_over_and_made_again():
    world = World(1, values=6)
    players = crowd(world)
    together(players, 2)
    for share in range(SHARES):
        world.objects[share_name(0, 3, share, 0)] = b"garbage"
    together(players, 4)
    assert all(share_name(0, 3, share, 1) in world.objects for share in range(SHARES))
    named = {event.get("object") for event in players[0].reduce.events() if event["event"] == "invalid"}
    assert named == {share_name(0, 3, share, 0) for share in range(SHARES)}


class Deceived(World):
    """As soon as the first round is closed, a false share is there, no larger than the deltas allow."""

    def attempt(self, operation):
        answer = super().attempt(operation)
        if isinstance(operation, Create) and operation.name == record_name(0, 1, 0):
            record = self.record(0, 1, Link())
            false = seal_share(Envelope(self.run), record, 0, 0, torch.full((2,), -1.0).view(torch.uint8))
            self.objects.setdefault(false.name, false.body)
        return answer


def test_a_false_share_is_noticed_by_chance_and_all_hold_the_same_bits(monkeypatch):
    monkeypatch.setattr(averaging, "chance", lambda: 0.0)
    players = crowd(Deceived(1, values=6))
    together(players, 3)
    mean = rounds_of(players[0])[0].mean.tolist()
    assert mean[:2] == [-1.0] * 2 and len(set(mean[2:])) == 1 and mean[2] < -1  # only the share is false
    for player in players:
        told = [e for e in player.reduce.events() if e["event"] == "false share"]
        assert told == [{"event": "false share", "object": share_name(0, 1, 0, 0)}]


def test_a_false_share_is_noticed_by_who_has_made_the_same(monkeypatch):
    monkeypatch.setattr(averaging, "chance", lambda: 1.0)
    world = World(1, values=6)
    players = crowd(world)
    wanted = None
    while not isinstance(wanted, Create):
        for player in players:
            player.step()
            while (wanted := player.want(1)) is not None:
                if isinstance(wanted, Create) and "/s0" in wanted.name:
                    break
                if not player.go(1):
                    break
            if isinstance(wanted, Create):
                break
        world.now += 0.2
    share = int(wanted.name[-6:-2])
    record = player.reduce._protocols[0]._round.averaging.record
    false = seal_share(Envelope(world.run), record, share, 0, torch.full((2,), -1.0).view(torch.uint8))
    world.objects[false.name] = false.body
    player.turn()
    assert {"event": "false share", "object": wanted.name} in player.reduce.events()


def test_a_newcomer_makes_what_is_missing_when_all_others_are_dead(monkeypatch):
    monkeypatch.setattr(snapshots, "MOVED", 1e9)  # it follows all rounds from the beginning
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


def strange_delta(world, index, broken=None, norms=None, values=5.0):
    """A delta of member x against the last state. `broken`: which of its pieces is not what the head says."""
    layout, fingerprint = layout_of(Float32(), 6, sharing=True), world.states[0, index - 1]
    payloads, _ = layout.pack(torch.full((6,), values))
    fields = delta_fields(0, index, "x", fingerprint, 2.0, 2.0)
    sealed = seal_delta(Envelope(world.run), layout, fields, payloads, norms or layout.norms(payloads))
    bodies = {each.name: each.body for each in sealed.pieces}
    if broken is not None:
        part, at = places(sealed.listed)[broken]
        name = sealed.pieces[part].name
        at += sealed.listed[broken].size - 1
        bodies[name] = bodies[name][:at] + bytes([bodies[name][at] ^ 1]) + bodies[name][at + 1 :]
    return sealed.head, bodies


@pytest.mark.parametrize("how", ["altered", "larger than it says", "inf"])
def test_a_piece_that_is_not_what_its_head_says_counts_as_zeros(how):
    """Nobody reads a whole delta, so a record may name one that is broken. The averager leaves the piece out."""
    world = World(1, values=6)
    players = crowd(world)
    together(players, 2)
    options = {"altered": {"broken": 1}, "larger than it says": {"norms": [7.1, 0.1, 7.1]}}.get(how)
    index = next_round(players)
    head, bodies = strange_delta(world, index, **(options or {"norms": [1.0] * 3, "values": float("inf")}))
    round = with_stranger(players, head, bodies, index)
    assert "x" in round.members
    mean = round.mean
    if how == "inf":
        assert torch.isfinite(mean).all() and mean[0] == mean[2] == mean[4]
    else:
        assert mean[0] == mean[4] != mean[2]
    invalid = [e for p in players for e in p.reduce.events() if e["event"] == "invalid"]
    assert invalid and all(e["object"] in bodies for e in invalid)


@pytest.mark.parametrize("what", ["no pieces", "pieces cut off"])
def test_a_head_without_its_pieces_is_not_counted(what):
    world = World(1, values=6)
    players = crowd(world)
    together(players, 2)
    index = next_round(players)
    head, bodies = strange_delta(world, index)
    left = {name: body[:-1] for name, body in bodies.items()} if what == "pieces cut off" else {}
    assert set(with_stranger(players, head, left, index).members) == {"a", "b", "c", "d"}


def test_a_whole_delta_of_a_stranger_is_counted():
    players = crowd(World(1, values=6))
    together(players, 2)
    index = next_round(players)
    assert "x" in with_stranger(players, *strange_delta(players[0].world, index), index).members


def test_a_record_that_lies_about_heads_does_not_count():
    """The closer says of a delta that it has done more work than its head says."""
    world = World(1, values=6)
    players = crowd(world)
    together(players, 2)
    liar = players[0].reduce._protocols[0]
    close = liar.round_store.close

    def lying(record, slot, lies=()):
        factor = 1 if slot else 2  # it finds its own lie, too
        entries = tuple(replace(e, tokens=e.tokens * factor) if e.member == "a" else e for e in record.entries)
        return close(replace(record, entries=entries), slot, lies)

    liar.round_store.close = lying
    together(players, 12)
    lies = [e for p in players[1:] for e in p.reduce.events() if e["event"] == "lie"]
    assert lies and {e["by"] for e in lies} == {"a"}


@pytest.mark.parametrize("options", [{}, {"pace": "strict"}], ids=str)
def test_four_members_over_a_folder_share_and_agree(tmp_path, monkeypatch, options):
    monkeypatch.setattr(deltas, "LEAST", 64)
    monkeypatch.setattr(deltas, "UNIT", 256)
    gate = threading.Barrier(4)
    members = [Member(tmp_path, name, 30, gate=gate, grace=None if options else PATIENT, **options) for name in "abcd"]
    for member in members:
        member.end()
    agree(*members)
    names = open_store(str(tmp_path)).attempt(List("rounds/"))
    assert any("/s0001.0" in name for name in names)
    assert any(round.members == 4 and round.counted for round in members[0].rounds)
    assert not [e for member in members for e in member.reduce.events() if e["event"] in ("lie", "false share", "gone")]


# What is computed, without a store.


def shared_record(count, layout, seed=0, scale=1.0):
    """A record of so many members, and their pieces."""
    generator = torch.Generator().manual_seed(seed)
    packed = [layout.pack(torch.randn(layout.n, generator=generator) * scale)[0] for _ in range(count)]
    envelope, found, entries = Envelope("r"), {}, []
    for k, payloads in enumerate(packed):
        fields = delta_fields(0, 1, f"m{k:03d}", 7, float(k + 1), 1.0)
        sealed = seal_delta(envelope, layout, fields, payloads, layout.norms(payloads))
        norm = sum(piece.norm**2 for piece in sealed.listed) ** 0.5
        found[sealed.head.digest] = deltas.Contribution(
            f"m{k:03d}", sealed.head.digest, 7, float(k + 1), norm, payloads, 0, 1.0, sealed.listed
        )
        entries.append(Entry(f"m{k:03d}", sealed.head.digest, float(k + 1), norm, 1.0))
    return Record(0, 1, Link(), 7, "m000", tuple(entries), "ab" * 32, "cd" * 32), found


def averaged(record, found, layout, merge="mean", without=()):
    payloads = []
    for share in range(len(layout.cuts)):
        average = Average(record, share, layout, merge)
        for digests in average.groups():
            average.add({d: None if d in without else found[d].payloads[share] for d in digests})
        payloads.append(average.payload())
    return payloads


@pytest.mark.parametrize("merge", ["mean", "closest"])
@pytest.mark.parametrize("count", [4, GROUP, 2 * GROUP + 3])
def test_averaged_shares_are_the_mean_of_the_deltas_encoded_again(count, merge):
    layout = Layout(24, E3M0(), (slice(0, 8), slice(8, 16), slice(16, 24)))
    record, found = shared_record(count, layout)
    wanted = mean_in_parts(record, found, layout, merge)
    for share, payload in enumerate(averaged(record, found, layout, merge)):
        values = encoded_share(payload, share, layout).values()
        assert torch.allclose(values, E3M0().decode(pack(E3M0(), wanted[share].values()), 8), rtol=0.5)
        most = largest(record, found, share, merge)
        sealed = seal_share(Envelope("r"), record, share, 0, payload)
        opened = Envelope("r").open(sealed.name, "share", sealed.body, None)
        assert torch.equal(read_share(opened, record, share, layout, most).values(), values)
    exact = replace(layout, codec=Float32())
    record, found = shared_record(count, exact)
    wanted = mean_in_parts(record, found, exact, merge)
    for share, payload in enumerate(averaged(record, found, exact, merge)):
        assert torch.allclose(payload.view(torch.float32), wanted[share].values(), atol=1e-6)


@pytest.mark.parametrize("merge", ["mean", "closest"])
def test_what_is_left_out_counts_as_zeros(merge):
    layout = Layout(8, Float32(), (slice(0, 4), slice(4, 8)))
    record, found = shared_record(5, layout)
    out = record.entries[2].digest
    zeros = replace(found[out], payloads=tuple(torch.zeros(16, dtype=torch.uint8) for _ in range(2)))
    left_out = averaged(record, found, layout, merge, without={out})
    assert all(map(torch.equal, left_out, averaged(record, found | {out: zeros}, layout, merge)))


def bad_shares(record, layout, payload):
    other = replace(record, digest="ef" * 32)
    huge = pack(layout.mean_codec, torch.full((layout.count(0),), 1e6))
    return {
        "of another record": seal_share(Envelope("r"), other, 0, 0, payload),
        "another share": seal_share(Envelope("r"), record, 1, 0, payload),
        "too large": seal_share(Envelope("r"), record, 0, 0, huge),
        "too short": seal_share(Envelope("r"), record, 0, 0, payload[:-1]),
        "not finite": seal_share(Envelope("r"), record, 0, 0, torch.full((4,), float("inf")).view(torch.uint8)),
    }


@pytest.mark.parametrize("how", ["of another record", "another share", "too large", "too short", "not finite"])
def test_a_share_that_cannot_be_right_does_not_count(how):
    layout = Layout(8, Float32(), (slice(0, 4), slice(4, 8)))
    record, found = shared_record(5, layout)
    payload = averaged(record, found, layout)[0]
    sealed = bad_shares(record, layout, payload)[how]

    def read():
        opened = Envelope("r").open(sealed.name, "share", sealed.body, Float32().nbytes(4))
        return read_share(opened, record, 0, layout, largest(record, found, 0, "mean"))

    with pytest.raises(Invalid):
        read()


def test_shares_go_round_among_the_living():
    order = ["a", "b", "c", "d"]
    assert [turn(order, 1, name, {"a", "b", "c", "d"}) for name in order] == [3, 0, 1, 2]
    assert turn(order, 1, "d", {"c"}) == 1 and turn(order, 1, "d", set()) == 0
    assert turn(order, 1, "z", {"a", "b", "z"}) == 2
    record, _ = shared_record(5, Layout(2, Float32(), (slice(0, 1), slice(1, 2))))
    names = {e.member for e in record.entries}
    firsts = [next(n for n in names if turn_to_average(record, k, n, names) == 0) for k in range(5)]
    assert set(firsts) == names


def test_large_deltas_are_cut_at_blocks_and_small_or_sparse_ones_are_not(monkeypatch):
    monkeypatch.undo()
    assert not layout_of(E3M0(), 1000, sharing=True).cut
    assert not layout_of(E3M0(), 1 << 24, sharing=False).cut
    assert not layout_of(TopK(), 1 << 24, sharing=True).cut
    for n in (70_000, 1_000_001, 42_000_000):
        layout = layout_of(E3M0(), n, sharing=True)
        assert [cut.start for cut in layout.cuts[1:]] == [cut.stop for cut in layout.cuts[:-1]]
        assert layout.cuts[0].start == 0 and layout.cuts[-1].stop == n and 2 <= len(layout.cuts) <= 16
        assert all(cut.start % deltas.UNIT == 0 for cut in layout.cuts)
        assert layout.nbytes <= E3M0().nbytes(n) + len(layout.cuts)
    assert len(layout_of(Float32(), 200_000_000, sharing=True).cuts) > 16  # no piece is larger than an object may be
    assert layout_of(TwoBit(), 1 << 20, sharing=True).mean_codec == E3M0()


def test_pieces_lie_in_as_few_objects_as_they_fit_in():
    listed = [deltas.Piece(size, "", 0.0) for size in (PART // 2, PART // 2, 1, PART, 5)]
    assert places(listed) == [(0, 0), (0, PART // 2), (1, 0), (2, 0), (3, 0)]
    assert sizes(listed) == [PART, 1, PART, 5]


def test_names_of_pieces_heads_and_shares_are_not_taken_for_deltas():
    assert member_of(share_name(0, 1, 2, 0)) is None
    assert member_of(pieces_name(0, 1, "a", "0" * 64, 0)) is None
    assert member_of(delta_name(0, 123_456, "a", "0" * 64)) == "a"
    assert record_name(3, 123_456, 0) == "rounds/00123/456/0003/closed.0"


def test_an_own_share_is_recognised_by_its_beginning():
    layout = Layout(8192, Float32(), (slice(0, 4096), slice(4096, 8192)))
    record, _ = shared_record(2, layout)
    one, two = (
        seal_share(Envelope("r", KEY), record, 0, 0, torch.full((16384,), k, dtype=torch.uint8)) for k in (1, 2)
    )
    assert len(one.body) > BEGINNING and one.body[:BEGINNING] != two.body[:BEGINNING]


@pytest.mark.parametrize("given", [1, -1])
def test_the_number_of_members_is_checked(given):
    with pytest.raises(ConfigError, match=f"shares_from={given}: give at least 2 members"):
        Bucket("memory://shares", "a", shares_from=given)


def test_no_single_member_decides_a_share_where_members_are_judged():
    with pytest.raises(ConfigError, match=r"merge='closest' only 0: one member would decide a share alone"):
        Bucket("memory://shares", "a", shares_from=4, merge="closest")


def test_all_members_share_from_the_same_number_on():
    world = World(1, values=6)
    Player(world, "a", shares_from=5).turn()
    with pytest.raises(Mismatch, match=r"each averages a share is 5\.0 on the run, 6\.0 on this member"):
        Player(world, "b", shares_from=6).turn()
