"""A codec of one's own: a sign and one scale per tensor chunk, 1 bit a value, tried on M replicas in one process.

python examples/new_codec.py
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from diloco import E3M0, DiLoCo, Float32
from diloco.codecs.codec import CHUNK, Codec
from diloco.exchange import local


@dataclass(frozen=True)
class Sign:
    """Each value becomes plus or minus the mean magnitude."""

    coarse = True  # what it loses stays in the replica's weights, and is in the next delta

    def nbytes(self, n: int) -> int:
        return 4 * -(-n // CHUNK) + -(-n // 8)

    def encode(self, x: Tensor) -> Tensor:
        scale = x.abs().mean().reshape(1).view(torch.uint8)
        return torch.cat([scale, torch.from_numpy(np.packbits(x.numpy() < 0))])

    def decode(self, payload: Tensor, n: int) -> Tensor:
        scale = payload[:4].clone().view(torch.float32)
        negative = torch.from_numpy(np.unpackbits(payload[4:].numpy(), count=n)).bool()
        return torch.where(negative, -scale, scale)


def loss_with(codec: Codec) -> float:
    """Four replicas learn a linear map; the loss of what they agree on."""
    torch.manual_seed(0)
    target = torch.randn(64, 64) / 8

    def loop(reduce: local.Local) -> float:
        torch.manual_seed(1)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = torch.Generator().manual_seed(reduce.replica)
        with DiLoCo(model, optimizer, sync_every=10, codec=codec, reducer=reduce):
            for _ in range(60):
                x = torch.randn(32, 64, generator=data)
                (model(x) - x @ target).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        x = torch.randn(1000, 64, generator=data)
        return (model(x) - x @ target).square().mean().item()

    return local.run(4, loop)[0]


if __name__ == "__main__":
    for codec in (Float32(), E3M0(), Sign()):
        bits = codec.nbytes(1 << 17) * 8 / (1 << 17)
        print(f"{type(codec).__name__:8} {bits:6.3f} bits a value   loss {loss_with(codec):.6f}")
