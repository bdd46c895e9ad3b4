"""A delta that an accelerator has encoded, and what the host must know of it: the payloads, filled up to whole words,
then the sums over the words of the delta, of the anchor and of the momentum, and whether the delta is finite."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from diloco.codecs import device as on_device
from diloco.codecs.codec import Codec
from diloco.exchange.mean import Packed, cuts
from diloco.exchange.reducer import fingerprint

TRAILER = 32
"""Bytes behind the payloads."""


def _places(codec: Codec, n: int, replicas: int) -> list[slice]:
    """The bytes of each payload."""
    sizes = [codec.nbytes(cut.stop - cut.start) if cut.stop > cut.start else 0 for cut in cuts(n, replicas)]
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def room(codec: Codec, n: int, replicas: int) -> int:
    """Memory for an encoded delta, in fp32 values."""
    return 2 * -(-_places(codec, n, replicas)[-1].stop // 8) + TRAILER // 4


def encode(codec: Codec, delta: Tensor, replicas: int, out: Tensor, state: Sequence[Tensor]) -> None:
    """Fill `out` on the device. `state`: anchor and momentum, if they are on the device too."""
    data, n = out.view(torch.uint8), len(delta)
    finite = [
        on_device.encode(codec, delta[cut], data[place])
        for cut, place in zip(cuts(n, replicas), _places(codec, n, replicas), strict=True)
    ]
    sums = [on_device.words(values) for values in (delta, *state)]
    sums += [torch.zeros_like(sums[0])] * (3 - len(sums))
    data[-TRAILER:].view(torch.int64).copy_(torch.stack([*sums, torch.stack(finite).all().to(torch.int64)]))


def packed(memory: Tensor, codec: Codec, n: int, replicas: int) -> Packed:
    """What `encode` has filled."""
    data = memory.view(torch.uint8)
    words, _, _, finite = data[-TRAILER:].view(torch.int64).tolist()
    payloads = [data[place] for place in _places(codec, n, replicas)]
    return Packed(payloads, n, bool(finite), words % (1 << 64))


def state_fingerprint(memory: Tensor) -> int:
    """Of the state that the delta is against, if it was on the device."""
    _, anchor, momentum, _ = memory.view(torch.uint8)[-TRAILER:].view(torch.int64).tolist()
    return fingerprint(anchor % (1 << 64), momentum % (1 << 64))
