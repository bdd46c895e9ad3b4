"""A store that lists late or has lost objects, garbage in the way, and machines that compute other bits."""

from dataclasses import replace

import pytest

from diloco import SGD, Diverged
from diloco.bucket import snapshots
from diloco.bucket.members import Member
from diloco.bucket.rounds import Entry, Record, folder, member_of, place_of, record_name, snapshot_index
from diloco.bucket.store import Create, List, Read
from tests.support.players import GARBAGE, SETTINGS, Player, World, complete, meet, one_member
from tests.support.sharing import crowd, rounds_of, small_pieces, together


def attempts_at(world, fragment, index):
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
    assert [len(attempts_at(world, 0, index)) for index in range(1, world.closed(0) + 1)] == [1] * world.closed(0)
    assert not any(e["event"] == "invalid" for p in players for e in p.reduce.events())


def test_a_record_that_its_own_writer_would_not_follow_is_never_written():
    world, a = one_member(1)
    store = a.reduce._fragments[0].rounds
    empty = Record(0, 1, "", 7, "a", ())
    assert complete(world, store.close(empty, 0)) is None and not attempts_at(world, 0, 1)
    good = Record(0, 1, "", 7, "a", (Entry("a", "0" * 64, 1.0),))
    digest = a.reduce.session.envelope.seal(record_name(0, 1, 0), "record", *good.sealed()).digest
    store.void.add(digest)  # it has found that its own record says of deltas what they are not
    assert complete(world, store.close(good, 0)) is None and not attempts_at(world, 0, 1)
    store.void.clear()
    assert complete(world, store.close(good, 0)).digest == digest


def test_garbage_in_the_attempts_of_a_round_is_read_once_and_many_at_a_time():
    """Nobody needs a key to put it there."""
    world, a = one_member(1)
    for attempt in range(500):
        world.objects[record_name(0, 1, attempt)] = GARBAGE
    reads, waits = [], 0
    for _ in range(20):
        a.step()
        for job in a.jobs:
            while True:
                operation = a.want(job)
                attempts = [
                    o
                    for o in getattr(operation, "operations", [operation])
                    if isinstance(o, Read) and "/closed." in o.name
                ]
                reads += [o.name for o in attempts if o.name.startswith(folder(0, 1))]
                waits += bool(attempts)
                if not a.go(job):
                    break
        world.now += 1.0
    assert a.held[0] > 3 and record_name(0, 1, 500) in world.objects
    assert len(reads) < 2 * 500 + 20  # twice, because a reply may have been cut off on its way
    assert waits < 120
    late = Player(world, "b")
    late.turn()
    assert late.held[0] > 0 or late.reduce._fragments[0].machine.frontier > 0


@pytest.mark.parametrize("values", [1, 6])
def test_a_record_whose_delta_is_lost_is_replaced_after_a_while_and_the_fragment_goes_on(values, monkeypatch):
    """Also where all have stopped, and the one that starts again follows the records."""
    small_pieces(monkeypatch)
    world = World(1, values=values)
    a, b = crowd(world, 2)
    together((a, b), 2)
    while not any(place_of(name) == (0, world.closed(0) + 1) and member_of(name) == "b" for name in world.objects):
        b.step()
        b.turn()
        world.now += 0.1
    lost = world.closed(0) + 1
    own = next(d for d in b.reduce._fragments[0].machine.seen.deltas.values() if d.member == "b")
    other = Entry("b", "f" * 64, 1.0, 1.0)
    record = Record(0, lost, b.reduce._fragments[0].machine.previous, own.fingerprint, "b", (other,))
    sealed = b.reduce.session.envelope.seal(record_name(0, lost, 0), "record", *record.sealed())
    world.objects[sealed.name] = sealed.body
    for player in (a, b):
        for _ in range(4):
            player.step()
            player.turn()
            world.now += 1.0
    assert a.held == b.held == [lost - 1]
    for _ in range(120):
        for player in (a, b):
            player.turn()
            player.step()
        world.now += 10.0
    assert min(a.held[0], b.held[0]) > lost + 3 and len(attempts_at(world, 0, lost)) == 2
    assert "void" in [e["event"] for p in (a, b) for e in p.reduce.events()]
    late = Player(world, "c")
    late.turn()
    together((a, b, late), a.held[0] + 3)
    assert any(len(outcome.members) == 3 for outcome in rounds_of(late))


