"""The weighted mean of encoded deltas: summed in fp32, in the order of the replicas, so that all get equal bits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.codecs.codec import CHUNK, BFloat16, Codec, Float32, is_coarse, pack, unpack, weighted
from diloco.codecs.formats import gathers

PIECES, PIECE = 16, 4 * CHUNK
"""A payload travels in at most this many pieces, of at least this many values: 256 kB in E3M0. The first one leaves
when one sixteenth of the delta is encoded, and a round ends one sixteenth of the decoding after the last has come."""


@dataclass(frozen=True)
class Encoded:
    """Values from `at` on of a mean, still encoded: the sum of factor · decoded payload."""

    at: int
    n: int
    codec: Codec
    payloads: Sequence[Tensor]
    factors: Sequence[float]

    def values(self) -> Tensor:
        return weighted(self.codec, self.payloads, self.factors, self.n)


@dataclass(frozen=True)
class Packed:
    """A delta that an accelerator has encoded, in parts as `cuts` says."""

    payloads: Sequence[Tensor]
    n: int
    finite: bool
    words: int  # as `reducer.words` of the delta


def exact(values: Tensor) -> tuple[Encoded, ...]:
    """A mean that is known as values."""
    return (Encoded(0, len(values), Float32(), [values.view(torch.uint8)], [1.0]),)


def decode(mean: Sequence[Encoded]) -> Tensor:
    """The values of a mean, given in one or more parts."""
    if len(mean) == 1:
        return mean[0].values()
    out = torch.empty(sum(part.n for part in mean), dtype=torch.float32, device="cpu")
    for part in mean:
        out[part.at : part.at + part.n] = part.values()
    return out


def shares(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1; equal ones if all are 0."""
    total = sum(weights)
    return [w / total for w in weights] if total else [1 / len(weights)] * len(weights)


def mean_lr(weights: Sequence[float], lrs: Sequence[float]) -> float:
    """Σ share · lr."""
    return sum(share * lr for share, lr in zip(shares(weights), lrs, strict=True))


def codec_of_mean(codec: Codec, given: Codec | None) -> Codec:
    """The codec of averaged shares. What it loses is in no replica's weights, so a coarse codec names a finer one."""
    return given or getattr(codec, "mean_codec", None) or codec


def codec_of_round(codec: Codec, *, last: bool) -> Codec:
    """What a coarse codec loses of the last deltas would be lost for good, so they are sent in bfloat16."""
    return BFloat16() if last and is_coarse(codec) else codec


def parts(n: int, replicas: int) -> list[slice]:
    """The share of a fragment that each replica averages; the last ones may be shorter, or empty."""
    size = -(-n // replicas)
    return [slice(min(i * size, n), min((i + 1) * size, n)) for i in range(replicas)]


def cuts(n: int, replicas: int) -> list[slice]:
    """How a delta is cut before it is encoded: one part for each replica, or no cut."""
    return [slice(0, n)] if gathers(replicas) else parts(n, replicas)


def room_for_cuts(codec: Codec, n: int, replicas: int) -> list[Tensor]:
    """Memory for the payloads of these parts of n values."""
    counts = [cut.stop - cut.start for cut in cuts(n, replicas)]
    return [torch.empty(codec.nbytes(count) if count else 0, dtype=torch.uint8, device="cpu") for count in counts]


def encode_cuts(codec: Codec, values: Tensor, replicas: int) -> list[Tensor]:
    return [pack(codec, values[cut]) for cut in cuts(len(values), replicas)]


def decode_cuts(codec: Codec, payloads: Sequence[Tensor], n: int, replicas: int) -> Tensor:
    out = torch.empty(n, dtype=torch.float32, device="cpu")
    for cut, payload in zip(cuts(n, replicas), payloads, strict=True):
        out[cut] = unpack(codec, payload, cut.stop - cut.start)
    return out


def pieces(codec: Codec, n: int, longest: int, streams: int) -> list[tuple[slice, slice]]:
    """(values, bytes) of the pieces in which a payload of n values travels, each of whole chunks, so that it can be
    decoded by itself: at least one for each stream, if there are enough chunks. `longest`: values of the longest
    payload that travels with it. All have equally many pieces; the last ones of shorter payloads are empty."""
    size = max(PIECE, -(-longest // (PIECES * CHUNK)) * CHUNK)
    if streams > 1:
        size = min(size, max(-(-longest // (streams * CHUNK)), 1) * CHUNK)
    ends = [min(k * size, n) for k in range(-(-longest // size) + 1)]
    marks = [codec.nbytes(end) if end else 0 for end in ends]
    return [(slice(*ends[k : k + 2]), slice(*marks[k : k + 2])) for k in range(len(ends) - 1)]


def mean_of_encoded(
    codec: Codec, mean_codec: Codec, encoded: Sequence[Sequence[Tensor]], weights: Sequence[float], n: int
) -> list[Encoded]:
    """What the replicas of a collective agree on, bit for bit, from the payloads of each."""
    replicas, factors = len(encoded), shares(weights)
    if gathers(replicas):
        return [Encoded(0, n, codec, [payloads[0] for payloads in encoded], factors)]
    averages = []
    for i, cut in enumerate(parts(n, replicas)):
        count = cut.stop - cut.start
        averaged = pack(mean_codec, weighted(codec, [payloads[i] for payloads in encoded], factors, count))
        averages.append(Encoded(cut.start, count, mean_codec, [averaged], [1.0]))
    return averages
