"""What `diloco fleet` shows: goodput for each number of members, and which of the inputs matters."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from diloco.plan.events import DAY, simulate
from diloco.plan.failures import Fleet, Outcome, group_of, outcome, slices_of, spare_slices
from diloco.plan.plot import Plot
from diloco.plan.sheet import Sheet, width
from diloco.report.units import YEAR, amount, duration, percent

INPUTS = ("chips", "mtbf", "slice", "detect", "restart", "rejoin", "resize", "repair", "save_every", "spares", "quorum",
          "grace")  # fmt: skip
COUNTS = ("chips", "slice", "spares", "quorum")
"""Inputs that are not times."""


@dataclass(frozen=True)
class Row:
    members: int
    elastic: bool
    """Whether a group trains on without a slice that failed."""
    predicted: Outcome
    simulated: Outcome
    spares: float
    """Share of the slices that stand by."""
    stalls: float
    """Stalls of one member in a day."""


@dataclass(frozen=True)
class Effect:
    """Goodput of each way with half and with twice the value of an input."""

    input: str
    value: float
    goodputs: tuple[tuple[float, float], ...]

    @property
    def span(self) -> float:
        return max(abs(a - b) for a, b in self.goodputs)


def rows(fleet: Fleet, members: Sequence[int], days: float, seed: int) -> list[Row]:
    """Data-parallel training and DiLoCo, rigid and elastic."""
    return [_row(fleet, each, elastic, days, seed) for elastic in (False, True) for each in (1, *members)]


def _row(fleet: Fleet, members: int, elastic: bool, days: float, seed: int) -> Row:
    fleet = _of(fleet, members)
    return Row(
        members,
        elastic,
        outcome(fleet, members, elastic=elastic),
        simulate(fleet, members, elastic=elastic, days=days, seed=seed),
        0.0 if elastic else spare_slices(fleet, members) / slices_of(fleet, members),
        group_of(fleet, members, elastic=elastic).stalls * DAY,
    )


def _of(fleet: Fleet, members: int) -> Fleet:
    """Data-parallel training has no quorum."""
    return replace(fleet, quorum=1) if members == 1 else fleet


def ways(members: int) -> list[tuple[int, bool]]:
    """What the effects of the inputs are shown for: data-parallel and DiLoCo, rigid and elastic."""
    return [(1, False), (1, True), (members, False), (members, True)]


def effects(fleet: Fleet, members: int) -> list[Effect]:
    """Each input alone halved and doubled, the one with the largest effect first. Inputs that are 0 have none.

    A quorum stays a whole number of at most all members.
    """

    def goodput(name: str, value: float, members: int, elastic: bool) -> float:
        return outcome(_of(replace(fleet, **{name: value}), members), members, elastic=elastic).goodput

    out = []
    for name in INPUTS:
        if value := getattr(fleet, name):
            half, twice = (max(value // 2, 1), min(2 * value, members)) if name == "quorum" else (value / 2, 2 * value)
            out.append(Effect(name, value, tuple((goodput(name, half, *way), goodput(name, twice, *way))
                                                 for way in ways(members))))  # fmt: skip
    return sorted(out, key=lambda effect: -effect.span)


def verdict(fleet: Fleet, rows: list[Row]) -> str:
    best = {row.elastic: row for row in rows}  # the last of each: most members
    whole = {row.elastic: row for row in rows if row.members == 1}
    between = duration(fleet.mtbf / fleet.chips)
    shares = {key: percent(row.predicted.goodput, digits=1) for key, row in whole.items()}
    more = {key: percent(row.predicted.goodput, digits=1) for key, row in best.items()}
    return (
        f"Somewhere in this fleet a chip fails every {between}. Of all chips' time, {shares[False]} counts with "
        f"data-parallel training that waits for a replacement (rigid), {shares[True]} if it goes on without the "
        f"failed chips (elastic). With DiLoCo and {best[True].members} members it is {more[False]} and {more[True]}."
    )


def sheets(fleet: Fleet, rows: list[Row], found: list[Effect]) -> list[Sheet]:
    """Fit 80 columns."""
    out = []
    for elastic, title in (
        (False, "Rigid groups: a member needs all its chips; spares stand by"),
        (True, "Elastic groups: a member goes on without the slice that failed"),
    ):
        mine = [row for row in rows if row.elastic == elastic]
        out.append(Sheet(title, _HEAD[: None if not elastic else -1], [_line(fleet, row) for row in mine]))
    last = rows[-1].members
    head = ["input", "value", "rigid", "elastic", f"{last}, rigid", f"{last}, elastic"]
    title = "Goodput in percent if one input is halved / doubled, the most important first"
    return [*out, Sheet(title, head, [effect_cells(each) for each in found], spare=(0, 0, 1, 2, 3, 0))]


def note(fleet: Fleet, days: float) -> str:
    failures = fleet.chips * days * DAY / fleet.mtbf
    return (
        f"One member is data-parallel training. Simulated: {days:g} days event by event, with about {failures:,.0f} "
        f"failures; the fewer they are, the more chance is in it. Uptime: the share of the time in which at least "
        f"{fleet.quorum} of the members trains. Stalls: of one member in a day."
    )


def tables(fleet: Fleet, rows: list[Row], found: list[Effect], days: float) -> str:
    shown = "".join(map(str, sheets(fleet, rows, found)))
    return f"{_filled(verdict(fleet, rows))}\n{shown}{_filled(note(fleet, days))}"


def _filled(text: str) -> str:
    """As wide as the terminal; no line begins with a percent sign."""
    return textwrap.fill(text.replace(" %", "\N{NO-BREAK SPACE}%"), width()).replace("\N{NO-BREAK SPACE}", " ") + "\n"


def _time(seconds: float) -> str:
    """
    >>> _time(5.8 * YEAR), _time(YEAR), _time(3600)
    ('5.8 years', '1 year', '1 h 00 min')
    """
    if seconds < YEAR:
        return duration(seconds)
    return f"{seconds / YEAR:.3g} year{'s' if seconds > YEAR else ''}"


_HEAD = ["members", "chips each", "goodput", "simulated", "uptime", "stalls", "spares"]


def _line(fleet: Fleet, row: Row) -> list[str]:
    shares = (row.predicted.goodput, row.simulated.goodput, row.predicted.uptime)
    cells = [str(row.members), amount(fleet.chips / row.members), *(percent(share, digits=1) for share in shares)]
    return [*cells, amount(row.stalls), *([] if row.elastic else [percent(row.spares, digits=1)])]


def effect_cells(effect: Effect) -> list[str]:
    """Name, value, and the goodput of each way in percent with half and with twice the value."""
    value = amount(effect.value) if effect.input in COUNTS else _time(effect.value)
    if effect.input == "spares":
        value = percent(effect.value, digits=1)
    return [effect.input, value, *(f"{100 * a:.1f} / {100 * b:.1f}" for a, b in effect.goodputs)]


def plot(fleet: Fleet, members: Sequence[int]) -> Plot:
    """Goodput against the number of chips."""
    chips = np.union1d(np.geomspace(min(1e3, fleet.chips), max(1e7, 2 * fleet.chips), 120), fleet.chips).tolist()

    def curve(each: int, elastic: bool) -> tuple[list[float], list[float]]:
        sizes = [n for n in chips if n >= each * fleet.slice]
        return sizes, [outcome(_of(replace(fleet, chips=n), each), each, elastic=elastic).goodput for n in sizes]

    named = {"data-parallel, rigid": (1, False), "data-parallel, elastic": (1, True)}
    named |= {f"DiLoCo, {each} members, elastic inside": (each, True) for each in members}
    return Plot(
        title="Goodput of a fleet whose chips fail",
        share="goodput",
        axis=f"chips, each of which fails once in {_time(fleet.mtbf)}",
        tick=amount,
        unit="",
        curves={name: curve(*way) for name, way in named.items()},
        mark=(fleet.chips, f"your fleet, {amount(fleet.chips)} chips"),
    )
