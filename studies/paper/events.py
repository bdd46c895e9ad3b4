"""A fleet's failures and repairs simulated in order of time: the same model as the closed form in `diloco.plan.fleet`.

A million chips for 30 days are some hundred thousand events, which take about a second.
"""

import heapq
import math
from collections.abc import Iterator

import numpy as np

from diloco.plan.fleet import DAY, Fleet, Outcome, spare_slices

Stretch = tuple[float, float, float]
"""Start, end, and how many slices do work that counts."""


def simulate(fleet: Fleet, members: int, *, elastic: bool, days: float = 30.0, seed: int = 0) -> Outcome:
    """One member is data-parallel training, several are DiLoCo. Some slices are already broken at the start."""
    end, slices = days * DAY, fleet.slices(members)
    stretches: list[Stretch] = []
    for member in range(members):
        rng = np.random.default_rng([seed, members, member])
        stretches += _elastic(fleet, slices, end, rng) if elastic else _rigid(fleet, slices, end, rng, members)
    starts, ends, work = np.array(stretches).reshape(-1, 3).T
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    lengths = np.diff(times[order], append=end)

    def total(amount: np.ndarray) -> np.ndarray:
        return np.cumsum(np.concatenate([amount, -amount])[order])

    training = total(np.ones(len(starts))) >= min(fleet.quorum, members)
    useful = float((total(work) * lengths)[training].sum())
    return Outcome(useful / (members * slices * end), float(lengths[training].sum()) / end)


def _elastic(fleet: Fleet, slices: int, end: float, rng: np.random.Generator) -> Iterator[Stretch]:
    start, working = 0.0, slices
    for time, change, _ in _events(fleet, slices, end, rng):
        if time >= start:  # an event during a stall is handled by that stall
            if working and time > start:
                yield start, time, working
            start = time + fleet.resize + (fleet.detect if change < 0 else 0.0)
        working += change
    if start < end and working:
        yield start, end, working


def _rigid(fleet: Fleet, slices: int, end: float, rng: np.random.Generator, members: int) -> Iterator[Stretch]:
    needed, stall = slices - spare_slices(fleet, members), fleet.detect + fleet.restart
    start, working, rest = 0.0, slices, 0.0  # rest: what is left of a stall, which pauses while a slice is missing
    for time, change, chance in _events(fleet, slices, end, rng):
        hit = change < 0 and chance * slices < needed  # not a spare
        before, working = working, working + change
        if before >= needed and time >= start and hit:
            yield start, time, needed * _saved(time - start, fleet.save_every)
            start = time + stall
        if before >= needed > working:
            rest = max(start - time, 0.0)
        elif working >= needed > before:
            start = time + rest
    if working >= needed and start < end:
        yield start, end, needed * _saved(end - start, fleet.save_every)


def _saved(seconds: float, every: float) -> float:
    return seconds // every * every / seconds if every and seconds else 1.0


def _events(fleet: Fleet, slices: int, end: float, rng: np.random.Generator) -> Iterator[tuple[float, int, float]]:
    """(time, -1 for a failure or +1 for a return, a random number below the share of slices that work).

    All slices together fail at a constant rate. A failure that hits a broken slice is none.
    """
    between = fleet.mtbf / fleet.slice
    broken = rng.binomial(slices, fleet.repair / (between + fleet.repair))
    returns = rng.exponential(fleet.repair, broken).tolist()
    heapq.heapify(returns)
    for _ in returns:
        yield 0.0, -1, 0.0
    count = rng.poisson(end * slices / between)
    times = np.sort(rng.uniform(0, end, count)).tolist()
    for time, chance, repair in zip(
        times, rng.random(count).tolist(), rng.exponential(fleet.repair, count).tolist(), strict=True
    ):
        while returns and returns[0] <= time:
            yield heapq.heappop(returns), 1, math.nan
        if chance * slices < slices - len(returns):
            yield time, -1, chance
            heapq.heappush(returns, time + repair)
    while returns and returns[0] <= end:
        yield heapq.heappop(returns), 1, math.nan
