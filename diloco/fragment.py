"""Cut a model's parameters into fragments: the pieces that are synced in turn (paper, section 2.2).

A fragment is a list of pieces (parameter name, first row, last row), in the coordinates of the whole parameter, so
that it means the same however a replica shards its parameters.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Protocol

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diloco import layers as rules
from diloco.errors import ConfigError

WITHOUT_LAYERS = 4
"""Fragments of a model in which no list of layers is found: a quarter of the peak, few enough to stay large."""


@dataclass(frozen=True)
class Piece:
    """Rows start..stop of a parameter. A scalar has one row."""

    name: str
    start: int
    stop: int


Fragment = tuple[Piece, ...]
Shapes = Mapping[str, tuple[int, ...]]
"""The whole shape of each parameter, in the model's order."""


class Fragmenter(Protocol):
    def split(self, shapes: Shapes, layers: Sequence[Sequence[str]]) -> list[Fragment]:
        """Put every row of every parameter into exactly one fragment. `layers`: the parameter names of each layer."""
        ...


@dataclass(frozen=True)
class Strided:
    """Interleaved layers, `layers` to a fragment: the paper's default. What is no layer goes apart."""

    layers: int = 3

    def __post_init__(self) -> None:
        _check_positive("layers", self.layers)

    def split(self, shapes: Shapes, layers: Sequence[Sequence[str]]) -> list[Fragment]:
        return _by_layer(shapes, layers, rules.strided(len(layers), self.layers))


@dataclass(frozen=True)
class Sequential:
    """Consecutive layers, `layers` to a fragment. What is no layer goes apart."""

    layers: int = 3

    def __post_init__(self) -> None:
        _check_positive("layers", self.layers)

    def split(self, shapes: Shapes, layers: Sequence[Sequence[str]]) -> list[Fragment]:
        return _by_layer(shapes, layers, rules.sequential(len(layers), self.layers))


@dataclass(frozen=True)
class Balanced:
    """`fragments` of nearly equal size, cut from all parameters in the model's order, whatever the layers are."""

    fragments: int

    def __post_init__(self) -> None:
        _check_positive("fragments", self.fragments)

    def split(self, shapes: Shapes, layers: Sequence[Sequence[str]]) -> list[Fragment]:
        names = list(shapes)
        return _pieces(names, rules.cut([_rows(shapes[n]) for n in names], self.fragments))


@dataclass(frozen=True)
class Named:
    """One fragment for each group of name patterns (`layers.0.*`); what matches none goes apart."""

    groups: tuple[tuple[str, ...], ...]

    def split(self, shapes: Shapes, layers: Sequence[Sequence[str]]) -> list[Fragment]:
        chosen: list[list[str]] = [[] for _ in self.groups]
        for name in shapes:
            for group, patterns in zip(chosen, self.groups, strict=True):
                if any(fnmatch(name, pattern) for pattern in patterns):
                    group.append(name)
                    break
        for group, patterns in zip(chosen, self.groups, strict=True):
            if not group:
                raise ConfigError(f"no parameter matches {patterns}; there are {', '.join(list(shapes)[:8])}, …")
        return _with_rest(shapes, chosen)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and DDP, so that its names do not depend on them."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod  # pyright: ignore[reportAssignmentType]
        elif isinstance(model, DistributedDataParallel):
            model = model.module
        else:
            return model


def _clean(name: str) -> str:
    """A name without what compiled or checkpointed layers put into it."""
    return re.sub(r"(_orig_mod\.|_checkpoint_wrapped_module\.)", "", name)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name, tied ones once. Frozen ones are not: they never differ."""
    found = {_clean(name): p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in found.items():
        if isinstance(p, nn.parameter.UninitializedParameter) or p.is_meta:
            raise ConfigError(f"parameter {name} has no values yet (meta or lazy); materialise the model first")
        if not p.is_floating_point():
            raise ConfigError(f"parameter {name} is {p.dtype}; only real floating-point parameters can be averaged")
    if not found:
        raise ConfigError("the model has no parameter with requires_grad; freeze only what is not trained")
    return found


def frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not trained: replicas must start with the same, for they are never synced."""
    return {_clean(name): p for name, p in model.named_parameters() if not p.requires_grad}


def trained_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that training may change: float, saved with the model, finite (a mask of -inf is none of them)."""
    fixed = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    floats = {name: b for name, b in model.named_buffers() if name not in fixed and b.is_floating_point()}
    return {_clean(name): b for name, b in floats.items() if bool(b.isfinite().all())}


def find_layers(model: nn.Module, names: Mapping[str, Tensor]) -> list[list[str]]:
    """The trained parameters of each layer: the children of the largest ModuleList or ModuleDict.

    Unless a Sequential holds more than twice as much: then its children are the layers. (One that holds hardly more is
    what the list is in.)
    """
    lists = _largest(model, names, (nn.ModuleList, nn.ModuleDict))
    chain = _largest(model, names, (nn.Sequential,))
    return chain if _values(chain, names) > 2 * _values(lists, names) else lists


def _largest(model: nn.Module, names: Mapping[str, Tensor], kinds: tuple[type, ...]) -> list[list[str]]:
    """Of the modules of these kinds with at least two trained children, the parameters of the largest, by child."""
    best: list[list[str]] = []
    for prefix, module in model.named_modules():
        if isinstance(module, kinds):
            starts = [_clean(f"{prefix}.{child}.".lstrip(".")) for child, _ in module.named_children()]
            found = [[n for n in names if n.startswith(start)] for start in starts]
            layers = [layer for layer in found if layer]
            if len(layers) > 1 and _values(layers, names) > _values(best, names):
                best = layers
    return best


def _values(layers: Sequence[Sequence[str]], names: Mapping[str, Tensor]) -> int:
    return sum(names[name].numel() for layer in layers for name in layer)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}={value}: give a whole number of at least 1")


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def _pieces(names: Sequence[str], cuts: Sequence[Sequence[rules.Rows]]) -> list[Fragment]:
    return [tuple(Piece(names[i], start, stop) for i, start, stop in cut) for cut in cuts]


def _by_layer(shapes: Shapes, layers: Sequence[Sequence[str]], rule: list[list[int]]) -> list[Fragment]:
    if not layers:
        return Balanced(WITHOUT_LAYERS).split(shapes, layers)
    return _with_rest(shapes, [[name for layer in fragment for name in layers[layer]] for fragment in rule])


def _with_rest(shapes: Shapes, groups: Sequence[Sequence[str]]) -> list[Fragment]:
    """The groups, then what is in none of them, cut so that no piece is larger than the largest group.

    At 35M parameters the embedding is 46 % of the model: uncut it alone would set the bandwidth.
    """
    rest = [name for name in shapes if not any(name in group for group in groups)]
    limit = max(sum(math.prod(shapes[name]) for name in group) for group in groups)
    whole = [tuple(Piece(name, 0, _rows(shapes[name])[0]) for name in group) for group in groups]
    return whole + _pieces(rest, rules.cut_below([_rows(shapes[name]) for name in rest], limit))
