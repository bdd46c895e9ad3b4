"""Meet the other processes of a run, at an address that all of them know."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from diloco.errors import ConfigError, PeerLost
from diloco.world import World, own_address, own_job

QUIET = 3.0
"""Seconds after which the first process of a machine says what it waits for."""
PATIENCE = 600.0


def meet(world: World, backend: str = "gloo", patience: float = PATIENCE) -> None:
    """Make the default process group of all processes. `patience` limits only the meeting, in seconds: afterwards one
    process may prepare a corpus for as long as it takes."""
    store = launched_store(world, patience)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)


def launched_store(world: World, patience: float = PATIENCE) -> dist.Store:
    """A store that all processes share that torchrun, Slurm or `diloco train` has started."""
    host, port = own_address()
    limit = timedelta(seconds=patience)
    with _waiting(f"{world.size} processes", host, port, patience, world.local_rank == 0):
        store, _, _ = next(dist.rendezvous(f"tcp://{host}:{port}", world.rank, world.size, timeout=limit))
        store = dist.PrefixStore(own_job(), store)  # two steps of one Slurm job may have come to the same port
        store.set(f"here/{world.rank}", "")
        store.wait([f"here/{rank}" for rank in range(world.size)], limit)
    store.set_timeout(dist.default_pg_timeout)
    return store


def meet_at(address: str, rank: int, replica: int, replicas: int, patience: float) -> dist.Store:
    """A store that the replicas share, each a job of its own. Rank 0 of replica 0 listens at the address. Returns when
    the processes with this rank are there."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"at={address!r}: give host:port of the first process of replica 0")
    limit = timedelta(seconds=patience)
    with _waiting(f"{replicas} replicas", host, int(port), patience, rank == 0):
        first = replica == 0 and rank == 0
        store: dist.Store = dist.TCPStore(host.strip("[]"), int(port), None, first, limit, False, multi_tenant=True)
        store = dist.PrefixStore(f"rank {rank}", store)
        store.set(f"here/{replica}", "")
        store.wait([f"here/{each}" for each in range(replicas)], limit)
    return store


@contextlib.contextmanager
def _waiting(whom: str, host: str, port: int, patience: float, says: bool) -> Iterator[None]:
    """Say after a while what this process waits for, and at the end of its patience what to do."""
    waiting = f"waiting for {whom} to meet at {host}:{port}"
    remark = threading.Timer(QUIET, lambda: print(waiting, file=sys.stderr, flush=True))  # noqa: T201
    remark.daemon = True
    if says:
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
