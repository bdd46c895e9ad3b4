"""The goodput that Decoupled DiLoCo publishes for fleets whose chips fail, recomputed cell by cell.

    python -m studies.paper.fleet                       the table
    python -m studies.paper.fleet --write               README.md here and docs/fleet.svg

The paper (arXiv 2604.21428) names the inputs of its simulation, but our sources do not have their values. `fleet.toml`
has ours. Three are fitted to the cells of 1.2 million chips alone, as the best point of a grid of round values. The
others were set by hand and compared with all nine cells.
"""

import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.record import insert
from diloco.cli.fleet import MEMBERS, FleetConfig, fleet_of
from diloco.plan.fleet import Fleet, outcome
from diloco.runs.flags import parse
from studies.paper.events import simulate

ROOT = Path(__file__).parents[2]
RECIPE = Path(__file__).with_name("fleet.toml")
PAGE, FIGURE = Path(__file__).with_name("README.md"), ROOT / "docs/fleet.svg"
PUBLISHED = {
    (1_200_000, 1, False): 27, (1_200_000, 1, True): 58, (1_200_000, 2, True): 70, (1_200_000, 8, True): 88,
    (1_200_000, 16, True): 93, (2_400_000, 1, False): 18, (2_400_000, 1, True): 40, (2_400_000, 8, True): 80,
    (2_400_000, 16, True): 86,
}  # fmt: skip
"""Goodput in percent, by chips, members and whether groups are elastic."""
FITTED_ON = 1_200_000
GRID = {
    "restart": (20, 30, 40, 50, 60, 70, 80, 90, 120),
    "resize": (4, 5, 6, 7, 8, 9, 10, 12),
    "repair": (900, 1800, 2700, 3600, 5400, 7200, 14_400),
}
"""Seconds."""


@dataclass(frozen=True)
class Cell:
    """Goodput in percent."""

    chips: int
    members: int
    elastic: bool
    published: int
    ours: float
    simulated: float


def method(members: int, elastic: bool) -> str:
    kind = "elastic" if elastic else "rigid"
    return f"data-parallel, {kind}" if members == 1 else f"{members} {kind} members"


def assumed(chips: int) -> Fleet:
    return fleet_of(parse(FleetConfig, [str(RECIPE), "--chips", str(chips)]))


def cells(days: float = 30.0) -> list[Cell]:
    results = []
    for (chips, members, elastic), published in PUBLISHED.items():
        fleet = assumed(chips)
        simulated = simulate(fleet, members, elastic=elastic, days=days).goodput
        ours = outcome(fleet, members, elastic=elastic).goodput
        results.append(Cell(chips, members, elastic, published, 100 * ours, 100 * simulated))
    return results


def fitted() -> dict[str, int]:
    """The grid point with the smallest maximum error over the cells it is fitted to."""
    targets = {key: value for key, value in PUBLISHED.items() if key[0] == FITTED_ON}

    def worst(values: dict[str, int]) -> float:
        fleet = replace(assumed(FITTED_ON), **values)
        return max(abs(100 * outcome(fleet, m, elastic=e).goodput - value) for (_, m, e), value in targets.items())

    return min((dict(zip(GRID, point, strict=True)) for point in product(*GRID.values())), key=worst)


def table(cells: list[Cell]) -> str:
    """In Markdown."""
    lines = ["| chips | method | published | ours | simulated | difference |", "|---|---|---|---|---|---|"]
    for cell in cells:
        mark = "" if cell.chips == FITTED_ON else " (not fitted)"
        lines.append(
            f"| {cell.chips / 1e6:g} M{mark} | {method(cell.members, cell.elastic)} | {cell.published} % | "
            f"{cell.ours:.1f} % | {cell.simulated:.1f} % | {cell.ours - cell.published:+.1f} |"
        )
    return "\n".join(lines) + "\n"


def draw(path: Path) -> None:
    """Goodput against the number of chips; the published cells are points."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    chips = np.geomspace(1e3, 1e7, 60)
    with rc_context({"svg.hashsalt": "fleet", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(8.4, 4.8), layout="constrained", facecolor="white")
        axes = figure.subplots()
        for members, elastic in [(1, False), (1, True), *((number, True) for number in MEMBERS)]:
            sizes = chips[chips >= members * assumed(FITTED_ON).slice]
            goodput = [100 * outcome(assumed(int(n)), members, elastic=elastic).goodput for n in sizes]
            (line,) = axes.semilogx(sizes, goodput, label=method(members, elastic))
            points = [(n, value) for (n, m, e), value in PUBLISHED.items() if (m, e) == (members, elastic)]
            axes.plot([n for n, _ in points], [value for _, value in points], "o", color=line.get_color())
        axes.set(
            xlabel="chips, each of which fails once a year", ylabel="goodput (%); points: published", ylim=(0, 102)
        )
        axes.grid(color="#e4e4e4")
        axes.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    results = cells()
    print(table(results), end="")
    print(
        f"largest difference {max(abs(cell.ours - cell.published) for cell in results):.1f} points; fitted {fitted()}"
    )
    if "--write" in sys.argv[1:]:
        PAGE.write_text(insert(PAGE.read_text(), {"fleet": table(results)}))
        draw(FIGURE)


if __name__ == "__main__":
    main()
