"""The guarantees of the bucket under every interleaving, crash, lost reply and late put that hypothesis thinks of.

EXAMPLES and STEPS in the environment ask for more than the few short runs of the suite, as `make nightly` does.
"""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from diloco.bucket import rounds as round_
from diloco.bucket import rules
from diloco.bucket import snapshots as snapshot
from diloco.bucket.rounds import folder, record_name, share_name
from diloco.bucket.store import All, Create, List
from diloco.exchange.reducer import Jump
from tests.support.players import FRAGMENTS, GARBAGE, SETTINGS, SYNC_EVERY, Player, Violation, World, meet, train

NAMES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    """Snapshots, garbage collection and jumps after a few rounds, so that short runs have them."""
    shorten(monkeypatch.setattr)


def shorten(set_):
    set_(round_, "LEAST", 4)
    set_(round_, "UNIT", 2)
    set_(snapshot, "EVERY", 3)
    set_(snapshot, "STRIDE", 1)
    set_(snapshot, "KEEP", 0.0)
    set_(rules, "BEHIND", 2)


class Members(RuleBasedStateMachine):
    VALUES = 1
    """Of a fragment."""

    def __init__(self):
        super().__init__()
        self.world = World(values=self.VALUES)
        self.world.honest = True
        self.alive: dict[str, Player] = {}
        self.checkpoints = {}

    @initialize(count=st.integers(0, 3), times=st.integers(0, 30))
    def beginning(self, count, times):
        """Some are together and have some rounds behind them."""
        for name in NAMES[:count]:
            self.begin(name, 0, False)
        self.all_go_on(times)

    @rule(name=st.sampled_from(NAMES), start=st.integers(0, 3), back=st.booleans())
    def begin(self, name, start, back):
        """A member comes, or one is started again under its name, with its last checkpoint or without."""
        checkpoint = self.checkpoints.get(name) if back else None
        rate = float(1 + NAMES.index(name))
        self.alive[name] = Player(self.world, name, checkpoint, float(start), rate)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), fates=st.lists(st.sampled_from(["done"] * 4 + ["lost", "refused", "slow"]), max_size=12))
    def operations(self, data, fates):
        """Some store operations of one part of one member, each with its fate."""
        player = self.any(data)
        job = data.draw(st.sampled_from(list(player.jobs)))
        for fate in fates:
            if not player.go(job, fate):
                break

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), count=st.integers(1, 4))
    def steps(self, data, count):
        player = self.any(data)
        for _ in range(count if player.joined else 0):
            player.step()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def turn(self, data):
        self.any(data).turn()

    @precondition(lambda self: self.alive)
    @rule(times=st.integers(1, 8))
    def all_go_on(self, times):
        for _ in range(times):
            for player in self.alive.values():
                player.turn()
                player.step()
            self.world.now += 0.5

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), steps=st.integers(0, 2), times=st.integers(2, 6))
    def relapse(self, data, steps, times):
        """A member dies some rounds after its last checkpoint, and returns with it."""
        player = self.any(data)
        if not player.joined:
            return
        for _ in range(steps):
            player.step()
        self.checkpoints[player.name] = player.save()
        self.all_go_on(times)
        self.begin(player.name, 0, True)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), in_flight=st.booleans())
    def crash(self, data, in_flight):
        """A member dies; a put that it has begun may land later."""
        player = self.any(data)
        del self.alive[player.name]
        if in_flight:
            for operation in player.wanted.values():
                each = operation.operations if isinstance(operation, All) else [operation]
                self.world.limbo += [put for put in each if isinstance(put, Create)]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def save(self, data):
        player = self.any(data)
        if player.joined:
            self.checkpoints[player.name] = player.save()

    @precondition(lambda self: self.world.limbo)
    @rule(data=st.data())
    def land(self, data):
        """A put arrives, late."""
        at = data.draw(st.integers(0, len(self.world.limbo) - 1))
        self.world.attempt(self.world.limbo.pop(at))
        self.world.check()

    @rule(late=st.booleans())
    def listings(self, late):
        """From now on listings answer what was there at this moment, or again what is there."""
        self.world.stale = self.world.names() if late else None

    @rule(seconds=st.sampled_from([0.3, 3.0, 30.0]))
    def time(self, seconds):
        self.world.now += seconds

    @precondition(lambda self: self.world.run)
    @rule(fragment=st.integers(0, FRAGMENTS - 1), attempt=st.integers(0, 1))
    def bad_record(self, fragment, attempt):
        """Garbage takes the name of the next commit record."""
        name = record_name(fragment, self.world.closed(fragment) + 1, attempt)
        self.world.objects.setdefault(name, GARBAGE)
        self.world.check()

    def any(self, data):
        return self.alive[data.draw(st.sampled_from(sorted(self.alive)))]

    def teardown(self):
        """4: what is closed outlives all processes. 7: replay gives the same. 5: one living member goes on."""
        for put in self.world.limbo:
            self.world.attempt(put)
        self.world.check()
        self.world.stale = None
        closed = [self.world.closed(f) for f in range(FRAGMENTS)]
        alone(self.world, "z", closed)


