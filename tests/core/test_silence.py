"""What would end in different weights on the replicas, and no word about it: each is refused, warned of, or agrees."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from diloco import Bucket, Collective, ConfigError, DiLoCo, DiLoCoError
from diloco.reduce import local
from tests.support.models import Tiny, adamw, flat, loss_of, steps
from tests.support.processes import run


def replaced(model, optimizer):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def assigned(model, optimizer):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def converted(model, optimizer):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.to(torch.float64)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def unfrozen(model, optimizer):
    model.norm.requires_grad_(True)


def added(model, optimizer):
    model.extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [model.extra]})


def added_to_the_optimizer(model, optimizer):
    optimizer.add_param_group({"params": [torch.ones(3, requires_grad=True)]})


CHANGES = {
    replaced: r"head\.weight is trained, but not there when DiLoCo was made",
    assigned: r"embedding\.weight and \d+ more are trained, but not there .*assign=True",
    converted: r"embedding\.weight and \d+ more are trained, but not there .*conversion",
    unfrozen: r"norm\.weight and 1 more are trained, but not there .*unfreezing",
    added: "extra is trained, but not there",
    added_to_the_optimizer: r"a parameter of shape \(3,\) that the model does not have",
}


def _start(reduce):
    model = Tiny()
    model.norm.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, DiLoCo(model, optimizer, sync_every=4, overlap=1, reduce=reduce)


def _leave_after(diloco, match, act):
    try:
        with pytest.raises(DiLoCoError, match=match):
            act()
    finally:
        diloco.leave()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_parameter_that_is_not_known_is_noticed_at_join_before_a_send_and_in_finish(change):
    def at_join(reduce):
        model, optimizer, diloco = _start(reduce)
        change(model, optimizer)
        _leave_after(diloco, CHANGES[change], diloco.join)

    def before_a_send(reduce):
        model, optimizer, diloco = _start(reduce)
        diloco.join()
        change(model, optimizer)

        def train():
            for _ in range(8):
                diloco._step()

        _leave_after(diloco, CHANGES[change], train)
        assert diloco.step_count <= 4  # at the first send after it, not at the end

    def in_finish(reduce):
        model, optimizer, diloco = _start(reduce)
        diloco.join()
        change(model, optimizer)
        _leave_after(diloco, CHANGES[change], diloco.finish)

    for loop in (at_join, before_a_send, in_finish):
        local.run(1, loop)


def test_what_changes_nothing_for_the_sync_is_not_refused():
    """Tied or frozen later, converted in place: all that is trained is still known."""

    def loop(reduce):
        model, optimizer, diloco = _start(reduce)
        with diloco:
            for step in steps(model, optimizer, reduce.replica, 1, 12):
                if step == 2:
                    model.head.weight = model.embedding.weight
                if step == 5:
                    model.layers[0].requires_grad_(False)
                if step == 7:
                    model.to(torch.bfloat16)
        return flat(model)

    one, two = local.run(2, loop)
    assert torch.equal(one, two)


def test_an_optimizer_over_copies_of_the_parameters_is_refused():
    model = Tiny()
    optimizer = torch.optim.SGD([p.detach().clone().requires_grad_(True) for p in model.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match=r"holds no parameter of this model: make it from model\.parameters"):
        local.run(1, lambda reduce: DiLoCo(model, optimizer, reduce=reduce).join())


def test_an_optimizer_that_never_steps_is_an_error_before_training_would_be_lost():
    def other(reduce):
        model = Tiny()
        given, used = adamw(model), adamw(model)
        diloco = DiLoCo(model, given, sync_every=4, reduce=reduce)
        diloco.join()
        for _ in steps(model, used, 0, 1, 3):
            pass
        trained = flat(model)
        _leave_after(diloco, "the model has changed and no step was counted", diloco.finish)
        assert torch.equal(flat(model), trained)

    def one_of_two(reduce):
        model = Tiny()
        body = torch.optim.SGD([p for n, p in model.named_parameters() if "head" not in n], lr=0.1)
        head = torch.optim.SGD(model.head.parameters(), lr=0.1)
        diloco = DiLoCo(model, [body, head], sync_every=4, reduce=reduce)
        list(steps(model, body, 0, 1, 3))
        _leave_after(diloco, r"have not \(all\) stepped", diloco.finish)

    for loop in (other, one_of_two):
        local.run(1, loop)


def test_a_call_of_step_beside_the_hook_is_refused():
    def loop(reduce):
        model, optimizer, diloco = _start(reduce)
        with diloco:
            list(steps(model, optimizer, 0, 1, 3))
            with pytest.raises(DiLoCoError, match="hook already counts"):
                diloco.step()
        return diloco.step_count

    assert local.run(1, loop) == [3]


@pytest.mark.parametrize("act", ["anchors", "state_dict"])
def test_training_that_is_not_counted_is_an_error_at_the_first_evaluation_or_save(act):
    def loop(reduce):
        model = Tiny()
        given, used = adamw(model), adamw(model)  # as with SAM, whose two calls run no hook
        diloco = DiLoCo(model, given, sync_every=4, reduce=reduce)
        model.load_state_dict(Tiny(1).state_dict())
        diloco.state_dict()  # before it joins, weights may be loaded
        diloco.join()
        with diloco.anchors():  # nothing is trained yet
            pass
        list(steps(model, used, 0, 1, 1))
        _leave_after(diloco, "no step was counted", lambda: contextlib.ExitStack().enter_context(diloco.anchors())
                     if act == "anchors" else diloco.state_dict())  # fmt: skip

    local.run(1, loop)


def test_a_step_after_finish_warns_once_and_a_new_diloco_ends_the_warning():
    def loop(reduce):
        model = Tiny()
        optimizer = adamw(model)
        for _ in range(2):
            with DiLoCo(model, optimizer, sync_every=4, reduce=reduce):
                list(steps(model, optimizer, 0, 1, 4))
        with pytest.warns(RuntimeWarning, match=r"steps after DiLoCo has left .* drift apart. Make a new DiLoCo"):
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()

    local.run(1, loop)


class Accelerated(torch.optim.Optimizer):
    """An optimizer by inheritance only, as accelerate's wrapper: __init__ of Optimizer is never called."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)


