"""A replica's model, optimizer and sync, from the config: where names become objects."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from diloco.codec import Float32, codec_named
from diloco.diloco import DiLoCo
from diloco.errors import ConfigError
from diloco.fragment import Balanced, fragmenter
from diloco.outer import SGD, Nesterov, Outer
from diloco.reduce import Reduce
from diloco.reduce.collective import Collective
from diloco.runs.config import TrainConfig
from diloco.world import World


def device_for(config: TrainConfig, world: World) -> torch.device:
    if config.device != "auto":
        try:
            device = torch.device(config.device)
        except RuntimeError:
            raise ConfigError(f"device={config.device!r}: give auto, cpu, cuda or another torch device") from None
    else:
        found = torch.accelerator.current_accelerator(check_available=True)
        device = torch.device("cpu") if found is None or found.type == "mps" else found
    if device.type != "cpu":
        count = torch.accelerator.device_count()
        if world.local_rank >= count:
            raise ConfigError(f"process {world.local_rank} of this machine finds only {count} {device.type} devices: "
                              "start fewer processes here, or give --device cpu")  # fmt: skip
        device = torch.device(device.type, world.local_rank)
        torch.accelerator.set_device_index(world.local_rank)
    return device


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Of the generators that dropout draws from."""
    state = {"cpu": torch.get_rng_state()}
    return state if device.type == "cpu" else state | {"device": torch.get_device_module(device).get_rng_state(device)}


def set_random_state(device: torch.device, state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"], device)


def spread(
    model: nn.Module, config: TrainConfig, world: World, device: torch.device
) -> tuple[nn.Module, DeviceMesh | None]:
    """Shard the model inside the replica (FSDP2) and, for data-parallel, copy it over the replicas."""
    if world.shards > 1:
        mesh = init_device_mesh(device.type, (world.replicas, world.shards), mesh_dim_names=("replica", "shard"))
        over = mesh if config.method == "dp" else mesh["shard"]  # two dimensions: shard over one, copy over the other
        for module in list(model.modules()):
            if isinstance(module, nn.ModuleList):
                for layer in module:
                    fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
        return model, mesh
    if config.method == "dp" and world.replicas > 1:
        model = DistributedDataParallel(model, device_ids=[device.index] if device.index is not None else None)
    return model, None


def adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW 0.9/0.99, with weight decay on matrices only. Fused: a third of the time of the default on small models."""
    assert config.lr is not None and config.weight_decay is not None
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=(0.9, 0.99), fused=True)


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    mesh: DeviceMesh | None,
    reduce: Reduce | None = None,
) -> DiLoCo | None:
    """The sync of the method: none for `dp` and `local`."""
    if config.method not in ("streaming", "diloco"):
        return None
    streaming = config.method == "streaming"
    if reduce is None:
        group, shards = (mesh.get_group("replica"), mesh.get_group("shard")) if mesh else (None, None)
        reduce = Collective(group, shards=shards, streams=config.streams, timeout=config.timeout)
    return DiLoCo(
        model,
        optimizer,
        sync_every=config.sync_every,
        fragments=fragmenter(config.fragments) if streaming else Balanced(1),
        overlap=config.overlap if streaming else 0,
        keep_local=config.keep_local if streaming else 0.0,
        codec=codec_named(config.codec) if streaming else Float32(),
        outer=outer(config),
        reduce=reduce,
    )


def outer(config: TrainConfig) -> Outer:
    assert config.outer_lr is not None
    if config.outer == "sgd":
        return SGD(config.outer_lr)
    assert config.outer_momentum is not None
    return Nesterov(config.outer_lr, config.outer_momentum)
