"""Turn a process of torchrun or srun into a replica, for frameworks that take all processes for one job."""

import os
from typing import Any

import torch

from diloco.errors import ConfigError
from diloco.exchange.collective import Collective
from diloco.exchange.rendezvous import PATIENCE, launched_store
from diloco.exchange.world import hide, own_world


def replica(*, patience: float = PATIENCE, **options: Any) -> Collective:
    """Meet the other replicas, then make this process look like a job of one process with one device. Call it before
    anything else, and pass the result to DiLoCo as `reducer`.

    Frameworks look at RANK and WORLD_SIZE, or at the default process group, and train one model on all ranks together.
    So this reads these variables, hides them, and sets CUDA_VISIBLE_DEVICES to the device of this process. Divide the
    data yourself, by `.replica` and `.replicas`, and give each replica its own folder for checkpoints.

    Args:
        patience: seconds to wait for the other processes.
        options: of `Collective`, such as `streams` and `timeout`.
    """
    world = own_world(1, None)
    if world is None:
        raise ConfigError(
            "not started by torchrun or srun: start it with `torchrun --nproc_per_node 2 script.py` or `srun -n 2 "
            "python script.py`; or pass each replica reducer=Collective(at='host:port', replica=…, replicas=…)"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise ConfigError("a process group exists already, which frameworks take for one job: call replica() first")
    device = _visible(world.local_rank, os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())
    if device is not None:
        if torch.cuda.is_initialized():
            raise ConfigError("CUDA is already initialized with all devices: call replica() first")
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    store = launched_store(world, patience)
    hide()
    return Collective(at=store, replica=world.rank, replicas=world.size, **options)


def _visible(local_rank: int, given: str | None, count: int) -> str | None:
    """CUDA_VISIBLE_DEVICES for this process; None to leave it unchanged.

    >>> _visible(1, "4,6", 2), _visible(1, None, 8), _visible(1, "3", 1), _visible(1, None, 0)
    ('6', '1', None, None)
    """
    if count < 2:
        return None  # no device, or the launcher has given each process its own
    if local_rank >= count:
        raise ConfigError(f"local rank {local_rank} with {count} devices: start one process for each device")
    return given.split(",")[local_rank] if given else str(local_rank)
