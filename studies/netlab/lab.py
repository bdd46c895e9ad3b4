"""The lab from outside: one worker for each replica in a namespace of its own, told step by step what to train."""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.record import Record
from tests.support.netns import DEVICE, Network, Rate, network

SAMPLE = 0.1
"""Seconds between two looks at the interfaces' counters: each takes 0.1 ms of a core."""
QUIET_BYTES = 20_000
"""In a third of a second: what a link carries when no round is under way (heartbeats, acknowledgements)."""

FOREIGN, ATTEMPTS = 0.04, 4
"""Cores that other processes may take; how often a run is tried at most when they take more."""


@dataclass
class Lab:
    """Replicas that are up, and their network. `run` trains; `network.shape` sets the rate in between."""

    network: Network
    workers: list[subprocess.Popen[str]]
    log: list[Record] = field(default_factory=list)
    parameters: int = 0

    def run(self, steps: int, *, synced: bool, lead: int = 0, seconds: float = 600) -> Record:
        """Train on every replica: seconds of the slowest, what each says, and what the interfaces carried."""
        self._tell({"steps": steps, "lead": lead, "synced": synced})
        self._hear(seconds)  # "begun": the steps that do not count are over
        foreign, began = self._foreign(), time.monotonic()
        said, samples = self._hear(seconds, watch=True)
        foreign = (self._foreign() - foreign) / (time.monotonic() - began)
        reports = [json.loads(line) for line in said]
        length = max(report["seconds"] for report in reports)
        tx = [b - a for a, b in zip(samples[0][1], samples[-1][1], strict=True)]
        return {
            "seconds": length,
            "steps": steps,
            "bytes_step": max(tx) / steps,
            "burst": burst(samples),
            "foreign": foreign,
            "replicas": reports,
        }

    def calm(self, steps: int, *, synced: bool, lead: int = 0) -> Record:
        """`run`, again if something else on this machine took more than a little of the cores meanwhile."""
        found = self.run(steps, synced=synced, lead=lead)
        for _ in range(ATTEMPTS - 1):
            if found["foreign"] < FOREIGN:
                break
            found = self.run(steps, synced=synced, lead=lead)
        return found

    def _foreign(self) -> float:
        """Seconds of all cores that were taken by other processes, or by other guests of the host."""
        numbers = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        user, nice, stolen = (int(numbers[i]) for i in (1, 2, 8))
        mine = sum(ticks(pid) for pid in (os.getpid(), *(worker.pid for worker in self.workers)))
        return (user + nice + stolen - mine) / os.sysconf("SC_CLK_TCK")

    def drain(self, seconds: float = 120) -> None:
        """Wait until what is still under way has arrived."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            before = self.sent()
            time.sleep(1 / 3)
            if all(b - a < QUIET_BYTES for a, b in zip(before, self.sent(), strict=True)):
                return
        raise RuntimeError(f"the link still carries data {seconds:g} s after the last step")

    def _tell(self, command: Record) -> None:
        for worker in self.workers:
            assert worker.stdin
            worker.stdin.write(json.dumps(command) + "\n")
            worker.stdin.flush()

    def _hear(self, seconds: float, watch: bool = False) -> tuple[list[str], list[tuple[float, list[int]]]]:
        """A line from each worker; meanwhile the counters, if they are wanted."""
        said: dict[int, str] = {}
        samples = [(time.monotonic(), self.sent())] if watch else []
        deadline = time.monotonic() + seconds
        while len(said) < len(self.workers):
            waiting = {w.stdout: i for i, w in enumerate(self.workers) if i not in said and w.stdout}
            for stream in select.select(list(waiting), [], [], SAMPLE if watch else 1.0)[0]:
                line = stream.readline()
                if not line:
                    code = self.workers[waiting[stream]].wait()
                    raise RuntimeError(f"replica {waiting[stream]} ended with {code}; its own words are above")
                said[waiting[stream]] = line
            if time.monotonic() > deadline:
                raise RuntimeError(f"replicas {sorted(set(waiting.values()))} did not answer within {seconds:g} s")
            if watch:
                samples.append((time.monotonic(), self.sent()))
        return [said[i] for i in range(len(self.workers))], samples

    def sent(self) -> list[int]:
        """Bytes sent by each replica's interface, headers included, as the kernel counts them."""
        return [sent_bytes(worker.pid) for worker in self.workers]


def ticks(pid: int) -> int:
    """Ticks of the clock that a process spent outside the kernel."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def sent_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == DEVICE:
            return int(rest.split()[8])
    return 0


def burst(samples: Sequence[tuple[float, list[int]]]) -> float:
    """The most bytes that one replica sent within a second."""
    most, first = 0.0, 0
    for last in range(1, len(samples)):
        while first < last - 1 and samples[last][0] - samples[first + 1][0] >= 1.0:
            first += 1
        span = samples[last][0] - samples[first][0]
        sent = max(b - a for a, b in zip(samples[first][1], samples[last][1], strict=True))
        most = max(most, sent / max(span, 1.0))
    return most


@contextlib.contextmanager
def lab(method: str | None, replicas: int, batch: int) -> Iterator[Lab]:
    """Make the network and start the workers; end them and remove it whatever happens."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    workers: list[subprocess.Popen[str]] = []
    try:
        with network(replicas, offload=True) as net:
            addresses = [net.address(host) for host in range(replicas)]
            settings = json.dumps({"method": method, "batch": batch, "addresses": addresses})
            try:
                for rank in range(replicas):
                    command = [*net.command(rank), sys.executable, "-m", "studies.netlab.worker", settings]
                    workers.append(
                        subprocess.Popen(
                            command,
                            env={**os.environ, **_environment(rank, replicas, net)},
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            text=True,
                            preexec_fn=_die_with_parent,
                        )
                    )
                made = Lab(net, workers)
                made.parameters = json.loads(made._hear(120)[0][0])["parameters"]
                yield made
            finally:
                for worker in workers:
                    worker.kill()
                    worker.communicate()  # closes the pipes too
    finally:
        signal.signal(signal.SIGTERM, previous)


def _environment(rank: int, replicas: int, net: Network) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(replicas),
        "MASTER_ADDR": net.address(0),
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # addresses in a namespace have no names: a warning
        "RUST_LOG": "error",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # torchft's imports would start processes that take the cores for 20 s
    }


def _die_with_parent() -> None:
    """Even `kill -9` of the lab must leave no replica behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def link(mbit: float) -> Rate:
    """A token bucket that holds 1 ms, at least 32 kB, and queues at most 50 ms."""
    return Rate(mbit, burst_kbyte=max(32, round(mbit / 8)))
