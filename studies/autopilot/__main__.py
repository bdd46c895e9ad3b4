"""Autopilot beside a search by brute force, on real shaped links. Run, as root: python -m studies.autopilot

Each rate has a network of its own, and all rates are measured at the same time: steps are pauses, so the cores are
nearly idle.
"""

import argparse
import json
import signal
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.record import Record, Target, write
from diloco.core.overlap import SAFE_OVERLAP
from diloco.plan.choose import SYNC_EVERY, Settings
from studies.autopilot.worker import LAYERS, STEP_SECONDS, WIDTH, Cell
from tests.support.netns import DEVICE, impossible, network

PATH = Path(__file__).parent / "results.json"
MBITS = (3.0, 9.0, 18.0)
SECONDS = 1500


def main() -> None:
    parser = argparse.ArgumentParser(description="the autopilot beside a search by brute force, on shaped links")
    parser.add_argument(
        "--quick", action="store_true", help="a few cells, shortly, to see that it runs; writes nothing"
    )
    parser.add_argument("--lane", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.lane is not None:
        print(json.dumps(lane(arguments.lane, arguments.quick)), flush=True)
        return
    if reason := impossible():
        print(f"studies.autopilot is skipped: {reason}")
        return
    values = summary(lanes(arguments.quick))
    settings = {"parameters": LAYERS * WIDTH**2, "step_seconds": STEP_SECONDS}
    if arguments.quick:
        print(json.dumps(values, indent=1), *targets(values), sep="\n")
    else:
        write(PATH, settings, values, targets(values))


def grid() -> list[Settings]:
    """What is searched by brute force: every sync_every, with the paper's fragments and with small ones. With the
    largest overlap, because more overlap never makes training less busy."""
    fragments = ("strided:3", "balanced:20", "balanced:40")
    every = [Settings(h, cut, SAFE_OVERLAP, "e3m0") for h, cut in product(SYNC_EVERY, fragments)]
    return [
        *every,
        Settings(SYNC_EVERY[0], "strided:3", 5, "twobit"),
        Settings(SYNC_EVERY[-1], "strided:3", 5, "twobit"),
    ]


def cells(mbit: float, quick: bool) -> list[Cell]:
    fixed = [Settings(30, "strided:3", 5, "e3m0")] if quick else grid()
    scale = 0.3 if quick else 1.0
    return [Cell(settings=settings, mbit=mbit, scale=scale) for settings in (*fixed, None)]


def lane(mbit: float, quick: bool) -> list[Record]:
    """All cells of one rate, one after another: the mean of both replicas."""
    given = json.dumps([asdict(cell) for cell in cells(mbit, quick)])
    with network(2) as net:
        environment = {"MASTER_ADDR": net.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": DEVICE}
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # addresses in a namespace have no names: a warning
        both: Any = processes.run(
            "studies.autopilot.worker", [f"--cells={given}"], 2, environment, net.command, SECONDS
        )
    return [_mean(*pair) for pair in zip(*both, strict=True)]


def _mean(one: Record, other: Record) -> Record:
    return one | {"measured": (one["measured"] + other["measured"]) / 2}


def lanes(quick: bool) -> dict[float, list[Record]]:
    """A process for each rate, all at once."""
    words = [sys.executable, "-m", "studies.autopilot", *(["--quick"] if quick else [])]
    started = {m: subprocess.Popen([*words, f"--lane={m}"], stdout=subprocess.PIPE, text=True) for m in MBITS}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return {mbit: json.loads(process.communicate()[0].splitlines()[-1]) for mbit, process in started.items()}
    finally:
        for process in started.values():
            process.terminate()
            process.wait()


def summary(rows_by_rate: dict[float, list[Record]]) -> Record:
    """By rate the best fixed settings, and what the autopilot chose and reached."""
    rates = {}
    for mbit, rows in rows_by_rate.items():
        fixed = [row for row in rows if "expected" not in row]
        (flown,) = (row for row in rows if "expected" in row)
        rates[f"{mbit:g}"] = {
            "best": max(fixed, key=lambda row: row["measured"]),
            "auto": flown,
            "fixed": [(row["settings"], row["measured"]) for row in fixed],
        }
    return rates


def targets(values: Record) -> list[Target]:
    out = []
    for mbit, rate in values.items():
        auto, best = rate["auto"], rate["best"]["measured"]
        out.append(Target(f"{mbit} Mbit/s: below the best fixed settings, points", _points(best, auto["measured"]),
                          at_most=3))  # fmt: skip
        apart = abs(_points(auto["expected"], auto["measured"]))
        out.append(Target(f"{mbit} Mbit/s: between what was expected and measured, points", apart, at_most=5))
    return out


def _points(one: float, other: float) -> float:
    return 100 * (one - other)


if __name__ == "__main__":
    main()
