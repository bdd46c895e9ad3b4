"""The plots of docs/parity.md."""

from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from diloco.plan import laws
from studies.parity import today
from studies.parity.cell import STEPS
from studies.parity.paper import DILOCO, DP, NARROW, PAPER, ROWS, STREAMING, WIDE, WIDTH, at_width, data_parallel_of
from studies.parity.run import CURVE_EVERY
from studies.parity.spread import Spread
from studies.parity.study import Study
from studies.parity.today import TODAY

INK, GRID = "#777777", "#99999955"
"""Readable on white and on black."""
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")

WIDTHS = (NARROW, WIDTH, WIDE)
TICKS = (-2, -1, 0, 1, 2, 3, 4, 8, 16)
SIZES = (35e6, 100e6, 200e6, 300e6, 500e6, 1e9)
LOSSES = (3.51, 3.19, 2.97, 2.80, 2.67, 2.49)
"""Of data-parallel training at these sizes (streaming paper, Table 5)."""
PRINTED = 0.005
"""The paper's losses are rounded to two decimals."""
CURVES = (STREAMING, DILOCO, "outer momentum 0.9", at_width(WIDE, STREAMING))


def draw(folder: Path) -> None:
    import matplotlib
    from cycler import cycler

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "parity", "svg.fonttype": "none", "font.size": 9,
                            "axes.prop_cycle": cycler(color=COLORS)}  # fmt: skip
    figures = {"sizes": sizes(), "gaps": gaps(), "curves": curves()}
    for name, drawn in figures.items():
        drawn.savefig(folder / f"parity-{name}.svg", transparent=True, bbox_inches="tight", metadata={"Date": None})


def sizes() -> Any:
    """Gap to data-parallel with the same inner optimizer, two replicas, against the size of the model."""
    figure, axes = _axes((7, 3.6))
    line = [10 ** (exponent / 10) for exponent in range(43, 101)]
    fit = [100 * laws.loss_gap(size, 2, 30, 1).gap for size in line]
    fitted = [laws.FITTED[0] <= size <= laws.FITTED[1] for size in line]
    axes.plot(line, fit, ":", color=INK, linewidth=1)
    inside = [(size, gap) for size, gap, is_fitted in zip(line, fit, fitted, strict=True) if is_fitted]
    axes.plot(*zip(*inside, strict=True), color=INK, label="scaling laws (dotted: extrapolated)")
    for i, (label, points) in enumerate(_measured().items()):
        places = [size * 1.1**i for size, _ in points]  # beside each other
        gaps = [gap for _, gap in points]
        axes.errorbar(places, [gap.mean for gap in gaps], yerr=[gap.half_width for gap in gaps], fmt="o",
                      color=COLORS[i], markersize=5, capsize=3, label=label)  # fmt: skip
    paper = [(100 * (streaming / loss - 1), 200 * PRINTED / loss)
             for loss, (streaming, _) in zip(LOSSES, laws.LOSS_30_100[2], strict=True)]  # fmt: skip
    axes.errorbar(SIZES, [gap for gap, _ in paper], yerr=[rounding for _, rounding in paper], fmt="s", color=COLORS[5],
                  markersize=4, capsize=3, label="the paper (bars: rounding of what it prints)")  # fmt: skip
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("parameters")
    axes.set_ylabel("gap to data-parallel, %")
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def _measured() -> dict[str, list[tuple[int, Spread]]]:
    """Sizes and gaps, where there are seeds enough for an interval."""
    pairs = {
        "AdamW, fixed outer optimizer": [(PAPER, at_width(width, STREAMING), at_width(width, DP)) for width in WIDTHS],
        "AdamW, the trainer's outer optimizer": [(TODAY, today.SAME, today.ADAMW)],
        "Muon, the trainer's defaults": [
            (TODAY, today.DEFAULTS, today.MUON),
            (TODAY, today.LARGEST + today.DEFAULTS, today.LARGEST + today.MUON),
        ],
    }
    return {label: [(_parameters(study, row), gap) for study, row, against in rows
                    if (gap := study.gap(row, against)) is not None and gap.half_width < inf]
            for label, rows in pairs.items()}  # fmt: skip


def _parameters(study: Study, row: str) -> int:
    return next(iter(study.runs(row).values()))["parameters"]


def gaps() -> Any:
    """Every row against data-parallel of its width, with intervals."""
    gaps = {name: PAPER.gap(name, data_parallel_of(name)) for name, cell in reversed(ROWS.items()) if cell.replicas}
    shown = {name: gap for name, gap in gaps.items() if gap is not None}
    figure, axes = _axes((7, 0.25 * len(shown) + 1))
    for y, (name, gap) in enumerate(shown.items()):
        color = COLORS[WIDTHS.index(ROWS[name].width)]
        interval = gap.half_width if gap.half_width < inf else 0
        axes.errorbar(gap.mean, y, xerr=interval, fmt="o", color=color, markersize=4, capsize=2)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_xscale("symlog", linthresh=4)
    axes.set_xticks(TICKS, [str(tick) for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlabel("gap to data-parallel, % of the loss (linear to 4 %, then logarithmic)")
    return figure


def curves() -> Any:
    """Gap of the anchors to data-parallel over the run, mean of seeds."""
    figure, axes = _axes((7, 3.2))
    steps = range(CURVE_EVERY, STEPS + 1, CURVE_EVERY)
    for name in CURVES:
        if gap := _curve(name, data_parallel_of(name)):
            axes.plot(steps, gap, "o-", label=name, markersize=3)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("gap of the anchors, %")
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def _curve(row: str, against: str) -> list[float]:
    """Difference of the anchors in percent over the run, mean of the seeds that both have."""
    ours, theirs = PAPER.runs(row), PAPER.runs(against)
    both = [zip(ours[seed]["curve"], theirs[seed]["curve"], strict=True) for seed in ours.keys() & theirs.keys()]
    return [fmean(100 * (a / b - 1) for a, b in points) for points in zip(*both, strict=True)]


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
