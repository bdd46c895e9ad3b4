"""The outer rules, against torch.optim.SGD as an oracle with tolerance."""

import subprocess
import sys

import pytest
import torch

from diloco import SGD, ConfigError, Nesterov
from diloco.outer import CHUNK, outer_named

RULES = [(Nesterov(0.4, 0.9), 0.4, 0.9), (Nesterov(0.7, 0.0), 0.7, 0.0), (SGD(1.0), 1.0, 0.0), (SGD(0.3), 0.3, 0.0)]


@pytest.mark.parametrize(("rule", "lr", "momentum"), RULES, ids=lambda v: repr(v))
@pytest.mark.parametrize("n", [0, 1, 1000, CHUNK + 7])
def test_an_outer_rule_is_torchs_sgd_up_to_rounding(rule, lr, momentum, n):
    torch.manual_seed(0)
    anchor = torch.randn(n)
    parameter = torch.nn.Parameter(anchor.clone())
    oracle = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=momentum > 0)
    state = rule.state(n)
    for _ in range(5):
        delta = torch.randn(n)
        parameter.grad = delta.clone()
        oracle.step()
        rule.step(anchor, delta, state)
        torch.testing.assert_close(anchor, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_nesterov_rounds_every_multiply_and_add_by_itself():
    """Bit for bit what scalar fp32 arithmetic without fused multiply-adds gives, on any CPU."""
    import numpy as np

    rng = np.random.default_rng(0)
    anchor, v = rng.standard_normal((2, 20_000)).astype(np.float32)
    mine, state = torch.from_numpy(anchor.copy()), torch.from_numpy(v.copy())
    lr, mu = np.float32(0.4), np.float32(0.9)
    for _ in range(3):
        delta = rng.standard_normal(20_000).astype(np.float32)
        Nesterov(0.4, 0.9).step(mine, torch.from_numpy(delta.copy()), state)
        v = mu * v + delta
        anchor = anchor - lr * (mu * v + delta)
    assert np.array_equal(mine.numpy(), anchor)
    assert np.array_equal(state.numpy(), v)


def test_sgd_rounds_every_multiply_and_add_by_itself():
    import numpy as np

    anchor, delta = np.random.default_rng(0).standard_normal((2, 20_000)).astype(np.float32)
    mine = torch.from_numpy(anchor.copy())
    SGD(0.3).step(mine, torch.from_numpy(delta.copy()), torch.empty(0))
    assert np.array_equal(mine.numpy(), anchor - np.float32(0.3) * delta)


def test_state_is_fp32_on_the_host_and_starts_at_zero():
    assert torch.equal(Nesterov().state(5), torch.zeros(5))
    assert Nesterov().state(5).device.type == "cpu"
    assert len(SGD().state(5)) == 0


@pytest.mark.parametrize("make", [lambda: Nesterov(lr=0), lambda: Nesterov(momentum=1.0), lambda: SGD(lr=-1.0),
                                  lambda: Nesterov(lr=float("nan")), lambda: Nesterov(lr=float("inf")),
                                  lambda: SGD(lr=float("inf")), lambda: Nesterov(momentum=-0.1)])  # fmt: skip
def test_impossible_rules_are_refused_with_what_is_allowed(make):
    with pytest.raises(ConfigError, match=r"give a (positive )?number.*(the paper|published runs)"):
        make()


def test_an_outer_rule_has_a_name_and_its_numbers_in_order():
    assert outer_named("nesterov:0.6,0.9") == Nesterov(0.6, 0.9)
    assert outer_named("sgd:1") == SGD(1.0)
    assert outer_named("sgd") == SGD()


@pytest.mark.parametrize("text", ["adam:1", "nesterov:fast", "nesterov:0.7", "nesterov:", "sgd:1,2", "sgd:-1", ""])
def test_a_wrong_name_of_an_outer_rule_says_what_is_allowed(text):
    with pytest.raises(ConfigError, match="nesterov:LR,MOMENTUM, sgd or sgd:LR, with a positive LR"):
        outer_named(text)


def test_naming_an_outer_rule_imports_no_torch():
    code = "import sys; from diloco.outer import outer_named; outer_named('sgd:1'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
