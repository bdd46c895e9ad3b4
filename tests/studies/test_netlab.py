"""The network lab, in short. Needs root: it makes network namespaces."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco.plan.simulate import Group, utilization
from diloco.plan.traffic import Link
from studies.netlab.cell import predict
from studies.netlab.lab import burst, lab
from studies.netlab.methods import METHODS, OURS, SYNC_EVERY
from studies.netlab.relay import far_apart
from studies.netlab.summary import crossing
from tests.support.netns import impossible, network

REASON = impossible()
needs_root = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


@needs_root
def test_a_lab_sends_every_parameter_once_in_a_sync_period_and_leaves_no_namespace():
    with lab(OURS, 2, batch=1) as made:
        made.run(SYNC_EVERY + METHODS[OURS].lead, synced=True)
        made.drain()
        before = made.sent()
        made.run(SYNC_EVERY, synced=True)
        made.drain()
        sent = [b - a for a, b in zip(before, made.sent(), strict=True)]
        assert len(made.network.namespaces) == 2 and set(made.network.namespaces) <= set(namespaces())
    assert not set(made.network.namespaces) & set(namespaces())
    for one in sent:  # half a byte a parameter and the scales, with at most a tenth of headers
        assert 1.0 < one / (0.504 * made.parameters) < 1.1


@needs_root
def test_a_killed_lab_leaves_no_replica_and_its_namespaces_go_with_the_next():
    code = """from studies.netlab.lab import lab
with lab(None, 2, 1) as made:
    print(*(worker.pid for worker in made.workers), *made.network.namespaces, flush=True)
    input()"""
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    assert parent.stdin and parent.stdout
    words = parent.stdout.readline().split()
    workers, left = [int(word) for word in words[:2]], words[2:]
    assert len(left) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    deadline = time.monotonic() + 100  # against a hang
    while any(os.path.exists(f"/proc/{pid}") for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with network(2):
        assert not set(left) & set(namespaces())


@needs_root
def test_the_relay_holds_packets_for_its_latency_each_way():
    answer = (
        "import socket; s = socket.create_server(('', 9000)); print('up', flush=True); c, _ = s.accept(); "
        "c.send(c.recv(1))"
    )
    ask = (
        "import socket, time; s = socket.create_connection(('{}', 9000)); t = time.monotonic(); "
        "s.send(b'x'); s.recv(1); print(time.monotonic() - t)"
    )
    with far_apart(0.05) as net:
        server = subprocess.Popen([*net.command(1), sys.executable, "-c", answer], stdout=subprocess.PIPE, text=True)
        assert server.stdout and server.stdout.readline() == "up\n"
        command = [*net.command(0), sys.executable, "-c", ask.format(net.address(1))]
        asked = subprocess.run(command, capture_output=True, text=True, check=True)
        server.wait(100)
        server.stdout.close()
    assert float(asked.stdout) >= 0.1  # a busy machine takes longer, none takes less


def test_the_burst_is_the_most_that_one_replica_sent_within_a_second():
    samples = [(t / 10, [100 * t if t < 20 else 2000 + 1000 * (t - 20), 50 * t]) for t in range(31)]
    assert burst(samples) == pytest.approx(10_000)
    assert burst(samples[:11]) == pytest.approx(1000)


def test_a_crossing_lies_between_two_cells_on_a_line_over_the_logarithm_of_the_rate():
    cells = [
        {"bounds": bounds, "computing": share} for bounds, share in ((None, 0.9), (100.0, 0.9), (10.0, 0.7), (1.0, 0.3))
    ]
    assert crossing(cells, "half") == pytest.approx(10**0.5)
    assert crossing(cells, "most") == pytest.approx(10 ** (1 + (0.81 - 0.7) / 0.2))
    assert crossing(cells[:3], "half") is None


def test_the_prediction_charges_headers_and_the_cores_that_communication_shares():
    method = METHODS["e3m0"].predicted()
    rate = 8 * sum(method.nbytes(n) for t in range(30, 60) for _, n in method.sends(t)) / (30 * 0.1)  # just enough
    assert utilization(method, Group(0.1), Link.same(1.02 * rate))[0] == pytest.approx(1.0, abs=0.01)
    assert utilization(method, Group(0.1, wire=1.25), Link.same(rate))[0] == pytest.approx(0.8, abs=0.01)
    lost = 100e-9 * method.values() / 3.0
    assert utilization(method, Group(0.1, busy_ns=100), Link.same(1e12))[0] == pytest.approx(1 / (1 + lost), rel=1e-6)
    assert predict("ddp", 1000.0, 0.1, 0.0) > 20 * predict("ddp", 5.0, 0.1, 0.0)
