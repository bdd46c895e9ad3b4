"""Numbers on the wire: a codec turns flat fp32 values into bytes and back.

Codecs run on the host, where the deltas are. `pack` and `unpack` apply one in chunks that fit the cache, so a codec
that is written for short tensors is fast on long ones. Decoding gives the same bits on every CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from diloco.codecs import kernels, levels
from diloco.codecs.formats import BLOCK, FORMATS, blocks, format_named
from diloco.errors import ConfigError

CHUNK = kernels.CHUNK


class Codec(Protocol):
    def nbytes(self, n: int) -> int:
        """Exactly how many bytes n values take: what `encode` gives for each chunk of them, added up."""
        ...

    def encode(self, x: Tensor) -> Tensor:
        """Flat fp32 on the host, finite → flat uint8 of `nbytes(len(x))`."""
        ...

    def decode(self, payload: Tensor, n: int) -> Tensor:
        """What `encode` gave → n fp32 values."""
        ...


def pack(codec: Codec, x: Tensor) -> Tensor:
    """Encode chunk by chunk into one payload of `codec.nbytes(len(x))` bytes."""
    return pack_checked(codec, x)[0]


def pack_checked(codec: Codec, x: Tensor) -> tuple[Tensor, bool]:
    """The payload, and what `pack_into` says of it."""
    payload = torch.empty(codec.nbytes(len(x)), dtype=torch.uint8, device="cpu")
    return payload, pack_into(codec, x, payload)


def pack_into(codec: Codec, x: Tensor, payload: Tensor) -> bool:
    """Encode chunk by chunk. Returns whether all values are finite; if not, the payload means nothing."""
    if isinstance(codec, _Shipped) and kernels.encodes(codec.name):
        return kernels.encode(codec.name, x, payload)
    for values, data in chunks(codec, len(x)):
        payload[data] = codec.encode(x[values])
    return is_finite(x)


def is_finite(x: Tensor) -> bool:
    """A sum, at a quarter of the cost, is enough to know that all are finite; a sum of large values may overflow."""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def check_sizes(codec: Codec) -> None:
    """Refuse a codec whose sizes do not add up over chunks, before a fragment of more than one chunk is sent."""
    parts, together = codec.nbytes(CHUNK) + codec.nbytes(1), codec.nbytes(CHUNK + 1)
    if parts != together:
        raise ConfigError(
            f"codec={codec!r}: nbytes({CHUNK}) + nbytes(1) is {parts}, nbytes({CHUNK + 1}) is {together}. Values are "
            f"encoded in chunks of {CHUNK}: count what is sent once for each chunk in nbytes"
        )


def chunks(codec: Codec, n: int) -> list[tuple[slice, slice]]:
    """(values, bytes) of each chunk of a packed payload of n values."""
    out, position = [], 0
    for start in range(0, n, CHUNK):
        stop = min(start + CHUNK, n)
        size = codec.nbytes(stop - start)
        out.append((slice(start, stop), slice(position, position + size)))
        position += size
    return out


def unpack(codec: Codec, payload: Tensor, n: int) -> Tensor:
    """Decode what `pack` gave."""
    return weighted(codec, [payload], [1.0], n)


def weighted(codec: Codec, payloads: Sequence[Tensor], factors: Sequence[float], n: int) -> Tensor:
    """Σ factor · decoded payload, every multiply and add rounded by itself, in fp32."""
    out = torch.empty(n, dtype=torch.float32, device="cpu")
    if name := native_name(codec):
        kernels.mean(name, payloads, factors, out)
        return out
    for values, data in chunks(codec, n):
        total, count = out[values], values.stop - values.start
        for i, (payload, factor) in enumerate(zip(payloads, factors, strict=True)):
            term = codec.decode(payload[data], count)
            if i == 0:
                torch.mul(term, factor, out=total)
            else:
                total.add_(term.mul_(factor))
    return out


def native_name(codec: Codec) -> str | None:
    """The name of a codec that the kernels decode, if they are there."""
    return codec.name if isinstance(codec, _Shipped) and kernels.decodes(codec.name) else None


def name_of(codec: Codec) -> str:
    """The name of a codec with a row in `FORMATS`; "" for others."""
    return codec.name if isinstance(codec, _Shipped) else ""


def is_coarse(codec: Codec) -> bool:
    """Whether a codec says that it loses so much of a delta that the loss must stay in the replica's weights."""
    return getattr(codec, "coarse", False)


class _Shipped:
    """A codec with a row in `FORMATS`, where the planner counts its bytes too."""

    classes: ClassVar[dict[str, Any]] = {}
    name: ClassVar[str]

    def __init_subclass__(cls, name: str) -> None:
        cls.name = name
        cls.classes[name] = cls

    def nbytes(self, n: int) -> int:
        return FORMATS[self.name].nbytes(n)

    @property
    def coarse(self) -> bool:
        return FORMATS[self.name].coarse

    @property
    def mean_codec(self) -> "Codec | None":
        mean = FORMATS[self.name].mean
        return codec_named(mean) if mean else None


