"""What a loop does wrong around DiLoCo that would end in different weights in silence: refused or warned of."""

import atexit
import contextlib
import warnings

import pytest
import torch
from torch import nn

from diloco import Balanced, DiLoCo, DiLoCoError, Mismatch, NotFinite, run_replicas
from diloco.core.hook import lr_of
from diloco.core.outer import Nesterov
from diloco.core.sync import Work
from diloco.exchange import local
from tests.support.commands import Command, ended
from tests.support.fake_reducer import Script, start
from tests.support.models import Tiny, adamw, flat, make, steps, train_steps


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


def extended(model, optimizer):
    model.layers.append(nn.Linear(16, 16))


def adapted(model, optimizer):
    """Like adapters: everything is frozen, and small matrices are added."""
    model.requires_grad_(False)
    model.adapter = nn.Parameter(torch.zeros(2, 16))


def added(model, optimizer):
    model.extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [model.extra]})


def added_to_the_optimizer(model, optimizer):
    optimizer.add_param_group({"params": [torch.ones(3, requires_grad=True)]})


CHANGES = {
    replaced: r"head\.weight is trained but did not exist",
    assigned: r"embedding\.weight and \d+ more are trained but did not exist .*assign=True",
    converted: r"embedding\.weight and \d+ more are trained but did not exist .*conversion",
    unfrozen: r"norm\.weight and 1 more are trained but did not exist .*unfreezing",
    extended: r"parameter layers\.6\.weight and 1 more are trained but did not exist",
    adapted: "parameter adapter is trained but did not exist",
    added: "extra is trained but did not exist",
    added_to_the_optimizer: r"a parameter of shape \(3,\) that the model does not have",
}


def _start(reducer):
    model = Tiny()
    model.norm.requires_grad_(False)
    return make(model, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), sync_every=4, reducer=reducer)


def _leave_after(diloco, match, act):
    try:
        with pytest.raises(DiLoCoError, match=match):
            act()
    finally:
        diloco.leave()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("late", ["join", "send", "finish"])
def test_a_changed_model_or_optimizer_is_noticed_at_join_at_the_next_send_and_in_finish(change, late):
    def loop(reducer):
        model, optimizer, diloco = _start(reducer)
        if late == "send":
            train_steps(model, optimizer, 0, 1, 3)
        elif late == "finish":
            diloco.join()
        change(model, optimizer)
        act = diloco._step if late == "send" else getattr(diloco, late)  # the first send is due after step 4
        _leave_after(diloco, CHANGES[change], act)

    local.run(1, loop)


def test_a_change_that_leaves_all_that_is_trained_known_is_not_refused():
    """Tied or frozen later, converted in place."""

    def loop(reducer):
        model, optimizer, diloco = _start(reducer)
        with diloco:
            for step in steps(model, optimizer, reducer.replica, 1, 12):
                if step == 2:
                    model.head.weight = model.embedding.weight
                if step == 5:
                    model.layers[0].requires_grad_(False)
                if step == 7:
                    model.to(torch.bfloat16)
        return flat(model)

    one, two = local.run(2, loop)
    assert torch.equal(one, two)


def _other_optimizer(reducer):
    model, _, diloco = make(sync_every=4, reducer=reducer)
    diloco.join()
    return model, adamw(model), diloco, "the model has changed and no step was counted"


def _one_of_two_optimizers(reducer):
    model = Tiny()
    body = torch.optim.SGD([p for n, p in model.named_parameters() if "head" not in n], lr=0.1)
    head = torch.optim.SGD(model.head.parameters(), lr=0.1)
    return model, body, DiLoCo(model, [body, head], sync_every=4, reducer=reducer), r"did not \(all\) step"


@pytest.mark.parametrize("of", [_other_optimizer, _one_of_two_optimizers])
def test_an_optimizer_that_never_steps_is_an_error_before_training_would_be_lost(of):
    def loop(reducer):
        model, used, diloco, message = of(reducer)
        train_steps(model, used, 0, 1, 3)
        trained = flat(model)
        _leave_after(diloco, message, diloco.finish)
        assert torch.equal(flat(model), trained)

    local.run(1, loop)


@pytest.mark.parametrize("act", ["anchors", "state_dict"])
def test_training_that_is_not_counted_is_an_error_at_the_first_evaluation_or_save(act):
    def loop(reducer):
        model, _, diloco = make(sync_every=4, reducer=reducer)
        model.load_state_dict(Tiny(1).state_dict())
        diloco.state_dict()  # before it joins, weights may be loaded
        diloco.join()
        with diloco.anchors():  # nothing is trained yet
            pass
        train_steps(model, adamw(model), 0, 1, 1)  # an optimizer that runs no hook, such as SAM
        _leave_after(diloco, "no step was counted", lambda: contextlib.ExitStack().enter_context(diloco.anchors())
                     if act == "anchors" else diloco.state_dict())  # fmt: skip

    local.run(1, loop)


