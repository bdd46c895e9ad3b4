"""What a member asks of the store: how often it lists, how much it reads at once, and how long its end may take."""

from collections import Counter

import pytest

from diloco.bucket import round_store
from diloco.bucket.bucket import PATIENCE
from diloco.bucket.rounds import delta_name, folder
from diloco.bucket.store.operations import All, List, Read
from diloco.reduce import Dropped
from tests.support.players import Player, World


class Counting(World):
    def __init__(self, fragments):
        super().__init__(fragments)
        self.count, self.listed, self.most = Counter(), 0, 0

    def attempt(self, operation):
        self.count[type(operation).__name__, getattr(operation, "prefix", "")] += 1
        answer = super().attempt(operation)
        if isinstance(operation, List) and operation.prefix == "rounds/":
            self.listed = max(self.listed, len(answer))
        return answer


@pytest.mark.parametrize("fragments", [1, 8])
def test_one_listing_serves_all_fragments(fragments):
    """A turn is a whole tick of each fragment. Two more listings a round: what follows a closed round is looked for."""
    world = Counting(fragments)
    a = Player(world, "a")
    a.turn()
    world.count.clear()
    for _ in range(50):
        a.turn()
        a.step()
        world.now += 0.4
    rounds = sum(a.held)
    assert min(a.held) > 5
    assert world.count["List", "rounds/"] <= 50 + 2 * rounds + 2
    assert not [key for key in world.count if key[0] == "List" and key[1].startswith("rounds/0")]


def test_listings_do_not_grow_with_the_rounds_of_a_run():
    world = Counting(1)
    a = Player(world, "a")
    for _ in range(200):
        a.turn()
        a.step()
        world.now += 1.0
    assert a.held[0] > 60 and world.listed < 40


def test_of_many_deltas_a_few_are_read_at_a_time():
    world = World(1)
    a = Player(world, "a")
    a.turn()
    for k in range(100):
        world.objects[delta_name(0, 1, f"m{k}", f"{k:064d}")] = b"garbage"
    together = [0]
    for _ in range(8):
        a.step()
        while (operation := a.want(1)) is not None:
            each = operation.operations if isinstance(operation, All) else ()
            together.append(sum(isinstance(o, Read) and o.name.startswith(folder(0, 1)) for o in each))
            if not a.go(1):
                break
        world.now += 1.0
    assert max(together) == round_store.AT_ONCE and a.held[0] > 0 and a.reduce.session.rejected == 100


def test_the_end_waits_once_for_all_fragments():
    """With a quorum that is never met, the last round of no fragment is closed."""
    world = World(4)
    a = Player(world, "a", quorum=2)
    a.turn()
    for _ in range(20):
        a.step()
        a.turn()
        world.now += 0.5
    a.reduce.settle()
    began, waits = world.now, []
    lock = a.reduce._lock

    def wait(seconds):
        waits.append(seconds)
        world.now += seconds

    lock.wait = wait
    outcomes = [a.reduce.take(fragment, 1) for fragment in range(4)]
    assert outcomes == [Dropped()] * 4
    assert PATIENCE < world.now - began < PATIENCE + 2 * a.reduce._options.ttl
