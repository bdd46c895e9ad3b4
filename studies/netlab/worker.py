"""One replica of the lab, on a core of its own. Reads commands from its input, answers each with a line of JSON.

A command {"steps": 60, "lead": 6, "synced": true} trains 60 steps after 6 that are not counted. Without
`synced` it trains a second model of the same kind that nothing is attached to: the baseline, in the same process.
"""

import gc
import json
import os
import sys
import threading
import time

import torch.distributed as dist

from benchmarks.processes import pin
from benchmarks.record import Record
from studies.netlab.methods import SETUPS, Sync
from studies.netlab.training import Training


def main() -> None:
    settings = json.loads(sys.argv[1])
    pin()
    dist.init_process_group("gloo")
    plain, trained = Training(settings["batch"]), Training(settings["batch"])
    train(plain, None, 2)
    sync = SETUPS[settings["method"]].attach(trained, settings["addresses"]) if settings["method"] else None
    gc.collect()
    gc.freeze()  # a collection would walk through all of torch, at any time, in any method
    answer({"parameters": sum(p.numel() for p in plain.model.parameters())})
    for line in sys.stdin:
        command = json.loads(line)
        dist.barrier()
        synced = sync if command["synced"] else None
        training = trained if synced else plain
        train(training, synced, command["lead"])
        print("begun", flush=True)
        before, cpu, began = synced.spent() if synced else {}, cpu_seconds(), time.perf_counter()
        steps = train(training, synced, command["steps"])
        found: Record = {"seconds": time.perf_counter() - began, "steps": steps}
        found |= {f"cpu_{name}": seconds - cpu[name] for name, seconds in cpu_seconds().items()}
        answer(found | {name: value - before[name] for name, value in (synced.spent() if synced else {}).items()})
    os._exit(0)  # replicas end at different times; gloo's farewell is not what is measured


def train(training: Training, sync: Sync | None, steps: int) -> list[float]:
    """Seconds of each step."""
    out = []
    for _ in range(steps):
        began = time.perf_counter()
        training.step()
        if sync is not None:
            sync.step()
        out.append(time.perf_counter() - began)
    return out


def answer(found: Record) -> None:
    print(json.dumps(found), flush=True)


def cpu_seconds() -> dict[str, float]:
    """CPU time of the training thread, of our communication thread, and of all others of the process."""
    threads = [t.ident for t in threading.enumerate() if t.name == "diloco" and t.ident]
    ours = sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in threads)
    training = time.thread_time()
    return {"training": training, "thread": ours, "others": time.process_time() - training - ours}


if __name__ == "__main__":
    main()