def test_finishing_without_a_step_warns():
    with pytest.warns(UserWarning, match="without a single step.*call step"):
        DiLoCo(Tiny(), None, reducer=Script()).finish()


def test_a_call_of_step_next_to_the_hook_and_a_late_count_are_refused():
    model, optimizer, diloco = make(reducer=Script())
    train_steps(model, optimizer, 0, 1, 3)
    with pytest.raises(DiLoCoError, match="hook already counts"):
        diloco.step()
    with pytest.raises(DiLoCoError, match="call it before every step, or never"):
        diloco.count(10)
    assert diloco.step_count == 3


def test_a_step_before_the_join_is_refused_because_it_has_moved_the_start():
    diloco = DiLoCo(Tiny(), reducer=Script())
    with pytest.raises(DiLoCoError, match="call join"):
        diloco.step()
    diloco.join()
    diloco.step()
    diloco.load_state_dict(diloco.state_dict())
    with pytest.raises(DiLoCoError, match="call join"):
        diloco.step()


def test_an_optimizer_counts_once_though_it_is_listed_twice_or_calls_the_step_that_it_inherits():
    class Inherits(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = Tiny()
    for kind in (torch.optim.SGD, Inherits):  # the hooks are put into each class once it is used
        optimizer = kind(model.parameters(), lr=0.1)
        with DiLoCo(model, [optimizer, optimizer], reducer=Script()) as diloco:
            train_steps(model, optimizer, 0, 1, 3)
            assert diloco.step_count == 3


def test_anchors_before_the_join_are_the_weights_that_were_loaded():
    model, loaded = Tiny(seed=0), Tiny(seed=1)
    diloco = DiLoCo(model, adamw(model), reducer=Script())
    model.load_state_dict(loaded.state_dict())
    with diloco.anchors():
        assert torch.equal(flat(model), flat(loaded))


def test_a_last_sync_that_was_interrupted_is_not_made_again():
    class Interrupted(Script):
        def drain(self, seconds=None):
            raise KeyboardInterrupt

    model, optimizer, diloco = make(reducer=(script := Interrupted()))
    train_steps(model, optimizer, 0, 1, 3)
    with pytest.raises(KeyboardInterrupt):
        diloco.finish()
    with pytest.raises(DiLoCoError, match="has left"):
        diloco.finish()
    assert not script.sent


def test_a_rate_that_is_a_tensor_is_summed_without_rounding_it():
    optimizer = torch.optim.AdamW(Tiny().parameters(), lr=torch.tensor(3e-4), foreach=False)
    work = sum((Work(lr_sum=lr_of([optimizer]), steps=1) for _ in range(100)), Work(lr_sum=64.0))
    assert float(work.lr_sum) - 64 == pytest.approx(100 * 3e-4, rel=1e-6)


def test_a_step_after_finish_warns_once_and_a_new_diloco_ends_the_warning():
    def loop(reducer):
        model = Tiny()
        optimizer = adamw(model)
        for _ in range(2):
            with DiLoCo(model, optimizer, sync_every=4, reducer=reducer):
                train_steps(model, optimizer, 0, 1, 4)
        with pytest.warns(RuntimeWarning, match=r"stepped after DiLoCo left .* drift apart. Create a new DiLoCo"):
            optimizer.step()
        optimizer.step()  # a warning is an error in tests

    local.run(1, loop)


def test_steps_without_a_single_token_are_warned_of():
    def loop(reducer, tokens):
        _, optimizer, diloco = make(sync_every=4, fragments=Balanced(1), reducer=reducer)
        with diloco:
            for step in range(9):
                diloco.count(tokens(reducer.replica, step))
                optimizer.step()

    with pytest.warns(UserWarning, match=r"count\(\) got 0 tokens on all replicas so far"):
        local.run(2, lambda reducer: loop(reducer, lambda replica, step: 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tokens in (lambda replica, step: 7 * (step == 0), lambda replica, step: 7 * replica):
            local.run(2, lambda reducer, tokens=tokens: loop(reducer, tokens))  # some rounds or replicas have tokens
        diloco, step = start(Script())
        step()  # steps count as work
        diloco.finish()


def test_nan_in_a_buffer_at_the_end_leaves_the_parameters_equal_and_names_the_buffer():
    def loop(reducer):
        model = nn.Sequential(Tiny(reducer.replica), nn.BatchNorm1d(3))
        diloco = DiLoCo(model, reducer=reducer, fragments=Balanced(2))
        diloco.join()
        diloco.step()
        if reducer.replica:
            model[1].running_mean[1] = float("nan")
        message = r"running_mean on replica 1\. This is a buffer\. The parameters are synced"
        with pytest.raises(NotFinite, match=message):
            diloco.finish()
        return flat(model)

    one, two = local.run(2, loop)
    assert torch.equal(one, two)


@pytest.mark.parametrize("act", [
    lambda diloco, optimizer: diloco.finish(),
    lambda diloco, optimizer: diloco.anchors().__enter__(),
    lambda diloco, optimizer: optimizer.step(),
])  # fmt: skip
def test_nothing_that_needs_the_local_values_is_done_inside_anchors_and_they_come_back(act):
    def loop(reducer):
        model, optimizer, diloco = make(sync_every=4, reducer=reducer)
        with diloco:
            train_steps(model, optimizer, reducer.replica, 1, 2)
            before = flat(model)
            with diloco.anchors(), pytest.raises(DiLoCoError, match=r"inside anchors\(\) the model holds the anchors"):
                act(diloco, optimizer)
            assert torch.equal(flat(model), before)
        return flat(model)

    one, two = local.run(2, loop)
    assert torch.equal(one, two)


def test_an_interrupt_while_the_anchors_are_written_leaves_the_local_values():
    model, optimizer, diloco = make(sync_every=4, reducer=Script())
    diloco.join()
    train_steps(model, optimizer, 0, 1, 2)
    before, reshard = flat(model), diloco.replica.reshard

    def interrupted():
        diloco.replica.reshard = reshard
        raise KeyboardInterrupt

    diloco.replica.reshard = interrupted
    with pytest.raises(KeyboardInterrupt), diloco.anchors():
        pass
    assert torch.equal(flat(model), before)
    diloco.leave()


def test_a_replica_may_leave_inside_its_with_block():
    model, optimizer, diloco = make(sync_every=4, reducer=Script())
    with diloco:
        train_steps(model, optimizer, 0, 1, 2)
        diloco.leave()
    assert diloco.reducer.left == 1


def test_replicas_in_one_process_that_resume_out_of_step_are_refused_as_by_the_collective():
    """Both send round 1 of both fragments, but in a different order, which only the collective cannot undo."""

    def loop(reducer):
        model, optimizer, diloco = make(sync_every=6, overlap=5, fragments=Balanced(2), reducer=reducer)
        diloco.replica.work = Work(steps=8 * reducer.replica)
        train_steps(model, optimizer, reducer.replica, 1, 30)

    with pytest.raises(Mismatch, match="replica 1 sends round 1 of fragment 1 while replica 0"):
        local.run(2, loop)


class Watched(Nesterov):
    def step(self, anchor, delta, state, stage):
        assert not torch.compiler.is_compiling()
        super().step(anchor, delta, state, stage)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in the compiler itself
def test_a_compiled_optimizer_step_does_not_compile_the_outer_step():
    def loop(reducer):
        torch._dynamo.reset()
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, optimizer, sync_every=2, outer=Watched(), reducer=reducer) as diloco:
            step = torch.compile(optimizer.step, backend="eager")
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            for _ in range(5):
                model(torch.ones(1, 3)).sum().backward()
                step()
            return diloco.step_count, torch._dynamo.utils.counters["stats"]["unique_graphs"] - before

    assert local.run(1, loop) == [(5, 1)]  # the only graph is the optimizer's own


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


def test_schedule_free_modes_do_not_move_the_anchors_and_the_weights_agree_after_finish():
    def loop(reducer):
        model, optimizer, diloco = make(optimizer=lambda m: ScheduleFree(m.parameters()), sync_every=4, reducer=reducer)
        with diloco:
            train_steps(model, optimizer, reducer.replica, 1, 9)
            before = flat(model)
            with diloco.anchors():
                optimizer.eval()
                evaluated = flat(model)
            optimizer.train()  # like a loop before its next step
            assert torch.equal(flat(model), before)
        optimizer.eval()  # what a user does next: nothing is left to do
        return evaluated, flat(model)

    (evaluated, final), (evaluated_too, final_too) = local.run(2, loop)
    assert torch.equal(evaluated, evaluated_too) and torch.equal(final, final_too)


def _end(name):
    """Train, call the method of DiLoCo if there is one of that name, and end as an interpreter does."""

    def loop(reducer):
        model, optimizer, diloco = make(sync_every=5, reducer=reducer)
        train_steps(model, optimizer, 0, 1, 3)
        getattr(diloco, name, lambda: None)()
        return diloco

    kept = run_replicas(1, loop)
    atexit._run_exitfuncs()
    del kept


@pytest.mark.slow
def test_a_process_that_ends_without_finish_is_warned_of(tmp_path):
    ends = [ended(Command(tmp_path, _end, name)) for name in ("none", "finish", "leave", "state_dict")]
    assert [code for code, _, _ in ends] == [0] * 4, ends
    text = "ended without finish(), so the replicas end with different weights"
    assert [text in err for _, _, err in ends] == [True, False, False, True]
