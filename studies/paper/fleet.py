"""The goodput that Decoupled DiLoCo publishes for fleets whose chips fail, recomputed cell by cell.

    python -m studies.paper.fleet                       the table
    python -m studies.paper.fleet --write               docs/planner.md and docs/fleet.svg

The paper (arXiv 2604.21428) names the inputs of its simulation, among them the time to go on with fewer or more chips
and the time until failed chips return, but what we know of it has no values of them. `fleet.toml` has ours. Three are
fitted, on the cells of 1.2 million chips alone, as the best of a grid of round values. What was set by hand before was
compared with all nine cells.
"""

import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from benchmarks.record import insert
from diloco.cli.fleet import FleetConfig, fleet_of, members_of
from diloco.flags import parse
from diloco.plan import fleet as fleets
from diloco.plan import plot
from diloco.plan.events import simulate
from diloco.plan.failures import Fleet, outcome

ROOT = Path(__file__).parents[2]
RECIPE = Path(__file__).with_name("fleet.toml")
PAGE, FIGURE = ROOT / "docs/planner.md", ROOT / "docs/fleet.svg"
PUBLISHED = {
    (1_200_000, 1, False): 27, (1_200_000, 1, True): 58, (1_200_000, 2, True): 70, (1_200_000, 8, True): 88,
    (1_200_000, 16, True): 93, (2_400_000, 1, False): 18, (2_400_000, 1, True): 40, (2_400_000, 8, True): 80,
    (2_400_000, 16, True): 86,
}  # fmt: skip
"""Goodput in percent, by chips, members and whether a group goes on without the chips that fail."""
FITTED_ON = 1_200_000
GRID = {
    "restart": (20, 30, 40, 50, 60, 70, 80, 90, 120),
    "resize": (4, 5, 6, 7, 8, 9, 10, 12),
    "repair": (900, 1800, 2700, 3600, 5400, 7200, 14_400),
}
"""Seconds."""
SMALL = (
    "--chips 64 --mtbf 30d --slice 8 --members 8 --quorum 4 --snapshot 14gb --link 1gbit --spares 0.125 --grace 2min"
)
"""A small fleet that fails often, in which no input is 0."""


@dataclass(frozen=True)
class Cell:
    chips: int
    members: int
    elastic: bool
    published: int
    ours: float
    """In percent, as all."""
    simulated: float

    @property
    def way(self) -> str:
        inside = "elastic" if self.elastic else "rigid"
        return f"data-parallel, {inside}" if self.members == 1 else f"{self.members} members, {inside} inside"


def assumed(chips: int) -> Fleet:
    return fleet_of(parse(FleetConfig, [str(RECIPE), "--chips", str(chips)]))


def cells(days: float = 30.0) -> list[Cell]:
    out = []
    for (chips, members, elastic), published in PUBLISHED.items():
        fleet = assumed(chips)
        simulated = simulate(fleet, members, elastic=elastic, days=days).goodput
        ours = outcome(fleet, members, elastic=elastic).goodput
        out.append(Cell(chips, members, elastic, published, 100 * ours, 100 * simulated))
    return out


def fitted() -> dict[str, int]:
    """The point of the grid whose largest difference in the cells that may be looked at is smallest."""
    known = {way: value for way, value in PUBLISHED.items() if way[0] == FITTED_ON}

    def worst(values: dict[str, int]) -> float:
        fleet = replace(assumed(FITTED_ON), **values)
        return max(abs(100 * outcome(fleet, m, elastic=e).goodput - value) for (_, m, e), value in known.items())

    return min((dict(zip(GRID, point, strict=True)) for point in product(*GRID.values())), key=worst)


def table(found: list[Cell]) -> str:
    """In Markdown."""
    lines = ["| chips | way | published | ours | simulated | difference |", "|---|---|---|---|---|---|"]
    for cell in found:
        star = "" if cell.chips == FITTED_ON else " (not fitted)"
        lines.append(
            f"| {cell.chips / 1e6:g} M{star} | {cell.way} | {cell.published} % | {cell.ours:.1f} % | "
            f"{cell.simulated:.1f} % | {cell.ours - cell.published:+.1f} |"
        )
    return "\n".join(lines) + "\n"


def small() -> Fleet:
    return fleet_of(parse(FleetConfig, SMALL.split()))


def effects(fleet: Fleet, members: int = 8) -> str:
    """What each input matters, in Markdown."""
    lines = [f"| input | value | rigid | elastic | {members} members, rigid | {members} members, elastic |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    lines += [f"| {' | '.join(fleets.effect_cells(effect))} |" for effect in fleets.effects(fleet, members)]
    return "\n".join(lines) + "\n"


def figure() -> plot.Plot:
    """The published cells as points beside the curves."""
    config = parse(FleetConfig, [str(RECIPE), "--chips", str(FITTED_ON)])
    drawn = fleets.plot(fleet_of(config), members_of(config))
    points: dict[str, list[tuple[float, float]]] = {}
    for (chips, members, elastic), value in PUBLISHED.items():
        inside = "elastic" if elastic else "rigid"
        name = f"data-parallel, {inside}" if members == 1 else f"DiLoCo, {members} members, {inside} inside"
        points.setdefault(name, []).append((chips, value / 100))
    assert points.keys() <= drawn.curves.keys()
    return replace(drawn, points=points, mark=(FITTED_ON, "1.2 M chips; points: as published"))


def written(page: str, found: list[Cell]) -> str:
    """The page with the tables in their places."""
    tables = {"fleet": table(found), "effects": effects(assumed(FITTED_ON)), "small": effects(small())}
    return insert(page, tables)


if __name__ == "__main__":
    found = cells()
    print(table(found), end="")
    print(f"largest difference {max(abs(cell.ours - cell.published) for cell in found):.1f} points; fitted {fitted()}")
    if "--write" in sys.argv[1:]:
        PAGE.write_text(written(PAGE.read_text(), found))
        FIGURE.write_text(plot.svg(figure()), encoding="utf-8")
