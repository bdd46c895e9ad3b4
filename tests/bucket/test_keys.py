"""Members with keys of their own: who is listed takes part, who is not is ignored, and the list changes as the run goes
on. The same code as in production, one store operation at a time."""

import json
from dataclasses import replace

import pytest

from diloco.bucket import KeyPair
from diloco.bucket.deltas import delta_fields
from diloco.bucket.members import StruckOff
from diloco.bucket.roster import change, changed, load_lists
from diloco.bucket.rounds import Entry, Link, Record, delta_name, place_of, record_name
from diloco.bucket.run import read_run
from diloco.bucket.snapshots import seal_snapshot
from diloco.bucket.store.envelope import Envelope, Invalid
from diloco.bucket.store.keys import Listed, Roster, public_key, read_key, shown
from diloco.errors import ConfigError
from diloco.reduce import Round
from tests.support.players import Player, World, complete

FOUNDER, OTHER, THIRD, STRANGER = (KeyPair(bytes([k]) * 32) for k in (1, 2, 3, 4))


class Keyed(World):
    """A world that judges records as members do: by their own following of the run."""

    def check(self):
        pass


def begun(fragments=1, **others):
    """A run of founder a and these listed others; returns the world and the players."""
    world = Keyed(fragments)
    a = Player(world, "a", key=FOUNDER)
    a.turn()
    for name, key in others.items():
        edit(world, name, key)
    return world, [a, *(Player(world, name, key=key) for name, key in others.items())]


def envelope_of(world, key=FOUNDER):
    envelope = complete(world, read_run(None)).envelope(key)
    complete(world, load_lists(envelope))
    return envelope


def edit(world, name, key, founder=FOUNDER):
    """The founder's command; returns the rounds from which on it counts."""
    envelope = envelope_of(world, founder)
    listed = changed(envelope, name, None if key is None else key.public)
    return complete(world, change(envelope, world.fragments, listed))


def go_on(world, players, seconds=20):
    for _ in range(seconds):
        for player in players:
            if not player.joined:
                player.turn()
            player.step()
            player.turn()
        world.now += 1.0


def at_the_frontier(player, least=0):
    """Let it apply what was closed; returns the index of the open round, which is at least this."""
    protocol = player.reduce._protocols[0]
    while protocol.held != protocol.frontier or protocol.frontier + 1 < least:
        player.step()
        player.turn()
        player.world.now += 1.0
    return protocol.frontier + 1


def members_of(player):
    """Who was in each round that it took."""
    return [set(outcome.members) for _, outcome in player.reduce.outcomes if isinstance(outcome, Round)]


def test_listed_members_are_in_all_rounds_and_hold_the_same_bits():
    world, players = begun(2, b=OTHER)
    go_on(world, players)
    assert min(map(min, (p.held for p in players))) > 5
    assert members_of(players[0])[-4:] == [{"a", "b"}] * 4
    assert [p.reduce.session.rejected for p in players] == [0, 0]


def test_who_is_not_listed_is_told_what_to_ask_for():
    world, _ = begun()
    with pytest.raises(ConfigError, match=f"diloco keys add BUCKET b {shown(OTHER.public)}"):
        Player(world, "b", key=OTHER).turn()
    with pytest.raises(ConfigError, match="another key for 'a'"):
        Player(world, "a", key=OTHER).turn()
    with pytest.raises(ConfigError, match="give yours with --key-file"):
        Player(world, "b", key=b"secret" * 4).turn()
    with pytest.raises(ConfigError, match="give yours with --key-file"):
        Player(world, "b").turn()


def test_a_run_of_another_founder_is_refused_by_who_knows_the_founder():
    world, _ = begun()
    with pytest.raises(ConfigError, match=f"the founder of the run is {shown(FOUNDER.public)}"):
        Player(world, "b", key=replace(OTHER, founder=THIRD.public)).turn()
    with pytest.raises(ConfigError, match="you are not the founder that you gave"):
        Player(World(), "b", key=replace(OTHER, founder=THIRD.public)).turn()


def delta(world, index, name, key, run=None, tokens=8.0):
    fields = delta_fields(0, index, name, world.states[0, index - 1], tokens)
    return Envelope(run or world.run, key).seal(delta_name(0, index, name), "delta", fields, b"\0\0\x80?")


def put(world, sealed):
    assert sealed.name not in world.objects
    world.objects[sealed.name] = sealed.body
    return sealed.name


def test_strangers_and_members_that_sign_as_another_are_ignored_and_named_once():
    world, (a, _b) = begun(b=OTHER)
    bad = [
        put(world, delta(world, 1, "x", STRANGER)),
        put(world, delta(world, 1, "b", STRANGER, tokens=9.0)),
        put(world, delta(world, 1, "a", OTHER)),  # a listed member in the name of another
        put(world, delta(world, 1, "b", OTHER, run="0" * 16)),  # of another run of the same people
        put(world, delta(world, 1, "b", b"secret" * 4)),
    ]
    go_on(world, [a])
    assert members_of(a)[:1] == [{"a"}]
    named = [event["object"] for event in a.reduce.events() if event["event"] == "invalid"]
    assert sorted(named) == sorted(bad)


