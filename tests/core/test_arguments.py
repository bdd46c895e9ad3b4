"""What DiLoCo is created with: a wrong model, optimizer, setting or reducer is refused, with what to pass instead."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from diloco import (
    SGD,
    Balanced,
    Bucket,
    Collective,
    ConfigError,
    DiLoCo,
    Float32,
    Mismatch,
    run_replicas,
)
from diloco.core.outer import denormals
from diloco.exchange import local
from diloco.exchange.reducer import Identity
from tests.support.fake_reducer import Script
from tests.support.models import Tiny, adamw, train
from tests.support.processes import message_of, run
from tests.support.ranks import replica_mesh


class Closed(torch.optim.Optimizer):
    """A wrapper by inheritance only, which does not show what it wraps."""

    def __init__(self):
        pass


class Scheduler:
    optimizer = None


def _eight_bits():
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2).to(torch.float8_e4m3fn))
    return model


class Ranks(Script):
    identity = Identity("me", ddp_ranks=(0, 1))


@pytest.mark.parametrize(("settings", "message"), [
    ({"model": Tiny().parameters()}, "model is a generator: pass the module itself"),
    ({"model": []}, "an empty list: pass the modules"),
    ({"model": [nn.Linear(2, 2), "head"]}, "model is a str: pass the module itself"),
    ({"model": nn.Linear(2, 2).requires_grad_(False)}, "no parameter of the model has requires_grad"),
    ({"model": _eight_bits()}, r"parameter weight is torch\.float8_e4m3fn: .*16 bits or more"),
    ({"optimizer": Tiny()}, "optimizer is a Tiny: pass a torch.optim.Optimizer"),
    ({"optimizer": Closed()}, "pass the optimizer that it wraps"),
    ({"optimizer": Scheduler()}, r"optimizer is a Scheduler.*Pass its \.optimizer"),
    ({"optimizer": torch.optim.LBFGS(Tiny().parameters())},
     r"LBFGS measures the curvature.*an optimizer that needs only gradients"),
    ({"sync_every": 0}, "sync_every=0: pass a whole number of steps, at least 1"),
    ({"sync_every": 2.5}, "sync_every=2.5: pass a whole number"),
    ({"sync_every": "10"}, "sync_every='10': pass a whole number"),
    ({"overlap": 0.5}, "overlap=0.5 with sync_every=100: pass a whole number"),
    ({"overlap": 100}, "overlap=100 with sync_every=100: .* from 0 .* to 99"),
    ({"overlap": "often"}, "overlap='often' with sync_every=100: pass a whole number"),
    ({"overlap": "auto", "reducer": Ranks()}, 'overlap="auto" with DDP inside a replica.*DDP needs equal weights'),
    ({"keep_local": 1.5}, "keep_local=1.5: pass a number from 0 .* to 1"),
    ({"codec": "e3m0"}, r"codec='e3m0': pass an object such as E3M0\(\)"),
    ({"fragments": 3}, r"fragments=3: pass an object such as Strided\(layers=3\)"),
    ({"outer": SGD}, "outer=<class .*: pass an object"),
    ({"outer": torch.optim.SGD([torch.zeros(1)])}, r"outer is torch\.optim\.SGD.*diloco\.SGD\(lr=1\.0\)"),
    ({"reducer": object()}, r"reducer is a object: pass a reducer, such as Collective\(group\)"),
    ({"reducer": None}, "no process group: call torch.distributed.init_process_group.*torchrun"),
])  # fmt: skip
def test_a_wrong_argument_fails_at_construction_with_what_is_allowed(settings, message):
    with pytest.raises(ConfigError, match=message):
        DiLoCo(**{"model": Tiny(), "reducer": Script()} | settings)


@pytest.mark.parametrize(("act", "message"), [
    (lambda: local.run(0, lambda reducer: None), "replicas=0"),
    (lambda: local.run(print, 2), "pass a whole number of at least 1, then the loop"),
    (lambda: Bucket("folder", "lab", quorum=0), "quorum=0, straggler_timeout=.*: use a quorum of at least 1"),
])  # fmt: skip
def test_a_reducer_refuses_wrong_arguments(act, message):
    with pytest.raises(ConfigError, match=message):
        act()


def _wrong_collectives(rank):
    for arguments in ({"streams": 0}, {"timeout": 0}, {"timeout": -1.0}):
        with pytest.raises(ConfigError, match="at least 1 stream"):
            Collective(**arguments)


@pytest.mark.slow
def test_a_collective_refuses_wrong_arguments():
    run(1, _wrong_collectives)


def test_the_optimizer_must_hold_all_that_is_trained_and_nothing_else():
    model, other = Tiny(), nn.Linear(3, 2)
    copies = [p.detach().clone().requires_grad_(True) for p in model.parameters()]
    for parameters, message in (
        (copies, r"the optimizer holds no parameter of this model: create it from model\.param"),
        (model.layers.parameters(), r"parameter embedding\.weight and 3 more are trained .* in no optimizer"),
        ([*model.parameters(), *other.parameters()], r"shape \(2, 3\) that the model does not have"),
    ):
        with pytest.raises(ConfigError, match=message):
            DiLoCo(model, torch.optim.SGD(parameters), reducer=Script()).join()


def test_all_optimizers_together_hold_the_model_and_may_hold_frozen_parameters():
    model = Tiny()
    model.head.requires_grad_(False)
    rest = [p for name, p in model.named_parameters() if not name.startswith("layers.")]
    both = [torch.optim.SGD(model.layers.parameters()), torch.optim.SGD(rest)]
    DiLoCo(model, both, reducer=Script()).join()


class Accelerated(torch.optim.Optimizer):
    """An optimizer by inheritance only, like accelerate's wrapper: __init__ of Optimizer is never called."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self):
        self.optimizer.zero_grad()


