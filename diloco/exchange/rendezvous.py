"""Meet the other processes of a run at an address."""

import contextlib
import ipaddress
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from diloco.errors import ConfigError, PeerLost
from diloco.exchange.world import World, own_address, own_job

QUIET = 3.0
"""Seconds after which the first process of a machine prints what it waits for."""
PATIENCE = 600.0
SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface."""


def meet(world: World, backend: str = "gloo", patience: float = PATIENCE) -> None:
    """Create the default process group. `patience` limits only the meeting, in seconds: afterwards one process may
    prepare a corpus for as long as it takes."""
    store = launched_store(world, patience)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)


def launched_store(world: World, patience: float = PATIENCE) -> dist.Store:
    """The store of all processes that torchrun, Slurm or `diloco train` started together."""
    host, port = own_address()
    use_route_to(host)
    limit = timedelta(seconds=patience)
    with _waiting(f"{world.size} processes", host, port, patience, world.local_rank == 0):
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun holds the store
            store, _, _ = next(dist.rendezvous(f"tcp://{host}:{port}", world.rank, world.size, timeout=limit))
        else:
            store = _store(host, port, world.rank == 0, limit)
        store = dist.PrefixStore(own_job(), store)  # two steps of one Slurm job may have come to the same port
        store.set(f"here/{world.rank}", "")
        store.wait([f"here/{rank}" for rank in range(world.size)], limit)
    store.set_timeout(dist.default_pg_timeout)
    return store


def meet_at(address: str, rank: int, replica: int, replicas: int, patience: float) -> dist.Store:
    """The store of replicas that are separate jobs. Rank 0 of replica 0 listens at the address. Waits for this rank of
    every replica."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"at={address!r}: pass host:port of the first process of replica 0")
    use_route_to(host)
    limit = timedelta(seconds=patience)
    with _waiting(f"{replicas} replicas", host, int(port), patience, rank == 0):
        store = dist.PrefixStore(f"rank {rank}", _store(host.strip("[]"), int(port), replica == 0 and rank == 0, limit))
        store.set(f"here/{replica}", "")
        store.wait([f"here/{m}" for m in range(replicas)], limit)
    return store


def use_route_to(host: str) -> None:
    """Let gloo use the interface that reaches the first process, unless the user has chosen one. By itself it takes the
    one that the machine's name stands for; Debian and Ubuntu map that to 127.0.1.1, which no other machine reaches."""
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ and (name := _interface_to(host)):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _interface_to(host: str) -> str | None:
    """The interface whose IPv4 address packets to this host carry. None for this machine itself, and where unknown."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((host, 9))  # sends nothing
        own = probe.getsockname()[0]
        for _, name in [] if own.startswith("127.") else socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24]) == own:
                    return name
    return None


def _store(host: str, port: int, listens: bool, limit: timedelta) -> dist.Store:
    """Listen at this address only, not at all of them as torch would: anyone who can connect may read and write."""
    listener = _listener(host, port) if listens else None
    return dist.TCPStore(host, port, None, listens, limit, False, multi_tenant=True, master_listen_fd=listener)


def _listener(host: str, port: int) -> int | None:
    """A socket at this address only. None, for all addresses, if `host` is a name, which may mean another address on
    this machine than elsewhere, or belongs to a router or container host that forwards to this machine."""
    with contextlib.suppress(ValueError, OSError):  # if the port is taken, TCPStore shares its own server or says so
        address = "127.0.0.1" if host == "localhost" else host
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        return socket.create_server((address, port), family=family).detach()
    return None


@contextlib.contextmanager
def _waiting(whom: str, host: str, port: int, patience: float, verbose: bool) -> Iterator[None]:
    """Print after a while what this process waits for, and raise what to do when its patience ends."""
    waiting = f"waiting for {whom} to meet at {host}:{port}"
    remark = threading.Timer(QUIET, lambda: print(waiting, file=sys.stderr, flush=True))  # noqa: T201
    remark.daemon = True
    if verbose:
        remark.start()
    try:
        yield
    except dist.DistError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise ConfigError(f"{host}:{port} is in use by another program, so {whom} cannot meet there: choose "
                              "another port (MASTER_PORT)") from None  # fmt: skip
        raise PeerLost(
            f"{whom} did not meet at {host}:{port} within {patience:.0f} s: start all of them, and check address, "
            "port and firewall"
        ) from None
    finally:
        remark.cancel()
