"""Members as processes. A step is a pause, as long as an accelerator would take, and a small change of the weights: so
what is measured is what the reducer takes from training, not how processes share the cores."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.record import Record
from diloco import Balanced, Collective, DiLoCo
from diloco.bucket import Bucket

STEP = 0.05
HEARTBEAT = 1.0
COMMON: Record = {"parameters": 400_000, "fragments": 4, "sync_every": 20}


class Worker:
    """One member; its settings are those that `work` reads."""

    module = "studies.bucket.worker"

    def __init__(self, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None, **settings: Any) -> None:
        words = [*prefix, sys.executable, "-m", self.module, json.dumps(settings)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})

    def joined(self) -> None:
        assert self.process.stdout and "joined" in json.loads(self.process.stdout.readline())

    def result(self) -> Record:
        return json.loads(self.process.communicate()[0].splitlines()[-1])

    def kill(self) -> float:
        """Returns when."""
        self.process.kill()
        killed = time.time()
        self.process.communicate()
        return killed


def crowd(folder: str, names: str, each: Mapping[str, Record] | None = None, **common: Any) -> list[Worker]:
    """Members that start to train at the same time."""
    gate = f"{folder}-{names}-gate"
    workers = [
        Worker(**{"url": folder, "name": name, "seed": k, "gate": gate, **common, **(each or {}).get(name, {})})
        for k, name in enumerate(names)
    ]
    open_gate(workers, gate)
    return workers


def open_gate(workers: Sequence[Worker], gate: str) -> None:
    for worker in workers:
        worker.joined()
    with open(gate, "w"):
        pass


def rate(result: Record, first: float = 0.0, last: float = float("inf")) -> float:
    """Steps a second between two times."""
    ends = [t for t in result["ends"] if first <= t <= last]
    return (len(ends) - 1) / (ends[-1] - ends[0])


def work(settings: Record, watch: Callable[[DiLoCo], None] = lambda diloco: None) -> Record:
    """`watch` is called before the first step and after each."""
    torch.set_num_threads(1)
    n, pause, kind = settings["parameters"], settings.get("step", STEP), settings.get("kind", "bucket")
    model = nn.Linear(n // 1000, 1000, bias=False)
    noise = torch.randn(1000, n // 1000, generator=torch.Generator().manual_seed(settings["seed"])) * 1e-3
    reduce = _reduce(settings, kind)
    diloco = DiLoCo(model, sync_every=settings["sync_every"], overlap=settings.get("overlap", 2),
                    fragments=Balanced(settings["fragments"]), reducer=reduce)  # fmt: skip
    _wait_for(settings.get("before"))
    if kind != "none":
        diloco.join()
    print(json.dumps({"joined": time.time()}), flush=True)
    _wait_for(settings.get("gate"))
    time.sleep(2 * HEARTBEAT)  # so that all know each other
    began, ends, inside, held = time.time(), [], [], []
    bucket = reduce if isinstance(reduce, Bucket) else None

    def is_over() -> bool:
        if settings.get("rounds") and bucket:
            return bucket.ended
        return os.path.exists(settings["until"]) if "until" in settings else time.time() - began > settings["seconds"]

    watch(diloco)
    while not is_over():
        time.sleep(pause)
        with torch.no_grad():
            model.weight += noise
        at = time.perf_counter()
        if kind != "none":
            diloco.step()
        inside.append(time.perf_counter() - at)
        ends.append(time.time())
        held.append(min(diloco.indices))
        watch(diloco)
    rounds = [(r.fragment, r.sent_step, r.members, r.counted) for r in diloco.stats.last]
    if bucket:
        diloco.finish()
    moved = bucket.traffic if bucket else {}
    direct = bucket.session.carrier.received if bucket and bucket.session else 0
    return {"ends": ends, "inside": inside, "held": held, "rounds": rounds, "traffic": moved, "direct": direct,
            "events": bucket.events() if bucket else []}  # fmt: skip


def _reduce(settings: Record, kind: str) -> Any:
    if kind == "collective":
        dist.init_process_group("gloo")
        return Collective()
    url = settings["url"] if kind == "bucket" else "memory://"
    return Bucket(
        url,
        settings["name"],
        quorum=settings.get("quorum", 1),
        heartbeat=HEARTBEAT,
        rounds=settings.get("rounds"),
        announce=settings.get("announce"),
        key=settings["key"].encode() if "key" in settings else None,
    )


def _wait_for(path: str | None) -> None:
    while path is not None and not os.path.exists(path):
        time.sleep(0.01)


def steps_a_round(result: Record, fragments: int) -> float:
    """Own steps between two sends of a fragment."""
    sends = [[step for number, step, *_ in result["rounds"] if number == f and step] for f in range(fragments)]
    spans = [(each[-1] - each[0], len(each) - 1) for each in sends if len(each) > 1]
    return sum(span for span, _ in spans) / sum(count for _, count in spans)


if __name__ == "__main__":
    print(json.dumps(work(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # the replicas of a collective end at different times
