"""Goodput and uptime of a fleet whose chips fail, in closed form. `studies/paper/events.py` simulates the same model.

Chips fail independently and at a constant rate, whether they train or not. A failed chip takes its slice (a host, a
rack, a pod) down until the slice is repaired. A group of chips in lockstep then stalls:

- A rigid group needs all its chips. A spare slice replaces the failed one, and the group restarts from its last
  checkpoint. Without a spare it waits for a repair first. Spares do not train.
- An elastic group continues without the failed slice, and stalls again to resize when the slice returns.

Data-parallel training is one group. DiLoCo has several, its members: while one stalls, the others keep training. A
failure during a stall does not prolong it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diloco.plan.table import Sheet, wrapped
from diloco.runs.units import amount, duration, percent

DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The chips and how they fail. Times in seconds."""

    chips: float
    mtbf: float
    """Mean time between failures of one chip."""
    slice: float = 1.0
    """Chips that go down together."""
    detect: float = 0.0
    restart: float = 0.0
    """Time until a rigid group computes again, from its checkpoint."""
    resize: float = 0.0
    """Time until an elastic group computes again with fewer or more chips."""
    repair: float = 0.0
    """Mean time until a failed slice returns."""
    save_every: float = 0.0
    """Time between checkpoints of a rigid group, which loses the work since the last one."""
    quorum: int = 1
    """Fewest members that train; with fewer, all wait."""

    @property
    def broken(self) -> float:
        """Share of the time that a slice is under repair."""
        return self.repair / (self.mtbf / self.slice + self.repair)

    def slices(self, members: int) -> int:
        """Slices of one member."""
        return max(round(self.chips / members / self.slice), 1)


@dataclass(frozen=True)
class Outcome:
    goodput: float
    """Share of all chip time spent on work that counts."""
    uptime: float
    """Share of the time in which at least a quorum trains."""


@dataclass(frozen=True)
class Group:
    """Chips in lockstep."""

    running: float
    """Share of the time in which it trains."""
    stalls: float
    """Stalls per second."""
    counted: float
    """While it runs, the share of its chips' work that counts; spares and broken slices do no work."""


def outcome(fleet: Fleet, members: int, *, elastic: bool) -> Outcome:
    """One member is data-parallel training, several are DiLoCo.

    >>> fleet = Fleet(chips=16_384, mtbf=5.8 * 365.25 * 86_400, slice=8, restart=600, resize=60, repair=3600)
    >>> [round(outcome(fleet, members, elastic=False).goodput, 3) for members in (1, 8)]
    [0.947, 0.989]
    """
    group = group_of(fleet, members, elastic=elastic)
    up, down = group.running, 1 - group.running
    quorum = min(fleet.quorum, members)  # data-parallel training has none
    shares = {k: math.comb(members, k) * up**k * down ** (members - k) for k in range(quorum, members + 1)}
    return Outcome(group.counted * sum(k * share for k, share in shares.items()) / members, sum(shares.values()))


def group_of(fleet: Fleet, members: int, *, elastic: bool) -> Group:
    """One of the members, by renewal: between two stalls it runs for 1 / rate seconds on average."""
    return _elastic_group(fleet, members) if elastic else _rigid_group(fleet, members)


def _elastic_group(fleet: Fleet, members: int) -> Group:
    nonempty = 1 - fleet.broken ** fleet.slices(members)  # a group without any slice cannot run
    rate = fleet.chips / members * (1 - fleet.broken) / fleet.mtbf
    stall = fleet.detect + fleet.resize
    # A slice that returns only after the stall it caused makes the group stall again to resize.
    late = math.exp(-stall / fleet.repair) if fleet.repair else 0.0
    running = nonempty / (1 + rate * (stall + late * fleet.resize))
    return Group(running, running * rate * (1 + late), (1 - fleet.broken) / nonempty)


def _rigid_group(fleet: Fleet, members: int) -> Group:
    slices, spares = fleet.slices(members), spare_slices(fleet, members)
    training = 1 - spares / slices
    rate = fleet.chips / members * training / fleet.mtbf
    complete = float(_at_most(slices, fleet.broken, spares)[-1])
    running = complete / (1 + rate * (fleet.detect + fleet.restart))
    return Group(running, running * rate, training * kept(rate, fleet.save_every))


