"""The autopilot in the loop: two replicas in one process, a link and a clock that are numbers."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diloco import E3M0, Balanced, Collective, ConfigError, DiLoCo, Float32, Mismatch
from diloco import pilot as pilots
from diloco.pilot import autopilot, model_of
from diloco.reduce import Round, local
from diloco.reduce.link import LinkSpeed
from diloco.speed import Speed
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


@pytest.fixture
def _machine(monkeypatch):
    monkeypatch.setattr(pilots.speed, "known", lambda: SPEED)


@pytest.mark.usefixtures("_machine")
def test_a_model_without_layers_is_cut_as_it_was_planned():
    def loop(reduce):
        torch.manual_seed(0)
        model = nn.ParameterDict({f"w{k}": torch.ones(2**k, 8) for k in range(6)})
        diloco = DiLoCo(model, reduce=Linked(reduce, 1e4))
        diloco.pace.clock = Clock()  # type: ignore[assignment]
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
def test_what_is_kept_is_not_chosen():
    def loop(reduce):
        model = Tiny()
        optimizer = adamw(model)
        diloco = DiLoCo(model, optimizer, sync_every=40, fragments=Balanced(5), overlap=3, reduce=Linked(reduce, 1e3))
        diloco.pace.clock = Clock()  # type: ignore[assignment]
        pilot = autopilot(diloco, keep=("sync_every", "fragments", "overlap", "codec"))
        with diloco:
            for _ in steps(model, optimizer, reduce.replica, 1, 60):
                pass
        assert pilot is not None and pilot.choice is not None
        assert set(pilot.choice.reasons.values()) == {"given"}
        return diloco.schedule.sync_every, diloco.codec, diloco.overlap, len(diloco.fragments)

    assert local.run(2, loop) == [(40, E3M0(), 3, 5)] * 2


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


@pytest.mark.slow
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
    return asdict(pilot.choice), asdict(pilot.facts), diloco.schedule.sync_every, diloco.overlap, flat(model)


@pytest.mark.slow
def test_with_ddp_inside_all_ranks_of_all_replicas_take_the_same_settings():
    (choice, facts, sync_every, overlap, weights), *others = run(4, _with_ddp)
    assert sync_every == choice["settings"]["sync_every"] < 100
    assert overlap == choice["settings"]["overlap"] and facts["rate"] > 0
    for other in others:
        assert other[:4] == (choice, facts, sync_every, overlap) and torch.equal(other[4], weights)


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
    return asdict(pilot.choice), asdict(pilot.facts), names["diloco"].schedule.sync_every, flat(model)


@pytest.mark.slow
def test_the_loop_on_the_page_measures_and_chooses_over_real_processes():
    (choice, facts, sync_every, weights), (choice_too, facts_too, sync_every_too, weights_too) = run(2, _snippet)
    assert (choice, facts, sync_every) == (choice_too, facts_too, sync_every_too) and torch.equal(weights, weights_too)
    assert choice["settings"]["codec"] == "e3m0" and choice["reasons"]["codec"] == "given"
    assert sync_every == choice["settings"]["sync_every"]
    assert 0 < facts["round_trip"] < 60 and 1e3 < facts["rate"] < 1e14 and facts["step_seconds"] > 0


def test_before_the_first_round_fragments_can_be_cut_anew_without_a_trace():
    """As if the run had begun with them: nothing was sent, and the anchors are the start."""
    given = {"sync_every": 12, "fragments": Balanced(4), "overlap": 1, "codec": Float32()}

    def loop(reduce, late):
        model = Tiny()
        optimizer = adamw(model)
        begun = {**given, "sync_every": 100, "fragments": Balanced(2)} if late else given
        diloco = DiLoCo(model, optimizer, reduce=reduce, **begun)
        with diloco:
            for step in steps(model, optimizer, reduce.replica, 1, 40):
                if late and step == 9:
                    diloco.settle_on(**given)
        with pytest.raises(Exception, match="only before the first round"):
            diloco.settle_on(**given)
        return flat(model)

    whole, changed = (local.run(2, lambda r, late=late: loop(r, late)) for late in (False, True))
    assert torch.equal(whole[0], changed[0]) and torch.equal(whole[1], changed[1])
