"""The tensors of a model: which are trained, which are synced, and the part of each that lives in this process."""

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from diloco.errors import ConfigError
from diloco.exchange.reducer import Shard


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, in the same memory, with at least one dimension."""
    mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return mine.detach().unsqueeze(0) if mine.dim() == 0 else mine.detach()


def first_row(tensor: Tensor) -> int:
    """The row of the unsharded tensor at which this process's part begins."""
    if not isinstance(tensor, DTensor) or tensor.dim() == 0:
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0]


def checksum(tensor: Tensor) -> int:
    """A sum over the bits of this process's part, the same on every kind of device."""
    part = local(tensor)
    if is_traceable_wrapper_subclass(part):  # quantized, as torchao does it: the bits are in the tensors inside
        return checksum_all(getattr(part, name) for name in part.__tensor_flatten__()[0])
    octets = part.contiguous().flatten().view(torch.uint8)
    octets = octets.clone() if octets.storage_offset() % 8 else octets
    whole = len(octets) // 8 * 8  # words of 64 bits: 20 times as fast as 32
    return int(octets[:whole].view(torch.int64).sum()) + int(octets[whole:].sum())


def checksum_all(tensors: Iterable[Tensor]) -> int:
    return sum(place * checksum(tensor) for place, tensor in enumerate(tensors, 1)) % (1 << 63)


def shard_id(tensors: Iterable[Tensor]) -> Shard:
    """The shard that this process holds, by the mesh with the most ranks: with tensor parallelism some parameters are
    split over fewer."""
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    widest = max(meshes, key=DeviceMesh.size, default=None)
    if widest is None or widest.size() == 1:
        return Shard()
    ranks = widest.mesh.flatten().tolist()
    return Shard(ranks.index(widest.get_rank()), len(ranks))


def forget_not_finite(optimizer: torch.optim.Optimizer) -> None:
    """Clear the optimizer's state of each parameter for which it holds inf or nan."""
    for state in optimizer.state.values():
        values = [local(v) for v in state.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
        if not all(bool(v.isfinite().all()) for v in values):
            state.clear()


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(modules: Iterable[FSDPModule]) -> None:
    """Make FSDP2 drop gathered parameters: it keeps the root's after a forward without a backward, and would use them
    although the shards have changed."""
    for module in modules:
        module.reshard()


def unwrap(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """The model inside torch.compile and DDP, so that its names do not depend on them; of several parts, one module
    that holds them."""
    if not isinstance(model, nn.Module):
        return Parts(unwrap(part) for part in model)
    inside: nn.Module = model
    while True:
        if hasattr(inside, "_orig_mod"):
            inside = inside._orig_mod  # pyright: ignore[reportAssignmentType]
        elif isinstance(inside, DistributedDataParallel):
            inside = inside.module
        else:
            return inside


def _clean(name: str) -> str:
    """The name without what torch.compile and activation checkpointing put into it."""
    return re.sub(r"(_orig_mod\.|_checkpoint_wrapped_module\.)", "", name)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name, tied ones once."""
    found = {_clean(name): p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in found.items():
        if isinstance(p, nn.parameter.UninitializedParameter) or p.is_meta:
            raise ConfigError(f"parameter {name} has no values yet (meta or lazy): materialise the model first")
        if not p.is_floating_point() or p.dtype.itemsize < 2:
            raise ConfigError(
                f"parameter {name} is {p.dtype}: only real floating-point parameters of 16 bits or more can be averaged"
            )
    if not found:
        raise ConfigError("no parameter of the model has requires_grad: set it on the ones to train")
    return found


def frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not trained. They are never synced, so all replicas must start with the same ones."""
    return {_clean(name): p for name, p in model.named_parameters() if not p.requires_grad}


def float_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The float buffers that are saved with the model."""
    fixed = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return {_clean(name): b for name, b in model.named_buffers() if name not in fixed and b.is_floating_point()}


def trained_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that training may change: float, saved with the model, and finite (unlike a mask of -inf)."""
    return {name: b for name, b in float_buffers(model).items() if bool(b.isfinite().all())}


def find_layers(model: nn.Module, names: Mapping[str, Tensor]) -> list[list[str]]:
    """The trained parameters of each layer: the children of the largest ModuleList or ModuleDict. The parts of a
    pipeline have each a piece of that list.

    If a Sequential holds more than twice as much, its children are the layers. (A Sequential that holds only a little
    more contains that list.)
    """
    lists = _largest(model, names, (nn.ModuleList, nn.ModuleDict))
    chain = _largest(model, names, (nn.Sequential,))
    return chain if _values(chain, names) > 2 * _values(lists, names) else lists


def _largest(model: nn.Module, names: Mapping[str, Tensor], kinds: tuple[type, ...]) -> list[list[str]]:
    """The parameters of each child of the largest module of these kinds with at least two trained children."""
    below: dict[str, list[str]] = {}  # by the path of a module
    for name in names:
        path = name
        while "." in path:
            path = path.rpartition(".")[0]
            below.setdefault(path, []).append(name)
    found: dict[str, list[list[str]]] = {}  # by the path of the list, which is the same in all parts
    for prefix, module in model.named_modules():
        if isinstance(module, kinds):
            children = [_clean(f"{prefix}.{child}.".lstrip("."))[:-1] for child, _ in module.named_children()]
            place = prefix.partition(".")[2] if isinstance(model, Parts) else prefix
            found.setdefault(place, []).extend(below[child] for child in children if child in below)
    lists = [layers for layers in found.values() if len(layers) > 1]
    return max(lists, key=lambda layers: _values(layers, names), default=[])


def _values(layers: Sequence[Sequence[str]], names: Mapping[str, Tensor]) -> int:
    return sum(names[name].numel() for layer in layers for name in layer)


class Parts(nn.Module):
    """Modules that together are one model, as the stages that a rank of a pipeline holds."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        for i, part in enumerate(parts):
            self.add_module(str(i), part)
