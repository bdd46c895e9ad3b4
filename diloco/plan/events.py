"""A fleet's failures and repairs one after another, in order of time: what `diloco.plan.failures` has in closed form.

A million chips for 30 days are some hundred thousand events, which take about a second.
"""

import heapq
import math
from collections.abc import Iterator

import numpy as np

from diloco.plan.failures import Fleet, Outcome, rigid_stall, slices_of, spare_slices

DAY = 86_400
Stretch = tuple[float, float, float]
"""From, to, and the slices' worth of work that counts in a second of it."""


def simulate(fleet: Fleet, members: int, *, elastic: bool, days: float = 30.0, seed: int = 0) -> Outcome:
    """Data-parallel training with one member, DiLoCo with more. It begins in the middle: some slices are broken."""
    end, slices = days * DAY, slices_of(fleet, members)
    run: list[Stretch] = []
    waits: list[Stretch] = []
    for member in range(members):
        rng = np.random.default_rng([seed, members, member])
        own = list(_elastic(fleet, slices, end, rng) if elastic else _rigid(fleet, slices, end, rng, members))
        run += own
        if fleet.grace and members > 1:
            starts, ends = (np.array([each[i] for each in own]) for i in (0, 1))
            waits += [(a, min(a + fleet.grace, b), 0.0) for a, b in zip(ends, [*starts[1:], end], strict=True)]
    return _together(run, waits, end, members * slices, fleet.quorum)


def _together(run: list[Stretch], waits: list[Stretch], end: float, slices: int, quorum: int) -> Outcome:
    """What counts while at least the quorum runs and nobody is waited for."""
    stretches = np.array([*run, *waits]).reshape(-1, 3)
    running = np.repeat([1, 0], [len(run), len(waits)])
    times = np.concatenate([stretches[:, 0], stretches[:, 1]])
    order = np.argsort(times, kind="stable")
    lasting = np.diff(times[order], append=end)

    def at(amount: np.ndarray) -> np.ndarray:
        return np.cumsum(np.concatenate([amount, -amount])[order])

    trains = (at(running) >= quorum) & (at(1 - running) == 0)
    useful = float((at(stretches[:, 2]) * lasting)[trains].sum())
    return Outcome(useful / (slices * end), float(lasting[trains].sum()) / end)


def _elastic(fleet: Fleet, slices: int, end: float, rng: np.random.Generator) -> Iterator[Stretch]:
    since, there = 0.0, slices
    for time, change, _ in _events(fleet, slices, end, rng):
        if time >= since:  # it runs; otherwise the stall deals with this too
            if there and time > since:
                yield since, time, there
            since = time + fleet.resize + (fleet.detect if change < 0 else 0.0)
        there += change
    if since < end and there:
        yield since, end, there


def _rigid(fleet: Fleet, slices: int, end: float, rng: np.random.Generator, members: int) -> Iterator[Stretch]:
    needed, stall = slices - spare_slices(fleet, members), rigid_stall(fleet, members)
    since, there, left = 0.0, slices, 0.0  # left: of the stall, which pauses while a slice is missing
    for time, change, chance in _events(fleet, slices, end, rng):
        hit = change < 0 and chance * slices < needed  # not a spare
        was, there = there, there + change
        if was >= needed and time >= since and hit:
            yield since, time, needed * _saved(time - since, fleet.save_every)
            since = time + stall
        if was >= needed > there:
            left = max(since - time, 0.0)
        elif there >= needed > was:
            since = time + left
    if there >= needed and since < end:
        yield since, end, needed * _saved(end - since, fleet.save_every)


def _saved(lasted: float, every: float) -> float:
    return lasted // every * every / lasted if every and lasted else 1.0


def _events(fleet: Fleet, slices: int, end: float, rng: np.random.Generator) -> Iterator[tuple[float, int, float]]:
    """(time, -1 for a slice that fails or +1 for one that is back, a number below the share of slices that are there).

    All slices together fail at a constant rate. A failure that hits a slice which is broken already is none.
    """
    between = fleet.mtbf / fleet.slice
    broken = rng.binomial(slices, fleet.repair / (between + fleet.repair))
    back = rng.exponential(fleet.repair, broken).tolist()
    heapq.heapify(back)
    for _ in back:
        yield 0.0, -1, 0.0
    count = rng.poisson(end * slices / between)
    times = np.sort(rng.uniform(0, end, count)).tolist()
    for time, chance, repair in zip(
        times, rng.random(count).tolist(), rng.exponential(fleet.repair, count).tolist(), strict=True
    ):
        while back and back[0] <= time:
            yield heapq.heappop(back), 1, math.nan
        if chance * slices < slices - len(back):
            yield time, -1, chance
            heapq.heappush(back, time + repair)
    while back and back[0] <= end:
        yield heapq.heappop(back), 1, math.nan
