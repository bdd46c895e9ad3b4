"""Bytes and seconds of a mean over replicas, between network namespaces. Run, as root: python -m benchmarks.reduce

Every replica is a process in a network namespace of its own; gloo joins them over virtual Ethernet (MTU 1500, one
segment a packet), which a token bucket holds at 100 Mbit/s each way. Without root, iproute2 or kernel support it says
why and ends without a result.

Bytes: a fragment goes through `Collective` with E3M0 for several rounds. Payload is what a round says it sent; the
kernel's counters of the interface, both ways, add Ethernet, IP and TCP headers and acknowledgements. The bound is
2(M−1)/M · 4 bits a parameter. Seconds: a 4-bit mean of 10M parameters against gloo's own fp32 `all_reduce` of as many,
in turn, in the same two processes, at several rates and without a limit. There the kernel may hand over many segments
at once, as to a real card. The bound is the payload over the rate; Ethernet, IP and TCP headers alone add 4.6 %.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import processes
from benchmarks.record import RESULTS, Record, Target, write
from diloco.codecs.codec import E3M0, Codec
from diloco.exchange.collective import Collective
from diloco.exchange.mean import Encoded
from diloco.exchange.reducer import Delta, Join, Round, State, unchanged
from tests.support.netns import DEVICE, Network, Rate, impossible, network

BITS = 4
LINK = Rate(mbit=100, burst_kbyte=32, latency_ms=50)
RATES = {100: 1.12, 300: 1.15, 1000: 1.3}
"""Mbit/s: the most that a mean may take, times the bound."""
UNLIMITED = "unlimited"


def main() -> None:
    parser = argparse.ArgumentParser(description="bytes and seconds of a mean over replicas")
    parser.add_argument("--fragment", type=int, default=4_000_000, help="parameters whose bytes are counted")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parameters", type=int, default=10_000_000, help="parameters whose mean is timed")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--worker", choices=["bytes", "seconds"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        dist.init_process_group("gloo")
        worker = count_bytes if arguments.worker == "bytes" else time_means
        print(json.dumps(worker(arguments)), flush=True)
        os._exit(0)  # replicas end at different times; gloo's farewell is not what is measured
    if reason := impossible():
        print(f"benchmarks.reduce is skipped: {reason}")
        return
    values: Record = {}
    for replicas in (2, 4):
        with network(replicas) as net:
            net.shape(LINK)  # without it the kernel's own queues lose packets, which are then counted twice
            found = values[f"bytes_{replicas}"] = summary(run(net, "bytes"), replicas, arguments.fragment)
        print(f"M={replicas}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()))
    values["seconds"] = {}
    with network(2, offload=True) as net:
        for rate in (*RATES, None):
            net.shape(None if rate is None else Rate(rate, burst_kbyte=32 if rate < 1000 else 128, latency_ms=50))
            found = values["seconds"][str(rate or UNLIMITED)] = run(net, "seconds")[0]
            if rate:
                found["bound"] = found["payload"] * 8e-6 / rate
            print(f"{rate} Mbit/s: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()))
    targets = []
    for m in (2, 4):
        counted = values[f"bytes_{m}"]
        targets.append(Target(f"M={m}: payload, times the bound", counted["payload"], at_most=1.03))
        targets.append(Target(f"M={m}: with TCP, times the bound", counted["wire"], at_most=1.08))
    for rate, most in RATES.items():
        found = values["seconds"][str(rate)]
        times = found["e3m0_seconds"] / found["bound"]
        targets.append(Target(f"{rate} Mbit/s: 4-bit mean, times the bound", times, at_most=most))
    for rate, least in (("100", 6), (UNLIMITED, 3)):
        what = f"{rate}{' Mbit/s' if rate.isdigit() else ''}: 4-bit mean, times faster than fp32 all_reduce"
        targets.append(Target(what, values["seconds"][rate]["ratio"], at_least=least))
    settings = {key: value for key, value in vars(arguments).items() if key != "worker"}
    write(RESULTS / "reduce.json", {**settings, "codec": "E3M0", "mtu": 1500, "link": vars(LINK)}, values, targets)


def run(net: Network, worker: str) -> list[Record]:
    environment = {"MASTER_ADDR": net.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": DEVICE}
    environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # addresses in a namespace have no names: a warning
    arguments = [*sys.argv[1:], "--worker", worker]
    return processes.run("benchmarks.reduce", arguments, len(net.namespaces), environment, net.command, seconds=600)


def summary(reports: list[Record], replicas: int, parameters: int) -> Record:
    """The mean over replicas, per round, in units of the bound; `wire` is the larger of the two directions."""
    bound = 2 * (replicas - 1) / replicas * BITS / 8 * parameters
    mean = {key: statistics.mean(report[key] for report in reports) / bound for key in ("payload", "tx", "rx")}
    out: Record = {**mean, "wire": max(mean["tx"], mean["rx"]), "bound_bytes_per_parameter": bound / parameters}
    return {**out, "retransmitted_segments": sum(report["retransmitted"] for report in reports)}


def count_bytes(arguments: argparse.Namespace) -> Record:
    reducer, values = joined(arguments.fragment)
    mean(reducer, values, 1)  # connections are made, windows have grown
    dist.barrier()
    before, payload = counters(), 0
    for index in range(2, arguments.rounds + 2):
        payload += mean(reducer, values, index).cost.bytes_sent
    spent = {key: value - before[key] for key, value in counters().items()}
    per_round = {key: value / arguments.rounds for key, value in {**spent, "payload": payload}.items()}
    return {**per_round, "retransmitted": spent["retransmitted"]}


def time_means(arguments: argparse.Namespace) -> Record:
    reducer, values = joined(arguments.parameters)
    before, payload = counters(), 0
    times: dict[str, list[float]] = {"fp32": [], "e3m0": []}
    for index in range(1, arguments.repetitions + 2):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values.clone())
        half = time.perf_counter()
        dist.barrier()
        again = time.perf_counter()
        payload = mean(reducer, values, index).cost.bytes_sent
        if index > 1:  # the first warms up
            times["fp32"].append(half - began)
            times["e3m0"].append(time.perf_counter() - again)
    ratios = [fp32 / e3m0 for fp32, e3m0 in zip(times["fp32"], times["e3m0"], strict=True)]
    medians = {f"{key}_seconds": statistics.median(value) for key, value in times.items()}
    retransmitted = counters()["retransmitted"] - before["retransmitted"]
    return {"ratio": statistics.median(ratios), **medians, "payload": payload, "retransmitted_segments": retransmitted}


class Decoded:
    """Decode the mean and keep the state: the outer step is not part of the measurement."""

    def __init__(self, state: State) -> None:
        self._state = state

    def add(self, part: Encoded) -> None:
        part.values()

    def state(self, index: int) -> State:
        return unchanged(self._state)


def join(n: int, codec: Codec) -> Collective:
    reducer = Collective(timeout=120)
    states = [State(0, torch.zeros(n), torch.zeros(0))]
    reducer.join(Join({}, states, [codec], lambda fragment, state, *, lr, last: Decoded(state)))
    return reducer


def joined(n: int) -> tuple[Collective, torch.Tensor]:
    torch.set_num_threads(1)
    reducer = join(n, E3M0())
    return reducer, torch.randn(n, generator=torch.Generator().manual_seed(reducer.replica))


def mean(reducer: Collective, values: torch.Tensor, index: int) -> Round:
    reducer.send(0, index, lambda: Delta(values, 1.0, False, 0))
    outcome = reducer.poll(0, index)
    assert isinstance(outcome, Round)
    return outcome


def counters() -> dict[str, int]:
    """Counted in this namespace since it was made: bytes through its interface, and TCP segments sent again."""
    statistic = Path("/sys/class/net") / DEVICE / "statistics"
    names, numbers = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:"]
    return {
        "tx": int((statistic / "tx_bytes").read_text()),
        "rx": int((statistic / "rx_bytes").read_text()),
        "retransmitted": int(numbers[names.index("RetransSegs")]),
    }


if __name__ == "__main__":
    main()
