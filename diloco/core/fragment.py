"""Cut a model's parameters into fragments: the pieces that are synced in turn (paper, section 2.2).

A fragment is a list of pieces (parameter name, first row, last row), with rows counted in the
unsharded parameter, so that it means the same however a replica shards its parameters. No torch: the planner cuts with
the same code.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from diloco.errors import ConfigError

WITHOUT_LAYERS = 4
"""Fragments of a model in which no list of layers is found: a quarter of the peak, few enough to stay large."""
MOST_REST = 4
"""Fragments of what is in no layer, for each fragment of layers."""
Rows = tuple[int, int, int]
"""(tensor, start, stop): rows start..stop of the tensor with that position."""


@dataclass(frozen=True)
class Piece:
    """Rows start..stop of a parameter. A scalar has one row."""

    name: str
    start: int
    stop: int


Fragment = tuple[Piece, ...]
Shapes = Mapping[str, tuple[int, ...]]
"""The unsharded shape of each parameter, in the model's order."""


class Fragmenter(Protocol):
    def split(self, shapes: Shapes, layers: Sequence[Sequence[str]]) -> list[Fragment]:
        """Put every row of every parameter into exactly one fragment. `layers`: the parameter names of each layer."""
        ...


@dataclass(frozen=True)
class _Layered:
    layers: int = 3

    def __post_init__(self) -> None:
        _check_positive("layers", self.layers)


class Strided(_Layered):
    """Interleaved layers, `layers` to a fragment: the paper's default. Other parameters get fragments of their own."""

    def split(self, shapes: Shapes, layers: Sequence[Sequence[str]]) -> list[Fragment]:
        return _by_layer(shapes, layers, strided(len(layers), self.layers))


class Sequential(_Layered):
    """Consecutive layers, `layers` to a fragment. Other parameters get fragments of their own."""

    def split(self, shapes: Shapes, layers: Sequence[Sequence[str]]) -> list[Fragment]:
        return _by_layer(shapes, layers, sequential(len(layers), self.layers))


@dataclass(frozen=True)
class Balanced:
    """`fragments` of nearly equal size, cut from all parameters in the model's order without regard to layers."""

    fragments: int

    def __post_init__(self) -> None:
        _check_positive("fragments", self.fragments)

    def split(self, shapes: Shapes, layers: Sequence[Sequence[str]]) -> list[Fragment]:
        names = list(shapes)
        return _pieces(names, cut([_rows(shapes[n]) for n in names], self.fragments))


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}={value}: give a whole number of at least 1")


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def _pieces(names: Sequence[str], cuts: Sequence[Sequence[Rows]]) -> list[Fragment]:
    return [tuple(Piece(names[i], start, stop) for i, start, stop in cut) for cut in cuts]


def _by_layer(shapes: Shapes, layers: Sequence[Sequence[str]], rule: list[list[int]]) -> list[Fragment]:
    if not layers:
        return Balanced(WITHOUT_LAYERS).split(shapes, layers)
    return _with_rest(shapes, [[name for layer in fragment for name in layers[layer]] for fragment in rule])


def _with_rest(shapes: Shapes, groups: Sequence[Sequence[str]]) -> list[Fragment]:
    """The groups, then what is in none of them, cut so that no piece is larger than the largest group.

    At 35M parameters the embedding is 46 % of the model: without a cut it would determine the bandwidth. Beside
    adapters it would be cut into thousands, so there are at most MOST_REST pieces for each group.
    """
    grouped = {name for group in groups for name in group}
    rest = [name for name in shapes if name not in grouped]
    largest = max(sum(math.prod(shapes[name]) for name in group) for group in groups)
    limit = max(largest, -(-sum(math.prod(shapes[name]) for name in rest) // (MOST_REST * len(groups))))
    grouped_pieces = [tuple(Piece(name, 0, _rows(shapes[name])[0]) for name in group) for group in groups]
    return grouped_pieces + _pieces(rest, cut_below([_rows(shapes[name]) for name in rest], limit))


def strided(layers: int, per_fragment: int) -> list[list[int]]:
    """Interleaved layers, the paper's default (section 2.2): fragment p holds p, p + P, p + 2P, …

    >>> strided(6, 3)
    [[0, 2, 4], [1, 3, 5]]
    """
    count = -(-layers // per_fragment)
    return [list(range(p, layers, count)) for p in range(count)]


def sequential(layers: int, per_fragment: int) -> list[list[int]]:
    """Consecutive layers.

    >>> sequential(6, 3)
    [[0, 1, 2], [3, 4, 5]]
    """
    return [list(range(i, min(i + per_fragment, layers))) for i in range(0, layers, per_fragment)]


def fragmenter(text: str) -> Fragmenter:
    """The fragmenter that a flag or a config names.

    >>> fragmenter("strided:3")
    Strided(layers=3)
    """
    kind, _, number = text.partition(":")
    if kind not in _BY_NUMBER or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"fragments={text!r}: give strided:N, sequential:N or balanced:N with N of at least 1")
    return _BY_NUMBER[kind](int(number))


_BY_NUMBER = {"strided": Strided, "sequential": Sequential, "balanced": Balanced}


def cut(tensors: Sequence[tuple[int, int]], pieces: int) -> list[list[Rows]]:
    """Cut tensors, given as (rows, values a row), in their order into at most `pieces` of nearly equal size.

    A piece ends before the first row that begins at or behind its share of the total. No piece is empty.

    >>> cut([(4, 10), (4, 10)], 2)
    [[(0, 0, 4)], [(1, 0, 4)]]
    """
    total = sum(rows * width for rows, width in tensors)
    begins = [0, *accumulate(rows * width for rows, width in tensors)]

    def row_at(tensor: int, value: int) -> int:
        rows, width = tensors[tensor]
        return min(max(-(-(value - begins[tensor]) // width), 0), rows) if width else rows

    out = []
    for p in range(pieces):
        first, last = -(-p * total // pieces), -(-(p + 1) * total // pieces)
        spans = [(i, row_at(i, first), row_at(i, last)) for i in range(len(tensors))]
        out.append([(i, a, b) for i, a, b in spans if a < b])
    return [piece for piece in out if piece]


def cut_below(tensors: Sequence[tuple[int, int]], limit: int) -> list[list[Rows]]:
    """Cut tensors into few, nearly equal pieces of at most `limit` values (or one row, if that is more)."""
    limit = max(limit, *(width for _, width in tensors), 1) if tensors else 1
    pieces = -(-sum(rows * width for rows, width in tensors) // limit)
    while True:
        out = cut(tensors, pieces)
        if all(sum((b - a) * tensors[i][1] for i, a, b in piece) <= limit for piece in out):
            return out
        pieces += 1 + pieces // 20