def codec_named(name: str) -> Codec:
    """The codec with this name in flags and recipes.

    >>> codec_named("e3m0")
    E3M0()
    """
    return _Shipped.classes[format_named(name).name]()


@dataclass(frozen=True)
class Float32(_Shipped, name="float32"):
    """Exact; 32 bits a value."""

    def encode(self, x: Tensor) -> Tensor:
        return x.view(torch.uint8)

    def decode(self, payload: Tensor, n: int) -> Tensor:
        return payload.clone().view(torch.float32)


@dataclass(frozen=True)
class BFloat16(_Shipped, name="bfloat16"):
    """Round to nearest even; 16 bits a value."""

    def encode(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).view(torch.uint8)

    def decode(self, payload: Tensor, n: int) -> Tensor:
        return payload.clone().view(torch.bfloat16).to(torch.float32)


@dataclass(frozen=True)
class E3M0(_Shipped, name="e3m0"):
    """1 sign bit, 3 exponent bits, no mantissa: 4.03 bits a value (paper, section 2.4).

    A block of 256 has a power-of-two scale s, the magnitude of its largest value after rounding. Codes 1..7 mean
    s·2^-6 .. s; code 0 is zero. A magnitude between two powers of two goes to the nearer one (the border is 1.5 times
    the smaller); what would go below s·2^-6 becomes zero. On Gaussian data the relative error is 0.19, the cosine 0.98,
    and values shrink by 4 % on average. At the ends of fp32: a block with s below 2^-119 becomes zeros; magnitudes from
    1.5·2^127 on, and inf, become 2^127; a nan becomes a zero or 2^127 (a delta with inf or nan is never sent).

    The sum uses only the upper half of each float, as int16: sign, 8 exponent bits, 7 of the mantissa. Adding 0.5 in
    units of the exponent's last place, 0x40, carries into the exponent exactly when the mantissa is at least 1.5.
    """

    def encode(self, x: Tensor) -> Tensor:
        n, count = len(x), blocks(len(x))
        upper = np.zeros((count, BLOCK), np.int16)
        upper.reshape(-1)[:n] = x.numpy().view(np.int16)[1::2]
        upper += 0x40
        upper >>= 7  # sign and rounded exponent
        code = torch.from_numpy(upper.astype(np.uint8)).clamp_max_(254)
        scale, code = code.amax(1).numpy(), code.numpy()
        # Scales below 2^-119 are sent as 0: their codes would be denormals, which some processors flush to zero.
        scale[scale < 8] = 0
        zero = (np.maximum(scale, 7) - np.uint8(7))[:, None]
        np.maximum(code, zero, out=code)
        code -= zero
        upper >>= 5
        upper &= 8
        code |= upper.astype(np.uint8)
        pairs = code.view(np.uint16).reshape(-1)  # little-endian: the even value is in the lower half
        pairs |= pairs >> 4
        payload = np.empty(self.nbytes(n), np.uint8)
        payload[:count] = scale
        payload[count:] = pairs[: -(-n // 2)].astype(np.uint8)
        return torch.from_numpy(payload)

    def decode(self, payload: Tensor, n: int) -> Tensor:
        count = blocks(n)
        scale = (payload[:count].to(torch.int32) << 23).view(torch.float32)
        pairs = torch.index_select(E3M0_PAIRS, 0, payload[count:].to(torch.int32))
        values = _blocks(pairs.view(torch.float32))
        return values.mul_(scale.unsqueeze(1)).view(-1)[:n]


@dataclass(frozen=True)
class TwoBit(_Shipped, name="twobit"):
    """One of 4 levels, the best for its block of 256: 2.06 bits a value (levels.py).

    The relative error is 0.341 on Gaussian values, 0.415 on Laplace values, and 0.336 to 0.395 on deltas of a model of
    0.34M parameters.
    """

    def encode(self, x: Tensor) -> Tensor:
        return torch.from_numpy(levels.encode(x.numpy()))

    def decode(self, payload: Tensor, n: int) -> Tensor:
        return torch.from_numpy(levels.decode(payload.numpy(), n))


def _blocks(x: Tensor) -> Tensor:
    """x with one block in each row; the last row is padded with zeros."""
    missing = -len(x) % BLOCK
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).view(-1, BLOCK)


def _e3m0_pairs() -> Tensor:
    """For each byte the two values in it, before scaling, as one int64: one look-up decodes two values."""
    magnitudes = [0.0, *(2.0 ** (code - 7) for code in range(1, 8))]
    values = torch.tensor([*magnitudes, *(-m for m in magnitudes)], dtype=torch.float32, device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1).view(torch.int64).view(-1)


E3M0_PAIRS = _e3m0_pairs()
