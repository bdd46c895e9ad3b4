"""The autopilot in a training loop: with a virtual link and clock, and over real processes."""

from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diloco import E3M0, Balanced, Collective, ConfigError, DiLoCo, DiLoCoError, Float32, Mismatch
from diloco.autopilot import pilot as pilots
from diloco.autopilot.pilot import autopilot, model_of
from diloco.autopilot.speed import Speed
from diloco.core.overlap import Overlap
from diloco.core.tensors import trainable
from diloco.exchange import local
from diloco.exchange.transport import LinkSpeed
from tests.support.fake_reducer import Script
from tests.support.models import Tiny, flat, make, steps, train_steps
from tests.support.processes import message_of, run
from tests.support.ranks import groups

STEP, TRIP = 0.5, 0.001
SPEED = Speed(
    dict.fromkeys(("e3m0", "twobit", "float32"), 1.0), dict.fromkeys(("e3m0", "twobit", "float32"), 1.0), 1.0, 0.0
)


class Linked(Collective):
    """Another reducer behind a link of this rate, which all replicas measure alike."""

    def __init__(self, inner, rate):
        self.rate, self.replica, self.replicas, self.identity = rate, inner.replica, inner.replicas, inner.identity
        self.join, self.should_send, self.send = inner.join, inner.should_send, inner.send
        self.poll, self.drain, self.leave = inner.poll, inner.drain, inner.leave

    def measure(self):
        return LinkSpeed(TRIP, self.rate)

    def gather(self, value):
        return [value] * self.replicas


@pytest.fixture
def _machine(monkeypatch):
    monkeypatch.setattr(pilots.speed, "measured", lambda: SPEED)
    monkeypatch.setattr(Overlap, "step_seconds", STEP)


@pytest.mark.usefixtures("_machine")
def test_a_model_without_layers_is_cut_as_it_was_planned():
    def loop(reducer):
        torch.manual_seed(0)
        model = nn.ParameterDict({f"w{k}": torch.ones(2**k, 8) for k in range(6)})
        diloco = DiLoCo(model, reducer=Linked(reducer, 1e4))
        pilot = autopilot(diloco)
        diloco.join()
        for _ in range(10):
            diloco.step()
        assert pilot is not None and pilot.choice is not None
        return pilot.choice.settings.fragments, len(diloco.fragments)

    (planned, cut), _ = local.run(2, loop)
    assert planned == f"balanced:{cut}"


@pytest.mark.usefixtures("_machine")
def test_what_is_kept_is_not_chosen():
    def loop(reducer):
        settings = {"sync_every": 40, "fragments": Balanced(5), "overlap": 3}
        model, optimizer, diloco = make(reducer=Linked(reducer, 1e3), **settings)
        pilot = autopilot(diloco, keep=("sync_every", "fragments", "overlap", "codec"))
        with diloco:
            train_steps(model, optimizer, reducer.replica, 1, 20)
        assert pilot is not None and pilot.choice is not None
        assert set(pilot.choice.reasons.values()) == {"set explicitly"}
        return diloco.schedule.sync_every, diloco.codec, diloco.overlap, len(diloco.fragments)

    assert local.run(2, loop) == [(40, E3M0(), 3, 5)] * 2


def test_the_planner_sees_the_layers_and_what_is_outside_of_them():
    model = Tiny()
    planned = model_of(model, trainable(model))
    assert planned.layers == (272.0,) * 6
    assert planned.parameters == sum(p.numel() for p in model.parameters())
    plain = nn.Linear(8, 8)
    assert model_of(plain, trainable(plain)).parameters == 72


def test_without_a_link_there_is_nothing_to_choose():
    texts = []
    diloco = DiLoCo(Tiny(), sync_every=4, reducer=Script())
    assert autopilot(diloco, say=lambda text, values: texts.append(text)) is None
    assert len(texts) == 1 and "with a Script" in texts[0] and "not changed" in texts[0]
    with pytest.raises(ConfigError, match=r"keep=\['speed'\]: use any of sync_every"):
        autopilot(diloco, keep=["speed"])


@message_of(Mismatch)
def _on_one_replica(rank):
    model, optimizer, diloco = make(sync_every=5, reducer=Collective(timeout=60))
    if rank == 0:
        autopilot(diloco)
    with diloco:
        train_steps(model, optimizer, rank, 1, 20)


@pytest.mark.slow
def test_an_autopilot_on_one_replica_only_is_refused_on_all():
    for text in run(2, _on_one_replica):
        assert "use the autopilot on all replicas or on none" in text


def _with_ddp(rank):
    across, within = groups(rank)
    model = Tiny()
    wrapped = DistributedDataParallel(model, process_group=within)
    _, optimizer, diloco = make(wrapped, reducer=Collective(across, ddp_ranks=within))
    pilot = autopilot(diloco, steps=500)
    with diloco:
        train_steps(wrapped, optimizer, rank, 1, 25)
    assert pilot is not None and pilot.choice is not None
    return asdict(pilot.choice), asdict(pilot.facts), diloco.schedule.sync_every, diloco.overlap, flat(model)


@pytest.mark.slow
def test_with_ddp_inside_all_ranks_of_all_replicas_take_the_same_settings():
    (choice, facts, sync_every, overlap, weights), *others = run(4, _with_ddp)
    assert sync_every == choice["settings"]["sync_every"] < 100
    assert overlap == choice["settings"]["overlap"] and facts["rate"] > 0
    for other in others:
        assert other[:4] == (choice, facts, sync_every, overlap) and torch.equal(other[4], weights)


def test_settings_can_change_before_the_first_round_as_if_set_from_the_start():
    """Nothing was sent, and the anchors are the initial weights."""
    settings = {"sync_every": 12, "fragments": Balanced(4), "overlap": 1, "codec": Float32()}

    def loop(reducer, late):
        initial = {**settings, "sync_every": 100, "fragments": Balanced(2)} if late else settings
        model, optimizer, diloco = make(reducer=reducer, **initial)
        with diloco:
            for step in steps(model, optimizer, reducer.replica, 1, 40):
                if late and step == 9:
                    diloco.restart(**settings)
        with pytest.raises(DiLoCoError, match="only before the first round"):
            diloco.restart(**settings)
        return flat(model)

    from_start, changed = (local.run(2, lambda r, late=late: loop(r, late)) for late in (False, True))
    assert torch.equal(from_start[0], changed[0]) and torch.equal(from_start[1], changed[1])
