"""A long way between namespaces: a process that holds every packet for a while, between tun devices.

`tc tbf` cannot add latency and netem is not in every kernel. The relay takes about 20 µs of a core for each packet.
With `offload` a packet is up to 64 kB of one connection, as between the kernel and a card that cuts it itself.
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

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x1, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x1, 0x2
VNET_HEADER = 10
"""Bytes in front of a packet with `offload`. The kernel that reads them is the one that wrote them."""
CLONE_NEWNET = 0x40000000
LARGEST = (1 << 16) + VNET_HEADER
"""Bytes of a packet."""


@contextlib.contextmanager
def far_apart(seconds: float, hosts: int = 2, *, offload: bool = False) -> Iterator[Network]:
    """A packet takes `seconds` from any host to any other."""
    with network(hosts) as net:
        for namespace in net.namespaces[: 1 if hosts == 2 else hosts]:  # of a cable, the other end goes too
            _call(f"ip -n {namespace} link delete {DEVICE}")
        words = ["offload"] if offload else []
        command = [sys.executable, "-m", "studies.netlab.relay", str(seconds), *net.namespaces, *words]
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


@contextlib.contextmanager
def behind_nat(net: Network, host: int) -> Iterator[list[str]]:
    """A host from which all others can be reached, and which nobody can reach: `host` is its router. Yields what
    `Network.command` would. Needs nftables."""
    inside, router = f"diloco-{os.getpid()}-{len(net.namespaces) + 1}", net.namespaces[host]
    masquerade = ("add table ip nat; add chain ip nat out { type nat hook postrouting priority srcnat; };"
                  f"add rule ip nat out oifname {DEVICE} masquerade")  # fmt: skip
    try:
        for command in (
            f"ip netns add {inside}",
            f"ip -n {inside} link set lo up",
            f"ip link add {DEVICE} netns {inside} type veth peer name inside netns {router}",
            f"ip -n {inside} address add 192.168.77.2/24 dev {DEVICE}",
            f"ip -n {inside} link set {DEVICE} up",
            f"ip -n {inside} route add default via 192.168.77.1",
            f"ip -n {router} address add 192.168.77.1/24 dev inside",
            f"ip -n {router} link set inside up",
            f"ip netns exec {router} sysctl -q net.ipv4.ip_forward=1",
        ):
            _call(command)
        subprocess.run([*net.command(host), "nft", masquerade], check=True)
        yield ["ip", "netns", "exec", inside]
    finally:
        subprocess.run(["ip", "netns", "delete", inside], check=False, capture_output=True)


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the parent
    seconds, *namespaces = sys.argv[1:]
    offload = namespaces[-1] == "offload"
    devices = [tun(name, offload) for name in namespaces[: -1 if offload else None]]
    print("ready", flush=True)
    relay(devices, float(seconds), VNET_HEADER if offload else 0)


def tun(namespace: str, offload: bool) -> int:
    """A tun device in that namespace. A descriptor stays with its device, whatever namespace the process is in."""
    with open(f"/run/netns/{namespace}") as entered:
        if ctypes.CDLL(None, use_errno=True).setns(entered.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TUN | IFF_NO_PI | (IFF_VNET_HDR if offload else 0)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    if offload:
        fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return device


def relay(devices: list[int], seconds: float, header: int) -> None:
    """`header`: bytes before the IP header. The last byte of a destination is the number of its device, from 1."""
    held: deque[tuple[float, bytes]] = deque()
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        for device in select.select(devices, [], [], wait)[0]:
            with contextlib.suppress(OSError):  # it is empty, or down
                for _ in range(64):
                    packet = os.read(device, LARGEST)
                    held.append((time.monotonic() + seconds, packet))
        now = time.monotonic()
        while held and held[0][0] <= now:
            packet = held.popleft()[1]
            if packet[header] >> 4 != 4 or not 0 < (number := packet[header + 19]) <= len(devices):
                continue  # IPv6, multicast, or an address that nobody has
            with contextlib.suppress(OSError):  # a device that is full or down loses packets, as a link does
                os.write(devices[number - 1], packet)


def _call(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


if __name__ == "__main__":
    main()
