"""Start one worker per replica, each a process of its own, and collect what they report."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks.record import Record


def pin() -> int:
    """One core and one thread for this process, by its rank, which is returned."""
    rank, cores = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    return rank


def no_prefix(rank: int) -> list[str]:
    return []


def run(
    module: str,
    arguments: Sequence[str],
    replicas: int,
    environment: Mapping[str, str],
    prefix: Callable[[int], list[str]] = no_prefix,
    seconds: float = 1800,
) -> list[Record]:
    """`python -m module arguments` once per rank, with RANK and WORLD_SIZE set; the last line of each is its JSON.

    If a worker fails or time is up, all of them are ended and an error is raised.
    """
    workers: list[subprocess.Popen[str]] = []
    # Else a polite kill would leave the workers behind, and the network that the caller made for them.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for rank in range(replicas):
            names = {"RANK": str(rank), "WORLD_SIZE": str(replicas)}
            command = [*prefix(rank), sys.executable, "-m", module, *arguments]
            workers.append(
                subprocess.Popen(command, env={**os.environ, **names, **environment}, stdout=subprocess.PIPE, text=True)
            )
        deadline = time.monotonic() + seconds
        while any(worker.poll() is None for worker in workers):
            if any(worker.poll() for worker in workers) or time.monotonic() > deadline:
                raise RuntimeError(f"{module}: workers ended with {[worker.poll() for worker in workers]}")
            time.sleep(0.05)
        if any(worker.returncode for worker in workers):
            raise RuntimeError(f"{module}: workers ended with {[worker.returncode for worker in workers]}")
        return [json.loads(worker.communicate()[0].splitlines()[-1]) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        signal.signal(signal.SIGTERM, previous)
