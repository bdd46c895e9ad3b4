"""The autopilot in the loop: two replicas in one process, a link and a clock that are numbers."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diloco import Balanced, Collective, ConfigError, DiLoCo, Mismatch
from diloco import pilot as pilots
from diloco.pilot import autopilot, model_of
from diloco.reduce import Round, local
from diloco.reduce.link import LinkSpeed
from diloco.speed import Speed
from diloco.terms import Terms
from tests.support.fake_reduce import Script
from tests.support.models import Tiny, adamw, flat, steps
from tests.support.processes import message_of, run

STEP, TRIP = 0.5, 0.001
SPEED = Speed(dict.fromkeys(("e3m0", "twobit", "float32", "topk"), 1.0),
              dict.fromkeys(("e3m0", "twobit", "float32", "topk"), 1.0), 1.0, 0.0)  # fmt: skip


class Clock:
    """A step takes always the same."""

    seconds = STEP

    def begin(self, now):
        pass

    def end(self, now):
        pass


class Linked:
    """A reducer whose rounds take as long as a link of this rate needs. All replicas have the same one."""

    def __init__(self, reduce, rate, ranks=1):
        self._reduce, self.rate, self._ranks = reduce, rate, ranks
        self.replica, self.replicas = reduce.replica, reduce.replicas

    def __getattr__(self, name):
        return getattr(self._reduce, name)

    def measure(self):
        return LinkSpeed(TRIP, self.rate / self._ranks)  # what each rank has of it

    def tell(self, value):
        return [value] * self.replicas * self._ranks

    def take(self, fragment, index):
        outcome = self._reduce.take(fragment, index)
        if not isinstance(outcome, Round):
            return outcome
        seconds = 8 * outcome.sent / self.rate + TRIP
        return replace(outcome, sent=outcome.sent // self._ranks, seconds=seconds, transfer=seconds)


def fly(reduce, count, rates, watched=(0, 1), ranks=1, **options):
    """`rates`: {step: rate from then on}. Returns what was held after each step, and what was said."""
    link, model = Linked(reduce, rates[0], ranks), Tiny()
    optimizer = adamw(model)
    diloco = DiLoCo(model, optimizer, overlap="auto", reduce=link)
    diloco.tuning.clock = Clock()  # type: ignore[assignment]
    held, said = [], []
    if reduce.replica in watched:
        autopilot(diloco, say=lambda text, values: said.append((diloco.step_count, text, values)), **options)
    with diloco:
        for step in steps(model, optimizer, reduce.replica, 1, count):
            link.rate = rates.get(step, link.rate)
            held.append(diloco.tuning.held)
    return held, said, flat(model)


@pytest.fixture
def _machine(monkeypatch):
    monkeypatch.setattr(pilots.speed, "known", lambda: SPEED)


VALUES = sum(p.numel() for p in Tiny().parameters())
ENOUGH = 4.03 * VALUES / (30 * STEP)
"""Bits a second with which a sync_every of 30 keeps the link full."""


@pytest.mark.slow
@pytest.mark.usefixtures("_machine")
@pytest.mark.parametrize("factor", [1 / 3, 2.0])
def test_when_the_link_changes_all_change_within_three_sync_periods_and_say_why(factor):
    first, at = 0.55 * ENOUGH, 160
    results = local.run(2, lambda r: fly(r, 400, {0: first, at: factor * first}))
    (held, said, weights), (held_too, _, weights_too) = results
    assert held == held_too and torch.equal(weights, weights_too)
    before, after = held[at], held[-1]
    assert before == held[10] and after != before
    assert (after.sync_every > before.sync_every) == (factor < 1)
    assert held.index(after) - at <= 3 * before.sync_every
    fresh = local.run(2, lambda r: fly(r, 12, {0: factor * first}))[0][0][-1]
    assert after == fresh  # what a run on this link would have begun with
    _, text, values = said[-1]
    assert f"sync_every {before.sync_every} → {after.sync_every}, because the link gives" in text
    assert values["sync_every"] == after.sync_every and values["rate"] == pytest.approx(factor * first, rel=0.05)
    assert len(said) == 2


@pytest.mark.usefixtures("_machine")
def test_a_model_without_layers_is_cut_as_it_was_planned():
    def loop(reduce):
        torch.manual_seed(0)
        model = nn.ParameterDict({f"w{k}": torch.ones(2**k, 8) for k in range(6)})
        diloco = DiLoCo(model, reduce=Linked(reduce, 1e4))
        diloco.tuning.clock = Clock()  # type: ignore[assignment]
        pilot = autopilot(diloco)
        diloco.join()
        for _ in range(10):
            diloco.step()
        assert pilot is not None and pilot.choice is not None
        return pilot.choice.settings.fragments, len(diloco.fragments)

    (planned, cut), _ = local.run(2, loop)
    assert planned == f"balanced:{cut}"


@pytest.mark.slow
@pytest.mark.usefixtures("_machine")
def test_nothing_changes_on_a_steady_link_nor_when_it_wavers_by_a_fifth():
    """Which the two ranks of a replica share: one that was taken for half as fast would change something."""
    wavering = {step: 0.55 * ENOUGH * (0.85 if step % 80 else 1.2) for step in range(100, 300, 40)}
    (held, said, _), _ = local.run(2, lambda r: fly(r, 300, {0: 0.55 * ENOUGH, **wavering}, ranks=2))
    assert len(set(held[10:])) == 1 and len(said) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("_machine")
def test_without_retune_on_one_replica_all_keep_what_they_have():
    rates = {0: 0.55 * ENOUGH, 110: 0.18 * ENOUGH}
    results = local.run(2, lambda r: fly(r, 330, rates, retune=r.replica == 0))
    assert all(len(set(held[10:])) == 1 for held, _, _ in results)


@pytest.mark.slow
@pytest.mark.usefixtures("_machine")
def test_what_is_kept_is_neither_chosen_nor_changed():
    def loop(reduce):
        model = Tiny()
        optimizer = adamw(model)
        diloco = DiLoCo(model, optimizer, sync_every=40, fragments=Balanced(5), overlap=3, reduce=Linked(reduce, 1e3))
        diloco.tuning.clock = Clock()  # type: ignore[assignment]
        pilot = autopilot(diloco, keep=("sync_every", "fragments", "overlap", "codec"))
        with diloco:
            for _ in steps(model, optimizer, reduce.replica, 1, 200):
                pass
        assert pilot is not None and pilot.choice is not None
        assert set(pilot.choice.reasons.values()) == {"given"}
        return diloco.tuning.held, diloco.overlap, len(diloco.fragments)

    assert local.run(2, loop) == [(Terms(40, "e3m0"), 3, 5)] * 2


def test_the_planner_sees_the_layers_and_what_is_outside_of_them():
    model = Tiny()
    seen = model_of(DiLoCo(model, adamw(model), reduce=Script()))
    assert seen.layers == (272.0,) * 6
    assert seen.parameters == sum(p.numel() for p in model.parameters())
    plain = nn.Linear(8, 8)
    assert model_of(DiLoCo(plain, fragments=Balanced(2), reduce=Script())).parameters == 72


def test_without_a_link_there_is_nothing_to_choose():
    said = []
    diloco = DiLoCo(Tiny(), sync_every=4, reduce=Script())
    assert autopilot(diloco, say=lambda text, values: said.append(text)) is None
    assert said == ["autopilot: with a Script, sync_every, fragments and codec stay as given; overlap=1"]
    with pytest.raises(ConfigError, match=r"keep=\['speed'\]: give any of sync_every, fragments, overlap, codec"):
        autopilot(diloco, keep=["speed"])


@message_of(Mismatch)
def _on_one_replica(rank):
    model = Tiny()
    optimizer = adamw(model)
    diloco = DiLoCo(model, optimizer, sync_every=5, reduce=Collective(timeout=60))
    if rank == 0:
        autopilot(diloco)
    with diloco:
        for _ in steps(model, optimizer, rank, 1, 20):
            pass


def test_an_autopilot_on_one_replica_only_is_refused_on_all():
    for text in run(2, _on_one_replica):
        assert "use the autopilot on all replicas or on none" in text


def _with_ddp(rank):
    """Two replicas of two DDP ranks."""
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    within = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = Tiny()
    wrapped = DistributedDataParallel(model, process_group=within[rank // 2])
    optimizer = adamw(model)
    diloco = DiLoCo(wrapped, optimizer, reduce=Collective(across[rank % 2], ddp_ranks=within[rank // 2]))
    pilot = autopilot(diloco, steps=500)
    with diloco:
        for _ in steps(wrapped, optimizer, rank, 1, 25):
            pass
    assert pilot is not None and pilot.choice is not None
    return asdict(pilot.choice), asdict(pilot._facts), diloco.tuning.held, diloco.overlap, flat(model)


def test_with_ddp_inside_all_ranks_of_all_replicas_take_the_same_settings():
    (choice, facts, held, overlap, weights), *others = run(4, _with_ddp)
    assert held.sync_every == choice["settings"]["sync_every"] < 100
    assert overlap == choice["settings"]["overlap"] and facts["rate"] > 0
    for other in others:
        assert other[:4] == (choice, facts, held, overlap) and torch.equal(other[4], weights)


def _snippet(rank):
    """What the page leaves out: a model, an optimizer, data, a step."""
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    model = Tiny()
    optimizer = adamw(model)
    training = steps(model, optimizer, rank, 1, 25)
    names = {"model": model, "optimizer": optimizer, "data": range(25), "train_step": lambda _: next(training),
             "print": lambda *_: None}  # fmt: skip
    exec(compile(code, "planner.md", "exec"), names)
    pilot = names["pilot"]
    return asdict(pilot.choice), asdict(pilot._facts), names["diloco"].tuning.held, flat(model)


def test_the_loop_on_the_page_measures_and_chooses_over_real_processes():
    (choice, facts, held, weights), (choice_too, facts_too, held_too, weights_too) = run(2, _snippet)
    assert choice == choice_too and facts == facts_too and held == held_too and torch.equal(weights, weights_too)
    assert choice["settings"]["codec"] == "e3m0" and choice["reasons"]["codec"] == "given"
    assert held.sync_every == choice["settings"]["sync_every"]
    assert 0 < facts["round_trip"] < 60 and 1e3 < facts["rate"] < 1e14 and facts["step_seconds"] > 0
