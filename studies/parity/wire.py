"""Bytes of a round in each codec, counted by the kernel. Run, as root: python -m studies.parity.wire

Two processes in network namespaces of their own take the mean of a fragment through `Collective`, and of as many
gradients in bfloat16 through gloo's `all_reduce`, which is what data-parallel training sends in every step. Payload is
what the codec writes; the interface's counters add the headers of Ethernet, IP and TCP and the acknowledgements.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import processes
from benchmarks.record import Record, Target, table, write
from benchmarks.reduce import LINK, counters, mean
from diloco.codec import codec_named
from diloco.reduce import State
from diloco.reduce.collective import Collective
from tests.support.netns import DEVICE, impossible, network

PATH = Path(__file__).parent / "wire.json"
DATA_PARALLEL = "data-parallel, bfloat16"
CODECS = ("e3m0", "twobit", "topk")
PARAMETERS, ROUNDS = 4_000_000, 20
KINDS = ("payload", "counted")
SYNC_EVERY = 100
"""Steps of data-parallel training in a round, where both are compared."""


def main() -> None:
    parser = argparse.ArgumentParser(description="bytes of a round in each codec")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        dist.init_process_group("gloo")
        print(json.dumps(count(arguments.worker)), flush=True)
        os._exit(0)  # replicas end at different times; gloo's farewell is not what is counted
    if reason := impossible():
        sys.exit(f"studies.parity.wire needs network namespaces: {reason}")
    values = {}
    for what in (DATA_PARALLEL, *CODECS):
        with network(2) as net:
            net.shape(LINK)  # without it the kernel's own queues lose packets, which are then counted twice
            names = {"MASTER_ADDR": net.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": DEVICE}
            names["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # addresses in a namespace have no names: a warning
            found = processes.run("studies.parity.wire", ["--worker", what], 2, names, net.command, seconds=600)
        values[what] = {key: max(report[key] for report in found) for key in found[0]}
        print(what, values[what], flush=True)
    targets = [
        Target("2 bits: bits of payload a parameter and round", values["twobit"]["payload"], at_most=2.1),
        Target("top-k: bits of payload a parameter and round", values["topk"]["payload"], at_most=0.25),
        Target("top-k: times fewer bytes than data-parallel", fewer("topk", values, "payload"), at_least=7000),
    ]
    write(PATH, {"parameters": PARAMETERS, "rounds": ROUNDS, "sync_every": SYNC_EVERY}, values, targets)


def count(what: str) -> Record:
    """Bits for each parameter and round: payload, and what left the interface."""
    torch.set_num_threads(1)
    values = torch.randn(PARAMETERS, generator=torch.Generator().manual_seed(dist.get_rank()))
    once = _all_reduce(values) if what == DATA_PARALLEL else _mean(what, values)
    once(1)  # connections are made, windows have grown
    dist.barrier()
    before = counters()
    payload = sum(once(index) for index in range(2, ROUNDS + 2))
    spent = {key: value - before[key] for key, value in counters().items()}
    return {
        "payload": 8 * payload / PARAMETERS / ROUNDS,
        "counted": 8 * max(spent["tx"], spent["rx"]) / PARAMETERS / ROUNDS,
        "retransmitted": spent["retransmitted"],
    }


def _all_reduce(values: torch.Tensor) -> Callable[[int], int]:
    gradients = values.bfloat16()

    def once(index: int) -> int:
        dist.all_reduce(gradients.clone())
        return gradients.nbytes  # 2(M − 1)/M times as much, with two replicas

    return once


def _mean(codec: str, values: torch.Tensor) -> Callable[[int], int]:
    reduce = Collective(timeout=120)
    reduce.join({}, [State(0, torch.zeros(PARAMETERS), torch.zeros(0))], [codec_named(codec)])
    return lambda index: mean(reduce, values, index).sent


def fewer(codec: str, values: Record, what: str) -> float:
    """Times fewer bytes than data-parallel training sends in the steps of a round."""
    return SYNC_EVERY * values[DATA_PARALLEL][what] / values[codec][what]


def summary(record: Record) -> str:
    values = record["values"]
    lines = []
    for name in (DATA_PARALLEL, *CODECS):
        less = ("", "") if name == DATA_PARALLEL else (f"{fewer(name, values, what):,.0f}" for what in KINDS)
        lines.append((name, *(f"{values[name][what]:.4g}" for what in KINDS), *less))
    head = ("what is sent", "payload, bits a parameter and round", "counted by the kernel, bits",
            "payload, times less", "counted, times less")  # fmt: skip
    return table(head, lines)


if __name__ == "__main__":
    main()
