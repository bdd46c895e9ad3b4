"""Loss on held-out text, and samples of text."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from diloco.train.data.tokenizer import Tokenizer

Windows = Sequence[tuple[Tensor, Tensor]]


@torch.no_grad()
def loss_of(model: nn.Module, windows: Windows, device: torch.device) -> float:
    """Mean cross-entropy in nats a token. Every window holds the same number of tokens."""
    training = model.training
    model.eval()
    total = sum(model(x.to(device), y.to(device)).cross_entropy.double() for x, y in windows)
    model.train(training)
    return float(total) / len(windows)


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    return loss / math.log(2) / bytes_per_token


@torch.no_grad()
def sample(model: nn.Module, tokenizer: Tokenizer, prompt: str, count: int, context: int, device: torch.device) -> str:
    """Continue a prompt by `count` tokens at temperature 0.8, always with the same random numbers."""
    generator = torch.Generator().manual_seed(0)
    ids = [int(i) for i in tokenizer.encode(prompt.encode())]
    for _ in range(count):
        logits = model(torch.tensor([ids[-context:]], device=device))[0, -1].float().cpu()
        ids.append(int(torch.multinomial((logits / 0.8).softmax(0), 1, generator=generator)))
    return tokenizer.decode(ids)
