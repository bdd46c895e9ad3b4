"""The plots of docs/parity.md."""

from math import inf
from pathlib import Path
from typing import Any

from diloco.plan import laws
from studies.parity import today
from studies.parity.cell import STEPS
from studies.parity.paired import compared, curve
from studies.parity.results import Results
from studies.parity.rows import DILOCO, DP, NAMED, ROWS, STREAMING, WIDE, WIDTHS, at_width, data_parallel_of
from studies.parity.run import CURVE_EVERY
from studies.parity.spread import Spread

INK, GRID = "#777777", "#99999955"
"""Readable on white and on black."""
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")

TICKS = (-2, -1, 0, 1, 2, 3, 4, 8, 16)
SIZES = (35e6, 100e6, 200e6, 300e6, 500e6, 1e9)
LOSSES = (3.51, 3.19, 2.97, 2.80, 2.67, 2.49)
"""Of data-parallel training at these sizes (streaming paper, Table 5)."""
PRINTED = 0.005
"""The paper's losses are rounded to two decimals."""
CURVES = (STREAMING, DILOCO, "outer momentum 0.9", at_width(WIDE, STREAMING))


def draw(results: Results, newer: Results, folder: Path) -> None:
    import matplotlib
    from cycler import cycler

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "parity", "svg.fonttype": "none", "font.size": 9,
                            "axes.prop_cycle": cycler(color=COLOURS)}  # fmt: skip
    figures = {"sizes": sizes(results, newer), "gaps": gaps(results), "curves": curves(results)}
    for name, drawn in figures.items():
        drawn.savefig(folder / f"parity-{name}.svg", transparent=True, bbox_inches="tight", metadata={"Date": None})


def sizes(results: Results, newer: Results) -> Any:
    """Gap to data-parallel with the same inner optimizer, two replicas, against the size of the model."""
    figure, axes = _axes((7, 3.6))
    line = [10 ** (exponent / 10) for exponent in range(43, 101)]
    fit = [100 * laws.loss_gap(size, 2, 30, 1).gap for size in line]
    fitted = [laws.FITTED[0] <= size <= laws.FITTED[1] for size in line]
    axes.plot(line, fit, ":", color=INK, linewidth=1)
    inside = [(size, gap) for size, gap, is_fitted in zip(line, fit, fitted, strict=True) if is_fitted]
    axes.plot(*zip(*inside, strict=True), color=INK, label="scaling laws (dotted: extrapolated)")
    for i, (label, points) in enumerate(_measured(results, newer).items()):
        places = [size * 1.1**i for size, _ in points]  # beside each other
        gaps = [gap for _, gap in points]
        axes.errorbar(places, [gap.mean for gap in gaps], yerr=[gap.half_width for gap in gaps], fmt="o",
                      color=COLOURS[i], markersize=5, capsize=3, label=label)  # fmt: skip
    paper = [(100 * (streaming / loss - 1), 200 * PRINTED / loss)
             for loss, (streaming, _) in zip(LOSSES, laws.LOSS_30_100[2], strict=True)]  # fmt: skip
    axes.errorbar(SIZES, [gap for gap, _ in paper], yerr=[rounding for _, rounding in paper], fmt="s", color=COLOURS[5],
                  markersize=4, capsize=3, label="the paper (bars: rounding of what it prints)")  # fmt: skip
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("parameters")
    axes.set_ylabel("gap to data-parallel, %")
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def _measured(results: Results, newer: Results) -> dict[str, list[tuple[int, Spread]]]:
    """Sizes and gaps, where there are seeds enough for an interval."""
    parameters = {r["cell"]["width"]: r["parameters"] for r in (*results.values(), *newer.values())}
    fixed = [(width, compared(NAMED[at_width(width, STREAMING)], NAMED[at_width(width, DP)], results))
             for width in sorted(WIDTHS)]  # fmt: skip
    pairs = {"AdamW, the trainer's outer rule": (today.SAME, today.ADAMW),
             "Muon, the trainer's defaults": (today.DEFAULTS, today.MUON)}  # fmt: skip
    found = {"AdamW, a fixed outer rule": fixed}
    for label, names in pairs.items():
        found[label] = [(today.ROWS[names[0]].width, today.gap(*names, newer))]
    return {label: [(parameters[width], gap) for width, gap in points if gap is not None and gap.half_width < inf]
            for label, points in found.items()}  # fmt: skip


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