def spare_slices(fleet: Fleet, members: int) -> int:
    """Spare slices of a rigid member that give the highest goodput."""
    slices = fleet.slices(members)
    mean = slices * fleet.broken
    most = min(slices - 1, math.ceil(mean + 8 * math.sqrt(mean)))
    training = 1 - np.arange(most + 1) / slices
    stalled = fleet.chips / members * training / fleet.mtbf * (fleet.detect + fleet.restart)
    return int(np.argmax(training * _at_most(slices, fleet.broken, most) / (1 + stalled)))


def kept(rate: float, every: float) -> float:
    """Share of the work that survives when each failure returns to the last checkpoint; exact for a constant rate.

    >>> round(kept(1 / 100_000, 800), 4), kept(1, 0)
    (0.996, 1.0)
    """
    x = rate * every
    return x / math.expm1(x) if 0 < x < 700 else float(x == 0)


def _at_most(slices: int, broken: float, most: int) -> np.ndarray:
    """Probability that at most n slices are under repair, for n from 0 to `most`: the binomial distribution."""
    if broken == 0:
        return np.ones(most + 1)
    n = np.arange(1, most + 1)
    steps = np.log(slices - n + 1) - np.log(n) + math.log(broken) - math.log1p(-broken)
    exactly = np.exp(slices * math.log1p(-broken) + np.concatenate([[0.0], np.cumsum(steps)]))
    return np.minimum(np.cumsum(exactly), 1.0)


@dataclass(frozen=True)
class Row:
    members: int
    elastic: bool
    goodput: float
    uptime: float
    stalls_per_day: float
    """Of one member."""
    spares: float
    """Share of the slices."""


def rows(fleet: Fleet, members: Sequence[int]) -> list[Row]:
    """Data-parallel training and DiLoCo with each number of members, rigid and elastic."""
    return [_row(fleet, number, elastic) for elastic in (False, True) for number in (1, *members)]


def _row(fleet: Fleet, members: int, elastic: bool) -> Row:
    result = outcome(fleet, members, elastic=elastic)
    stalls = group_of(fleet, members, elastic=elastic).stalls * DAY
    spares = 0.0 if elastic else spare_slices(fleet, members) / fleet.slices(members)
    return Row(members, elastic, result.goodput, result.uptime, stalls, spares)


def text(fleet: Fleet, rows: Sequence[Row]) -> str:
    """The answer in a paragraph, and a table for each kind of group."""
    head = ["members", "chips each", "goodput", "uptime", "stalls/day", "spares"]
    titles = {
        False: "Rigid groups: a member needs all its chips; spares stand by",
        True: "Elastic groups: a member continues without the failed slice",
    }
    sheets = [
        Sheet(title, head[: 5 if elastic else 6], [_cells(fleet, row) for row in rows if row.elastic == elastic])
        for elastic, title in titles.items()
    ]
    note = (
        "One member is data-parallel training. Uptime: share of the time in which at least "
        f"{fleet.quorum} of the members train."
    )
    return f"{wrapped(_verdict(fleet, rows))}\n{''.join(map(str, sheets))}{wrapped(note)}"


def _verdict(fleet: Fleet, rows: Sequence[Row]) -> str:
    goodput = {(row.members, row.elastic): percent(row.goodput, digits=1) for row in rows}
    most = rows[-1].members
    return (
        f"Somewhere in this fleet a chip fails every {duration(fleet.mtbf / fleet.chips)}. Data-parallel training "
        f"uses {goodput[1, False]} of all chip time if it waits for a replacement (rigid), {goodput[1, True]} if it "
        f"continues without the failed chips (elastic). DiLoCo with {most} members uses {goodput[most, False]} and "
        f"{goodput[most, True]}."
    )


def _cells(fleet: Fleet, row: Row) -> list[str]:
    shares = [percent(share, digits=1) for share in (row.goodput, row.uptime)]
    cells = [str(row.members), amount(fleet.chips / row.members), *shares, amount(row.stalls_per_day)]
    return cells if row.elastic else [*cells, percent(row.spares, digits=1)]