def test_heads_that_were_damaged_in_the_store_stop_a_fragment_only_for_a_while(monkeypatch):
    small_pieces(monkeypatch)
    world, damaged = World(1, values=6), []
    players = crowd(world, 2)
    together(players, 2)
    attempt = world.attempt

    def damaging(operation):
        if isinstance(operation, Create) and "/heads-" in operation.name and len(damaged) < 1:
            damaged.append(operation.name)
            operation = replace(operation, data=operation.data[:-1] + bytes([operation.data[-1] ^ 1]))
        return attempt(operation)

    monkeypatch.setattr(world, "attempt", damaging)
    before = world.closed(0)
    for _ in range(250):
        for player in players:
            player.turn()
            player.step()
        world.now += 10.0
        if min(player.held[0] for player in players) > before + 3:
            break
    assert damaged and min(player.held[0] for player in players) > before + 3


class Flipping(SGD):
    """The outer optimizer on a machine with a broken memory: after some rounds, one value is another."""

    rounds: tuple[int, ...] = ()
    done = 0

    def step(self, anchor, delta, state, stage):
        super().step(anchor, delta, state, stage)
        object.__setattr__(self, "done", self.done + 1)
        if self.done in self.rounds:
            anchor[0] += 1.0

    def __repr__(self):
        return repr(SGD(self.lr))


def with_one_flipping(count, rounds, first):
    """Members of which one computes other bits after these rounds; it closes rounds before the others, or after."""
    world = World(1)
    world.holds = lambda *_: None
    flipping = Flipping(1.0)
    object.__setattr__(flipping, "rounds", rounds)
    bad = Player(world, "m", rate=5.0, settings=SETTINGS | {"outer": flipping})
    good = [Player(world, "abcdz"[k], rate=float(1 + k)) for k in range(count - 1)]
    players = [bad, *good] if first else [*good, bad]
    meet(*players)
    return world, players, good, bad


def train(world, players, turns):
    """Those that stop with an error are no longer there. Returns these errors."""
    stopped = {}
    for _ in range(turns):
        for player in players:
            if player.name not in stopped:
                try:
                    player.step()
                    player.turn()
                except Diverged as error:
                    stopped[player.name] = str(error)
        world.now += 0.5
    return stopped


ALWAYS = tuple(range(3, 1000))


@pytest.mark.parametrize("first", [True, False], ids=["it closes first", "it closes last"])
@pytest.mark.parametrize("count", [3, 4])
def test_one_member_with_other_bits_does_not_become_the_run(count, first):
    world, players, good, _ = with_one_flipping(count, ALWAYS, first)
    stopped = train(world, players, 160)
    assert set(stopped) == {"m"} and "computes other bits" in stopped["m"]
    held = [player.held[0] for player in good]
    assert min(held) > 15 and max(held) - min(held) < 2
    anchors = {p.held[0]: p.diloco._fragments[0].state.fingerprint() for p in good}
    assert all(anchors[p.held[0]] == p.diloco._fragments[0].state.fingerprint() for p in good)
    assert all("m" not in outcome.members for outcome in rounds_of(good[0])[-5:])


