"""Two replicas of two ranks each, in four processes."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from diloco import Collective


def shard(model: torch.nn.Module) -> Collective:
    """Shard a model over the ranks of its replica (FSDP2); returns the reducer over the replicas."""
    mesh = replica_mesh()
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return Collective(mesh.get_group("replica"), shards=mesh.get_group("shard"))


def replica_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))


def groups(rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's group over the replicas, and the one inside its replica."""
    mesh = replica_mesh()
    return mesh.get_group("replica"), mesh.get_group("shard")


def whole(model: torch.nn.Module) -> torch.Tensor:
    """The values of a sharded model on every rank."""
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])  # pyright: ignore
