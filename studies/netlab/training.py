"""What every replica of the lab trains, whatever syncs it: the same decoder, the same batch, one core."""

from typing import Any

import torch

from diloco.runs.presets import Shape
from diloco.train.model import Decoder, Loss

SHAPE = Shape(layers=6, width=256, heads=4, mlp=344, vocabulary=257)
"""3.2M parameters, 98 % of them in six equal layers, so that fragments made of layers are equal too."""
CONTEXT = 64


class Training:
    """A model, its optimizer and its loop. `call` is the model, or what wraps it."""

    def __init__(self, batch: int, seed: int = 0) -> None:
        self.model = Decoder(SHAPE, CONTEXT)
        self.model.initialize(torch.Generator().manual_seed(seed))
        self.call: Any = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        # Random tokens, all made before: the time of a step does not depend on what they say.
        self.tokens = torch.randint(SHAPE.vocabulary, (batch, CONTEXT + 1), generator=torch.Generator().manual_seed(1))

    def step(self) -> None:
        loss = self.call(self.tokens[:, :-1], self.tokens[:, 1:])
        assert isinstance(loss, Loss)
        loss.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
