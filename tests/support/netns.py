"""A network of its own on this machine: a namespace per host, joined by virtual Ethernet, with links as slow as asked.

Two hosts share one cable; more hang on a bridge in a further namespace. Nothing outside can be reached from inside,
and no interface or address outside is touched. Needs root, and `ip` and `tc` (iproute2).
"""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

DEVICE = "veth0"
"""The interface of every host, inside its own namespace."""


@dataclass(frozen=True)
class Rate:
    """What each host may send: a token bucket (`tc … tbf`) of this rate, burst and longest wait in the queue."""

    mbit: float
    burst_kbyte: int = 32
    latency_ms: int = 50


@dataclass(frozen=True)
class Network:
    """The hosts, by number; `command` in front of a command line runs it on one of them."""

    namespaces: tuple[str, ...]

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def command(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self.namespaces[host]]

    def shape(self, rate: Rate | None, hosts: Iterable[int] | None = None) -> None:
        """Limit what every host, or these hosts, send from now on. None: as fast as the kernel can."""
        for namespace in self.namespaces if hosts is None else [self.namespaces[host] for host in hosts]:
            if rate is None:  # fails where nothing limits
                subprocess.run(f"tc -n {namespace} qdisc del dev {DEVICE} root".split(), capture_output=True)
            else:
                _call(" ".join(shaping(rate, f"-n {namespace}")))


def shaping(rate: Rate, *where: str) -> list[str]:
    """The command that limits what a host sends; by default the one on which it is called."""
    limits = f"rate {rate.mbit}mbit burst {rate.burst_kbyte}kb latency {rate.latency_ms}ms"
    return " ".join(["tc", *where, "qdisc replace dev", DEVICE, "root tbf", limits]).split()


def impossible() -> str | None:
    """Why no network can be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    try:
        with network(2) as made:
            made.shape(Rate(100))
    except subprocess.CalledProcessError as error:
        return f"the kernel refuses `{' '.join(error.cmd)}`: {error.stderr.strip()}"
    return None


@contextlib.contextmanager
def network(hosts: int, *, offload: bool = False) -> Iterator[Network]:
    """Make it, and take it down whatever happens. Removing a namespace removes its interfaces and their peers.

    Without `offload` one segment is one packet, so that the kernel's counters see each packet's headers. With it the
    kernel hands over many at once, as it does to a real card, which cuts them itself: without it 13 MB each way took
    0.2 s of a core.
    """
    _remove_orphans()
    names = [f"diloco-{os.getpid()}-{i}" for i in range(hosts + 1)]
    made = Network(tuple(names[:hosts]))
    used = names[:hosts] if hosts == 2 else names
    try:
        for name in used:
            _call(f"ip netns add {name}")
            _call(f"ip -n {name} link set lo up")
        if hosts == 2:
            _call(f"ip link add {DEVICE} netns {names[0]} type veth peer name {DEVICE} netns {names[1]}")
        else:
            bridge = names[hosts]
            _call(f"ip -n {bridge} link add bridge0 type bridge")
            _call(f"ip -n {bridge} link set bridge0 up")
            for i in range(hosts):
                _call(f"ip link add {DEVICE} netns {names[i]} type veth peer name port{i} netns {bridge}")
                _call(f"ip -n {bridge} link set port{i} master bridge0 up")
        for i in range(hosts):
            if not offload:
                _call(f"ip -n {names[i]} link set {DEVICE} gso_max_segs 1")
            _call(f"ip -n {names[i]} address add {made.address(i)}/24 dev {DEVICE}")
            _call(f"ip -n {names[i]} link set {DEVICE} up")
        yield made
    finally:
        for name in used:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _remove_orphans() -> None:
    """The namespaces of processes that were killed before they could remove them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout.split()
    for name in listed:
        owner = re.fullmatch(r"diloco-(\d+)-\d+", name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _call(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
