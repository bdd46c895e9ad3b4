"""A negative control: a codec that should fail."""

from dataclasses import dataclass

import torch
from torch import Tensor

KEPT = 1 / 8
"""Share of values that random zeroing keeps: in fp32, as many bits as 4 for each (positions follow from a seed)."""


@dataclass
class Zeroing:
    """Random zeroing: each value is sent with probability KEPT, otherwise zero is sent."""

    generator: torch.Generator

    def nbytes(self, n: int) -> int:
        return 4 * n

    def encode(self, x: Tensor) -> Tensor:
        kept = torch.rand(len(x), generator=self.generator) < KEPT
        return (x * kept).view(torch.uint8)

    def decode(self, payload: Tensor, n: int) -> Tensor:
        return payload.clone().view(torch.float32)
