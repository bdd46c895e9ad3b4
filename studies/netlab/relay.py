"""A long way between two namespaces: a process that holds every packet for a while, between two tun devices.

`tc tbf` cannot add latency and netem is not in every kernel. The relay takes about 20 µs of a core for each packet, so
it is for links of some 10 Mbit/s and for measurements in which nothing else needs the core.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator

from tests.support.netns import DEVICE, Network, network

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
CLONE_NEWNET = 0x40000000
SNDBUF = 1 << 16
"""Largest packet that is read at once."""


@contextlib.contextmanager
def far_apart(seconds: float) -> Iterator[Network]:
    """Two hosts; a packet takes `seconds` from one to the other."""
    with network(2) as net:
        for host, namespace in enumerate(net.namespaces):
            if host == 0:
                _call(f"ip -n {namespace} link delete {DEVICE}")  # and with it the other end
        command = [sys.executable, "-m", "studies.netlab.relay", str(seconds), *net.namespaces]
        relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert relay.stdout and relay.stdout.readline() == "ready\n"
            for host, namespace in enumerate(net.namespaces):
                _call(f"ip -n {namespace} address add {net.address(host)}/24 dev {DEVICE}")
                _call(f"ip -n {namespace} link set {DEVICE} txqueuelen 1000 up")
            yield net
        finally:
            relay.kill()
            relay.communicate()  # closes the pipe too


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the parent
    seconds, *namespaces = sys.argv[1:]
    devices = [tun(name) for name in namespaces]
    print("ready", flush=True)
    relay(devices, float(seconds))


def tun(namespace: str) -> int:
    """A tun device in that namespace. A descriptor stays with its device, whatever namespace the process is in."""
    with open(f"/run/netns/{namespace}") as entered:
        if ctypes.CDLL(None, use_errno=True).setns(entered.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return device


def relay(devices: list[int], seconds: float) -> None:
    held: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    while True:
        due = min((queue[0][0] for queue in held if queue), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        for device in select.select(devices, [], [], wait)[0]:
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    packet = os.read(device, SNDBUF)
                    held[devices.index(device)].append((time.monotonic() + seconds, packet))
        now = time.monotonic()
        for source, queue in enumerate(held):
            while queue and queue[0][0] <= now:
                with contextlib.suppress(OSError):  # a device that is full or down loses packets, as a link does
                    os.write(devices[1 - source], queue.popleft()[1])


def _call(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


if __name__ == "__main__":
    main()
