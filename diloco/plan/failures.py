"""Goodput: the share of computed steps that count when replicas fail now and then.

Failures are independent, with exponential times between them (mean `mtbf` of one replica); a replica is away for
`restart` seconds. Two ways to live with it: everyone waits and goes back to the last checkpoint; or the others go on as
long as `quorum` of them are there.
"""

import math


def synchronous(replicas: int, mtbf: float, restart: float, save_seconds: float) -> float:
    """All wait for the one that failed, and repeat what came after the last checkpoint: half of `save_seconds`.

    >>> round(synchronous(4, 100_000, 600, 800), 3)
    0.962
    """
    if math.isinf(mtbf):
        return 1.0
    return 1 / (1 + replicas / mtbf * (restart + save_seconds / 2))


def quorum(replicas: int, mtbf: float, restart: float, least: int, grace: float = 0.0, lost: float = 0.0) -> float:
    """The others go on, if at least `least` are there.

    The one that failed loses `lost` seconds of its own work; each of the others waits `grace` seconds once for it
    (a dead member is awaited in one round, not in each).

    >>> round(quorum(4, 100_000, 600, 1), 3)
    0.994
    """
    if math.isinf(mtbf):
        return 1.0
    there = mtbf / (mtbf + restart)
    counted = sum(
        k / replicas * math.comb(replicas, k) * there**k * (1 - there) ** (replicas - k)
        for k in range(least, replicas + 1)
    )
    return counted / (1 + lost / mtbf + (replicas - 1) / mtbf * grace)
