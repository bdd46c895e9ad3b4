"""Beside the sweep: what training loses on an unlimited link, and four replicas on unequal links."""

import random
import statistics
from collections.abc import Callable
from itertools import pairwise

from benchmarks.record import Record
from diloco.plan.simulate import Group, utilization
from diloco.plan.traffic import WIRE
from studies.netlab.cell import BASELINE
from studies.netlab.lab import Lab, lab, link
from studies.netlab.methods import OURS, OVERLAP, SETUPS, SYNC_EVERY, WAN

PAIRS, BLOCK = 40, 2 * OVERLAP
LINKS = (1.5, 2.0, 3.0, 6.0)
"""Times the bound, of the four replicas."""
WAN_PARTS = 3


def stall(settings: Record) -> Record:
    """What a round costs when no time is spent waiting: blocks with sync and without alternate, ABBA.

    A block begins and ends between the end of one exchange and the next send, so that all of a round is in it.
    """
    with lab(OURS, 2, settings["batch"]) as made:
        made.run(SYNC_EVERY + 2 * OVERLAP - 2, synced=True)
        made.run(BLOCK, synced=False)
        pairs = [_pair(made, bool(i % 2)) for i in range(PAIRS)]
    ratios = [plain["seconds"] / synced["seconds"] for synced, plain in pairs]
    resampled = sorted(statistics.median(random.Random(seed).choices(ratios, k=PAIRS)) for seed in range(5000))
    total = _sum(pairs, 1, "seconds")
    shares = {
        "hook": (_sum(pairs, 0, "hook") - _sum(pairs, 0, "waited")) / total,
        "thread": _sum(pairs, 0, "cpu_thread") / total,
        "gloo": (_sum(pairs, 0, "cpu_others") - _sum(pairs, 1, "cpu_others")) / total,
    }
    values = PAIRS * BLOCK / SYNC_EVERY * settings["parameters"]
    return {
        "share": sum(shares.values()),
        "shares": shares,
        "ns_value": {name: 1e9 * share * total / 2 / values for name, share in shares.items()},
        "waited": _sum(pairs, 0, "waited") / total,
        "ratio": statistics.median(ratios),
        "interval": [resampled[125], resampled[-126]],  # 95 %
        "step_seconds": total / 2 / PAIRS / BLOCK,
        "pairs": PAIRS,
    }


def _pair(made: Lab, swapped: bool) -> tuple[Record, Record]:
    """(with sync, without)"""
    first = made.calm(BLOCK, synced=not swapped)
    second = made.calm(BLOCK, synced=swapped)
    return (second, first) if swapped else (first, second)


def _sum(pairs: list[tuple[Record, Record]], arm: int, name: str) -> float:
    return sum(report[name] for pair in pairs for report in pair[arm]["replicas"])


def wan(settings: Record) -> Record:
    """Four replicas, two to a core, each behind a link of its own; the slowest decides. On one stream, and on four."""
    out: Record = {"links": LINKS}
    for name in (OURS, WAN):
        with lab(name, 4, settings["batch"]) as made:
            made.run(SYNC_EVERY + SETUPS[name].lead, synced=True)
            plain = made.calm(BASELINE, synced=False)["seconds"] / BASELINE
            bound = 1.5 * 4 * made.parameters / (SYNC_EVERY * plain) / 1e6  # 2(M−1)/M · 4 bits
            baselines, parts = [plain], []
            for _ in range(WAN_PARTS):
                for host, multiple in enumerate(LINKS):
                    made.network.shape(link(multiple * bound), [host])
                parts.append(made.calm(SYNC_EVERY, synced=True, lead=SETUPS[name].lead))
                made.network.shape(None)
                made.drain()
                baselines.append(made.calm(BASELINE, synced=False)["seconds"] / BASELINE)
        alone = sum(a + b for a, b in pairwise(baselines)) / 2 * SYNC_EVERY
        group = Group(statistics.mean(baselines), replicas=4, wire=WIRE)
        out[name] = {
            "bound_mbit": bound,
            "utilisation": alone / sum(part["seconds"] for part in parts),
            "predicted": float(utilization(SETUPS[name].predicted(), group, 1e6 * min(LINKS) * bound)[0]),
            "baselines_ms": [1000 * seconds for seconds in baselines],
            "bytes_step": statistics.mean(part["bytes_step"] for part in parts),
            "waited": sum(r["waited"] for part in parts for r in part["replicas"])
            / sum(r["seconds"] for part in parts for r in part["replicas"]),
        }
    return out


CHECKS: dict[str, Callable[[Record], Record]] = {"stall": stall, "wan": wan}
SECONDS = {"stall": 130.0, "wan": 130.0}
"""About how long each takes."""
