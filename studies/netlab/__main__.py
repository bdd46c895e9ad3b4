"""Compute utilisation over a real, slow link, method by method. Run, as root: python -m studies.netlab

Every replica is a process in a network namespace of its own, pinned to a core; real gloo and TCP go over virtual
Ethernet that a token bucket (`tc tbf`) holds at a rate. Rates are multiples of the least that 4 bits a parameter need:
2(M−1)/M · 4 · parameters / (sync_every · step time). Each method is walked down from an unlimited link until it is
below 10 %, and then measured again where it crosses 50 %, and 90 % of its own best.

Everything is written after every cell; `--methods` measures only some again and keeps the rest.
"""

import argparse
import math
import time
from collections.abc import Iterable

from benchmarks.record import Record
from studies.netlab import checks
from studies.netlab.cell import BASELINE, bound_mbit, measure, planned, predict
from studies.netlab.lab import lab
from studies.netlab.methods import FRAGMENTS, METHODS, OVERLAP, SYNC_EVERY
from studies.netlab.summary import CLOSE, LEVELS, OURS, crossing, save, start
from tests.support.netns import impossible

COMMON = (None, 30, 3)
"""Multiples of the bound that all methods are measured at; None is unlimited."""
BETWEEN = (3000, 1000, 300, 100, 10, 1.5, 1, 0.5, 0.3)
"""Those at which a method is measured only if the link matters to it."""
LEAST, FULL = 0.15, 0.9
"""Predicted utilisation below which a method is not measured, and above which the link does not matter."""
REPEATED = 16
"""Parts of the most important cell: ours at 1.5 times the bound. The mean of 16 parts has an error of 2 %."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="studies.netlab", description="compute utilisation over a slow link")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, *checks.CHECKS], metavar="METHOD",
                        default=[*METHODS, *checks.CHECKS],
                        help=f"which to measure: {', '.join([*METHODS, *checks.CHECKS])}")  # fmt: skip
    parser.add_argument("--batch", type=int, default=5, help="sequences a step")
    parser.add_argument("--multiples", nargs="+", type=float, metavar="X",
                        help="only these multiples of the bound, keeping other cells; inf: unlimited")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    arguments = parser.parse_args()
    if reason := impossible():
        print(f"studies.netlab is skipped: {reason}")
        return
    settings = {
        "replicas": 2,
        "batch": arguments.batch,
        "sync_every": SYNC_EVERY,
        "fragments": FRAGMENTS,
        "overlap": OVERLAP,
    }
    record = start(settings, fresh=arguments.fresh)
    if "step_seconds" not in record["settings"]:
        record["settings"] |= calibrate(arguments.batch)
        save(record)
    print(f"bound {record['settings']['bound_mbit']:.3g} Mbit/s; about {duration(record, arguments.methods):.0f} min")
    for name in arguments.methods:
        if name in METHODS:
            sweep(record, name, [None if x == math.inf else x for x in arguments.multiples or ()])
        else:
            record["values"][name] = checks.CHECKS[name](record["settings"])
            save(record)


def calibrate(batch: int) -> Record:
    """The time of a step without sync, and the bound that follows from it."""
    with lab(None, 2, batch) as made:
        made.run(10, synced=False)
        seconds = made.run(60, synced=False)["seconds"] / 60
        bound = bound_mbit(made.parameters, seconds)
        return {"parameters": made.parameters, "step_seconds": seconds, "bound_mbit": bound}


def sweep(record: Record, name: str, only: list[float | None]) -> None:
    """All cells of one method, or only these, by the same two processes."""
    settings = record["settings"]
    bound, seconds = settings["bound_mbit"], settings["step_seconds"]
    kept = [c for c in record["values"]["cells"] if c["method"] != name or (only and c["multiple"] not in only)]
    record["values"]["cells"] = kept
    with lab(name, 2, settings["batch"]) as made:
        made.run(SYNC_EVERY + METHODS[name].lead, synced=True)  # buckets are made, rounds are under way
        made.run(5, synced=False)
        made.drain()

        def take(multiple: float | None) -> Record:
            expected = predict(name, None if multiple is None else multiple * bound, seconds, 0.0)
            cell = measure(made, name, multiple, planned(name, expected, seconds, parts(name, multiple, expected)))
            record["values"]["cells"].append(cell)
            save(record)
            report(cell)
            return cell

        cells = [take(multiple) for multiple in only or chosen(name, bound, seconds)]
        for level in () if only else LEVELS:  # once more where it is crossed
            if (at := crossing(cells, level)) is not None:
                take(at)


def chosen(name: str, bound: float, seconds: float) -> list[float | None]:
    """Multiples of the bound, the fastest first: the common ones, and those from where the link begins to matter."""
    shares = {each: predict(name, None if each is None else each * bound, seconds, 0.0) for each in (*COMMON, *BETWEEN)}
    enough = min((each for each in BETWEEN if shares[each] >= FULL), default=math.inf)
    return [
        multiple
        for multiple in sorted(shares, key=lambda each: -math.inf if each is None else -each)
        if (multiple == CLOSE and name in ("ddp", OURS))
        or (shares[multiple] >= LEAST and (multiple in COMMON or multiple <= enough))
    ]


def parts(name: str, multiple: float | None, expected: float) -> int:
    """Parts are short where nothing is waited for, and drift is all the difference: take more of them."""
    return REPEATED if name == OURS and multiple == CLOSE else 4 if expected > 0.7 else 2


def report(cell: Record) -> None:
    rate = "unlimited" if cell["mbit"] is None else f"{cell['mbit']:.4g} Mbit/s"
    measured = f"{cell['utilisation']:.3f} of the steps, {cell['computing']:.3f} of the cores' time"
    print(f"{time.strftime('%H:%M:%S')} {cell['method']}, {rate}: {measured}, predicted {cell['predicted']:.3f}, "
          f"{cell['bytes_step']:,.0f} bytes a step", flush=True)  # fmt: skip


def duration(record: Record, names: Iterable[str]) -> float:
    """Minutes, from the planner."""
    bound, seconds = record["settings"]["bound_mbit"], record["settings"]["step_seconds"]
    total = 0.0
    for name in names:
        if name not in METHODS:
            total += checks.SECONDS[name]
            continue
        total += 10 + 3 * (SYNC_EVERY + 35) * seconds  # start, and the two crossings
        for multiple in chosen(name, bound, seconds):
            share = predict(name, None if multiple is None else multiple * bound, seconds, 0.0)
            plan = planned(name, share, seconds, parts(name, multiple, share))
            total += plan.parts * (plan.steps / share + BASELINE + METHODS[name].lead / share) * seconds + plan.parts
    return total / 60


if __name__ == "__main__":
    main()
