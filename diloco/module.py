"""Look into an nn.Module: trained and frozen parameters, buffers, layers, by names that wrappers do not change."""

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diloco.errors import ConfigError


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
