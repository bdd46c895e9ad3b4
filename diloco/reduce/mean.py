"""The weighted mean of encoded deltas: summed in fp32, in the order of the replicas, so that all get equal bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from diloco.codec import Codec, pack, unpack, weighted

GATHER = 3
"""Up to this many replicas, each gathers all deltas: one quantisation, one round trip; the fewest bytes at 2, and 1.5
times the fewest at 3. With more, each replica averages one share, and the shares are gathered."""


def shares(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1; equal ones if all are 0."""
    total = sum(weights)
    return [w / total for w in weights] if total else [1 / len(weights)] * len(weights)


def mean(codec: Codec, payloads: Sequence[Tensor], weights: Sequence[float], n: int) -> Tensor:
    """Σ share · decoded delta."""
    return weighted(codec, payloads, shares(weights), n)


def parts(n: int, replicas: int) -> list[slice]:
    """The share of a fragment that each replica averages; the last ones may be shorter, or empty."""
    size = -(-n // replicas)
    return [slice(min(i * size, n), min((i + 1) * size, n)) for i in range(replicas)]


def cuts(n: int, replicas: int) -> list[slice]:
    """How a delta is cut before it is encoded: one part for each replica, or no cut."""
    return parts(n, replicas) if replicas > GATHER else [slice(0, n)]


def encode_cuts(codec: Codec, values: Tensor, replicas: int) -> list[Tensor]:
    return [pack(codec, values[cut]) for cut in cuts(len(values), replicas)]


def decode_cuts(codec: Codec, payloads: Sequence[Tensor], n: int, replicas: int) -> Tensor:
    out = torch.empty(n, dtype=torch.float32, device="cpu")
    for cut, payload in zip(cuts(n, replicas), payloads, strict=True):
        out[cut] = unpack(codec, payload, cut.stop - cut.start)
    return out


def reference_mean(codec: Codec, mean_codec: Codec, deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """What the replicas of a collective agree on, bit for bit."""
    encoded = [encode_cuts(codec, delta, len(deltas)) for delta in deltas]
    return mean_of_encoded(codec, mean_codec, encoded, weights, len(deltas[0]))


def mean_of_encoded(
    codec: Codec, mean_codec: Codec, encoded: Sequence[Sequence[Tensor]], weights: Sequence[float], n: int
) -> Tensor:
    """The same, from the result of `encode_cuts` of each replica."""
    replicas = len(encoded)
    if replicas <= GATHER:
        return mean(codec, [payloads[0] for payloads in encoded], weights, n)
    averages = [
        pack(mean_codec, mean(codec, [payloads[i] for payloads in encoded], weights, cut.stop - cut.start))
        for i, cut in enumerate(cuts(n, replicas))
    ]
    return decode_cuts(mean_codec, averages, n, replicas)
