"""The plots of docs/parity.md."""

from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from studies.parity.cell import STEPS
from studies.parity.cosines import BINS
from studies.parity.paired import compared, curve, judged
from studies.parity.results import Results
from studies.parity.rows import DILOCO, NAMED, ROWS, STREAMING, WIDE, WIDTHS, at_width, data_parallel_of
from studies.parity.run import CURVE_EVERY

INK, GRID = "#555555", "#99999955"
"""Readable on white and on black."""
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")

TICKS = (-2, -1, 0, 1, 2, 3, 4, 8, 16)
CURVES = (STREAMING, DILOCO, "outer momentum 0.9", at_width(WIDE, STREAMING))


def draw(results: Results, folder: Path) -> None:
    import matplotlib
    from cycler import cycler

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "parity", "svg.fonttype": "none", "font.size": 9,
                            "axes.prop_cycle": cycler(color=COLOURS)}  # fmt: skip
    for name, figure in (("gaps", gaps), ("curves", curves), ("cosines", cosines)):
        drawn = figure(results)
        drawn.savefig(folder / f"parity-{name}.svg", transparent=True, bbox_inches="tight", metadata={"Date": None})


def gaps(results: Results) -> Any:
    """Every row against data-parallel of its width, with intervals."""
    found = []
    for row in ROWS:
        gap = compared(row, data_parallel_of(row), results) if row.cell.replicas else None
        if gap is not None:
            found.append((row.name, gap, COLOURS[WIDTHS.index(row.cell.width)]))
    figure, axes = _axes((7, 0.25 * len(found) + 1))
    for y, (_, gap, colour) in enumerate(reversed(found)):
        axes.errorbar(
            gap.mean,
            y,
            xerr=gap.half_width if gap.half_width < inf else 0,
            fmt="o",
            color=colour,
            markersize=4,
            capsize=2,
        )
    axes.set_yticks(range(len(found)), [name for name, *_ in reversed(found)])
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_xscale("symlog", linthresh=4)
    axes.set_xticks(TICKS, [str(tick) for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlabel("gap to data-parallel, % of the loss (linear to 4 %, then logarithmic)")
    return figure


def curves(results: Results) -> Any:
    """Gap of the anchors to data-parallel over the run, mean of seeds."""
    figure, axes = _axes((7, 3.2))
    steps = range(CURVE_EVERY, STEPS + 1, CURVE_EVERY)
    for name in CURVES:
        row = NAMED[name]
        if gap := curve(row, data_parallel_of(row), results):
            axes.plot(steps, gap, "o-", label=name, markersize=3)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("gap of the anchors, %")
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def cosines(results: Results) -> Any:
    """Cosine between the deltas of two replicas, per fragment, mean of seeds."""
    figure, axes = _axes((7, 3.2))
    names = ("layers 0, 2, 4", "layers 1, 3, 5", "embedding and final norm")
    found = [r["cosines"] for r in judged(NAMED[STREAMING], results)]
    for i, name in enumerate(names):
        each = [one[i] for one in found if len(one) > i]
        if each:
            means = [fmean(tenth) for tenth in zip(*each, strict=True)]
            axes.plot([(k + 0.5) * STEPS / BINS for k in range(len(means))], means, "o-", label=name, markersize=3)
    axes.set_xlabel("step")
    axes.set_ylabel("cosine between replicas")
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def _axes(size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=size)
    axes.grid(color=GRID, linewidth=0.5)
    axes.tick_params(colors=INK)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
    for spine in axes.spines.values():
        spine.set_color(GRID)
    return figure, axes
