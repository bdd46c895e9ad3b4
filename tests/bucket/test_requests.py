"""What a member asks of the store: how often it lists, how much it reads at once, and how long its end may take."""

from collections import Counter

import pytest

import diloco.bucket.rounds as rounds_
from diloco.bucket import round_store
from diloco.bucket.bucket import PATIENCE
from diloco.bucket.members import Phase
from diloco.bucket.rounds import PIECES, delta_name, folder, is_record
from diloco.bucket.store import All, List, Read
from diloco.exchange.reducer import Dropped
from tests.support.players import SETTINGS, Player, World, meet, one_member, train


class Counting(World):
    def __init__(self, fragments):
        super().__init__(fragments)
        self.count, self.reads, self.listed, self.most = Counter(), Counter(), 0, 0

    def attempt(self, operation):
        self.count[type(operation).__name__, getattr(operation, "prefix", "")] += 1
        answer = super().attempt(operation)
        if isinstance(operation, List) and operation.prefix == "rounds/":
            self.listed = max(self.listed, len(answer))
        if isinstance(operation, Read) and is_record(operation.name) and answer is not None:
            self.reads[operation.name] += 1
        return answer


@pytest.mark.parametrize("fragments", [1, 8])
def test_one_listing_serves_all_fragments(fragments):
    """A turn is a whole tick of each fragment. Two more listings a round: what follows a closed round is looked for."""
    world = Counting(fragments)
    a = Player(world, "a")
    a.turn()
    world.count.clear()
    for _ in range(30):
        a.turn()
        a.step()
        world.now += 0.4
    rounds = sum(a.held)
    assert min(a.held) > 5
    assert world.count["List", "rounds/"] <= 30 + 2 * rounds + 2
    assert not [key for key in world.count if key[0] == "List" and key[1].startswith("rounds/0")]
    assert set(world.reads.values()) == {1}, "each record is read once"


@pytest.mark.slow
def test_listings_do_not_grow_with_the_rounds_of_a_run():
    world = Counting(1)
    a = Player(world, "a")
    for _ in range(200):
        a.turn()
        a.step()
        world.now += 1.0
    assert a.held[0] > 60 and world.listed < 40


def test_of_many_deltas_a_few_are_read_at_a_time():
    world, a = one_member(1)
    for k in range(100):
        world.objects[delta_name(0, 1, f"m{k}", f"{k:064d}")] = b"garbage"
    together = [0]
    for _ in range(8):
        a.step()
        while (operation := a.want(1)) is not None:
            operations = operation.operations if isinstance(operation, All) else ()
            together.append(sum(isinstance(o, Read) and o.name.startswith(folder(0, 1)) for o in operations))
            if not a.go(1):
                break
        world.now += 1.0
    assert max(together) == round_store.AT_ONCE and a.held[0] > 0 and a.reduce.session.rejected == 100


def test_the_end_waits_once_for_all_fragments():
    """With a quorum that is never met, the last round of no fragment is closed."""
    world, a = one_member(4, quorum=2)
    for _ in range(20):
        a.step()
        a.turn()
        world.now += 0.5
    a.reduce.drain()
    began, waits = world.now, []
    lock = a.reduce._lock

    def wait(seconds):
        waits.append(seconds)
        world.now += seconds

    lock.wait = wait
    outcomes = [a.reduce.poll(fragment, 1) for fragment in range(4)]
    assert outcomes == [Dropped()] * 4
    assert PATIENCE < world.now - began < PATIENCE + 2 * a.reduce._options.ttl


class PerMember(World):
    """Counts what is asked in rounds, whoever asks."""

    def __init__(self, **options):
        super().__init__(**options)
        self.count = Counter()

    def attempt(self, operation):
        name = getattr(operation, "name", getattr(operation, "prefix", ""))
        if name.startswith(("rounds/", "pieces/")):
            self.count[type(operation).__name__] += 1
        return super().attempt(operation)


@pytest.mark.slow
def test_in_a_crowd_requests_of_a_member_do_not_grow_with_the_members(monkeypatch):
    monkeypatch.setattr(rounds_, "LEAST", 4)
    monkeypatch.setattr(rounds_, "UNIT", 2)
    requests = {}
    for count in (4, 16):
        world = PerMember(fragments=1, values=6)
        players = [Player(world, f"m{k:02d}", rate=1.0 + k, shares_from=4) for k in range(count)]
        meet(*players)
        world.count.clear()
        train(world, players, 40, seconds=0.4)
        rounds = sum(player.held[0] for player in players)
        assert rounds > 5 * count and len(players[0].reduce.outcomes[-1][1].members) == count
        requests[count] = {kind: world.count[kind] / rounds for kind in ("Read", "List", "Create", "Size")}
    for kind in requests[4]:
        assert requests[16][kind] < 1.5 * requests[4][kind] + 1, requests


def test_a_piece_is_not_given_up_after_a_few_refusals(monkeypatch):
    """Who averages decides for all: a piece that it may not read for a moment would count as zeros for ever."""
    monkeypatch.setattr(rounds_, "LEAST", 4)
    monkeypatch.setattr(rounds_, "UNIT", 2)
    world, pieces = World(1, values=6), []
    attempt = world.attempt
    world.attempt = lambda o: (pieces.append(o) if getattr(o, "name", "").startswith(PIECES) else None, attempt(o))[1]
    players = [Player(world, name, rate=1.0) for name in "abc"]
    meet(*players)
    train(world, players, 12, seconds=0.4)
    requests = [o for o in pieces if isinstance(o, Read) and o.first is not None]  # a whole delta is read without it
    assert requests and all(o.patient for o in requests)


def test_a_member_looks_seldom_while_a_round_can_only_be_called_and_often_while_its_own_delta_is_under_way():
    world, a = one_member(1, settings=SETTINGS | {"sync_every": 40})
    fragment, timing = a.reduce._fragments[0], a.reduce.session.timing
    for _ in range(30):
        a.step()
        a.turn()
        world.now += 1.0
    assert (timing.poll, timing.idle, fragment.pause) == (0.5, 5.0, 5.0)
    while fragment.machine.sending is Phase.IDLE:
        a.step()
        world.now += 1.0
    assert fragment.pause == timing.poll
    assert a.reduce.session.timing.published == {}  # nothing was sent yet
    a.turn()
    assert timing.published["poll_seconds"] == timing.idle  # the others wait so long for an answer to a call