def test_a_wrapper_without_hooks_is_unwrapped():
    def loop(reduce):
        model = Tiny()
        wrapped = Accelerated(Accelerated(adamw(model)))
        with DiLoCo(model, wrapped, sync_every=4, reduce=reduce) as diloco:
            for step in range(1, 6):
                loss_of(model, reduce.replica, step).backward()
                wrapped.step()
                model.zero_grad()
        return flat(model), diloco.step_count

    (one, counted), (two, _) = local.run(2, loop)
    assert torch.equal(one, two) and counted == 5


def test_a_wrapper_that_cannot_be_opened_is_refused_with_what_to_give():
    class Closed(torch.optim.Optimizer):
        def __init__(self):
            pass

    class Scheduler:
        optimizer = None

    with pytest.raises(ConfigError, match="give the optimizer that it wraps"):
        DiLoCo(Tiny(), Closed())
    with pytest.raises(ConfigError, match=r"optimizer is a Scheduler.*Give its \.optimizer"):
        DiLoCo(Tiny(), Scheduler())  # pyright: ignore


def test_lbfgs_is_refused_with_the_reason():
    model = Tiny()
    with pytest.raises(ConfigError, match=r"LBFGS measures the curvature.*Give an optimizer that works with gradients"):
        DiLoCo(model, torch.optim.LBFGS(model.parameters()))


class ScheduleFree(torch.optim.Optimizer):
    """SGD with weights of its own, z, in the state: the model holds y = (z + x) / 2 in training, x in evaluation."""

    def __init__(self, params):
        super().__init__(params, {"train_mode": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                z.sub_(p.grad, alpha=0.1)
                p.lerp_(z, 0.3)

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] else ():
                p.mul_(2).sub_(self.state[p]["z"])
            group["train_mode"] = False

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            for p in () if group["train_mode"] else group["params"]:
                p.add_(self.state[p]["z"]).div_(2)
            group["train_mode"] = True


def test_schedule_free_modes_change_nothing_in_an_evaluation_of_the_anchors():
    def loop(reduce):
        model = Tiny()
        optimizer = ScheduleFree(model.parameters())
        with DiLoCo(model, optimizer, sync_every=4, overlap=1, reduce=reduce) as diloco:
            list(steps(model, optimizer, reduce.replica, 1, 9))
            before = flat(model)
            with diloco.anchors():
                optimizer.eval()
                evaluated = flat(model)
            optimizer.train()  # as a loop does before its next step
            assert torch.equal(flat(model), before)
        return evaluated

    one, two = local.run(2, loop)
    assert torch.equal(one, two)


def test_schedule_free_weights_agree_after_finish():
    def loop(reduce):
        model = Tiny()
        optimizer = ScheduleFree(model.parameters())
        with DiLoCo(model, optimizer, sync_every=4, overlap=1, reduce=reduce):
            for _ in steps(model, optimizer, reduce.replica, 1, 9):
                pass
        optimizer.eval()  # what a user does next: nothing is left to do
        return flat(model)

    one, two = local.run(2, loop)
    assert torch.equal(one, two)


def _ddp_over_replicas(rank, folder):
    said = []
    inside, outside = Tiny(), Tiny()
    wrapped = [DistributedDataParallel(inside), DistributedDataParallel(outside)]
    for model in (inside, wrapped[1]):  # frameworks hand out the model inside; loops of one's own the wrapper
        with pytest.raises(ConfigError) as caught:
            DiLoCo(model, adamw(model)).join()
        said.append(str(caught.value))
    with pytest.raises(ConfigError, match=r"over the ranks \[0, 1\] with a Bucket that is told of none: .*ddp_ranks="):
        DiLoCo(inside, adamw(inside), reduce=Bucket(str(folder), f"m{rank}")).join()
    alone = [dist.new_group([each]) for each in range(2)]
    model = DistributedDataParallel(Tiny(), process_group=alone[rank])  # for a framework that insists on DDP
    DiLoCo(model, adamw(model)).join()
    return said


@pytest.mark.slow
def test_ddp_over_the_ranks_that_are_joined_is_refused_with_the_cure(tmp_path):
    for one, two in run(2, _ddp_over_replicas, tmp_path):
        assert "averages gradients over the ranks [0, 1] at every step, and DiLoCo joins the same ranks" in one
        assert "Leave DDP out" in one and one == two


def _hsdp_over_replicas(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = Tiny()
    fully_shard(model, mesh=mesh)
    reduce = Collective(mesh.get_group("replica"), shards=mesh.get_group("shard"))
    with pytest.raises(ConfigError) as caught:
        DiLoCo(model, adamw(model), reduce=reduce).join()
    return str(caught.value)


@pytest.mark.slow
def test_hsdp_over_the_replica_dimension_is_refused_with_the_cure():
    for said in run(4, _hsdp_over_replicas):
        assert "sharded or copied over the ranks [0, 1, 2, 3], and DiLoCo joins [" in said
        assert 'fully_shard(model, mesh=mesh["shard"])' in said
