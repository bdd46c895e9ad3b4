"""What would go wrong in silence is refused, or said, before it costs a run."""

import warnings

import pytest
import torch
from torch import nn

from diloco import Balanced, ConfigError, DiLoCo, DiLoCoError, Mismatch, NotFinite
from diloco.module import find_layers
from diloco.outer import Nesterov, denormals
from diloco.reduce import local
from tests.support.fake_reduce import Script, start
from tests.support.models import Tiny, adamw, flat, steps
from tests.support.processes import message_of, run


class Watched(Nesterov):
    """Says whether the compiler traces it."""

    def step(self, anchor, delta, state, stage):
        assert not torch.compiler.is_compiling()
        super().step(anchor, delta, state, stage)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in the compiler itself
def test_a_compiled_optimizer_step_does_not_compile_the_outer_step():
    def loop(reduce):
        torch._dynamo.reset()
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, optimizer, sync_every=2, outer=Watched(), reduce=reduce) as diloco:
            step = torch.compile(optimizer.step, backend="eager")
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            for _ in range(5):
                model(torch.ones(1, 3)).sum().backward()
                step()
            return diloco.step_count, torch._dynamo.utils.counters["stats"]["unique_graphs"] - before

    ((count, graphs),) = local.run(1, loop)
    assert count == 5
    assert graphs == 1  # the optimizer's own


def test_replicas_of_different_dtypes_are_refused_for_they_would_end_unequal():
    def loop(reduce):
        model = Tiny().to(torch.bfloat16 if reduce.replica else torch.float32)
        with DiLoCo(model, reduce=reduce):
            pass

    with pytest.raises(Mismatch, match=r"dtypes of replica 0 / replica 1: .*weight is float32 / bfloat16"):
        local.run(2, loop)


def test_keep_local_may_differ_and_all_end_equal():
    def loop(reduce):
        model = Tiny()
        optimizer = adamw(model)
        with DiLoCo(model, optimizer, sync_every=4, keep_local=0.5 * reduce.replica, reduce=reduce):
            for _ in steps(model, optimizer, reduce.replica, 1, 10):
                pass
        return flat(model)

    one, two = local.run(2, loop)
    assert torch.equal(one, two)


def test_replicas_that_treat_denormals_differently_are_refused():
    def loop(reduce):
        assert denormals() == "kept"
        if reduce.replica == 1 and not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush denormals to zero")
        with DiLoCo(Tiny(), reduce=reduce):
            pass

    with pytest.raises(Mismatch, match="denormals is kept on replica 0, flushed to zero on replica 1"):
        local.run(2, loop)


def test_one_reducer_for_two_models_is_refused():
    script = Script()
    diloco = DiLoCo(nn.Linear(1, 1), reduce=script)
    diloco.step()
    with pytest.raises(ConfigError, match="serves another DiLoCo: make one for each"):
        DiLoCo(nn.Linear(1, 1), reduce=script).join()
    diloco.finish()
    DiLoCo(nn.Linear(1, 1), reduce=script).join()  # the first one has left


@message_of(Mismatch)
def _crosswise(rank):
    first, second = DiLoCo(Tiny(1)), DiLoCo(Tiny(2))
    for diloco in (first, second) if rank == 0 else (second, first):
        diloco.join()


@pytest.mark.slow
def test_two_models_that_are_joined_crosswise_are_not_exchanged():
    one, two = run(2, _crosswise)
    assert one == two
    assert "place in the order of construction is 1 on replica 0, 2 on replica 1" in one


def test_steps_without_a_single_token_are_said():
    def loop(reduce, tokens=lambda replica, step: 0):
        model = Tiny()
        optimizer = adamw(model)
        with DiLoCo(model, optimizer, sync_every=4, fragments=Balanced(1), reduce=reduce) as diloco:
            for step in range(9):
                diloco.count(tokens(reduce.replica, step))
                optimizer.step()

    with pytest.warns(UserWarning, match=r"count\(\) has had 0 tokens on all replicas so far"):
        local.run(2, loop)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tokens in (lambda replica, step: 7 * (step == 0), lambda replica, step: 7 * replica):
            local.run(2, lambda reduce, tokens=tokens: loop(reduce, tokens))  # some rounds, or some replicas, have any
        diloco, step = start(Script())
        step()  # steps count as work
        diloco.finish()


def test_inf_in_a_buffer_at_the_end_leaves_the_parameters_equal_and_names_the_buffer():
    def loop(reduce):
        model = nn.Sequential(Tiny(reduce.replica), nn.BatchNorm1d(3))
        diloco = DiLoCo(model, reduce=reduce, fragments=Balanced(2))
        diloco.step()
        if reduce.replica:
            model[1].running_mean[1] = float("nan")
        with pytest.raises(
            NotFinite, match=r"running_mean on replica 1\. This is a buffer\. The parameters are synced"
        ):
            diloco.finish()
        return flat(model)

    one, two = local.run(2, loop)
    assert torch.equal(one, two)


def test_parameters_of_eight_bits_are_refused_at_construction():
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2).to(torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match=r"parameter weight is torch\.float8_e4m3fn: .*16 bits or more"):
        DiLoCo(model, reduce=Script())


class Counted(dict):
    """Parameters by name; counts how often one is looked at."""

    looks = 0

    def __iter__(self):
        for name in super().__iter__():
            self.looks += 1
            yield name


def test_finding_the_layers_looks_at_each_name_once_however_many_layers_there_are():
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(1, 1) for _ in range(200))})
    names = Counted(model.named_parameters())
    layers = find_layers(model, names)
    assert layers == [[f"layers.{i}.weight", f"layers.{i}.bias"] for i in range(200)]
    assert names.looks <= 4 * len(names)


def test_replicas_in_one_process_that_resume_out_of_step_are_refused_as_by_the_collective():
    """Both send round 1 of both fragments, but in another order, which only the collective cannot undo."""

    def loop(reduce):
        model = Tiny()
        optimizer = adamw(model)
        diloco = DiLoCo(model, optimizer, sync_every=6, overlap=5, fragments=Balanced(2), reduce=reduce)
        diloco.step_count = 8 * reduce.replica
        with diloco:
            for _ in steps(model, optimizer, reduce.replica, 1, 30):
                pass

    with pytest.raises(Mismatch, match="fragment 1, round 1 is send 2 of replica 0, 1 of replica 1: they resumed from"):
        local.run(2, loop)


@pytest.mark.parametrize("act", [
    lambda diloco, optimizer: diloco.finish(),
    lambda diloco, optimizer: diloco.anchors().__enter__(),
    lambda diloco, optimizer: optimizer.step(),
])  # fmt: skip
def test_nothing_that_needs_the_local_values_is_done_inside_anchors_and_they_come_back(act):
    def loop(reduce):
        model = Tiny()
        optimizer = adamw(model)
        with DiLoCo(model, optimizer, sync_every=4, reduce=reduce) as diloco:
            for _ in steps(model, optimizer, reduce.replica, 1, 2):
                pass
            before = flat(model)
            with diloco.anchors(), pytest.raises(DiLoCoError, match=r"inside anchors\(\) the model holds the anchors"):
                act(diloco, optimizer)
            assert torch.equal(flat(model), before)
        return flat(model)

    one, two = local.run(2, loop)
    assert torch.equal(one, two)
