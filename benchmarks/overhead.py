"""What training pays while it syncs: steps per second, CPU time, memory. Run: python -m benchmarks.overhead

Two processes, pinned to one core each (training, communication and gloo share it), gloo on loopback, E3M0, 4 equal
fragments, sync_every 20, overlap 2. Blocks of 20 steps with DiLoCo and without it alternate in the same processes, on
the same model, ABBA: a pair is one of each, side by side. In a block with DiLoCo every parameter goes through exactly
one round, from send to apply; nothing of it reaches into the block after.

Speed: steps per second of both processes with DiLoCo over without, the median over pairs and its bootstrap interval.
CPU: the training thread inside `diloco.step()`, plus all other threads (in blocks with DiLoCo minus in blocks
without), per parameter and round; in the larger model of the memory figures too, where what a round costs whatever its
size counts less. Memory: resident bytes before DiLoCo is made, and at the peak during rounds
(VmHWM), in a fresh pair of processes with a larger model; freed heap is given back (malloc_trim) before the first.
"""

import argparse
import ctypes
import json
import os
import random
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import processes
from benchmarks.record import RESULTS, Record, Target, write
from diloco import Balanced, DiLoCo
from diloco.exchange.collective import Collective

SYNC_EVERY, OVERLAP, FRAGMENTS, WIDTH = 20, 2, 4, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="what training pays while it syncs")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--step_ms", type=float, default=320, help="how long a step should take; the batch is chosen")
    parser.add_argument("--memory_layers", type=int, default=32, help="layers of 1M parameters, for memory")
    parser.add_argument("--worker", choices=["speed", "memory"], help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(worker(arguments)), flush=True)
        os._exit(0)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("benchmarks.overhead is skipped: it needs a core for each of its two processes")
        return
    memory = worse(run(arguments, "memory"))
    values: Record = {"speed": speed(run(arguments, "speed")), "memory": memory}
    print(*(f"{group}.{key}: {value}" for group in values for key, value in values[group].items()), sep="\n")
    cpu = values["speed"]["cpu_ns"]
    targets = [
        Target("steps per second with DiLoCo over without, median", values["speed"]["ratio"], at_least=0.99),
        Target("ms a step without DiLoCo", values["speed"]["step_ms"], at_least=200),
        Target(
            "CPU of hook and communication thread, ns a parameter and round", cpu["hook"] + cpu["thread"], at_most=3
        ),
        Target("the same in the larger model of the memory figures", memory["cpu_ns"], at_most=3),
        Target("memory during rounds, MB", memory["rounds_mb"], at_most=memory["rounds_allowed_mb"]),
    ]
    settings = {"sync_every": SYNC_EVERY, "overlap": OVERLAP, "fragments": FRAGMENTS, "codec": "E3M0", "replicas": 2}
    write(RESULTS / "overhead.json", {**settings, "pairs": arguments.pairs, "threads": 1}, values, targets)


def run(arguments: argparse.Namespace, worker: str) -> list[Record]:
    names = ("pairs", "step_ms", "memory_layers")
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--{name}={getattr(arguments, name)}" for name in names]
        flags += [f"--worker={worker}", f"--store={folder}/store"]
        return processes.run("benchmarks.overhead", flags, 2, {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})


def speed(reports: list[Record]) -> Record:
    """Put the two processes' blocks together."""
    rates = {arm: [sum(SYNC_EVERY / t for t in both) for both in zip(*(r[arm] for r in reports), strict=True)]
             for arm in ("with", "without")}  # fmt: skip
    ratios = [a / b for a, b in zip(rates["with"], rates["without"], strict=True)]
    resampled = sorted(statistics.median(random.Random(seed).choices(ratios, k=len(ratios))) for seed in range(5000))
    cpu = {name: statistics.mean(report["cpu_ns"][name] for report in reports) for name in reports[0]["cpu_ns"]}
    return {
        "ratio": statistics.median(ratios),
        "interval": [resampled[125], resampled[-126]],  # 95 %
        "ratios": ratios,
        "step_ms": 1000 * statistics.median(t for r in reports for t in r["without"]) / SYNC_EVERY,
        "waited_ms_per_round": statistics.mean(report["waited_ms_per_round"] for report in reports),
        "cpu_ns": {**cpu, "sum": cpu["hook"] + cpu["thread"] + cpu["gloo"]},
        "parameters": reports[0]["parameters"],
        "batch": reports[0]["batch"],
    }


def worse(reports: list[Record]) -> Record:
    """The larger of the two processes' figures, and what is allowed with one fragment in flight and with all."""
    largest = {key: max(report[key] for report in reports) for key in reports[0]}
    allowed = {
        name: largest["parameters"] * (8 + 20 / of) / 1e6 + 32 for name, of in (("rounds", FRAGMENTS), ("finish", 1))
    }
    return {**largest, **{f"{name}_allowed_mb": value for name, value in allowed.items()}}


