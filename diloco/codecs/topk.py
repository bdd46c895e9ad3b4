"""The largest values of each chunk and their places: how a delta is sent in less than a quarter of a bit a value.

Of 4,096 values the 64 with the largest magnitude are sent, each with a place of 12 bits, a sign, and one of two
magnitudes of the chunk: the means of the larger and of the smaller ones. The rest is zero, and stays in
the replica's weights, so that the next delta contains it again.
"""

import numpy as np

from diloco.codecs.formats import PLACES, kept, sparse_nbytes
from diloco.codecs.levels import (
    LARGEST,
    SMALLEST,
    Array,
    folded,
    from_bfloat16,
    pack_codes,
    to_bfloat16,
    unpack_codes,
)

STEPS = 2


def encode(x: Array) -> Array:
    """For each chunk: both magnitudes as bfloat16, then places, then codes: magnitude, sign above."""
    whole = len(x) // PLACES * PLACES
    rows = [_encode_rows(x[:whole].reshape(-1, PLACES))] if whole else []
    if whole < len(x):
        rows.append(_encode_rows(x[whole:].reshape(1, -1)))
    return np.concatenate([row.reshape(-1) for row in rows]) if rows else np.zeros(0, np.uint8)


def decode(payload: Array, n: int) -> Array:
    out, whole, size = np.zeros((-(-n // PLACES), PLACES), np.float32), n // PLACES, sparse_nbytes(PLACES)
    if whole:
        _decode_rows(payload[: whole * size].reshape(whole, size), kept(PLACES), out[:whole])
    if rest := n - whole * PLACES:
        _decode_rows(payload[whole * size :].reshape(1, -1), kept(rest), out[whole:])
    return out.reshape(-1)[:n]


def _encode_rows(x: Array) -> Array:
    count, width = x.shape
    k = kept(width)
    words = np.ascontiguousarray(x).view(np.uint32)
    # The first ones of equal magnitudes are taken: a lower place makes a larger key, and all keys differ.
    keys = (words & 0x7FFFFFFF).astype(np.int64) << 12 | (PLACES - 1 - np.arange(width))
    least = np.partition(keys, width - k, axis=1)[:, width - k, None]
    places = np.nonzero(keys >= least)[1].reshape(count, k)
    chosen = np.take_along_axis(words, places, 1)
    values = np.minimum(chosen & 0x7FFFFFFF, LARGEST.view(np.uint32)).view(np.float32)
    magnitudes = to_bfloat16(_two_means(values))
    low, high = (from_bfloat16(each) for each in np.split(magnitudes, 2, axis=1))
    code = (values >= (low + high) / np.float32(2)).astype(np.uint8) | (chosen >> 31 << 1).astype(np.uint8)
    # Either all rows are full, and their codes fill bytes exactly, or there is one row.
    codes = pack_codes(code.reshape(-1)).reshape(count, -1)
    return np.concatenate([magnitudes.view(np.uint8), _pack_places(places), codes], axis=1)


def _two_means(values: Array) -> Array:
    """The means of the smaller and of the larger magnitudes in each row, (rows, 2): Lloyd's steps from the mean on."""
    k = values.shape[1]
    padded = np.zeros((len(values), kept(PLACES)), np.float32)
    padded[:, :k] = values
    border = folded(padded) / np.float32(k)
    there = np.arange(padded.shape[1]) < k
    means = np.zeros((len(values), 2), np.float32)
    for _ in range(1 + STEPS):
        for side, mask in enumerate(((padded < border) & there, (padded >= border) & there)):
            size = np.maximum(mask.sum(1, dtype=np.float32, keepdims=True), np.float32(1))
            means[:, side : side + 1] = folded(np.where(mask, padded, np.float32(0))) / size
        border = (means[:, :1] + means[:, 1:]) / np.float32(2)
    return np.where(means < SMALLEST, np.float32(0), means)


def _decode_rows(data: Array, k: int, out: Array) -> None:
    heads, packed, codes = np.split(data, [4, data.shape[1] - -(-k // 4)], axis=1)
    magnitudes = from_bfloat16(np.ascontiguousarray(heads).view(np.uint16))
    places = _unpack_places(packed, k)
    code = unpack_codes(codes.reshape(-1), k * len(data)).reshape(-1, k).astype(np.intp)
    signed = np.concatenate([magnitudes, -magnitudes], axis=1)
    # If a place is given twice, which no encoder does, the last value counts.
    np.put_along_axis(out, places, np.take_along_axis(signed, code, 1), 1)


def _pack_places(places: Array) -> Array:
    """Two places in three bytes, the first in the lowest bits."""
    count, k = places.shape
    pairs = np.zeros((count, -(-k // 2), 2), np.uint32)
    pairs.reshape(count, -1)[:, :k] = places
    words = pairs[:, :, 0] | pairs[:, :, 1] << 12
    return words.view(np.uint8).reshape(count, -1, 4)[:, :, :3].reshape(count, -1)[:, : -(-3 * k // 2)]


def _unpack_places(packed: Array, k: int) -> Array:
    count = len(packed)
    padded = np.zeros((count, -(-k // 2) * 3), np.uint8)
    padded[:, : packed.shape[1]] = packed
    words = np.zeros((count, -(-k // 2), 4), np.uint8)
    words[:, :, :3] = padded.reshape(count, -1, 3)
    pair = words.view(np.uint32)
    return np.concatenate([pair & 0xFFF, pair >> 12], axis=2).reshape(count, -1)[:, :k].astype(np.intp)