def test_a_member_is_added_while_the_run_goes_on_and_counts_from_a_definite_round():
    world, (a,) = begun()
    go_on(world, [a])
    since = edit(world, "b", OTHER)
    b = Player(world, "b", key=OTHER)
    go_on(world, [a, b])
    taken = {outcome.index: set(outcome.members) for _, outcome in a.reduce.outcomes if isinstance(outcome, Round)}
    assert not any("b" in members for index, members in taken.items() if index < since[0])
    assert members_of(a)[-3:] == [{"a", "b"}] * 3


def test_a_member_is_struck_off_while_the_run_goes_on_and_what_it_gave_before_stays():
    world, (a, b, c) = begun(b=OTHER, c=THIRD)
    go_on(world, [a, b, c])
    assert members_of(a)[-1] == {"a", "b", "c"}
    held = b.held[0]
    since = edit(world, "c", None)
    assert held < since[0] <= held + 3
    with pytest.raises(StruckOff, match="has struck 'c' off"):
        go_on(world, [a, b, c])
    go_on(world, [a, b])
    assert members_of(a)[-3:] == [{"a", "b"}] * 3
    edit(world, "d", STRANGER)
    late = Player(world, "d", key=STRANGER)  # follows the rounds in which c was, too
    go_on(world, [a, b, late])
    assert members_of(late)[-1] == {"a", "b", "d"} and late.held == a.held


@pytest.mark.slow
def test_records_of_a_member_that_was_struck_off_are_followed_by_who_never_saw_the_list_it_was_in():
    """A member that sleeps through the change that added b, and that which struck it off."""
    world, (a, c) = begun(c=THIRD)
    go_on(world, [a, c])
    edit(world, "b", OTHER)
    b = Player(world, "b", key=OTHER)
    go_on(world, [b], 30)  # it closes rounds alone
    assert b.held[0] > a.held[0] + 5
    edit(world, "b", None)
    go_on(world, [a], 60)
    late = Player(world, "c", key=THIRD, checkpoint=c.save())
    for player in (c, late):
        go_on(world, [a, player], 40)
        assert abs(player.held[0] - a.held[0]) <= 1 and player.held[0] > b.held[0]
        if player is c:
            c.reduce.leave()


def test_one_that_was_struck_off_can_close_no_round_and_send_no_delta_any_more():
    """It goes on as if it did not know, and is always the first."""
    world, (a, b) = begun(b=OTHER)
    go_on(world, [a, b])
    index = at_the_frontier(a, edit(world, "b", None)[0])
    link = a.reduce._protocols[0].previous
    envelope = Envelope(world.run, OTHER)
    names = []
    for slot in range(4):
        name = record_name(0, index, slot)
        if name in world.objects:
            continue
        sent = delta(world, index, "b", OTHER, tokens=8.0 + slot)
        put(world, sent)
        record = Record(0, index, link, world.states[0, index - 1], "b", (Entry("b", sent.digest, 8.0 + slot, 1.0),))
        names.append(put(world, envelope.seal(name, "record", *record.sealed())))
    go_on(world, [a])
    assert members_of(a)[-5:] == [{"a"}] * 5 and a.held[0] > index
    assert set(names) <= {event.get("object") for event in a.reduce.events()}


def test_a_closer_that_gathered_before_the_list_changed_judges_its_deltas_again():
    """The change takes the slot between its look and its put."""
    world, (a, b) = begun(b=OTHER)
    go_on(world, [a, b])
    b.step(), b.step(), b.step()
    b.turn()  # its delta of the next round is there
    while True:
        for _ in range(2):
            a.step()
        for job in a.jobs:
            while (operation := a.want(job)) is not None:
                if getattr(operation, "name", "").endswith("closed.0") and hasattr(operation, "data"):
                    edit(world, "b", None)
                    index = place_of(operation.name)[1]
                    go_on(world, [a])
                    rounds = {o.index: set(o.members) for _, o in a.reduce.outcomes if isinstance(o, Round)}
                    assert all(rounds[i] == {"a"} for i in rounds if i >= index) and max(rounds) > index
                    return
                if not a.go(job):
                    break
        world.now += 1.0


def test_a_key_is_replaced_and_the_old_one_counts_no_more():
    world, (a, b) = begun(b=OTHER)
    go_on(world, [a, b])
    edit(world, "b", THIRD)
    with pytest.raises(StruckOff, match="another key"):
        go_on(world, [b])
    again = Player(world, "b", key=THIRD)
    go_on(world, [a, again])
    assert members_of(a)[-3:] == [{"a", "b"}] * 3
    again.reduce.leave()
    taken = len(members_of(a))
    put(world, delta(world, at_the_frontier(a), "b", OTHER))  # whoever has stolen the old one
    go_on(world, [a])
    assert len(members_of(a)) > taken + 3 and members_of(a)[taken + 1 :] == [{"a"}] * len(members_of(a)[taken + 1 :])