@pytest.mark.parametrize("first", [True, False], ids=["it closes first", "it closes last"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_one_flipped_bit_is_computed_again_and_everybody_goes_on(count, first):
    world, players, _, bad = with_one_flipping(count, (3,), first)
    assert not train(world, players, 160)
    go_on = [len(outcome.members) for outcome in rounds_of(players[0])[-5:]]
    assert go_on == [count] * 5 and "diverged" in [e["event"] for e in bad.reduce.events()]


@pytest.mark.parametrize("first", [True, False], ids=["it closes first", "it closes last"])
def test_of_two_members_with_other_bits_one_goes_on_and_the_other_stops(first):
    """Nobody can tell which one is right."""
    world, players, *_ = with_one_flipping(2, ALWAYS, first)
    stopped = train(world, players, 200)
    assert len(stopped) == 1 and "either one may be wrong" in next(iter(stopped.values()))
    last = next(player for player in players if player.name not in stopped)
    held = last.held[0]
    train(world, [last], 40)
    assert last.held[0] > held + 3


def test_a_flipped_bit_gets_into_no_snapshot(monkeypatch):
    """Who joined before the next record judges it would hold it, too."""
    monkeypatch.setattr(snapshots, "EVERY", 1)
    monkeypatch.setattr(snapshots, "STRIDE", 1)
    world = World(1)
    *_, bad = players = crowd(world, 3)  # the last one closes the rounds, and puts the snapshots
    together(players, 3)
    monkeypatch.setattr(
        bad.reduce, "_holds", lambda fragment, state: bad.reduce.indices.update({fragment: state.index})
    )
    fragment, machine = bad.diloco._fragments[0], bad.reduce._fragments[0].machine
    while fragment.state.index < machine.frontier:
        bad.step()
    fragment.state.anchor[0] += 1.0
    together(players, 12)
    assert "diverged" in [e["event"] for e in bad.reduce.events()]
    put = [name for name in world.objects if snapshot_index(name)]
    headers = [bad.reduce.session.envelope.open(n, "snapshot", world.objects[n], None, head=True).header for n in put]
    assert len(headers) > 6
    assert all(header["fingerprint"] == world.states[0, header["index"]] for header in headers)


@pytest.mark.parametrize("waiting", [True, False], ids=["others wait for its delta", "the next round is closed"])
def test_a_checkpoint_with_a_flipped_bit_is_not_believed(waiting):
    """World.holds compares the bits of all."""
    world = World(1)
    others = a, b, c = crowd(world, 3, straggler_timeout=30.0)
    together(others, 3)
    while c.held[0] < world.closed(0):
        c.step()
    index, saved = c.held[0], c.save()
    (fragment,) = saved["diloco"]["shard 0 of 1"]["fragments"].values()
    fragment["anchor"][0] += 1.0
    train(world, (a, b), 4)
    assert any(place_of(name) == (0, index + 1) and member_of(name) == "a" for name in world.objects)
    for _ in range(0 if waiting else 100):
        if world.closed(0) == index:
            train(world, (a, b), 1)
    assert world.closed(0) == index + (not waiting)
    again = Player(world, "c", checkpoint=saved, rate=3.0)
    again.turn()
    assert again.reduce.entered[0] is not None
    together((a, b, again), world.closed(0) + 3)


def outvoted(flip, alone=2):
    """One member has computed other bits in round `flip` and closed the next rounds before the others had sent. They
    outvote it and train on."""
    world, players, good, bad = with_one_flipping(3, (flip,), True)
    together(players, flip - 2)
    while bad.held[0] < flip + alone:
        bad.step()
        bad.turn()
        world.now += 40.0
    first = set(world.objects)
    while min(player.held[0] for player in good) < flip + 7:
        assert not train(world, good, 1)
    for name in world.objects.keys() - first:  # only its own snapshots remain
        if snapshot_index(name):
            del world.objects[name]
    assert "outvoted" in [e["event"] for player in good for e in player.reduce.events()]
    return world, bad, *good


@pytest.mark.parametrize(
    ("who", "flip", "alone"),
    [("other bits", 0, 3), ("the run's bits", 0, 2), ("new", 0, 1), ("new", -1, 2)],
)
def test_an_outvoted_record_and_its_snapshot_do_not_count(monkeypatch, who, flip, alone):
    """Not even for members that come when all who have seen the vote are gone. `flip`: since the snapshot's round."""
    monkeypatch.setattr(snapshots, "EVERY", 1)  # every STRIDE rounds
    world, bad, a, last = outvoted(snapshots.STRIDE + flip, alone)
    assert snapshots.STRIDE in {snapshot_index(name) for name in world.objects}
    held, before = last.held[0], {"other bits": bad, "the run's bits": a}.get(who)
    world.now += 600.0
    late = Player(world, before.name, checkpoint=before.save()) if before else Player(world, "late")
    late.turn()
    train(world, [late], 40)
    assert late.held[0] > held + 10
    train(world, [late, last], 40)
    assert last.held[0] > held + 10 and abs(late.held[0] - last.held[0]) < 2
    assert len(rounds_of(last)[-1].members) == 2
    assert not {"behind", "diverged"} & {event["event"] for event in late.reduce.events()}


def test_who_returns_to_a_store_that_was_rolled_back_says_so(caplog):
    world, a = one_member(1)
    together((a,), 3)
    before = dict(world.objects)
    together((a,), 8)
    saved, held = a.save(), a.held[0]
    world.objects, world.records = before, {}
    world.holds = lambda *_: None
    again = Player(world, "a", checkpoint=saved)
    again.turn()
    events = [e for e in again.reduce.events() if e["event"] == "behind"]
    assert [e["index"] for e in events] == [held] and events[0]["closed"] < held and "rolled back" in caplog.text


def test_a_member_that_asks_for_ever_newer_snapshots_gets_one_in_sixteen_rounds(monkeypatch):
    monkeypatch.setattr(snapshots, "EVERY", 1 << 40)  # none but those on demand
    world = World(1)
    a, b = crowd(world, 2)
    together((a, b), 2)
    for counter in range(200):
        greedy = Member("greedy", 0, counter, wants=((0, a.held[0] + 1),))
        world.objects[greedy.object_name] = greedy.sealed(a.reduce.session.envelope)
        for player in (a, b):
            player.step()
            player.turn()
        world.now += 0.5
    put = [index for name in world.objects if (index := snapshot_index(name))]
    assert a.held[0] > 5 * snapshots.STRIDE and min(put) < 8  # the first one at once
    assert 4 < len(put) <= 1 + a.held[0] / snapshots.STRIDE


@pytest.mark.parametrize("other", [None, GARBAGE, "another run"])
def test_a_store_that_is_emptied_under_a_run_is_noticed_once_and_said_at_the_end(other, caplog):
    world, a = one_member(1)
    together((a,), 3)
    world.tolerant, world.check = True, lambda: None
    world.objects.clear()
    if other == "another run":
        Player(world, "b").turn()
    elif other is not None:
        world.objects["run.json"] = other
    for _ in range(4):
        world.now += 60.0
        a.step()
        a.turn()
    assert [e["event"] for e in a.reduce.events()].count("run lost") == 1
    assert caplog.text.count("is no longer in the store") == 1
    a.reduce.drain()
    assert caplog.text.count("is no longer in the store") == 2


def test_a_run_that_is_missing_for_a_moment_is_not_called_lost(caplog):
    world, a = one_member(1)
    together((a,), 3)
    run = world.objects.pop("run.json")
    world.tolerant, world.check = True, lambda: None
    for _ in range(4):
        world.now += 60.0
        a.step()
        a.turn()
        world.objects["run.json"] = run
    a.reduce.drain()
    assert "is no longer in the store" not in caplog.text
    assert "run lost" not in [e["event"] for e in a.reduce.events()]


def test_who_begins_a_run_beside_members_whose_run_was_deleted_says_so(caplog):
    world, a = one_member(1)
    assert "started a new run" not in caplog.text
    world.objects.clear()
    a.turn()  # it still shows a heartbeat
    Player(world, "b").turn()
    assert "entries of members (a)" in caplog.text
