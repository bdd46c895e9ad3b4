"""Make a replica of a process that torchrun or srun has started, in a framework that takes all of them for one job."""

import os
from typing import Any

import torch

from diloco.errors import ConfigError
from diloco.exchange.collective import Collective
from diloco.exchange.rendezvous import PATIENCE, launched_store
from diloco.exchange.world import hide, own_world


def replica(*, patience: float = PATIENCE, **options: Any) -> Collective:
    """Meet the other replicas, and leave this process alone in its world: to every framework it is a job of one process
    with one device. Call it before anything else, and give what it returns as `reduce` to DiLoCo.

    Frameworks look at RANK and WORLD_SIZE, or at the default process group, and train one model on all ranks together.
    So it takes these variables, hides them, and sets CUDA_VISIBLE_DEVICES to the one device of this process. The data
    are yours to divide, by `.replica` and `.replicas`; each replica needs a folder of its own for its checkpoints.

    Args:
        patience: seconds to wait for the other processes.
        options: of `Collective`, as `streams` and `timeout`.
    """
    world = own_world(1, None)
    if world is None:
        raise ConfigError(
            "this process is one of none: start it with `torchrun --nproc_per_node 2 script.py` or `srun -n 2 python "
            "script.py`; or give each replica reducer=Collective(at='host:port', replica=…, replicas=…)"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise ConfigError("there is a process group already, which frameworks take for one job: call replica() first")
    device = _visible(world.local_rank, os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())
    if device is not None:
        if torch.cuda.is_initialized():
            raise ConfigError("CUDA is in use already, with all devices: call replica() first")
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    store = launched_store(world, patience)
    hide()
    return Collective(at=store, replica=world.rank, replicas=world.size, **options)


def _visible(local_rank: int, given: str | None, count: int) -> str | None:
    """The device of one process, as CUDA_VISIBLE_DEVICES; None: leave it as it is.

    >>> _visible(1, "4,6", 2), _visible(1, None, 8), _visible(1, "3", 1), _visible(1, None, 0)
    ('6', '1', None, None)
    """
    if count < 2:
        return None  # no device, or the launcher has given each process its own
    if local_rank >= count:
        raise ConfigError(f"local rank {local_rank} with {count} devices: start one process for each device")
    return given.split(",")[local_rank] if given else str(local_rank)
