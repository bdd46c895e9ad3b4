"""A member that computes other bits, and one that comes from far behind: what it jumps to, and when it stops."""

from collections import Counter
from dataclasses import dataclass

import pytest

from diloco import SGD, Diverged
from diloco.bucket import snapshots as snapshot
from diloco.bucket.round_store import AT_ONCE
from diloco.bucket.rounds import folder, record_name
from diloco.bucket.rules import BEHIND
from diloco.bucket.store import List, Read, Size, Work
from diloco.exchange.reducer import Dropped, Jump, Round
from tests.support.players import SETTINGS, Player, World, complete, meet, train


@dataclass(frozen=True)
class Wrong(SGD):
    """The outer rule on a machine that computes other bits, always or once."""

    times: int = 1 << 30

    def step(self, anchor, delta, state, stage):
        super().step(anchor, delta, state, stage)
        if self.times > 0:
            anchor.mul_(1 + 1e-6)
            object.__setattr__(self, "times", self.times - 1)

    def __repr__(self):
        return repr(SGD(self.lr))


def two(outer):
    """A sound member, which closes first, and one with this outer rule."""
    world = World(1)
    world.holds = lambda *_: None  # other bits are what this is about
    good, bad = Player(world, "a"), Player(world, "b", rate=2.0, settings=SETTINGS | {"outer": outer})
    meet(good, bad)
    return world, good, bad


def jumps(player):
    return [outcome.state.index for _, outcome in player.reduce.outcomes if isinstance(outcome, Jump)]


@pytest.mark.slow
def test_who_was_far_behind_jumps_once(monkeypatch):
    """What follows the snapshot is followed from there: 7 rounds are no reason to jump again."""
    monkeypatch.setattr(snapshot, "EVERY", 10)
    monkeypatch.setattr(snapshot, "STRIDE", 1)
    world = World(1)
    a, b = Player(world, "a"), Player(world, "b", rate=2.0)
    meet(a, b)
    train(world, (a, b), 20)
    newest = 0
    while a.held[0] < b.held[0] + 37 or a.held[0] != newest + 7:
        train(world, (a,), 1)
        newest = max(int(name.split("/")[2][:8]) for name in world.objects if name.startswith("anchors"))
    train(world, (a, b), 60)
    assert jumps(b) == [newest] and b.held[0] >= a.held[0] - 1


def stop_at(player, matches):
    """Go on with fragment 0 until it asks for something like this, which is not done yet."""
    while not matches(player.want(1)):
        player.go(1)


def behind(rounds):
    """a has closed this many rounds; b joined at the beginning and has not looked since."""
    world = World(1)
    world.holds = lambda *_: None
    a, b = Player(world, "a"), Player(world, "b", rate=2.0)
    meet(a, b)
    while world.closed(0) < rounds:
        train(world, (a,), 1)
    while a.held[0] < rounds:
        a.step()
    b.finish_tick(0)
    return world, a, b


@pytest.mark.parametrize(("after", "stops"), [(1, True), (2, False)])
def test_other_bits_are_forgotten_once_a_record_agrees_with_what_was_computed_after_the_jump(after, stops, monkeypatch):
    """The first round after the jump is judged by the record of the second one."""
    monkeypatch.setattr(snapshot, "EVERY", 1)
    monkeypatch.setattr(snapshot, "STRIDE", 1)
    world, good, bad = two(Wrong(1.0, times=0))
    outer = bad.diloco._fragments[0].outer
    spoiled, ready = [], bad.reduce._fragments[0].machine.ready

    def step(anchor, delta, state, stage):
        SGD(1.0).step(anchor, delta, state, stage)
        jumped = [*jumps(bad), *(outcome.state.index for outcome in ready if isinstance(outcome, Jump))]
        if stage.index == (jumped[0] + after if jumped else 4) and len(spoiled) <= len(jumped[:1]):
            spoiled.append(stage.index)
            anchor.mul_(1 + 1e-6)

    object.__setattr__(outer, "step", step)
    if stops:
        with pytest.raises(Diverged, match="computes other bits"):
            train(world, (good, bad), 60)
    else:
        train(world, (good, bad), 60)
        assert len(jumps(bad)) == 2 and bad.held[0] >= good.held[0] - 1
    assert Counter(event["event"] for event in bad.reduce.events())["diverged"] == 2 and len(spoiled) == 2


@pytest.mark.parametrize("rounds", [BEHIND, BEHIND + 1])
def test_who_comes_from_too_far_behind_follows_all_rounds_and_gives_up_its_local_work(rounds):
    """There is no snapshot ahead, and no living member to ask for one."""
    world, _, b = behind(rounds)
    world.now += 100.0
    for _ in range(2 * rounds):
        b.step()
        b.turn()
        if b.held[0] == rounds:
            break
    assert [o.state.index for _, o in b.reduce.outcomes if isinstance(o, Round)] == list(range(1, rounds + 1))
    b.step()
    dropped = [o for _, o in b.reduce.outcomes if isinstance(o, Dropped)]
    assert dropped == [Dropped(reset=True)] * (rounds > BEHIND)
    local = b.model.weight.item() - b.diloco._fragments[0].state.anchor.item()
    assert (local == b.rate) == (rounds > BEHIND)  # the step since, or everything


def test_where_deltas_are_gone_the_snapshot_of_the_next_round_will_do():
    world, a, b = behind(1)
    fragment = a.reduce._fragments[0]
    complete(world, fragment.snapshots.store(a.diloco._fragments[0].state, fragment.machine.previous))
    for name in [name for name in world.objects if "/d-" in name]:
        del world.objects[name]
    for _ in range(3):
        b.turn()
        b.step()
    assert jumps(b) == [1]
    assert [e["index"] for e in b.reduce.events() if e["event"] == "gone"] == [1]


