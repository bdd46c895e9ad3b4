"""Meet the other processes of a run that torchrun, Slurm or `diloco train` has started."""

import sys
import threading
from datetime import timedelta

import torch.distributed as dist

from diloco.errors import PeerLost
from diloco.world import World, own_address

QUIET = 3.0
"""Seconds after which the first process of a machine says what it waits for."""
PATIENCE = 600.0


def meet(world: World, backend: str = "gloo", patience: float = PATIENCE) -> None:
    """Make the default process group of all processes. `patience` limits only the meeting, in seconds: afterwards one
    process may prepare a corpus for as long as it takes."""
    host, port = own_address()
    waiting = f"waiting for {world.size} processes to meet at {host}:{port}"
    remark = threading.Timer(QUIET, lambda: print(waiting, file=sys.stderr, flush=True))  # noqa: T201
    remark.daemon = True
    if world.local_rank == 0:
        remark.start()
    limit = timedelta(seconds=patience)
    try:
        store, _, _ = next(dist.rendezvous(f"tcp://{host}:{port}", world.rank, world.size, timeout=limit))
        store.set(f"here/{world.rank}", "")
        store.wait([f"here/{rank}" for rank in range(world.size)], limit)
    except dist.DistError:
        raise PeerLost(
            f"{world.size} processes did not meet at {host}:{port} within {patience:.0f} s: start all of them, and "
            "check address, port and firewall"
        ) from None
    finally:
        remark.cancel()
    store.set_timeout(dist.default_pg_timeout)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
