"""A negative control: a codec that should fail; and an outer optimizer that the trainer does not have."""

from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.core.outer import GROWTH, Nesterov, Stage

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


@dataclass(frozen=True)
class Capped(Nesterov):
    """The trainer's rule with another end: from plain averaging to this learning rate and momentum."""

    def at(self, stage: Stage, before: float) -> tuple[float, float, float]:
        assert self.lr is not None and self.momentum is not None
        momentum = min(max(1 - GROWTH / stage.index, 0.0), self.momentum)
        lr = 1 - (1 - self.lr) * momentum / self.momentum
        return Nesterov(lr, momentum).at(stage, before)
