"""A model of a few thousand parameters and a loop over data that depend on replica and step only."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from diloco import DiLoCo

VOCABULARY = 50


class Tiny(nn.Module):
    """Embedding, six residual layers, norm, head: what a decoder has, without attention."""

    def __init__(self, seed: int = 0, width: int = 16, layers: int = 6, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def batch(replica: int, step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, VOCABULARY, (size,), generator=torch.Generator().manual_seed(1000 * replica + step))
    return x, (x * 7 + 3) % VOCABULARY


def loss_of(model: nn.Module, replica: int, step: int) -> Tensor:
    device = next(model.parameters()).device
    x, y = (tensor.to(device) for tensor in batch(replica, step))
    return nn.functional.cross_entropy(model(x), y)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)  # one call, not ten for each tensor


def make(model: Any = None, *, optimizer: Any = adamw, **settings: Any) -> tuple[Any, Any, DiLoCo]:
    """A model, by default a tiny one, with an optimizer and a DiLoCo."""
    model = Tiny() if model is None else model
    inner = optimizer(model)
    return model, inner, DiLoCo(model, inner, **settings)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, replica: int, first: int, last: int) -> Iterator[int]:
    """Train steps first..last, yielding after each."""
    for step in range(first, last + 1):
        loss_of(model, replica, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, replica: int, first: int, last: int) -> None:
    for _ in steps(model, optimizer, replica, first, last):
        pass


def train(replica: int, count: int, **settings: Any) -> dict[str, Any]:
    """A whole run with the settings of `make`; what it leaves behind."""
    model, optimizer, diloco = make(**settings)
    history = []
    with diloco:
        for _ in steps(model, optimizer, replica, 1, count):
            history.append(fingerprints(diloco))
        local = flat(model)
    return {"weights": flat(model), "local": local, "history": history, "anchors": anchors(diloco),
            "stats": diloco.stats, "steps": diloco.step_count, "fragments": diloco.fragments}  # fmt: skip


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def anchors(diloco: DiLoCo) -> Tensor:
    return torch.cat([part.state.anchor for part in diloco._fragments]).clone()


def fingerprints(diloco: DiLoCo) -> dict[tuple[int, int], int]:
    """Of the state of each fragment, by its number and round."""
    return {(part.number, part.state.index): part.state.fingerprint() for part in diloco._fragments}
