"""A few levels for each block of values: how numbers are sent in 2 bits, one of them the sign.

A block has a scale and one of two tables of magnitudes: those with the least square error on Gaussian values (Lloyd and
Max), or on Laplace values if the block has long tails. Real deltas lie between the two. The scale is the one with the
least square error for the levels that the values have, found in two steps from the mean magnitude.

Sums are taken in halves, in fp32: the kernels do the same and get the same bytes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.codecs.formats import BLOCK, blocks

Array = NDArray[Any]

MAGNITUDES = np.array([[0.5675, 1.8930], [0.5936, 2.5936]], np.float32)
"""For Gaussian and for Laplace values with mean magnitude 1."""
BORDERS = (MAGNITUDES[:, :1] + MAGNITUDES[:, 1:]) / np.float32(2)
TAILS = np.float32(1.75)
"""The mean square of values with mean magnitude 1 is π/2 if they are Gaussian, 2 if Laplace."""
SMALLEST, LARGEST = np.float32(2.0**-100), np.float32(2.0**110)
"""A block with a smaller mean magnitude is sent as zeros; a larger value counts as this. In between nothing overflows,
and nothing is denormal, which some processors flush to zero."""
STEPS = 2


def encode(x: Array) -> Array:
    """The scale of each block as bfloat16 (its sign bit says which table), then all codes: magnitude, sign above."""
    n, count = len(x), blocks(len(x))
    rows = np.zeros((count, BLOCK), np.float32)
    rows.reshape(-1)[:n] = x
    words = rows.view(np.uint32)
    values = np.minimum(words & 0x7FFFFFFF, LARGEST.view(np.uint32)).view(np.float32)
    sizes = np.full((count, 1), BLOCK, np.float32)
    sizes[-1:] = n - (count - 1) * BLOCK
    mean = _folded(values) / sizes
    units = values / np.maximum(mean, SMALLEST)
    table = (_folded(units * units) / sizes > TAILS).astype(np.uint8)
    levels, border = MAGNITUDES[table[:, 0]], BORDERS[table[:, 0]]
    scale = np.ones((count, 1), np.float32)
    for _ in range(STEPS):
        level = np.take_along_axis(levels, (units >= border * scale).astype(np.intp), 1)
        level.reshape(-1)[n:] = 0
        scale = _folded(units * level) / _folded(level * level)
    upper = _to_bfloat16(np.where(mean < SMALLEST, np.float32(0), scale * np.maximum(mean, SMALLEST)))
    code = (values >= border * _from_bfloat16(upper)).astype(np.uint8)
    code |= (words >> 31 << 1).astype(np.uint8)
    heads = (upper | table.astype(np.uint16) << 15).view(np.uint8).reshape(-1)
    return np.concatenate([heads, _pack_codes(code.reshape(-1)[:n])])


def decode(payload: Array, n: int) -> Array:
    count = blocks(n)
    heads = payload[: 2 * count].copy().view(np.uint16)[:, None]
    scale, table = _from_bfloat16(heads & 0x7FFF), (heads >> 15).astype(np.intp)
    code = np.zeros(count * BLOCK, np.intp)
    code[:n] = _unpack_codes(payload[2 * count :], n)
    signed = np.concatenate([MAGNITUDES, -MAGNITUDES], axis=1).reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):  # malformed payloads may overflow; callers check the result
        return (signed[code.reshape(count, BLOCK) + (table << 2)] * scale).reshape(-1)[:n]


def _folded(rows: Array) -> Array:
    """The sum of each row: the second half is added to the first, and so on."""
    while (half := rows.shape[1] // 2) > 0:
        rows = rows[:, :half] + rows[:, half:]
    return rows


def _to_bfloat16(x: Array) -> Array:
    """The nearest, of two the even one."""
    words = x.view(np.uint32)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)


def _from_bfloat16(upper: Array) -> Array:
    return (upper.astype(np.uint32) << 16).view(np.float32)


def _pack_codes(code: Array) -> Array:
    """4 codes of 2 bits in a byte, the first in the lowest bits; what is missing at the end is zero."""
    four = np.zeros((-(-len(code) // 4), 4), np.uint8)
    four.reshape(-1)[: len(code)] = code
    return np.bitwise_or.reduce(four << np.arange(0, 8, 2, dtype=np.uint8), axis=1)


def _unpack_codes(packed: Array, n: int) -> Array:
    return (packed[:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1)[:n]
