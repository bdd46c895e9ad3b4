"""The outer optimizers, against torch.optim.SGD as an oracle with tolerance."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from diloco import SGD, ConfigError, Nesterov
from diloco.core.outer import CHUNK, Stage, outer_named

RULES = [(Nesterov(0.4, 0.9), 0.4, 0.9), (Nesterov(0.7, 0.0), 0.7, 0.0), (SGD(1.0), 1.0, 0.0), (SGD(0.3), 0.3, 0.0)]


@pytest.mark.parametrize(("rule", "lr", "momentum"), RULES, ids=lambda v: repr(v))
@pytest.mark.parametrize("n", [0, 1, 1000, CHUNK + 7])
def test_an_outer_optimizer_is_torchs_sgd_up_to_rounding(rule, lr, momentum, n):
    torch.manual_seed(0)
    anchor = torch.randn(n)
    parameter = torch.nn.Parameter(anchor.clone())
    oracle = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=momentum > 0)
    state = rule.state(n)
    for _ in range(5):
        delta = torch.randn(n)
        parameter.grad = delta.clone()
        oracle.step()
        rule.step(anchor, delta, state, Stage(1, 0.02))
        torch.testing.assert_close(anchor, parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inner", [0.6, 0.9, 0.0])
def test_an_outer_step_rounds_every_multiply_and_add_by_itself(inner):
    """Bit for bit what scalar fp32 arithmetic without fused multiply-adds gives, on any CPU."""
    rng = np.random.default_rng(0)
    anchor, v = rng.standard_normal((2, 20_000)).astype(np.float32)
    moved, state = torch.from_numpy(anchor.copy()), torch.from_numpy(np.append(v, np.float32(0.75)))
    lr, mu, decay = np.float32(0.4), np.float32(0.9), np.float32(0.9 * min(inner / 0.75, 1.0))
    delta = rng.standard_normal(20_000).astype(np.float32)
    Nesterov(0.4, 0.9).step(moved, torch.from_numpy(delta.copy()), state, Stage(1, inner))
    v = decay * v + delta
    assert np.array_equal(moved.numpy(), anchor - lr * (mu * v + delta))
    assert np.array_equal(state.numpy(), np.append(v, np.float32(inner)))
    moved = torch.from_numpy(anchor.copy())
    SGD(0.3).step(moved, torch.from_numpy(delta.copy()), torch.empty(0), Stage(1, 0.02))
    assert np.array_equal(moved.numpy(), anchor - np.float32(0.3) * delta)


def moved_by(rule, rounds):
    """How far each of the rounds, (delta, lr), moves one value."""
    anchor, state, places = torch.zeros(1), rule.state(1), [0.0]
    for delta, lr in rounds:
        rule.step(anchor, torch.tensor([delta]), state, Stage(1, lr))
        places.append(anchor.item())
    return [a - b for a, b in itertools.pairwise(places)]


def test_momentum_falls_with_the_inner_learning_rate_and_does_not_rise_with_it():
    """Deltas that fall with the learning rate give steps that fall with it."""
    falling = [(0.4, 0.04), (0.4, 0.04), (0.2, 0.02), (0.1, 0.01), (0.001, 0.0001)]
    constant = moved_by(Nesterov(0.5, 0.9, follow=False), [(1.0, 1.0)] * 5)
    expected = [step * delta for step, (delta, _) in zip(constant, falling, strict=True)]
    assert moved_by(Nesterov(0.5, 0.9), falling) == pytest.approx(expected, rel=1e-4)
    rising = falling[::-1]
    assert moved_by(Nesterov(0.5, 0.9), rising) == moved_by(Nesterov(0.5, 0.9, follow=False), rising)


def test_momentum_does_not_run_on_when_the_inner_learning_rate_is_gone():
    rounds = [(1.0, 0.1)] * 20 + [(0.0, 0.0)] * 5
    still, on = (moved_by(Nesterov(0.5, 0.9, follow), rounds)[-5:] for follow in (True, False))
    assert sum(still) == 0 and sum(on) > 10


def test_momentum_that_is_not_given_grows_with_the_rounds_and_the_learning_rate_falls_with_it():
    seen = {k: Nesterov().at(Stage(k, 1.0), 0.0)[:2] for k in (1, 10, 20, 40, 100, 1000)}
    expected = {1: (1.0, 0.0), 10: (1.0, 0.0), 20: (2 / 3, 0.5), 40: (0.5, 0.75), 100: (0.4, 0.9), 1000: (0.4, 0.9)}
    assert {k: pytest.approx(pair) for k, pair in expected.items()} == seen
    seen = {k: Nesterov(many=True).at(Stage(k, 1.0), 0.0)[:2] for k in (1, 20, 50, 1000)}
    expected = {1: (1.0, 0.0), 20: (0.9375, 0.5), 50: (0.9, 0.8), 1000: (0.9, 0.8)}
    assert {k: pytest.approx(pair) for k, pair in expected.items()} == seen
    assert Nesterov(lr=0.6).at(Stage(20, 1.0), 0.0)[:2] == (0.6, 0.5)
    assert Nesterov(momentum=0.3).at(Stage(10, 1.0), 0.0)[:2] == (0.8, 0.3)


def test_state_is_fp32_on_the_host_and_starts_at_zero():
    assert torch.equal(Nesterov().state(5), torch.zeros(6)) and len(Nesterov(follow=False).state(5)) == 5
    with torch.device("meta"):
        assert Nesterov().state(5).device.type == "cpu"
    assert len(SGD().state(5)) == 0


@pytest.mark.parametrize("make", [lambda: Nesterov(lr=0), lambda: Nesterov(momentum=1.0), lambda: SGD(lr=-1.0),
                                  lambda: Nesterov(lr=float("nan")), lambda: Nesterov(lr=float("inf")),
                                  lambda: SGD(lr=float("inf")), lambda: Nesterov(momentum=-0.1)])  # fmt: skip
def test_impossible_settings_are_refused_with_what_is_allowed(make):
    with pytest.raises(ConfigError, match=r"use a (positive )?number.*(the paper|published runs)"):
        make()


def test_an_outer_optimizer_has_a_name_and_its_numbers_in_order():
    assert outer_named("nesterov:0.6,0.9") == Nesterov(0.6, 0.9)
    assert outer_named("sgd:1") == SGD(1.0)
    assert outer_named("sgd") == SGD()
    assert outer_named("nesterov:many") == Nesterov(many=True)
    assert outer_named("nesterov:0.4,0.9,fixed") == Nesterov(0.4, 0.9, follow=False)


NAMES = "use nesterov, nesterov:LR,MOMENTUM, sgd or sgd:LR"
WRONG = ["adam:1", "nesterov:fast", "nesterov:0.7", "nesterov:", "sgd:1,2", "sgd:1,fixed", ""]


@pytest.mark.parametrize(("text", "message"), [
    *((text, NAMES) for text in WRONG),
    ("sgd:-1", "outer lr=-1.0: use a"),
    ("nesterov:1,1", "outer momentum=1.0: use a"),
])  # fmt: skip
def test_a_wrong_name_or_number_of_an_outer_optimizer_says_what_is_allowed(text, message):
    with pytest.raises(ConfigError, match=message):
        outer_named(text)


@pytest.mark.slow
def test_naming_an_outer_optimizer_imports_no_torch():
    code = "import sys; from diloco.core.outer import outer_named; outer_named('sgd:1'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
