"""The founder changes the list while members come, go and lose answers: in any order all follow the same records."""

import random

import pytest

from diloco.bucket.members import StruckOff
from diloco.bucket.roster import change, changed
from diloco.bucket.store.operations import advance
from diloco.errors import ConfigError
from tests.bucket.test_keys import OTHER, THIRD, begun, envelope_of
from tests.support.players import Player


class Founder:
    """The founder's command, one store operation at a time."""

    def __init__(self, world, name, key):
        self.world, self.since = world, None
        envelope = envelope_of(world)
        listed = changed(envelope, name, None if key is None else key.public)
        self.task = change(envelope, world.fragments, listed)
        self.wanted = advance(self.task, None)

    def go(self):
        each = getattr(self.wanted, "operations", None)
        attempt = self.world.attempt
        answer = attempt(self.wanted) if each is None else [attempt(operation) for operation in each]
        try:
            self.wanted = advance(self.task, answer)
        except StopIteration as stop:
            self.since = stop.value


def disturbed(seed):
    """Members, the founder's commands and a member that ignores them, interleaved at random. The world checks that who
    holds the same round holds the same bits."""
    chance = random.Random(seed)
    world, players = begun(b=OTHER, c=THIRD)
    players = dict(zip("abc", players, strict=True))
    for player in players.values():
        player.turn()
    keys, founder, listed, changes = {"b": OTHER, "c": THIRD}, None, {"b", "c"}, 0
    for _ in range(900):
        name = chance.choice(sorted(players))
        player = players[name]
        if founder is not None and chance.random() < 0.2:
            founder.go()
            if founder.since is not None:
                founder, changes = None, changes + 1
        elif founder is None and chance.random() < 0.02:
            who = chance.choice("bc")
            founder = Founder(world, who, None if who in listed else keys[who])
            listed ^= {who}
        elif player.joined and chance.random() < 0.15:
            player.step()
            world.now += 0.2
        else:
            try:
                player.go(chance.choice(list(player.jobs)), chance.choice(("done", "done", "done", "lost")))
            except (StruckOff, ConfigError):
                del players[name]
        for back in sorted(listed - set(players)):
            if founder is None and chance.random() < 0.05:
                players[back] = Player(world, back, key=keys[back])
    while founder is not None and founder.since is None:
        founder.go()
    alive = [player for name, player in players.items() if name == "a" or name in listed]
    before = players["a"].held[0]
    for _ in range(30):
        for player in list(alive):
            try:
                player.turn()
                player.step()
            except (StruckOff, ConfigError):
                alive.remove(player)
        world.now += 1.0
    assert players["a"].held[0] > before + 3
    assert all(abs(player.held[0] - players["a"].held[0]) <= 2 for player in alive)
    return changes


@pytest.mark.slow
def test_in_any_order_of_changes_and_rounds_all_members_follow_the_same_records():
    assert sum(disturbed(seed) for seed in range(12)) > 12