def worker(arguments: argparse.Namespace) -> Record:
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{arguments.store}", rank=rank, world_size=2)
    torch.manual_seed(rank)  # join() gives all the first one's weights
    return measure_speed(arguments) if arguments.worker == "speed" else measure_memory(arguments.memory_layers)


def attach(model: nn.Module) -> DiLoCo:
    """Without an optimizer, so that the blocks decide whether `step()` is called."""
    diloco = DiLoCo(model, sync_every=SYNC_EVERY, overlap=OVERLAP, fragments=Balanced(FRAGMENTS), reducer=Collective())
    diloco.join()
    return diloco


def layers(number: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(number)))


def measure_speed(arguments: argparse.Namespace) -> Record:
    model = layers(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: int) -> None:
        x = torch.randn(batch, WIDTH)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    batch = choose_batch(step, arguments.step_ms / 1000)
    diloco = attach(model)
    # Sends come at multiples of sync_every / fragments = 5 steps. A block begins and ends 2 steps after one,
    # when its result has been applied, so that each block with DiLoCo has all the work of its rounds.
    for _ in range(SYNC_EVERY + OVERLAP):
        step(batch)
        diloco.step()
    waited = diloco.stats.seconds_waited
    times: dict[str, list[float]] = {"with": [], "without": []}
    cpu = {"hook": 0.0, "thread": 0.0, "gloo": 0.0}
    for block in range(2 * arguments.pairs):
        arm, sign = (("with", 1), ("without", -1), ("without", -1), ("with", 1))[block % 4]
        dist.barrier()
        before, began = cpu_seconds(), time.perf_counter()
        for _ in range(SYNC_EVERY):
            step(batch)
            if arm == "with":
                hook = time.thread_time()
                diloco.step()
                cpu["hook"] += time.thread_time() - hook
        times[arm].append(time.perf_counter() - began)
        for name, seconds in cpu_seconds().items():
            cpu[name] += sign * (seconds - before[name])
    parameters = sum(p.numel() for p in model.parameters())
    rounds = arguments.pairs * FRAGMENTS
    return {
        **times,
        "cpu_ns": {name: 1e9 * seconds / arguments.pairs / parameters for name, seconds in cpu.items()},
        "waited_ms_per_round": 1000 * (diloco.stats.seconds_waited - waited) / rounds,
        "parameters": parameters,
        "batch": batch,
    }


def choose_batch(step: Callable[[int], None], seconds: float) -> int:
    """A batch size for which a step takes about `seconds` on the slower of the two cores."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        step(256)
        times.append(time.perf_counter() - began)
    batch = torch.tensor(256 * seconds / min(times))
    dist.all_reduce(batch, dist.ReduceOp.MAX)
    return round(float(batch))


def cpu_seconds() -> dict[str, float]:
    """CPU time of the communication thread, and of all threads but it and this one: gloo's."""
    threads = [t.ident for t in threading.enumerate() if t.name == "diloco" and t.ident]
    communication = sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in threads)
    return {"thread": communication, "gloo": time.process_time() - time.thread_time() - communication}


def measure_memory(number: int) -> Record:
    """Steps are imitated in place, so that all growth is DiLoCo's. One fragment is in flight at a time."""
    model = layers(number)
    dist.all_reduce(torch.zeros(1))  # gloo's own memory is there before
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    reset = Path("/proc/self/clear_refs")
    reset.write_text("5")  # from here on VmHWM is the peak
    diloco = attach(model)
    join = resident("VmHWM")
    reset.write_text("5")
    thread, hook, counted = 0.0, 0.0, 0
    with torch.no_grad():
        for step in range(5 * SYNC_EVERY + OVERLAP):
            if step == 2 * SYNC_EVERY:  # all memory has been used once
                thread, hook, counted = cpu_seconds()["thread"], 0.0, diloco.stats.rounds
            for p in model.parameters():
                p.mul_(1 - 1e-3)
            began = time.thread_time()
            diloco.step()
            hook += time.thread_time() - began
    cpu, rounds = cpu_seconds()["thread"] - thread + hook, resident("VmHWM")
    values = sum(p.numel() for p in model.parameters()) / FRAGMENTS * (diloco.stats.rounds - counted)
    reset.write_text("5")
    diloco.finish()
    peaks = {"join": join, "rounds": rounds, "finish": resident("VmHWM")}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "cpu_ns": 1e9 * cpu / values,
        **{f"{name}_mb": (peak - before) / 1e6 for name, peak in peaks.items()},
    }


def resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