def test_what_is_gone_is_looked_for_again_and_said_once():
    """A delta is away for a while, and nobody lives who could put a snapshot."""
    world, a, _ = behind(3)
    name = next(name for name in world.objects if name.startswith(folder(0, 2)) and "/d-" in name)
    away = world.objects.pop(name)
    b = Player(world, "c")
    for _ in range(6):
        b.turn()
        b.step()
        world.now += a.reduce._options.ttl
    assert b.held[0] == 1 and b.reduce._fragments[0].machine.caught_up  # it may train, and send
    assert [e["index"] for e in b.reduce.events() if e["event"] == "gone"] == [2]
    world.objects[name] = away
    for _ in range(3):
        b.turn()
        b.step()
        world.now += a.reduce._options.ttl
    assert b.held[0] >= 3 and b.reduce._fragments[0].machine.caught_up and not jumps(b)


@pytest.mark.parametrize(
    "matches",
    [
        lambda operation: isinstance(operation, Size) and "/closed." in operation.name,
        lambda operation: isinstance(operation, List) and operation.prefix.startswith("anchors/"),
        lambda operation: isinstance(operation, Work),
    ],
    ids=["during the look at a far record", "during the look at the snapshots", "during the mean of the next round"],
)
def test_other_bits_found_while_the_background_goes_on_lead_to_a_jump(matches):
    world, a, b = behind(BEHIND + 4)
    world.now += 100.0
    stop_at(b, lambda operation: matches(operation) and b.reduce._fragments[0].machine.frontier > 0)
    found_and_back(world, a, b)


def found_and_back(world, a, b):
    """The core of b finds that it holds other bits than the run, and b goes back to the only snapshot."""
    b.reduce._fragments[0].machine.fingerprint ^= 1
    b.step()
    assert [e["index"] for e in b.reduce.events() if e["event"] == "diverged"] == [1]
    b.finish_tick(1)
    for _ in range(40):
        b.step()
        b.turn()
        world.now += 0.5
    assert jumps(b) == [0] and b.held[0] >= a.held[0]


def test_who_is_late_follows_the_rounds_while_it_waits_for_a_snapshot(monkeypatch):
    """The others live, and none of them ever puts the snapshot that it asks for."""
    monkeypatch.setattr(snapshot, "EVERY", 1000)
    world, a, b = behind(3 * BEHIND)
    a.finish_tick(0)
    b.finish_tick(0)
    assert b.reduce.session.members.alive(world.now)
    for _ in range(6 * BEHIND):
        b.step()
        b.turn()
    assert b.held[0] >= 3 * BEHIND and not jumps(b) and b.reduce.session.entry.wants == ()


def test_rounds_that_go_on_while_a_snapshot_is_read_are_no_reason_for_another(monkeypatch):
    """Whenever b has read a snapshot, a is 12 rounds further: b follows them."""
    monkeypatch.setattr(snapshot, "EVERY", 10)
    monkeypatch.setattr(snapshot, "STRIDE", 1)
    world, a, b = behind(4 * BEHIND)
    attempt, reading = world.attempt, []

    def slowly(operation):
        if isinstance(operation, Read) and operation.name.startswith("anchors/") and operation.first is None:
            reading.append(operation.name)
            held = a.held[0]
            while a.held[0] < held + 12:
                train(world, (a,), 1)
        return attempt(operation)

    monkeypatch.setattr(world, "attempt", slowly)
    for _ in range(40 * BEHIND):
        b.turn()
        b.step()
        if b.held[0] == world.closed(0):
            break
    assert b.held[0] == world.closed(0) and len(reading) == 1


def test_a_record_that_was_read_wrongly_leads_back_to_the_run(monkeypatch):
    """What lies between b and the store cuts the record of round 3 off, each time at the same place, for a while: b
    closes the round again in the next attempt, and from there on both write records that do not follow the other's."""
    world, a, b = two(SGD(1.0))
    world.check = lambda: None
    wrong, perform = record_name(0, 3, 0), b._perform

    def cut(operation, fate):
        answer = perform(operation, fate)
        wrongly = isinstance(operation, Read) and operation.name == wrong and len(b.reduce.outcomes) < 5
        return answer[:50] if wrongly and answer is not None else answer

    monkeypatch.setattr(b, "_perform", cut)
    train(world, (b, a), 60)
    World.check(world)
    last = world.closed(0)
    assert [e["index"] for e in b.reduce.events() if e["event"] == "diverged"] == [3]
    assert jumps(b)[0] < 3 and b.held[0] >= a.held[0] - 1 > 10
    assert record_name(0, last - 1, 0) in world.objects and record_name(0, last - 1, 1) not in world.objects


def test_garbage_behind_a_record_and_before_another_makes_nobody_distrust_a_snapshot():
    """No key is needed for it."""
    world, a, _ = behind(3)
    for attempt in range(AT_ONCE + 2):
        world.objects[record_name(0, 4, attempt)] = b"garbage"
    while a.held[0] < 6:
        train(world, (a,), 1)
    fragment, state = a.reduce._fragments[0], a.diloco._fragments[0].state
    complete(world, fragment.snapshots.store(state, world.records[0, state.index]))
    world.objects[record_name(0, state.index + 1, 1)] = b"garbage"
    train(world, (a,), 6)
    b = Player(world, "c", start=9.0, rate=2.0)
    b.turn()
    assert b.held[0] == state.index
    train(world, (a, b), 20)
    assert b.held[0] >= a.held[0] - 1 and "diverged" not in [event["event"] for event in b.reduce.events()]
