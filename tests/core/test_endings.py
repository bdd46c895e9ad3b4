"""How a run ends: when the learning rate ends before it, and with what finish() leaves. Two replicas beside one alone,
on a small regression with noise."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from diloco import Balanced, DiLoCo, Float32, Nesterov
from diloco.outer import Outer
from diloco.reduce import local

pytestmark = pytest.mark.slow  # replicas train for many rounds

STEPS, SYNC_EVERY, WARMUP, BATCH, LR, NOISE = 200, 20, 20, 8, 0.01, 0.5
DECAYS: dict[str, Callable[[int], float]] = {
    "constant": lambda step: 1.0,
    "linear": lambda step: 1 - step / STEPS,
    "half": lambda step: max(1 - 2 * step / STEPS, 0.0),
}
FIXED = Nesterov(0.4, 0.9, follow=False)
LONG = Nesterov(0.7, 0.9, follow=False)


@dataclass(frozen=True)
class Ended:
    """A model's loss after the run, and what else the run could have ended with."""

    loss: float
    anchors: Tensor
    local: Tensor


def examples(seed: int, n: int) -> tuple[Tensor, Tensor]:
    teacher, random = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    first, second = torch.randn(8, 16, generator=teacher), torch.randn(16, 1, generator=teacher)
    x = torch.randn(n, 8, generator=random)
    return x, torch.tanh(x @ first / 2) @ second / 2 + NOISE * torch.randn(n, 1, generator=random)


def student() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def loss_of(model: nn.Module) -> float:
    x, y = examples(7, 4096)
    with torch.no_grad():
        return (model(x) - y).square().mean().item()


def loss_at(weights: Tensor) -> float:
    model = student()
    nn.utils.vector_to_parameters(weights, model.parameters())
    return loss_of(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, replica: int, decay: str, steps: int = STEPS) -> None:
    x, y = examples(10 + replica, steps * BATCH)
    for step, (inputs, outputs) in enumerate(zip(x.split(BATCH), y.split(BATCH), strict=True), 1):
        optimizer.param_groups[0]["lr"] = LR * min(step / WARMUP, 1) * DECAYS[decay](step)
        optimizer.zero_grad()
        (model(inputs) - outputs).square().mean().backward()
        optimizer.step()


@cache
def alone(decay: str) -> float:
    model = student()
    train(model, torch.optim.AdamW(model.parameters()), 0, decay)
    return loss_of(model)


def together(outer: Outer, decay: str, steps: int = STEPS, last_as_others: bool = False) -> list[Ended]:
    def loop(reduce: local.Local) -> Ended:
        if last_as_others:
            settle = reduce.settle
            reduce.settle = lambda: settle() and False
        model = student()
        optimizer = torch.optim.AdamW(model.parameters())
        settings = {"sync_every": SYNC_EVERY, "fragments": Balanced(2), "outer": outer, "codec": Float32()}
        with DiLoCo(model, optimizer, reduce=reduce, **settings) as diloco:
            train(model, optimizer, reduce.replica, decay, steps)
            mine = flat(model)
            with diloco.anchors():
                anchors = flat(model)
        return Ended(loss_of(model), anchors, mine)

    return local.run(2, loop)


@pytest.mark.parametrize("decay", DECAYS)
def test_with_the_default_rule_nothing_ends_above_training_alone(decay: str):
    assert together(Nesterov(), decay)[0].loss < 1.01 * alone(decay)


@pytest.mark.parametrize("decay", ["linear", "half"])
def test_a_fixed_momentum_runs_on_when_the_learning_rate_is_gone(decay: str):
    """What the default rule prevents shows on this task."""
    assert together(FIXED, decay)[0].loss > 1.05 * alone(decay)


@pytest.mark.parametrize("decay", ["constant", "linear"])
def test_finish_leaves_the_mean_of_the_replicas_where_an_outer_step_goes_too_far(decay: str):
    """After 195 steps of 20 nothing is under way: all that finish() changes is in its own round."""
    found = together(LONG, decay, steps=195)
    anchors, mean = loss_at(found[0].anchors), loss_at(torch.stack([each.local for each in found]).mean(0))
    assert found[0].loss == found[1].loss == pytest.approx(mean, rel=1e-4)
    assert mean < anchors
    assert together(LONG, decay, steps=195, last_as_others=True)[0].loss > 1.002 * mean
