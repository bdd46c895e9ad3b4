"""What failures cost a fleet of chips, in closed form; `diloco.plan.events` simulates the same.

Chips fail independently, at a constant rate, whether they train or not. With a chip its slice is gone (the chips that
stop together: a host, a rack, a pod) until it is repaired. A group of chips that train in lock-step stalls:

- rigid: it needs all its chips. A spare slice takes the place of the failed one, and the group goes back to its last
  checkpoint. Without a spare it waits for a repair first. Spares train nothing.
- elastic: it goes on without the failed slice, and stalls once more, for `resize`, when the slice is back.

Data-parallel training is one group. DiLoCo has several, its members: while one stalls the others train on.

A failure during a stall is dealt with by that stall, which does not begin again.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Everything about the chips and how they fail. Times in seconds."""

    chips: float
    mtbf: float
    """Mean time between failures of one chip."""
    slice: float = 1.0
    """Chips that stop together."""
    detect: float = 0.0
    restart: float = 0.0
    """Time until a rigid group computes again, with all its chips and from its checkpoint."""
    rejoin: float = 0.0
    """Time in which a rigid member of several fetches the others' state, besides `restart`."""
    resize: float = 0.0
    """Time until an elastic group computes again with fewer or more chips."""
    repair: float = 0.0
    """Mean time until a slice is back."""
    save_every: float = 0.0
    """Time between two checkpoints of a rigid group. What it has computed since the last one is lost."""
    spares: float | None = None
    """Share of a rigid group's slices that stand by. None: what gives the highest goodput."""
    quorum: int = 1
    """The fewest members that train. With fewer, all wait."""
    grace: float = 0.0
    """How long all members wait for one that stalls."""


@dataclass(frozen=True)
class Outcome:
    goodput: float
    """Share of all chips' time that went into work which counts."""
    uptime: float
    """Share of the time in which at least the quorum trains."""


@dataclass(frozen=True)
class Group:
    """Chips in lock-step, seen from outside."""

    running: float
    """Share of the time in which it trains."""
    stalls: float
    """How often it stalls, in a second."""
    waited: float
    """Share of the time in which it stalls and others, if they have a grace, wait for it."""
    counted: float
    """What counts of the work of its chips, spares and slices under repair included, while it runs."""


def outcome(fleet: Fleet, members: int, *, elastic: bool) -> Outcome:
    """Data-parallel training with one member, DiLoCo with more.

    >>> fleet = Fleet(chips=16_384, mtbf=5.8 * 365.25 * 86_400, slice=8, restart=600, resize=60, repair=3600)
    >>> [round(outcome(fleet, members, elastic=False).goodput, 3) for members in (1, 8)]
    [0.947, 0.989]
    """
    group = group_of(fleet, members, elastic=elastic)
    there = _there(group, members, fleet.quorum, fleet.grace > 0)
    share = sum(k * each for k, each in there) / members
    return Outcome(group.counted * share, sum(each for _, each in there))


def group_of(fleet: Fleet, members: int, *, elastic: bool) -> Group:
    """One of the members."""
    return elastic_group(fleet, members) if elastic else rigid_group(fleet, members)


def _there(group: Group, members: int, quorum: int, graceful: bool) -> list[tuple[int, float]]:
    """(k, share of the time in which k members train and wait for none), from the quorum on."""
    waited = group.waited if graceful and members > 1 else 0.0
    away = max(1 - group.running - waited, 0.0)
    return [(k, math.comb(members, k) * group.running**k * away ** (members - k)) for k in range(quorum, members + 1)]


def elastic_group(fleet: Fleet, members: int) -> Group:
    """By renewal: of the time between two stalls, 1 / rate, and the mean stall, only the first counts."""
    broken = _broken(fleet)
    there = 1 - broken ** slices_of(fleet, members)  # at least one slice, without which nothing runs
    rate = fleet.chips / members * (1 - broken) / fleet.mtbf
    down, missed = fleet.detect + fleet.resize, _missed(fleet)
    running = there / (1 + rate * (down + missed * fleet.resize))
    waited = running * rate * (min(down, fleet.grace) + missed * min(fleet.resize, fleet.grace))
    return Group(running, running * rate * (1 + missed), waited, (1 - broken) / there)


def _missed(fleet: Fleet) -> float:
    """Probability that a slice is not back within the stall that its failure causes, so that it causes another one."""
    return math.exp(-(fleet.detect + fleet.resize) / fleet.repair) if fleet.repair else 0.0


def rigid_group(fleet: Fleet, members: int) -> Group:
    """By renewal too: each failure of a running group takes one stall from the time in which no slice is missing."""
    slices, spares = slices_of(fleet, members), spare_slices(fleet, members)
    trained = 1 - spares / slices
    rate, stall = fleet.chips / members * trained / fleet.mtbf, rigid_stall(fleet, members)
    complete = _at_most(slices, _broken(fleet), spares)
    running = float(complete[-1]) / (1 + rate * stall)
    waited = min(stall, fleet.grace)
    if (
        running and fleet.repair and fleet.grace > stall
    ):  # if it was the last spare's turn, it is away until one of them is back
        last = 1 - float(complete[-2] / complete[-1]) if spares else 1.0
        back = fleet.repair / (spares + 1)
        waited += last * back * -math.expm1((stall - fleet.grace) / back)
    return Group(running, running * rate, running * rate * waited, trained * kept(rate, fleet.save_every))


def slices_of(fleet: Fleet, members: int) -> int:
    """Slices of one member."""
    return max(round(fleet.chips / members / fleet.slice), 1)


def spare_slices(fleet: Fleet, members: int) -> int:
    """How many slices of a rigid member stand by: as given, or as many as give the highest goodput."""
    slices = slices_of(fleet, members)
    if fleet.spares is not None:
        return min(round(fleet.spares * slices), slices - 1)
    mean = slices * _broken(fleet)
    most = min(slices - 1, math.ceil(mean + 8 * math.sqrt(mean)))
    trained = 1 - np.arange(most + 1) / slices
    stalled = fleet.chips / members * trained / fleet.mtbf * rigid_stall(fleet, members)
    return int(np.argmax(trained * _at_most(slices, _broken(fleet), most) / (1 + stalled)))


def rigid_stall(fleet: Fleet, members: int) -> float:
    return fleet.detect + fleet.restart + (fleet.rejoin if members > 1 else 0.0)


def kept(rate: float, every: float) -> float:
    """Share of the computed time that is not lost if one goes back to the last checkpoint at each failure.

    Exact for failures of a constant rate, however long a checkpoint's interval is.

    >>> round(kept(1 / 100_000, 800), 4), kept(1, 0)
    (0.996, 1.0)
    """
    x = rate * every
    return x / math.expm1(x) if 0 < x < 700 else float(x == 0)


def _broken(fleet: Fleet) -> float:
    """Share of the time that a slice is under repair."""
    return fleet.repair / (fleet.mtbf / fleet.slice + fleet.repair)


def _at_most(slices: int, share: float, most: int) -> np.ndarray:
    """Probability that at most n slices are under repair, n from 0 to `most`: the binomial distribution."""
    if share == 0:
        return np.ones(most + 1)
    n = np.arange(1, most + 1)
    steps = np.log(slices - n + 1) - np.log(n) + math.log(share) - math.log1p(-share)
    exactly = np.exp(slices * math.log1p(-share) + np.concatenate([[0.0], np.cumsum(steps)]))
    return np.minimum(np.cumsum(exactly), 1.0)
