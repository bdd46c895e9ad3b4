"""Utilisation against the link's rate: what was measured, and the planner's curve dashed."""

from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.record import Record
from studies.netlab.cell import predict
from studies.netlab.methods import METHODS
from studies.netlab.summary import of

COLORS = {
    "ddp": "#7f7f7f",
    "ddp-fp16": "#a08060",
    "ddp-powersgd": "#b05fb0",
    "diloco": "#d1751c",
    "streaming": "#c9a400",
    "overlap": "#1f6fb4",
    "e3m0": "#1d8a4b",
    "torchft-6": "#e58a8a",
    "torchft-2": "#c0392b",
}


def draw(record: Record, path: Path) -> None:
    settings, cells = record["settings"], record["values"]["cells"]
    bound = settings["bound_mbit"]
    with rc_context({"svg.hashsalt": "netlab", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(9, 5.6), layout="constrained", facecolor="white")
        axes = figure.subplots()
        multiples = np.geomspace(0.25, 2000, 60)
        for name, setup in METHODS.items():
            found = of(cells, name)
            if not found:
                continue
            seconds, lost = settings["step_seconds"], found[0]["busy_ns"]
            dashed = [100 * predict(name, multiple * bound, seconds, lost) for multiple in multiples]
            axes.semilogx(multiples, dashed, color=COLORS[name], linestyle="--", linewidth=0.9)
            limited = sorted((cell["bounds"], 100 * cell["computing"]) for cell in found if cell["bounds"])
            points = [*limited, (3000, 100 * found[0]["computing"])]
            axes.semilogx(*zip(*points, strict=True), color=COLORS[name], marker="o", markersize=4, label=setup.title)
        axes.axvline(1.0, color="#222222", linewidth=0.8)
        label = f"rate of the link, in multiples of the bound ({bound:.3g} Mbit/s); rightmost: unlimited"
        axes.set(xlabel=label, ylabel="utilization (%); dashed: predicted", ylim=(0, 105))
        axes.grid(color="#e4e4e4")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
        figure.savefig(path, metadata={"Date": None})
