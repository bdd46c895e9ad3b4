"""Members in virtual time that average shares for each other."""

import diloco.bucket.rounds as rounds_
from diloco.exchange.reducer import Round
from tests.support.players import Player, meet

SHARES = 3


def small_pieces(monkeypatch):
    """Fragments of 6 values in pieces of 2."""
    monkeypatch.setattr(rounds_, "LEAST", 4)
    monkeypatch.setattr(rounds_, "UNIT", 2)


def crowd(world, count=4, **options):
    """Members that know each other."""
    players = [Player(world, "abcdefgh"[k], rate=float(1 + k), **options) for k in range(count)]
    meet(*players)
    return players


def together(players, rounds, seconds=0.2, most=200):
    """Train in step until all hold so many rounds of the first fragment."""
    world = players[0].world
    for _ in range(most):
        for player in players:
            player.step()
            player.turn()
        world.now += seconds
        if min(player.held[0] for player in players) >= rounds:
            return
    raise AssertionError([player.held for player in players])


def rounds_of(player, fragment=0):
    return [o for f, o in player.reduce.outcomes if f == fragment and isinstance(o, Round)]
