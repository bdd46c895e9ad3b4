"""An outer optimizer or codec that is added as docs/extending.md says can be chosen by its flag."""

from dataclasses import dataclass

import pytest

from diloco import ConfigError
from diloco.codecs import formats
from diloco.codecs.codec import _Shipped, codec_named
from diloco.core import outer
from diloco.runs.config import TrainConfig
from diloco.train.settings import resolve


def test_an_entry_in_the_table_makes_an_outer_optimizer_a_flag(monkeypatch):
    @dataclass(frozen=True)
    class Heavy:
        lr: float = 0.4
        momentum: float = 0.8

    monkeypatch.setitem(outer.OUTERS, "heavy", Heavy)
    assert TrainConfig(outer="heavy:0.3,0.8").outer and outer.outer_named("heavy:0.3,0.8") == Heavy(0.3, 0.8)
    _, values = resolve(TrainConfig(outer="heavy"), 35_000_000, 2)
    assert {value.name: value.reason for value in values}["outer_momentum"] == "the optimizer's default"
    with pytest.raises(ConfigError, match="sgd:LR, heavy or heavy:LR,MOMENTUM, with numbers"):
        TrainConfig(outer="heavier")


def test_a_class_and_an_entry_make_a_codec_a_flag(monkeypatch):
    monkeypatch.setattr(_Shipped, "classes", dict(_Shipped.classes))
    monkeypatch.setitem(formats.FORMATS, "twice", formats.Format("twice", bits=64))

    @dataclass(frozen=True)
    class Twice(_Shipped, name="twice"):
        pass

    assert TrainConfig(codec="twice").codec == "twice"
    assert codec_named("twice") == Twice()
    assert Twice().nbytes(100) == 800