def test_a_wrapper_without_hooks_is_unwrapped():
    def loop(reducer):
        run = train(reducer.replica, 5, optimizer=lambda model: Accelerated(Accelerated(adamw(model))), sync_every=4,
                    reducer=reducer)  # fmt: skip
        return run["weights"], run["steps"]

    (one, counted), (two, _) = local.run(2, loop)
    assert torch.equal(one, two) and counted == 5


def test_a_model_or_reducer_belongs_to_one_diloco_until_that_one_leaves():
    def diloco(model, reducer):
        return DiLoCo(model, reducer=reducer, fragments=Balanced(1))

    model, reducer = nn.Linear(2, 2), Script()
    first, unused = diloco(model, reducer), diloco(model, Script())
    first.join()
    unused.leave()  # it never joined, so the model is not its own
    with pytest.raises(ConfigError, match="this model already has a DiLoCo: finish"):
        diloco(model, Script()).join()
    with pytest.raises(ConfigError, match="already belongs to another DiLoCo"):
        diloco(nn.Linear(2, 2), reducer).join()
    first.step()
    first.finish()
    diloco(model, reducer).join()


def test_one_fragment_is_hinted_at_unless_it_was_asked_for():
    chain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with pytest.warns(UserWarning, match=r"Strided\(layers=3\) makes one fragment .*Balanced\(4\)"):
        DiLoCo(chain, reducer=Script())
    DiLoCo(chain, reducer=Script(), fragments=Balanced(1))


@message_of(Mismatch)
def _differ(rank, settings, widths):
    with DiLoCo(Tiny(width=widths[rank]), None, **settings[rank]):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "widths", "text"), [
    ([{"sync_every": 10}, {"sync_every": 20}], [16, 16], "sync_every is 10 on replica 0, 20 on replica 1"),
    ([{}, {"codec": Float32()}], [16, 16], r"codec is E3M0() on replica 0, Float32() on replica 1"),
    ([{}, {}], [16, 8], "embedding.weight is [50, 16] / [50, 8]"),
    ([{}, {"fragments": Balanced(2)}], [16, 16], "fragments of replica 0 / replica 1"),
])  # fmt: skip
def test_replicas_that_disagree_are_told_which_settings_differ_on_both_sides(settings, widths, text):
    one, two = run(2, _differ, settings, widths)
    assert one == two
    assert text in one and len(one) < 300


def _other_dtype(reducer):
    DiLoCo(Tiny().to(torch.bfloat16 if reducer.replica else torch.float32), reducer=reducer).join()


def _other_frozen_values(reducer):
    model = Tiny(seed=reducer.replica)
    model.embedding.requires_grad_(False)
    DiLoCo(model, reducer=reducer).join()


