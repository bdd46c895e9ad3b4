"""A store that lists late or has lost objects, garbage in the way, and machines that compute other bits."""

import pytest

from diloco.bucket.rounds import Entry, Link, Record, folder, record_name
from diloco.bucket.store.operations import List, Read
from tests.support.players import GARBAGE, Player, World, complete
from tests.support.sharing import crowd, small_pieces, together


def slots_of(world, fragment, index):
    """Slots of a round that hold something."""
    return [name for name in world.objects if name.startswith(f"{folder(fragment, index)}closed.")]


@pytest.mark.parametrize("what", ["pieces/", "rounds/", ""])
def test_a_listing_that_is_late_makes_nobody_write_a_record_that_is_not_valid(what, monkeypatch):
    small_pieces(monkeypatch)
    world = World(1, values=6)
    players = crowd(world)
    together(players, 2)
    attempt, answers = world.attempt, [3]

    def late(operation):
        if isinstance(operation, List) and operation.prefix.startswith(what) and answers[0]:
            answers[0] -= 1
            return {}
        return attempt(operation)

    world.attempt = late
    together(players, 8)
    assert [len(slots_of(world, 0, index)) for index in range(1, world.closed(0) + 1)] == [1] * world.closed(0)
    assert not any(e["event"] == "invalid" for p in players for e in p.reduce.events())


def test_a_record_that_its_own_writer_would_not_follow_is_never_written():
    world = World(1)
    a = Player(world, "a")
    a.turn()
    store = a.reduce._protocols[0].round_store
    empty = Record(0, 1, Link(), 7, "a", ())
    assert complete(world, store.close(empty, 0)) is None and not slots_of(world, 0, 1)
    good = Record(0, 1, Link(), 7, "a", (Entry("a", "0" * 64, 1.0, 1.0),))
    digest = a.reduce.session.envelope.seal(record_name(0, 1, 0), "record", *good.sealed()).digest
    store.void.add(digest)  # it has found that its own record says of deltas what they are not
    assert complete(world, store.close(good, 0)) is None and not slots_of(world, 0, 1)
    store.void.clear()
    assert complete(world, store.close(good, 0)).digest == digest


def test_garbage_in_the_slots_of_a_round_is_read_once_and_many_at_a_time():
    """Nobody needs a key to put it there."""
    world = World(1)
    a = Player(world, "a")
    a.turn()
    for slot in range(500):
        world.objects[record_name(0, 1, slot)] = GARBAGE
    reads, waits = [], 0
    for _ in range(20):
        a.step()
        for job in a.jobs:
            while True:
                operation = a.want(job)
                slots = [
                    o
                    for o in getattr(operation, "operations", [operation])
                    if isinstance(o, Read) and "/closed." in o.name
                ]
                reads += [o.name for o in slots if o.name.startswith(folder(0, 1))]
                waits += bool(slots)
                if not a.go(job):
                    break
        world.now += 1.0
    assert a.held[0] > 3 and record_name(0, 1, 500) in world.objects
    assert len(reads) < 2 * 500 + 20  # twice, because a reply may have been cut off on its way
    assert waits < 120
    late = Player(world, "b")
    late.turn()
    assert late.held[0] > 0 or late.reduce._protocols[0].frontier > 0