def test_only_the_founder_changes_the_list():
    world, (a, b) = begun(b=OTHER)
    with pytest.raises(ConfigError, match="only the founder"):
        edit(world, "x", STRANGER, founder=OTHER)
    with pytest.raises(ConfigError, match="this key is that of 'b'"):
        edit(world, "x", OTHER)
    with pytest.raises(ConfigError, match="'x' is not listed: a, b is"):
        edit(world, "x", None)
    listed = Listed(7, {"b": OTHER.public, "x": STRANGER.public})
    sealed = envelope_of(world, OTHER).seal(f"keys/{listed.tail}", "list", {}, listed.payload)
    put(world, sealed)
    forged = record_name(0, 1, 1)  # behind the change that added b
    put(world, envelope_of(world, OTHER).seal(forged, "list", {}, listed.payload))
    go_on(world, [a, b])
    assert set(envelope_of(world).roster.newest.members) == {"a", "b"}
    assert members_of(a)[-1] == {"a", "b"}
    assert forged in {event.get("object") for event in a.reduce.events()}


def test_a_struck_member_forges_no_snapshot_for_who_comes_later():
    """It knows everything of before, and claims a round of far ahead."""
    world, (a, b) = begun(b=OTHER)
    go_on(world, [a, b])
    edit(world, "b", None)
    go_on(world, [a])
    envelope, index = Envelope(world.run, OTHER), 90_000
    record = Record(0, index, Link("p", 1.0, next(iter(keys_before(world)))), 7, "b", (Entry("b", "0" * 64, 1.0, 1.0),))
    sealed = envelope.seal(record_name(0, index, 0), "record", *record.sealed())
    put(world, sealed)
    state = a.diloco._fragments[0].state
    put(world, seal_snapshot(envelope, 0, replace(state, index=index, known=None), sealed.digest))
    edit(world, "c", THIRD)
    late = Player(world, "c", key=THIRD)
    go_on(world, [a, late])
    assert abs(late.held[0] - a.held[0]) <= 1
    assert members_of(late)[-1] == {"a", "c"}


def keys_before(world):
    """Lists in which b is."""
    for name, body in world.objects.items():
        if name.startswith("keys/") and not name.endswith(".from") and OTHER.public.hex().encode() in body:
            yield name.removeprefix("keys/")


@pytest.mark.parametrize(
    "changes",
    [
        {"version": -1},
        {"version": True},
        {"members": []},
        {"members": {"../x": "0" * 64}},
        {"members": {"x": "0"}},
        {"members": {"x": 3}},
        {"more": 1},
    ],
    ids=repr,
)
def test_a_list_that_is_not_one_is_refused(changes):
    roster = Roster(FOUNDER.public, Listed(0, {}))
    envelope = Envelope("r", FOUNDER, roster)
    value = {"version": 1, "members": {"a": "0" * 64}} | changes
    from diloco.bucket.store.lists import open_list

    sealed = envelope.seal("keys/x", "list", {}, json.dumps(value).encode())
    if changes == {"more": 1}:
        assert open_list(envelope, "keys/x", sealed.body).members == {"a": bytes(32)}
        return
    with pytest.raises(Invalid, match="not a list of members"):
        open_list(envelope, "keys/x", sealed.body)


def test_a_key_file_holds_a_pair_or_a_secret_and_nothing_else(tmp_path):
    from diloco.bucket.store.keys import new_pair

    made = new_pair(tmp_path / "me.key")
    assert read_key(tmp_path / "me.key") == made and (tmp_path / "me.key").stat().st_mode & 0o777 == 0o600
    assert public_key(shown(made.public)) == made.public
    with pytest.raises(ConfigError, match="never overwritten"):
        new_pair(tmp_path / "me.key")
    (tmp_path / "cut").write_text((tmp_path / "me.key").read_text()[:-9])
    with pytest.raises(ConfigError, match="cut off or changed"):
        read_key(tmp_path / "cut")
    (tmp_path / "secret").write_text("k" * 32 + "\n")
    assert read_key(tmp_path / "secret") == b"k" * 32
    with pytest.raises(ConfigError, match="so that the run has no founder"):
        read_key(tmp_path / "secret", shown(made.public))
    (tmp_path / "short").write_text("k")
    with pytest.raises(ConfigError, match="at least 16"):
        read_key(tmp_path / "short")
    with pytest.raises(ConfigError, match="No such file"):
        read_key(tmp_path / "none")
    with pytest.raises(ConfigError, match="is not a public key"):
        read_key(None, "ed25519:xyz")
