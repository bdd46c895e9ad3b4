"""What the cells say together: where each method crosses a level, what the targets are, and the record on disk."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.record import Record, Target, read, write
from studies.netlab.cell import bound_mbit, busy_ns, predict
from studies.netlab.methods import METHODS, OURS

RESULTS = Path(__file__).parent / "results.json"
LEVELS = ("half", "most")
"""50 % of the steps; 90 % of those that the method makes on an unlimited link."""
CLOSE = 1.5
"""Times the bound: where ours has to be nearly full and data-parallel is measured too, however hopeless."""


def start(settings: Record, *, fresh: bool = False) -> Record:
    """The record so far, if it was made with the same settings."""
    found = None if fresh else read(RESULTS)
    if found and all(found["settings"].get(key) == value for key, value in settings.items()):
        return found
    return {"settings": {**settings, **kernel()}, "values": {"cells": []}}


def kernel() -> Record:
    """What the link's behaviour depends on."""
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    release = Path("/proc/sys/kernel/osrelease").read_text().split("-")[0]
    return {"congestion_control": control, "kernel": release, "tbf": "burst 1 ms or 32 kB, latency 50 ms", "mtu": 1500}


def complete(record: Record) -> None:
    """Add to every cell what follows from all: its place in multiples of its own bound, and the prediction there.

    The step time is the one at the speed that the cores had during the cell.
    """
    for name in METHODS:
        found = of(record["values"]["cells"], name)
        lost = busy_ns(found[0]) if found else 0.0
        for cell in found:
            alone = cell["computing"] / cell["steps_per_second"]
            bound = bound_mbit(record["settings"]["parameters"], alone)
            cell["bounds"] = None if cell["mbit"] is None else cell["mbit"] / bound
            cell["busy_ns"], cell["predicted"] = lost, predict(name, cell["mbit"], alone, lost)


def save(record: Record) -> None:
    values = record["values"]
    complete(record)
    for key, measure in (("crossings", "computing"), ("crossings_clock", "utilisation")):
        values[key] = {
            name: {level: crossing(found, level, measure) for level in LEVELS}
            for name in METHODS
            if (found := of(values["cells"], name))
        }
    write(RESULTS, record["settings"], values, targets(values), quiet=True)


def of(cells: Sequence[Record], method: str) -> list[Record]:
    """One method's, the fastest link first."""
    mine = [cell for cell in cells if cell["method"] == method]
    return sorted(mine, key=lambda cell: -math.inf if cell["mbit"] is None else -cell["mbit"])


def crossing(cells: Sequence[Record], level: str, measure: str = "computing") -> float | None:
    """The rate, in multiples of the bound, at which a method passes the level: on a line over log(rate) between cells.

    Where noise has it pass more than once, the slowest rate counts.
    """
    ordered = sorted((c for c in cells if c["bounds"] is not None), key=lambda cell: -cell["bounds"])
    best = next((cell[measure] for cell in cells if cell["bounds"] is None), None)
    if best is None:
        return None
    wanted = 0.5 if level == "half" else 0.9 * best
    for fast, slow in reversed(list(pairwise(ordered))):
        if fast[measure] >= wanted > slow[measure]:
            share = (wanted - slow[measure]) / (fast[measure] - slow[measure])
            return slow["bounds"] * (fast["bounds"] / slow["bounds"]) ** share
    return None


def at(cells: Sequence[Record], method: str, multiple: float) -> float | None:
    """Utilisation, by the clock, at a multiple of the bound."""
    return next((c["utilisation"] for c in of(cells, method) if c["multiple"] == multiple), None)


def targets(values: Record) -> list[Target]:
    cells, crossings = values["cells"], values["crossings"]
    out = []
    ours = at(cells, OURS, CLOSE)
    if ours is not None:
        out.append(Target("utilisation of ours at 1.5 × the bound", ours, at_least=0.95))
    if (ddp := at(cells, "ddp", CLOSE)) is not None:
        out.append(Target("utilisation of DDP at 1.5 × the bound", ddp, at_most=0.02))
    theirs = [found for name in crossings if name.startswith("torchft") if (found := at(cells, name, CLOSE))]
    if theirs and ours is not None:
        out.append(Target("torchft's best at 1.5 × the bound, of ours", max(theirs) / ours, at_most=1.0))
    for level, words in zip(LEVELS, ("50 %", "90 % of its own best"), strict=True):
        mine = crossings.get(OURS, {}).get(level)
        peers = [rate for name in crossings if name.startswith("torchft") if (rate := crossings[name][level])]
        if mine and (rate := crossings.get("ddp", {}).get(level)):
            out.append(Target(f"{words}: DDP's rate, times ours", rate / mine, at_least=100))
        if mine and peers:
            out.append(Target(f"{words}: torchft's best rate, times ours", min(peers) / mine, at_least=6))
        clock = values["crossings_clock"]
        mine, others = clock.get(OURS, {}).get(level), clock.get("ddp", {}).get(level)
        if mine and others:
            out.append(Target(f"{words}, by the clock: DDP's rate, times ours", others / mine, at_least=100))
    if "stall" in values:
        out.append(Target("stalls outside the link's waiting, of a step", values["stall"]["share"], at_most=0.02))
    errors = [abs(cell["predicted"] - cell["computing"]) for cell in cells if cell["mbit"] is not None]
    if errors:
        out.append(Target("largest error of the prediction, points", 100 * max(errors), at_most=10))
    return out
