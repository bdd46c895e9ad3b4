"""A share that is bad, or false: it is made again, or noticed, and all members hold the same bits."""

import pytest
import torch

from diloco.bucket import KeyPair, averaging
from diloco.bucket.roster import change, changed, load_lists
from diloco.bucket.rounds import Link, read_record, record_name, share_name
from diloco.bucket.run import read_run
from diloco.bucket.shares import seal_share
from diloco.bucket.store.envelope import Envelope
from diloco.bucket.store.keys import Listed, Roster
from diloco.bucket.store.operations import Create
from tests.support.players import Player, World, complete
from tests.support.sharing import SHARES, crowd, rounds_of, small_pieces, together

FALSE = torch.full((2,), -1.0).view(torch.uint8)
KEYS = {name: KeyPair(bytes([k + 1]) * 32) for k, name in enumerate("abcd")}


@pytest.fixture(autouse=True)
def pieces(monkeypatch):
    small_pieces(monkeypatch)


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

    SLOT = 0
    """Of the record."""

    def attempt(self, operation):
        answer = super().attempt(operation)
        if isinstance(operation, Create) and operation.name == record_name(0, 1, self.SLOT):
            false = self.false()
            self.objects.setdefault(false.name, false.body)
        return answer

    def false(self):
        return seal_share(Envelope(self.run), self.record(0, 1, Link()), 0, 0, FALSE)


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
    false = seal_share(Envelope(world.run), record, share, 0, FALSE)
    world.objects[false.name] = false.body
    player.turn()
    assert {"event": "false share", "object": wanted.name} in player.reduce.events()


class Keyed(Deceived):
    """Members have keys of their own; the false share is signed by one of these. The first slots hold the lists, to
    which they were added one after the other."""

    SLOT = 3

    def __init__(self, signer):
        super().__init__(1, values=6)
        self.signer = signer

    def check(self):
        pass

    def false(self):
        roster = Roster(KEYS["a"].public, Listed(0, {name: key.public for name, key in KEYS.items()}))
        name = record_name(0, 1, self.SLOT)
        opened = Envelope(self.run, KEYS["a"], roster).open(name, "record", self.objects[name], None)
        record = read_record(opened, 0, 1, None)
        return seal_share(Envelope(self.run, self.signer), record, 0, 0, FALSE)


def keyed(signer):
    """What four members whom the founder lists take from the first round, with a false share that this one signs."""
    world = Keyed(signer)
    players = [Player(world, "a", key=KEYS["a"])]
    players[0].turn()
    for rate, name in enumerate("bcd", 2):
        envelope = complete(world, read_run(None)).envelope(KEYS["a"])
        complete(world, load_lists(envelope))
        complete(world, change(envelope, 1, changed(envelope, name, KEYS[name].public)))
        players.append(Player(world, name, key=KEYS[name], rate=float(rate)))
    for player in (*players, *players):
        player.turn()
    together(players, 2)
    return [(rounds_of(player)[0], player.reduce.events()) for player in players]


def test_where_members_have_keys_a_false_share_names_who_has_made_it(monkeypatch):
    monkeypatch.setattr(averaging, "chance", lambda: 0.0)
    for round, events in keyed(KEYS["c"]):
        assert len(round.members) == 4 and round.mean.tolist()[:2] == [-1.0] * 2
        told = [e for e in events if e["event"] == "false share"]
        assert told == [{"event": "false share", "object": share_name(0, 1, 0, 0), "by": "c"}]


def test_a_share_of_one_who_is_not_listed_is_passed_over_and_made_again():
    for round, events in keyed(KeyPair(bytes([9]) * 32)):
        assert len(round.encoded) == SHARES and len(set(round.mean.tolist())) == 1 and round.mean[0] < -1
        assert share_name(0, 1, 0, 0) in {e["object"] for e in events if e["event"] == "invalid"}
