"""Which layers, and which rows of what is no layer, form a fragment. No torch: the planner uses these too."""

from collections.abc import Sequence
from itertools import accumulate

from diloco.errors import ConfigError

Rows = tuple[int, int, int]
"""(tensor, start, stop): rows start..stop of the tensor with that position."""


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


def parse(text: str) -> tuple[str, int]:
    """How fragments are named in flags and recipes.

    >>> parse("strided:3")
    ('strided', 3)
    """
    kind, _, count = text.partition(":")
    if kind not in ("strided", "sequential", "balanced") or not count.isdigit() or int(count) < 1:
        raise ConfigError(f"fragments={text!r}: give strided:N, sequential:N or balanced:N with N of at least 1")
    return kind, int(count)


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
