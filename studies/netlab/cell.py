"""A cell: one method at one rate, measured in parts between baselines, and the planner's prediction beside it.

Step times here drift by 10 % within seconds, so a cell is cut into parts of one sync_every, each between two short
baselines: the same steps with no sync at all, in the same processes, on both cores at once.
"""

from dataclasses import dataclass
from itertools import pairwise

from benchmarks.record import Record
from diloco.plan.simulate import Group, Method, utilization
from diloco.plan.traffic import WIRE
from studies.netlab.lab import Lab, link
from studies.netlab.methods import METHODS, SYNC_EVERY

BITS = 4
BASELINE = 20
"""Steps of a baseline."""
MOST_SECONDS, ENOUGH_SECONDS, LEAST_STEPS = 90.0, 60.0, 3
"""The longest cell; the longest of those below 10 %; and the fewest steps of any."""
UNLIMITED = 1e12
"""Bits a second that stand for a veth without a token bucket."""


@dataclass(frozen=True)
class Plan:
    """How many parts, of how many steps."""

    parts: int
    steps: int


def planned(method: str, predicted: float, step_seconds: float, parts: int) -> Plan:
    """min(60 steps, 90 s), and two sync periods at least; below 10 %, a method that syncs every step may stop early."""
    if METHODS[method].period > 1:
        return Plan(parts, SYNC_EVERY)
    most = ENOUGH_SECONDS if predicted < 0.1 else MOST_SECONDS
    fitting = int(most * max(predicted, 1e-3) / step_seconds)
    steps = min(2 * SYNC_EVERY, max(LEAST_STEPS, fitting))
    return Plan(parts, SYNC_EVERY) if steps == 2 * SYNC_EVERY else Plan(1, steps)


def bound_mbit(parameters: int, step_seconds: float) -> float:
    """The least rate for full utilisation: 2(M−1)/M · 4 bits a parameter, which is 4 for two replicas."""
    return BITS * parameters / (SYNC_EVERY * step_seconds) / 1e6


def measure(lab: Lab, method: str, multiple: float | None, plan: Plan) -> Record:
    """One cell, at a multiple of the bound that follows from the baseline before each part.

    The link is unlimited during baselines, so that what is left of a part drains.
    """
    baselines, parts, rates = [lab.calm(BASELINE, synced=False)], [], []
    for _ in range(plan.parts):
        if multiple is not None:
            rates.append(multiple * bound_mbit(lab.parameters, baselines[-1]["seconds"] / BASELINE))
            lab.network.shape(link(rates[-1]))
        parts.append(lab.calm(plan.steps, synced=True, lead=METHODS[method].lead))
        lab.network.shape(None)
        lab.drain()
        baselines.append(lab.calm(BASELINE, synced=False))
    plain = [each["seconds"] / BASELINE for each in baselines]
    alone = sum(a + b for a, b in pairwise(plain)) / 2 * plan.steps
    total, steps = sum(part["seconds"] for part in parts), plan.parts * plan.steps
    return {
        "method": method,
        "multiple": multiple,
        "mbit": sum(rates) / len(rates) if rates else None,
        "utilisation": alone / total,
        "parts": [(a + b) / 2 * plan.steps / p["seconds"] for (a, b), p in zip(pairwise(plain), parts, strict=True)],
        "baselines_ms": [1000 * seconds for seconds in plain],
        "step_seconds": alone / steps,
        "steps": steps,
        "steps_per_second": steps / total,
        "bytes_step": sum(part["bytes_step"] for part in parts) / plan.parts,
        "burst": max(part["burst"] for part in parts),
        "foreign": max(each["foreign"] for each in [*baselines, *parts]),
        "computing": computing(parts) / computing(baselines),
        "shares": thread_shares(parts, total),
    }


def computing(runs: list[Record]) -> float:
    """The share of the time in which the training thread had its core, without what it did in the hook.

    Its ratio to that of the baselines is a utilisation too. A core that is slower for a while does not change it; but
    steps that take longer because communication takes memory and cache from them do not either.
    """
    reports = [report for run in runs for report in run["replicas"]]
    hook = sum(report.get("hook", 0.0) - report.get("waited", 0.0) for report in reports)
    return (sum(report["cpu_training"] for report in reports) - hook) / sum(report["seconds"] for report in reports)


def thread_shares(parts: list[Record], total: float) -> Record:
    """Shares of the time with sync, mean over replicas: hook and waiting on the training thread, CPU of all threads."""
    found: Record = {}
    replicas = len(parts[0]["replicas"])
    for part in parts:
        for report in part["replicas"]:
            for name in ("hook", "waited", "cpu_training", "cpu_thread", "cpu_others"):
                if name in report:
                    found[name] = found.get(name, 0.0) + report[name] / replicas / total
    return found


def predict(method: str, mbit: float | None, step_seconds: float, busy_ns: float) -> float:
    group = Group(step_seconds, busy_ns=busy_ns, wire=WIRE)
    rate = UNLIMITED if mbit is None else 1e6 * mbit
    return float(utilization(METHODS[method].predicted(), group, rate)[0])


def busy_ns(cell: Record) -> float:
    """What a value costs training in each round, from the cell on an unlimited link."""
    predicted: Method = METHODS[cell["method"]].predicted()
    lost = (1 - cell["computing"]) / cell["steps_per_second"] * predicted.period
    return max(0.0, 1e9 * lost / predicted.values())
