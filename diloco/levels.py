"""A few levels for each block of values: how numbers are sent in 2 or 3 bits, one of them the sign.

A block has a scale and one of two tables of magnitudes: those with the least square error on Gaussian values (Lloyd and
Max), or on Laplace values if the block has long tails. Real deltas lie between the two. The scale is the one with the
least square error for the levels that the values have, found in two steps from the mean magnitude.

Sums are taken in halves, in fp32: the kernels do the same and get the same bytes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.formats import BLOCK, blocks

Array = NDArray[Any]

MAGNITUDES: dict[int, Array] = {
    2: np.array([[0.5675, 1.8930], [0.5936, 2.5936]], np.float32),
    3: np.array([[0.3072, 0.9475, 1.6843, 2.6970], [0.3301, 1.1780, 2.3653, 4.3653]], np.float32),
}
"""By bits: for Gaussian and for Laplace values with mean magnitude 1."""
TAILS = np.float32(1.75)
"""The mean square of values with mean magnitude 1 is π/2 if they are Gaussian, 2 if Laplace."""
SMALLEST, LARGEST = np.float32(2.0**-100), np.float32(2.0**110)
"""A block with a smaller mean magnitude is sent as zeros; a larger value counts as this. In between nothing overflows,
and nothing is denormal, which some processors flush to zero."""
STEPS = 2


def encode(x: Array, bits: int) -> Array:
    """The scale of each block as bfloat16 (its sign bit says which table), then all codes: magnitude, sign above."""
    n, count = len(x), blocks(len(x))
    rows = np.zeros((count, BLOCK), np.float32)
    rows.reshape(-1)[:n] = x
    words = rows.view(np.uint32)
    values = np.minimum(words & 0x7FFFFFFF, LARGEST.view(np.uint32)).view(np.float32)
    sizes = np.full((count, 1), BLOCK, np.float32)
    sizes[-1:] = n - (count - 1) * BLOCK
    mean = folded(values) / sizes
    units = values / np.maximum(mean, SMALLEST)
    table = (folded(units * units) / sizes > TAILS).astype(np.uint8)
    levels, borders = MAGNITUDES[bits][table[:, 0]], _borders(bits)[table[:, 0]]
    scale = np.ones((count, 1), np.float32)
    for _ in range(STEPS):
        level = np.take_along_axis(levels, _places(units, borders * scale), 1)
        level.reshape(-1)[n:] = 0
        scale = folded(units * level) / folded(level * level)
    upper = to_bfloat16(np.where(mean < SMALLEST, np.float32(0), scale * np.maximum(mean, SMALLEST)))
    code = _places(values, borders * from_bfloat16(upper)).astype(np.uint8)
    code |= (words >> 31 << (bits - 1)).astype(np.uint8)
    heads = (upper | table.astype(np.uint16) << 15).view(np.uint8).reshape(-1)
    return np.concatenate([heads, pack_codes(code.reshape(-1)[:n], bits)])


def decode(payload: Array, n: int, bits: int) -> Array:
    count = blocks(n)
    heads = payload[: 2 * count].copy().view(np.uint16)[:, None]
    scale, table = from_bfloat16(heads & 0x7FFF), (heads >> 15).astype(np.intp)
    code = np.zeros(count * BLOCK, np.intp)
    code[:n] = unpack_codes(payload[2 * count :], n, bits)
    signed = np.concatenate([MAGNITUDES[bits], -MAGNITUDES[bits]], axis=1).reshape(-1)
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # of what no encoder has made; whoever reads it checks the result
        return (signed[code.reshape(count, BLOCK) + (table << bits)] * scale).reshape(-1)[:n]


def folded(rows: Array) -> Array:
    """The sum of each row: the second half is added to the first, and so on."""
    while (half := rows.shape[1] // 2) > 0:
        rows = rows[:, :half] + rows[:, half:]
    return rows


def to_bfloat16(x: Array) -> Array:
    """The nearest, of two the even one."""
    words = x.view(np.uint32)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(upper: Array) -> Array:
    return (upper.astype(np.uint32) << 16).view(np.float32)


def pack_codes(code: Array, bits: int) -> Array:
    """8 codes in `bits` bytes, the first in the lowest bits; what is missing at the end is zero."""
    eight = np.zeros((-(-len(code) // 8), 8), np.uint32)
    eight.reshape(-1)[: len(code)] = code
    words = np.bitwise_or.reduce(eight << (bits * np.arange(8, dtype=np.uint32)), axis=1)
    return words.view(np.uint8).reshape(-1, 4)[:, :bits].reshape(-1)[: -(-len(code) * bits // 8)]


def unpack_codes(packed: Array, n: int, bits: int) -> Array:
    padded = np.zeros((-(-n // 8), bits), np.uint8)
    padded.reshape(-1)[: len(packed)] = packed
    words = np.zeros((len(padded), 4), np.uint8)
    words[:, :bits] = padded
    code = words.view(np.uint32) >> (bits * np.arange(8, dtype=np.uint32)) & ((1 << bits) - 1)
    return code.reshape(-1)[:n]


def _places(values: Array, borders: Array) -> Array:
    """How many of its row's borders each value has reached."""
    place = np.zeros(values.shape, np.intp)
    for border in borders.T:
        place += values >= border[:, None]
    return place


def _borders(bits: int) -> Array:
    levels = MAGNITUDES[bits]
    return (levels[:, 1:] + levels[:, :-1]) / np.float32(2)
