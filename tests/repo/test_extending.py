"""The snippets of docs/extending.md are run as they stand there, and what it says about shipped parts is tried."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from diloco import ConfigError, formats, outer
from diloco.codec import _Shipped, codec_named
from diloco.reduce.header import NBYTES
from diloco.runs.config import TrainConfig
from diloco.train import setup
from diloco.train.defaults import resolve
from tests.support.models import Tiny, adamw, loss_of, steps
from tests.support.processes import run

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/extending.md").read_text()
CODEC, RULE, REDUCER = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def _train(rank, code):
    """Weights and statistics after 60 steps with the `diloco` that the code makes."""
    model = Tiny()
    optimizer = adamw(model)
    names = {"model": model, "optimizer": optimizer}
    exec(compile(code, "extending.md", "exec"), names)
    diloco = names["diloco"]
    with diloco:
        for _ in steps(model, optimizer, rank, 1, 60):
            pass
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, loss_of(model, 0, 0).item(), diloco.stats.bytes_sent, repr(diloco._contract())


def _default(rank):
    return _train(rank, "from diloco import DiLoCo\ndiloco = DiLoCo(model, optimizer, sync_every=20)")


def _start():
    return loss_of(Tiny(), 0, 0).item()


@pytest.mark.slow
def test_the_codec_of_the_page_trains_and_sends_one_bit_a_value():
    (one, loss, sent, contract), (two, *_) = run(2, _train, CODEC)
    assert torch.equal(one, two)
    assert "'codec': 'Sign()'" in contract
    assert loss < 0.75 * _start()
    rounds, values = 4, len(one)  # at the steps 20, 40 and 60, and a last one
    assert rounds * values / 8 < sent < rounds * values / 8 + rounds * 3 * (5 + NBYTES)  # of three fragments


@pytest.mark.slow
def test_the_outer_rule_of_the_page_trains():
    (one, loss, _, contract), (two, *_) = run(2, _train, RULE)
    assert torch.equal(one, two)
    assert "HeavyBall(lr=0.3, momentum=0.9)" in contract
    assert loss < 0.75 * _start()


@pytest.mark.slow
def test_the_reducer_of_the_page_gives_the_bits_of_the_collective():
    gathered, collective = run(2, _train, REDUCER), run(2, _default)
    assert torch.equal(gathered[0][0], gathered[1][0])
    assert torch.equal(gathered[0][0], collective[0][0])


def test_a_row_makes_an_outer_rule_of_the_flag(monkeypatch):
    @dataclass(frozen=True)
    class Plain(outer.Nesterov):
        pass

    monkeypatch.setitem(outer.OUTERS, "plain", Plain)
    assert setup.outer(resolve(TrainConfig(outer="plain:0.3,0.8"), 35_000_000, 2)[0]) == Plain(0.3, 0.8)
    derived = setup.outer(resolve(TrainConfig(outer="plain", outer_lr=0.3), 35_000_000, 2)[0])
    assert derived == Plain(0.3)


def test_a_rule_that_says_nothing_of_its_values_has_its_own_defaults(monkeypatch):
    @dataclass(frozen=True)
    class Heavy:
        lr: float = 0.4
        momentum: float = 0.8

    monkeypatch.setitem(outer.OUTERS, "heavy", Heavy)
    config, rules = resolve(TrainConfig(outer="heavy", outer_lr=0.3), 35_000_000, 2)
    assert (config.outer_lr, config.outer_momentum, setup.outer(config)) == (0.3, 0.8, Heavy(0.3, 0.8))
    assert {rule.name: rule.reason for rule in rules}["outer_momentum"] == "the default of the rule"
    with pytest.raises(ConfigError, match="sgd:LR, heavy or heavy:LR,MOMENTUM, with numbers"):
        TrainConfig(outer="heavier")


def test_a_class_and_a_row_make_a_codec_of_the_flag(monkeypatch):
    monkeypatch.setattr(_Shipped, "classes", dict(_Shipped.classes))
    monkeypatch.setitem(formats.FORMATS, "twice", formats.Format("twice", bits=64))

    @dataclass(frozen=True)
    class Twice(_Shipped, name="twice"):
        pass

    assert TrainConfig(codec="twice").codec == "twice"
    assert codec_named("twice") == Twice()
    assert Twice().nbytes(100) == 800
