"""What the bucket costs, over a local folder, on real processes. Run: python -m benchmarks.bucket

A step is a pause, as long as an accelerator would take, and a small change of the weights: so what is measured is what
the reducer takes from the training thread and from the store, not how processes share the cores.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from benchmarks.record import Target, write
from diloco import Balanced, DiLoCo
from diloco.reduce.bucket import Bucket

STEP = 0.05


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """One member."""
    torch.set_num_threads(1)
    n, fragments, pause = settings["parameters"], settings["fragments"], settings.get("step", STEP)
    model = nn.Linear(n // 1000, 1000, bias=False)
    noise = torch.randn(1000, n // 1000, generator=torch.Generator().manual_seed(settings["seed"])) * 1e-3
    reduce = Bucket(settings["url"], settings["name"], pace=settings.get("pace", "decoupled"), heartbeat=1.0,
                    rounds=settings.get("rounds"))  # fmt: skip
    diloco = DiLoCo(model, sync_every=settings["sync_every"], overlap=2, fragments=Balanced(fragments), reduce=reduce)
    synced = settings.get("sync", True)
    _wait_for(settings.get("before"))
    if synced:
        diloco.join()
    print(json.dumps({"joined": time.time()}), flush=True)
    _wait_for(settings.get("gate"))
    began, ends, inside = time.time(), [], []
    while not (reduce.ended if settings.get("rounds") and synced else time.time() - began > settings["seconds"]):
        time.sleep(pause)
        with torch.no_grad():
            model.weight += noise
        at = time.perf_counter()
        if synced:
            diloco.step()
        inside.append(time.perf_counter() - at)
        ends.append(time.time())
    rounds = [(r.fragment, r.sent_step, r.members, r.counted) for r in diloco.stats.last]
    if synced:
        diloco.finish()
    return {"ends": ends, "inside": inside, "rounds": rounds, "traffic": reduce.traffic if synced else {}}


def _wait_for(path: str | None) -> None:
    while path is not None and not os.path.exists(path):
        time.sleep(0.01)


class Worker:
    def __init__(self, **settings: Any) -> None:
        words = [sys.executable, "-m", "benchmarks.bucket", "--work", json.dumps(settings)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.out = self.process.stdout

    def joined(self) -> None:
        assert "joined" in json.loads(self.out.readline())

    def result(self) -> dict[str, Any]:
        return json.loads(self.out.read().splitlines()[-1])


def crowd(folder: str, names: str, each: dict[str, dict[str, Any]] | None = None, **common: Any) -> list[Worker]:
    """Members that start to train at the same time."""
    gate = f"{folder}-{names}-gate"
    workers = [
        Worker(url=folder, name=name, seed=k, gate=gate, **common, **(each or {}).get(name, {}))
        for k, name in enumerate(names)
    ]
    for worker in workers:
        worker.joined()
    with open(gate, "w"):
        pass
    return workers


def rate(result: dict[str, Any], first: float = 0.0, last: float = float("inf")) -> float:
    """Steps a second between two times."""
    ends = [t for t in result["ends"] if first <= t <= last]
    return (len(ends) - 1) / (ends[-1] - ends[0])


def traffic(folder: str) -> dict[str, Any]:
    """100 rounds of two fragments of a million parameters, two members, all of it: deltas, records, heartbeats, first
    snapshots, and those of round 100."""
    n, rounds = 2_000_000, 100
    workers = crowd(folder, "ab", parameters=n, fragments=2, sync_every=3, step=0.01, pace="strict", rounds=rounds)
    results = [worker.result() for worker in workers]
    moved = sum(r["traffic"]["sent"] + r["traffic"]["received"] for r in results)
    full = [members == 2 for r in results for _, _, members, _ in r["rounds"]]
    deltas = 2 * 2 * rounds * n // 2  # members · (up + down) · rounds · half a byte
    return {"bytes": moved, "deltas alone": deltas, "ratio": moved / deltas, "rounds with both": sum(full) / len(full),
            "requests": sum(r["traffic"]["requests"] for r in results)}  # fmt: skip


COMMON: dict[str, Any] = {"parameters": 400_000, "fragments": 4, "sync_every": 20}


def utilisation(folder: str) -> dict[str, Any]:
    alone = [w.result() for w in crowd(folder + "-none", "ab", seconds=15, sync=False, **COMMON)]
    synced = [w.result() for w in crowd(folder, "ab", seconds=15, **COMMON)]
    rounds = [r for result in synced for r in result["rounds"]]
    sends = [[step for number, step, *_ in synced[0]["rounds"] if number == f] for f in range(COMMON["fragments"])]
    between = [b - a for each in sends for a, b in pairwise(each)]
    return {
        "ratio": sum(map(rate, synced)) / sum(map(rate, alone)),
        "rounds with all": sum(members == 2 and counted for _, _, members, counted in rounds) / len(rounds),
        "steps a round ÷ sync_every": sum(between) / len(between) / COMMON["sync_every"],
    }


def kill(folder: str) -> dict[str, Any]:
    a, b = crowd(folder, "ab", seconds=16, **COMMON)
    time.sleep(6)
    b.process.send_signal(signal.SIGKILL)
    killed = time.time()
    b.process.wait()
    result = a.result()
    after = [inside for t, inside in zip(result["ends"], result["inside"], strict=True) if t > killed]
    return {"longest step of the hook after the kill, s": max(after), "rate after ÷ before": rate(result, killed)
            / rate(result, 0, killed), "rounds": len(result["rounds"])}  # fmt: skip


def slow(folder: str) -> dict[str, Any]:
    base = [w.result() for w in crowd(folder + "-two", "ab", seconds=15, **COMMON)]
    fast_and_slow = crowd(folder, "abs", {"s": {"step": 10 * STEP}}, seconds=15, **COMMON)
    a, b, s = (w.result() for w in fast_and_slow)
    return {"rate of the fast ÷ without the slow one": (rate(a) + rate(b)) / sum(map(rate, base)),
            "rounds of the slow one that count it": sum(r[3] for r in s["rounds"]),
            "rounds of the slow one": len(s["rounds"])}  # fmt: skip


def join(folder: str) -> dict[str, Any]:
    settings = {**COMMON, "parameters": 4_000_000}
    c = Worker(url=folder, name="c", seed=9, seconds=5, before=f"{folder}-begin", **settings)
    workers = crowd(folder, "ab", seconds=24, **settings)
    time.sleep(10)
    began = time.time()
    with open(f"{folder}-begin", "w"):  # its start of Python is not what is measured
        pass
    c.joined()
    joined = time.time()
    results = [w.result() for w in workers]
    c.result()
    during = sum(rate(r, began, joined + 2) for r in results) / sum(rate(r, 0, began) for r in results)
    return {"rate of the others while one joins ÷ before": during, "seconds to join": joined - began}


def main() -> None:
    parser = argparse.ArgumentParser(description="the bucket over a local folder")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        print(json.dumps(work(arguments.work)), flush=True)
        return
    values: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for measure in (traffic, utilisation, kill, slow, join):
            values[measure.__name__] = measure(f"{folder}/{measure.__name__}")
            print(measure.__name__, json.dumps(values[measure.__name__], indent=1), flush=True)
    targets = [
        Target("bytes up and down ÷ the deltas alone", values["traffic"]["ratio"], at_most=1.10),
        Target("steps per second ÷ those without sync", values["utilisation"]["ratio"], at_least=0.97),
        Target("rounds with all members", values["utilisation"]["rounds with all"], at_least=0.9),
        Target("steps a round ÷ sync_every", values["utilisation"]["steps a round ÷ sync_every"], at_most=1.05),
        Target("exposed at a kill, s", values["kill"]["longest step of the hook after the kill, s"], at_most=0.1),
        Target("steps per second of the fast, with ÷ without a slow one",
               values["slow"]["rate of the fast ÷ without the slow one"], at_least=0.9),
        Target("rounds that count the slow one", values["slow"]["rounds of the slow one that count it"], at_least=1),
        Target("steps per second of the others while one joins ÷ before",
               values["join"]["rate of the others while one joins ÷ before"], at_least=0.95),
    ]  # fmt: skip
    write("bucket", {"step": STEP, **COMMON}, values, targets)


if __name__ == "__main__":
    main()
