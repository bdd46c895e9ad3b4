"""Over a slow link: two members and an S3 server, each in a network namespace of its own, beside the collective."""

import subprocess
import sys

from benchmarks.record import Record
from studies.bucket.worker import STEP, Worker, open_gate, rate, steps_a_round
from studies.netlab.lab import link as shaped
from tests.support.netns import DEVICE, Network, impossible, network
from tests.support.s3 import ENVIRONMENT, cpu_seconds

SETTINGS: Record = {"parameters": 2_000_000, "fragments": 4, "sync_every": 20, "overlap": 5}
MULTIPLES = (1.5, 3.0)
"""Times the bound: 4 bits a parameter in the time of sync_every steps."""
SECONDS = 24
PORT = 9000


def link(folder: str) -> Record | None:
    """Steps a second over those without sync, for each rate. What the server sends is limited to what both members'
    links could carry."""
    if reason := impossible():
        print(f"link is skipped: {reason}")
        return None
    bound = 4 * SETTINGS["parameters"] / (SETTINGS["sync_every"] * STEP) / 1e6
    with network(3, offload=True) as net:
        words = [*net.command(2), sys.executable, "-m", "tests.support.s3", net.address(2), str(PORT)]
        server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdout
        try:
            pids = [int(pid) for pid in server.stdout.readline().split()]
            rates = [{"multiple": m, **_at(net, m * bound, pids, f"{folder}-{m}")} for m in MULTIPLES]
        finally:
            server.communicate()  # its input ends
    return {"settings": SETTINGS, "bound_mbit": bound, "rates": rates}


def _at(net: Network, mbit: float, server: list[int], folder: str) -> Record:
    net.shape(shaped(mbit), [0, 1])
    net.shape(shaped(2 * mbit), [2])
    alone = sum(map(rate, _run(net, "none", folder)))
    collective = _run(net, "collective", folder)
    before = cpu_seconds(*server)
    bucket = _run(net, "bucket", folder)
    spent = cpu_seconds(*server) - before
    rounds = [r for each in bucket for r in each["rounds"]]
    return {
        "mbit": mbit,
        "collective": sum(map(rate, collective)) / alone,
        "bucket": sum(map(rate, bucket)) / alone,
        "steps_a_round": sum(steps_a_round(each, SETTINGS["fragments"]) for each in bucket) / 2,
        "rounds_with_all": sum(members == 2 and counted for _, _, members, counted in rounds) / len(rounds),
        "server_cpu": spent / SECONDS,
        "server_cpu_round": 2 * spent / len(rounds),
    }


def _run(net: Network, kind: str, folder: str) -> list[Record]:
    gate, url = f"{folder}-{kind}", f"s3://bucket/{folder.rpartition('-')[2]}"
    common = ENVIRONMENT | {"AWS_ENDPOINT_URL": f"http://{net.address(2)}:{PORT}", "MASTER_ADDR": net.address(0),
                            "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": DEVICE, "WORLD_SIZE": "2",
                            "TORCH_CPP_LOG_LEVEL": "ERROR"}  # fmt: skip
    workers = [
        Worker(net.command(rank), common | {"RANK": str(rank)}, url=url, kind=kind, name=f"m{rank}", seed=rank,
               gate=gate, seconds=SECONDS, **SETTINGS)
        for rank in range(2)
    ]  # fmt: skip
    open_gate(workers, gate)
    return [worker.result() for worker in workers]
