"""How a payload passes between two replicas: gloo's own all-gather against this library's swap, on one stream or four.

Nothing trains meanwhile. `ratio` is the time over the ideal one, in which both directions are full at once.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import processes
from benchmarks.record import Record
from diloco.exchange.transport import Groups, Place, Transfer, place_in
from diloco.plan.traffic import TCP
from studies.netlab.relay import far_apart
from tests.support.netns import DEVICE, Network, Rate, network

MBIT, LATENCY = 12.0, 0.05
NBYTES = 1_000_000
REPETITIONS = 6
STREAMS = 4
PAUSE = 0.5
"""Seconds between two swaps, as rounds have them: TCP starts slowly again."""


def measure(settings: Record) -> Record:
    """Seconds of each kind and repetition: on a short link, and on one with latency."""
    out: Record = {"mbit": MBIT, "nbytes": NBYTES, "latency": LATENCY, "ideal": 8 * TCP * NBYTES / MBIT / 1e6}
    with network(2, offload=True) as net:
        out["near"] = _run(net)
    with far_apart(LATENCY) as net:
        out["far"] = _run(net)
    return out


def _run(net: Network) -> Record:
    net.shape(Rate(MBIT))
    environment = {"MASTER_ADDR": net.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": DEVICE}
    environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    reports = processes.run("studies.netlab.swap", [], 2, environment, net.command, seconds=300)
    return {kind: [max(pair) for pair in zip(*(r[kind] for r in reports), strict=True)] for kind in reports[0]}


def _swap(groups: Groups, pieces: Sequence[Tensor]) -> None:
    """As in a round: one piece on each stream."""
    transfer = Transfer(groups, [[torch.empty_like(piece) for _ in range(2)] for piece in pieces], 0)
    for piece in pieces:
        transfer.send([piece, piece], good=True)
    for _ in pieces:
        transfer.wait()


def main() -> None:
    dist.init_process_group("gloo")
    mine = torch.zeros(NBYTES, dtype=torch.uint8)
    out = torch.empty(2 * NBYTES, dtype=torch.uint8)
    kinds: dict[str, Callable[[], object]] = {"all_gather": lambda: dist.all_gather_single(out, mine)}
    for streams in (1, STREAMS):
        groups = Groups(place_in(dist.group.WORLD), 120.0)
        groups.open(streams, Place(), Place())
        kinds[f"swap_{streams}"] = partial(_swap, groups, mine.tensor_split(streams))
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for repetition in range(REPETITIONS + 1):
        for kind, move in kinds.items():
            time.sleep(PAUSE)
            dist.barrier()
            began = time.perf_counter()
            move()
            if repetition:  # the first makes connections
                found[kind].append(time.perf_counter() - began)
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
