"""The snippets of docs/extending.md are run as they stand there, and what it says about shipped parts is tried."""

import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco import Bucket, Collective, ConfigError, DiLoCo, Float32, formats, outer
from diloco.advance import NextState
from diloco.bucket.deltas import Layout
from diloco.bucket.open_round import OpenRound
from diloco.bucket.outbox import Outbox
from diloco.bucket.protocol import FragmentProtocol
from diloco.bucket.ranks import First
from diloco.bucket.rounds import Contribution
from diloco.bucket.store.envelope import Envelope
from diloco.bucket.store.folder import Folder
from diloco.bucket.store.operations import All, Create
from diloco.bucket.store.store import Store
from diloco.codec import _Shipped, codec_named
from diloco.reduce import Delta, State
from diloco.reduce.groups import Groups, Transfer
from diloco.reduce.header import NBYTES
from diloco.runs.config import TrainConfig
from diloco.sync import FragmentSync
from diloco.train import setup
from diloco.train.defaults import resolve
from tests.support.members import until
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


def test_the_codec_of_the_page_trains_and_sends_one_bit_a_value():
    (one, loss, sent, contract), (two, *_) = run(2, _train, CODEC)
    assert torch.equal(one, two)
    assert "'codec': 'Sign()'" in contract
    assert loss < 0.75 * _start()
    rounds, values = 4, len(one)  # at the steps 20, 40 and 60, and a last one
    assert rounds * values / 8 < sent < rounds * values / 8 + rounds * 3 * (5 + NBYTES)  # of three fragments


def test_the_outer_rule_of_the_page_trains():
    (one, loss, _, contract), (two, *_) = run(2, _train, RULE)
    assert torch.equal(one, two)
    assert "HeavyBall(lr=0.3, momentum=0.9)" in contract
    assert loss < 0.75 * _start()


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


def test_the_way_of_a_delta_goes_through_what_there_is():
    way = TEXT.partition("## The way of a delta")[2].partition("\n## ")[0]
    homes = {home.__name__: home for home in (Bucket, Collective, DiLoCo, Envelope, First, Folder, FragmentProtocol,
                                              FragmentSync, Groups, Layout, NextState, OpenRound, Outbox, Store,
                                              Transfer)}  # fmt: skip
    named = re.findall(r"`(\w+)\.(\w+)`", way)
    assert {home for home, _ in named} == homes.keys()
    assert all(callable(getattr(homes[home], name)) for home, name in named)


MARK = torch.tensor([1.25, -3.5, 7.75, 0.625])


def _given(value, later):
    """Whether a value is the delta, in any form: what takes it, its values, its bytes, or an operation with them."""
    match value:
        case Tensor() | bytes():
            return MARK.numpy().tobytes() in (value.numpy().tobytes() if isinstance(value, Tensor) else value)
        case list() | tuple():
            return any(_given(each, later) for each in value)
        case All(operations=inner) | Create(data=inner) | Delta(values=inner) | Contribution(payloads=inner):
            return _given(inner, later)
    return value is later


def _walk(folder):
    """The methods of the bucket that are given a delta: the first one of each class, until the delta stands."""
    walked, stands, bucket = {}, threading.Event(), Bucket("", "a", backend=Folder(folder), heartbeat=0.2, poll=0.02)
    state = State(0, torch.zeros(len(MARK)), torch.zeros(0))

    def later():
        return Delta(MARK.clone(), 1.0, True, state.fingerprint())

    def watch(frame, event, _):
        code = frame.f_code
        if event != "call" or stands.is_set() or not frame.f_globals.get("__name__", "").startswith("diloco.bucket"):
            return
        mine, *rest = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]] or [None]
        if code.co_varnames[:1] == ("self",) and any(_given(value, later) for value in rest):
            walked.setdefault(type(mine).__name__, code.co_name)
            if code.co_name == "saw":
                stands.set()

    threading.setprofile(watch)  # of the threads that the bucket starts
    try:
        bucket.join({"sync_every": 10}, [state], [Float32()])
        sys.setprofile(watch)
        bucket.send(0, 1, later)
        sys.setprofile(None)
        until(stands.is_set)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        bucket.leave()
    return [f"{home}.{name}" for home, name in walked.items() if not name.startswith("__")]


def test_a_delta_changes_object_on_its_way_into_a_bucket_as_often_as_the_page_says(tmp_path):
    page = TEXT.partition("Into a bucket, six changes:")[2].partition("With DDP")[0]
    first, *changes = re.findall(r"(?:→\s+`|: `)(\w+\.\w+)`", page)
    assert len(changes) == page.count("→") == 6
    assert _walk(tmp_path) == [first, *changes, "OpenRound.saw"]


def test_the_files_and_names_of_the_list_exist():
    rows = re.findall(r"^\| [\w ]+ \| (.*) \|$", TEXT.partition("## What to touch")[2], re.MULTILINE)
    assert len(rows) == 7
    for row in rows:
        names = re.findall(r"`([^`]+)`", row)
        files = [name for name in names if "/" in name]
        text = "".join((ROOT / name).read_text() for name in files if (ROOT / name).is_file())
        for name in files:
            assert (ROOT / name).exists(), name
        for name in {"ALL", "OUTERS", "VERBS", "CONFIG", "EXAMPLES", "Step", "PER_STEP", "STYLES", "_HOME"} & set(
            names
        ):
            assert re.search(rf"\b{name}\b", text), name
