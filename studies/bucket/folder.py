"""Over a local folder, without faults: bytes, utilisation, a slow member, a join."""

import time

from benchmarks.record import Record
from studies.bucket.worker import COMMON, STEP, Worker, crowd, rate, steps_a_round

SECONDS = 20


def traffic(folder: str) -> Record:
    """Two members that begin together, two fragments of a million parameters, all of it: deltas, records, heartbeats,
    lists, first snapshots. 200 rounds have the snapshots of round 112 too."""
    short, long = (_moved(f"{folder}-{rounds}", rounds) for rounds in (100, 200))
    return {**short, "long": long}


def _moved(folder: str, rounds: int) -> Record:
    n = 2_000_000
    workers = crowd(folder, "ab", parameters=n, fragments=2, sync_every=3, step=0.01, quorum=2, rounds=rounds)
    results = [worker.result() for worker in workers]
    moved = sum(r["traffic"]["sent"] + r["traffic"]["received"] for r in results)
    full = [members == 2 for r in results for _, _, members, _ in r["rounds"]]
    deltas = 2 * 2 * rounds * n // 2  # members · (up + down) · rounds · half a byte
    return {"rounds": rounds, "bytes": moved, "deltas": deltas, "ratio": moved / deltas,
            "rounds_with_all": sum(full) / len(full),
            "requests": sum(r["traffic"]["requests"] for r in results)}  # fmt: skip


def utilisation(folder: str) -> Record:
    """Without sync, with, and without again: the same steps."""
    arms = {}
    for arm, kind in (("first", "none"), ("synced", "bucket"), ("last", "none")):
        workers = crowd(f"{folder}-{arm}", "ab", kind=kind, seconds=SECONDS, **COMMON)
        arms[arm] = [worker.result() for worker in workers]
    alone = sum(rate(r) for arm in ("first", "last") for r in arms[arm]) / 2
    rounds = [r for result in arms["synced"] for r in result["rounds"]]
    between = [steps_a_round(result, COMMON["fragments"]) for result in arms["synced"]]
    return {
        "ratio": sum(map(rate, arms["synced"])) / alone,
        "rounds_with_all": sum(members == 2 and counted for _, _, members, counted in rounds) / len(rounds),
        "steps_a_round": sum(between) / len(between) / COMMON["sync_every"],
    }


def slow(folder: str) -> Record:
    """Two fast members, and the same with a third at a tenth of their speed."""
    base = [w.result() for w in crowd(f"{folder}-two", "ab", seconds=SECONDS, **COMMON)]
    a, b, s = (w.result() for w in crowd(folder, "abs", {"s": {"step": 10 * STEP}}, seconds=SECONDS, **COMMON))
    return {
        "ratio": (rate(a) + rate(b)) / sum(map(rate, base)),
        "counted": sum(counted for *_, counted in s["rounds"]),
        "rounds": len(s["rounds"]),
    }


def join(folder: str) -> Record:
    """A third member joins two that train. Its start of Python is over before: that is not what is measured."""
    settings = {**COMMON, "parameters": 4_000_000}
    c = Worker(url=folder, name="c", seed=9, seconds=5, before=f"{folder}-begin", **settings)
    workers = crowd(folder, "ab", seconds=30, **settings)
    time.sleep(12)
    began = time.time()
    with open(f"{folder}-begin", "w"):
        pass
    c.joined()
    joined = time.time()
    results = [w.result() for w in workers]
    c.result()
    # Rates over as long before as during: a period that holds more rounds than another is slower.
    before, during = (began - 8, began), (began, began + 8)
    ratio = sum(rate(r, *during) for r in results) / sum(rate(r, *before) for r in results)
    return {"ratio": ratio, "seconds": joined - began, "window": 8}
