"""E3M0 and bfloat16 on an accelerator: encode, mean and outer step, with the bits of kernels.c. Means may be fp32.

Plain torch operations, one kernel each: every multiply and add is rounded separately, as on the host. Nothing uses
fp64, which some accelerators lack, and nothing waits for the device. What the host needs to know, whether all values
are finite and the sums of a fingerprint, stays on the device and is copied along with the payload.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from diloco.codecs.codec import CHUNK, E3M0, E3M0_PAIRS, BFloat16, Codec, Float32
from diloco.codecs.formats import BLOCK, blocks
from diloco.codecs.kernels import Rule

PASS = 128 * CHUNK
"""Values at once: enough to keep a device busy. Intermediate results take up to 18 bytes for each."""
LARGEST = 0x7F80
"""The exponent of inf and nan, in the upper half of a float."""


def supports(codec: Codec) -> bool:
    return type(codec) in (E3M0, BFloat16)


def decodes(codec: Codec) -> bool:
    return type(codec) in (E3M0, BFloat16, Float32)


def prepare(device: torch.device) -> None:
    """Copy what decoding needs, on the current stream: before another stream decodes."""
    _pairs(device)


def encode(codec: Codec, x: Tensor, payload: Tensor) -> Tensor:
    """Fill the payload with what `pack` gives for x. Returns whether all values are finite."""
    most = torch.zeros((), dtype=torch.int16, device=x.device)
    for start, chunks, size in _runs(len(x)):
        values, data = x[start : start + chunks * size], _bytes(codec, payload, start, chunks, size)
        upper = values.view(torch.int16)[1::2]
        most = torch.maximum(most, (upper & LARGEST).amax())
        if type(codec) is BFloat16:
            data.view(torch.bfloat16).view(-1).copy_(values)
        else:
            _encode_e3m0(upper, data, size)
    return most < LARGEST


def advance(
    codec: Codec,
    payloads: Sequence[Tensor],
    factors: Sequence[float],
    rule: Rule,
    old: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
) -> None:
    """new ← what the rule makes of old, (anchor, velocity), and the mean."""
    for start, chunks, size in _runs(len(old[0])):
        part = slice(start, start + chunks * size)
        delta = _mean(codec, payloads, factors, start, chunks, size)
        if rule.momentum is not None:
            velocity = torch.mul(old[1][part], rule.decay, out=new[1][part]).add_(delta)
            delta = (velocity * rule.momentum).add_(delta)
        torch.sub(old[0][part], delta.mul_(rule.lr), out=new[0][part])


def words(x: Tensor) -> Tensor:
    """The sum of the 64-bit words of x, as in `reducer.words`; to be read modulo 2^64."""
    even = len(x) // 2 * 2
    odd = x[even:].view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return x[:even].view(torch.int64).sum() + odd.sum()


def _runs(n: int) -> Iterator[tuple[int, int, int]]:
    """First value, number of chunks, values of a chunk: whole chunks, at most PASS values at once, then the rest."""
    whole = n // CHUNK * CHUNK
    for start in range(0, whole, PASS):
        yield start, min(PASS, whole - start) // CHUNK, CHUNK
    if n > whole:
        yield whole, 1, n - whole


def _bytes(codec: Codec, payload: Tensor, start: int, chunks: int, size: int) -> Tensor:
    """What these chunks take of a payload, a row for each."""
    first, each = codec.nbytes(start) if start else 0, codec.nbytes(size)
    return payload[first : first + chunks * each].view(chunks, each)


def _padded(x: Tensor, multiple: int) -> Tensor:
    """With zeros at the end."""
    missing = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _encode_e3m0(upper: Tensor, data: Tensor, size: int) -> None:
    """As `E3M0.encode`, which explains it, for many chunks."""
    heads = blocks(size)
    rows = _padded(upper, BLOCK).view(-1, BLOCK) + 0x40
    code = (rows >> 7).to(torch.uint8).clamp_max_(254)
    scale = code.amax(1, keepdim=True)
    scale.masked_fill_(scale < 8, 0)
    zero = scale.clamp_min(7) - 7
    code = torch.maximum(code, zero).sub_(zero)
    code |= (rows >> 12 & 8).to(torch.uint8)
    pairs = code.view(torch.int16)
    pairs |= pairs >> 4
    data[:, :heads] = scale.view(-1, heads)
    data[:, heads:] = pairs.view(len(data), -1)[:, : -(-size // 2)]


def _mean(
    codec: Codec, payloads: Sequence[Tensor], factors: Sequence[float], start: int, chunks: int, size: int
) -> Tensor:
    total = None
    for payload, factor in zip(payloads, factors, strict=True):
        term = _decode(codec, _bytes(codec, payload, start, chunks, size), size).mul_(factor)
        total = term if total is None else total.add_(term)
    assert total is not None
    return total


def _decode(codec: Codec, data: Tensor, size: int) -> Tensor:
    """The values of chunks, in new memory."""
    if type(codec) is Float32:
        return data.clone().view(torch.float32).view(-1)
    if type(codec) is BFloat16:
        return data.view(torch.bfloat16).to(torch.float32).view(-1)
    heads = blocks(size)
    scale = (data[:, :heads].to(torch.int32) << 23).view(torch.float32)
    codes = _padded(data[:, heads:], BLOCK // 2).to(torch.int32)
    values = torch.index_select(_pairs(data.device), 0, codes.view(-1)).view(torch.float32)
    return values.view(-1, BLOCK).mul_(scale.view(-1, 1)).view(-1)[: len(data) * size]


@cache
def _pairs(device: torch.device) -> Tensor:
    return E3M0_PAIRS.to(device, non_blocking=True)