def alone(world, name, closed, rounds=2):
    """A new member takes up what was closed and goes on, though all others are dead."""
    world.now += 100.0
    player = Player(world, name, start=9.0)
    player.turn()
    for _ in range(50 + 4 * max(closed) + rounds * (4 * SYNC_EVERY + 8)):
        player.step()
        player.turn()
        world.now += 1.0
        if all(held >= index + rounds for held, index in zip(player.held, closed, strict=True)):
            return player
    raise Violation(f"stuck: {player.held} after {closed} were closed")


def sleeper(world):
    """b is about to close round 1 of fragment 0 with its own delta alone, and sleeps. a closes it with both and goes on
    until the round's deltas are no longer needed. Then b's put arrives."""
    a, b = Player(world, "a"), Player(world, "b", rate=2.0)
    meet(a, b)
    for _ in range(SYNC_EVERY):
        b.step()
    while not isinstance(b.want(1), List) or world.closed(0):
        b.go(1)
    b.go(1)  # it has seen no delta but its own, and now the straggler timeout passes
    world.now += 60.0
    while not (isinstance(b.want(1), Create) and b.want(1).name == record_name(0, 1, 0)):
        b.go(1)
    while a.held[0] < 8:
        a.step()
        a.turn()
        world.now += 1.0
    assert folder(0, 1) + "d-" not in "".join(world.objects)
    while b.held[0] < 1:
        b.turn()
        b.step()
    return a, b


def test_a_late_close_changes_nothing_because_records_are_never_deleted():
    world = World()
    a, b = sleeper(world)
    assert b.held[0] >= 3 and world.closed(0) >= a.held[0]  # it found the round closed, its deltas gone, and jumped
    assert any(isinstance(outcome, Jump) for _, outcome in b.reduce.outcomes)


def second_life(world):
    """a has put a delta for round 1 and dies; it comes back without a checkpoint, with other work, and closes."""
    a = Player(world, "a", rate=3.0)
    a.turn()
    for _ in range(SYNC_EVERY):
        a.step()
    while not any(name.startswith(folder(0, 1)) for name in world.objects):
        a.go(1)
    again = alone(world, "a", [0] * FRAGMENTS)
    return alone(world, "b", again.held)


def test_a_delta_of_an_earlier_life_stands_in_nobodys_way_because_names_hold_digests():
    world = World()
    second_life(world)
    assert len([n for n in world.objects if n.startswith(folder(0, 1) + "d-a-")]) == 2


@pytest.mark.parametrize("names", ["a", "ab"])
@pytest.mark.parametrize("saved", range(15, 20))
def test_steps_count_once_if_a_member_returns_with_a_checkpoint_from_before_its_last_rounds(saved, names, monkeypatch):
    monkeypatch.setattr(rules, "BEHIND", 8)
    world, settings = World(), SETTINGS | {"sync_every": 5}
    world.honest = True
    players = [Player(world, name, settings=settings) for name in names]
    meet(*players)
    train(world, players, saved)
    checkpoint = players[0].save()
    train(world, players, 8)
    players[0] = Player(world, "a", checkpoint, settings=settings)
    players[0].turn()
    assert all(fragment.lost == (0, 0) for fragment in players[0].diloco._fragments)
    train(world, players, 20)
    assert not any(isinstance(outcome, Jump) for _, outcome in players[0].reduce.outcomes)
    assert all(world.steps["a"] - work["a"] <= 10 for work in world.work.values())  # and few are lost


class Sharing(Members):
    """The same with three pieces a delta, of which each member averages some; from two members of a round on."""

    VALUES = 6

    @precondition(lambda self: self.world.run)
    @rule(fragment=st.integers(0, FRAGMENTS - 1), share=st.integers(0, 2), ahead=st.booleans())
    def bad_share(self, fragment, share, ahead):
        """Garbage takes the name of an averaged share of the last closed round, or of the next."""
        name = share_name(fragment, self.world.closed(fragment) + ahead, share, 0)
        self.world.objects.setdefault(name, GARBAGE)


Sharing.TestCase.settings = Members.TestCase.settings = settings(
    max_examples=int(os.environ.get("EXAMPLES", "12")),
    stateful_step_count=int(os.environ.get("STEPS", "30")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestMembers = pytest.mark.slow(Members.TestCase)
TestSharing = pytest.mark.slow(Sharing.TestCase)
