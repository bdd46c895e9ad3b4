"""A member that computes other bits, and one that comes from far behind: what it jumps to, and when it stops."""

from collections import Counter
from dataclasses import dataclass

import pytest

from diloco import SGD, Diverged
from diloco.bucket import snapshots as snapshot
from diloco.reduce import Jump
from tests.support.players import SETTINGS, Player, World


@dataclass(frozen=True)
class Wrong(SGD):
    """The outer rule on a machine that computes other bits, always or once."""

    times: int = 1 << 30

    def step(self, anchor, delta, state):
        super().step(anchor, delta, state)
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
    for player in (good, bad, good, bad):
        player.turn()
    return world, good, bad


def go_on(world, players, turns):
    for _ in range(turns):
        for player in players:
            player.step()
            player.turn()
        world.now += 0.5


def jumps(player):
    return [outcome.state.index for _, outcome in player.reduce.outcomes if isinstance(outcome, Jump)]


@pytest.mark.parametrize("every", [3, 100])
def test_other_bits_a_second_time_running_stop_the_member_however_old_the_snapshot(every, monkeypatch):
    monkeypatch.setattr(snapshot, "EVERY", every)
    world, good, bad = two(Wrong(1.0))
    with pytest.raises(Diverged, match="second time in a row"):
        go_on(world, (good, bad), 100)
    assert Counter(event["event"] for event in bad.reduce.events())["diverged"] == 2
    held = good.held[0]
    go_on(world, (good,), 20)
    assert good.held[0] > held


def test_one_wrong_bit_costs_one_jump_and_a_later_one_another(monkeypatch):
    monkeypatch.setattr(snapshot, "EVERY", 3)
    outer = Wrong(1.0, times=1)
    world, good, bad = two(outer)
    go_on(world, (good, bad), 40)
    object.__setattr__(bad.diloco._fragments[0].outer, "times", 1)
    go_on(world, (good, bad), 40)
    assert Counter(event["event"] for event in bad.reduce.events())["diverged"] == 2
    assert bad.held[0] >= good.held[0] - 1 and len(jumps(bad)) == 2


def test_who_was_far_behind_jumps_once(monkeypatch):
    """What follows the snapshot is followed from there: 7 rounds are no reason to jump again."""
    monkeypatch.setattr(snapshot, "EVERY", 10)
    world = World(1)
    a, b = Player(world, "a"), Player(world, "b", rate=2.0)
    for player in (a, b, a, b):
        player.turn()
    go_on(world, (a, b), 20)
    while a.held[0] < b.held[0] + 37:
        go_on(world, (a,), 1)
    newest = max(int(name.split("/")[2][:8]) for name in world.objects if name.startswith("anchors"))
    assert a.held[0] > newest + 2
    go_on(world, (a, b), 60)
    assert jumps(b) == [newest] and b.held[0] >= a.held[0] - 1