def _other_denormals(reducer):
    assert denormals() == "kept"
    if reducer.replica == 1 and not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals to zero")
    DiLoCo(Tiny(), reducer=reducer).join()


@pytest.mark.parametrize(("loop", "message"), [
    (_other_dtype, "dtypes of replica 0 / replica 1: .*weight is float32 / bfloat16"),
    (_other_frozen_values, "differ in value, embedding.weight: load the same base model"),
    (_other_denormals, "denormals is kept on replica 0, flushed to zero on replica 1"),
])  # fmt: skip
def test_replicas_that_would_end_unequal_are_refused(loop, message):
    with pytest.raises(Mismatch, match=message):
        local.run(2, loop)


def test_keep_local_may_differ_and_all_end_equal():
    one, two = local.run(2, lambda r: train(r.replica, 10, sync_every=4, keep_local=0.5 * r.replica, reducer=r))
    assert torch.equal(one["weights"], two["weights"])


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


@pytest.mark.parametrize("act", ["saved", "empty"])
def test_a_state_of_another_replica_is_warned_of_and_an_empty_one_refused(act, tmp_path):
    if act == "empty":
        with pytest.raises(Mismatch, match="the saved state is empty"):
            DiLoCo(Tiny(), reducer=Script()).load_state_dict({})
        return

    def of(name):
        return DiLoCo(Tiny(), reducer=Bucket(str(tmp_path), name))

    saved = of("lab").state_dict()
    of("lab").load_state_dict(saved)
    with pytest.warns(UserWarning, match="replica office loads a state that replica lab saved"):
        of("office").load_state_dict(saved)

    def numbered(reducer):
        DiLoCo(Tiny(), reducer=reducer).load_state_dict(saved)  # a member's name says nothing about a number
        state = DiLoCo(Tiny(), reducer=reducer).state_dict()
        state["shard 0 of 1"]["replica"] = 1 - reducer.replica
        with pytest.warns(UserWarning, match="replica . loads a state that replica . saved"):
            DiLoCo(Tiny(), reducer=reducer).load_state_dict(state)

    run_replicas(2, numbered)


def _ddp_over_replicas(rank, folder):
    inside, outside = Tiny(), Tiny()
    wrapped = [DistributedDataParallel(inside), DistributedDataParallel(outside)]
    messages = []
    for model in (inside, wrapped[1]):  # frameworks hand out the inner model, hand-written loops the wrapper
        with pytest.raises(ConfigError) as caught:
            DiLoCo(model, adamw(model)).join()
        messages.append(str(caught.value))
    with pytest.raises(ConfigError, match=r"over the ranks \[0, 1\] with a Bucket for one process: .*FirstRank"):
        DiLoCo(inside, adamw(inside), reducer=Bucket(str(folder), f"m{rank}")).join()
    alone = [dist.new_group([r]) for r in range(2)]
    model = DistributedDataParallel(Tiny(), process_group=alone[rank])  # for a framework that insists on DDP
    DiLoCo(model, adamw(model)).join()
    return messages


@pytest.mark.slow
def test_ddp_over_the_ranks_that_are_joined_is_refused_with_the_cure(tmp_path):
    for one, two in run(2, _ddp_over_replicas, tmp_path):
        assert "averages gradients over the ranks [0, 1] at every step, and DiLoCo joins the same ranks" in one
        assert "Leave DDP out" in one and one == two


def _sharded_over_replicas(rank):
    mesh, model = replica_mesh(), Tiny()
    fully_shard(model, mesh=mesh)
    with pytest.raises(ConfigError, match=r'reducer=Collective\(mesh.get_group\("replica"\), shards='):
        DiLoCo(model, adamw(model))
    reducer = Collective(mesh.get_group("replica"), shards=mesh.get_group("shard"))
    with pytest.raises(ConfigError) as caught:
        DiLoCo(model, adamw(model), reducer=reducer).join()
    return str(caught.value)


@pytest.mark.slow
def test_shards_without_a_group_or_over_the_replica_dimension_are_refused_with_the_line_to_write():
    for message in run(4, _sharded_over_replicas):
        assert "sharded or copied over the ranks [0, 1, 2, 3], and DiLoCo joins [" in message
        assert 'fully_shard(model, mesh=mesh["shard"])' in message
