"""Save at any step, also with rounds under way; resume; the trajectory is the same (invariant 7)."""

import copy
import io

import pytest
import torch
from torch import nn

from diloco import SGD, Balanced, DiLoCo, Mismatch, Sequential, Strided
from diloco.exchange import local
from tests.support.fake_reducer import Script
from tests.support.models import Tiny, anchors, fingerprints, flat, make, steps, train_steps
from tests.support.processes import run

SETTINGS = {"sync_every": 8, "overlap": 5, "fragments": Balanced(4), "keep_local": 0.25}  # two or three in flight


def _save(model, optimizer, diloco):
    buffer = io.BytesIO()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "diloco": diloco.state_dict()}
    torch.save(state, buffer)
    return buffer.getvalue()


def _load(saved, model, optimizer, diloco):
    state = torch.load(io.BytesIO(saved), weights_only=True)
    for part, name in ((model, "model"), (optimizer, "optimizer"), (diloco, "diloco")):
        part.load_state_dict(state[name])


def _resume(saved, replica, first, last, reducer=None):
    model, optimizer, diloco = made = make(reducer=reducer, **SETTINGS)
    _load(saved, *made)
    with diloco:
        train_steps(model, optimizer, replica, first, last)
    return flat(model), anchors(diloco)


def _uninterrupted(replica, last, reducer=None):
    """One run that saves after every step."""
    model, optimizer, diloco = made = make(reducer=reducer, **SETTINGS)
    saves = {}
    with diloco:
        for step in steps(model, optimizer, replica, 1, last):
            saves[step] = _save(*made)
    return flat(model), anchors(diloco), saves


def _in_processes(rank, at):
    weights, anchor, saves = _uninterrupted(rank, 30)
    fragments = torch.load(io.BytesIO(saves[at]))["diloco"]["shard 0 of 1"]["fragments"].values()
    again, anchor_again = _resume(saves[at], rank, at + 1, 30)
    same = torch.equal(weights, again) and torch.equal(anchor, anchor_again)
    return same, sum(bool(fragment["flight"]) for fragment in fragments)


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 13, 21])
def test_7_a_resumed_run_on_real_processes_is_the_uninterrupted_one_bit_for_bit(at):
    for same, in_flight in run(2, _in_processes, at):
        assert same
        assert (in_flight > 1) == (at > 10)


@pytest.mark.slow
def test_7_saving_at_any_step_resumes_to_the_same_trajectory():
    """Before the first send, after it, and at each step of a whole sync_every with two or three in flight."""
    last = 21
    whole = local.run(2, lambda reducer: _uninterrupted(reducer.replica, last, reducer))
    for at in range(1, last):
        again = local.run(2, lambda r: _resume(whole[r.replica][2][at], r.replica, at + 1, last, r))  # noqa: B023
        for (weights, anchor), (expected, expected_anchor, _) in zip(again, whole, strict=True):
            assert torch.equal(anchor, expected_anchor), at
            assert torch.equal(weights, expected), at


def _apart(replica, saves, steps_done, reducer=None):
    """Resume a replica from its own step."""
    model, optimizer, diloco = made = make(reducer=reducer, **SETTINGS)
    _load(saves[replica][steps_done[replica]], *made)
    before, history = diloco.indices, {}
    with diloco:
        after, counted = diloco.indices, diloco._fragments[0].counted.amount
        for _ in steps(model, optimizer, replica, steps_done[replica] + 1, 30):
            history |= fingerprints(diloco)
    return before, after, history, flat(model), counted


@pytest.mark.slow
@pytest.mark.parametrize("in_processes", [False, True])
@pytest.mark.parametrize("last", [13, 21])  # fragment 0, sent after 8 and 16, is applied 5 steps later
def test_8_a_replica_that_comes_back_a_round_behind_gets_it_from_one_that_is_ahead(last, in_processes):
    """Replica 1 lost the last step, at which a round was applied."""
    saves = [r[2] for r in local.run(2, lambda reducer: _uninterrupted(reducer.replica, 24, reducer))]
    done = [last, last - 1]
    parts = torch.load(io.BytesIO(saves[0][last]))["diloco"]["shard 0 of 1"]["fragments"]
    assert parts["0"]["outer"].any()  # otherwise there is no outer state to give
    if in_processes:
        ahead, behind = run(2, _apart, [{last: saves[0][last]}, {last - 1: saves[1][last - 1]}], done)
    else:
        ahead, behind = local.run(2, lambda reducer: _apart(reducer.replica, saves, done, reducer))
    assert ahead[4] == last - 5 and behind[4] == last - 1  # its work is given up, so it must not weigh
    assert behind[0] != behind[1] == ahead[1] == ahead[0]
    both = ahead[2].keys() & behind[2].keys()
    assert {k: ahead[2][k] for k in both} == {k: behind[2][k] for k in both}
    assert torch.equal(ahead[3], behind[3])


@pytest.mark.slow
def test_8_replicas_that_come_back_a_step_apart_send_again_in_the_order_of_the_first_time():
    """After step 24 fragments 2, 3 and 0 are in flight, in this order; after step 23 only 2 and 3."""
    saves = [r[2] for r in local.run(2, lambda reducer: _uninterrupted(reducer.replica, 24, reducer))]
    one, two = run(2, _apart, [{24: saves[0][24]}, {23: saves[1][23]}], [24, 23])
    assert torch.equal(one[3], two[3])


def test_a_state_of_another_model_is_refused():
    def of(width=16, **settings):
        return DiLoCo(Tiny(width=width), reducer=Script(), **SETTINGS | settings)

    small = of(width=8).state_dict()
    for target, state, message in (
        (of(width=8), of().state_dict(), r"fragment 0 has \(anchor, outer state\) of \(\d+, \d+\) values in the saved"),
        (of(fragments=Balanced(3)), small, "4 fragments, this model 3"),
        (of(fragments=Strided(3)), of(fragments=Sequential(3)).state_dict(), "fragment 0 holds other parameters"),
        (of(width=8, outer=SGD()), small, "outer optimizer"),
        (of(width=8), {"shard 1 of 2": {}}, "is of shard 1 of 2, this process is shard 0 of 1"),
    ):
        with pytest.raises(Mismatch, match=message):
            target.load_state_dict(state)


def _loaded_while_running(replica, reducer=None):
    model, optimizer, diloco = made = make(reducer=reducer, **SETTINGS)
    saved = b""
    with diloco:
        for step in steps(model, optimizer, replica, 1, 14):
            if step == 11:
                saved = _save(*made)
        _load(saved, *made)
        train_steps(model, optimizer, replica, 12, 30)
    return flat(model)


@pytest.mark.slow
def test_a_state_loaded_into_a_running_diloco_gives_up_what_is_in_flight():
    expected = local.run(2, lambda reducer: _uninterrupted(reducer.replica, 30, reducer))[0][0]
    together = local.run(2, lambda reducer: _loaded_while_running(reducer.replica, reducer))
    assert all(torch.equal(weights, expected) for weights in [*together, *run(2, _loaded_while_running)])


def _saved_at_13(reducer):
    model, optimizer, diloco = made = make(reducer=reducer, **SETTINGS)
    train_steps(model, optimizer, reducer.replica, 1, 13)
    saved = _save(*made)
    diloco.leave()
    return saved


@pytest.mark.filterwarnings("ignore:replica 0 loads a state that replica 1 saved")  # there is only one here
@pytest.mark.parametrize("of_model", ["another replica", "none"])
def test_a_state_with_weights_that_were_not_saved_with_it_is_refused(of_model):
    saves = [torch.load(io.BytesIO(saved)) for saved in local.run(2, _saved_at_13)]

    def resume(reducer):
        model, optimizer, diloco = make(reducer=reducer, **SETTINGS)
        if of_model == "another replica":
            model.load_state_dict(saves[0]["model"])
        diloco.load_state_dict(saves[1]["diloco"])
        train_steps(model, optimizer, reducer.replica, 14, 14)  # the optimizer's hook joins, before the step

    with pytest.raises(Mismatch, match="load the model that this replica saved"):
        local.run(1, resume)


def _variants():
    bf16, tied, base, odd = Tiny().bfloat16(), Tiny(tied=True), Tiny(), Tiny()
    base.layers.requires_grad_(False)
    buffer = torch.randn(odd.norm.weight.numel() + 1)
    odd.norm.weight = nn.Parameter(buffer[1:])  # a view that does not begin at a word of 64 bits
    return {"bf16": bf16, "tied": tied, "frozen base": base, "odd view": odd}


@pytest.mark.parametrize("kind", ["bf16", "tied", "frozen base", "odd view"])
def test_a_state_may_be_loaded_before_its_weights_and_takes_note_of_none_but_its_own(kind):
    def loop(reducer):
        made = model, optimizer, diloco = make(_variants()[kind], optimizer=sgd, reducer=reducer, **SETTINGS)
        train_steps(model, optimizer, 0, 1, 9)
        saved = torch.load(io.BytesIO(_save(*made)))
        diloco.leave()
        model = _variants()[kind]
        diloco = DiLoCo(model, reducer=reducer, **SETTINGS)
        diloco.load_state_dict(saved["diloco"])
        model.load_state_dict(saved["model"])
        diloco.join()
        diloco.leave()
        with torch.no_grad():
            next(p for p in model.parameters() if p.requires_grad).view(-1)[-1] += 1
        third = DiLoCo(model, reducer=reducer, **SETTINGS)
        third.load_state_dict(saved["diloco"])
        with pytest.raises(Mismatch, match="load the model"):
            third.join()

    local.run(1, loop)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_weights_that_move_after_everything_was_loaded_are_not_refused():
    """optimizer.train() of a schedule-free optimizer moves them before the first step."""

    def resume(reducer):
        model, _, diloco = made = make(reducer=reducer, **SETTINGS)
        _load(saved, *made)
        with torch.no_grad():
            model.head.weight.mul_(0.5)
        diloco.join()

    (saved,) = local.run(1, _saved_at_13)
    local.run(1, resume)


def test_the_statistics_are_part_of_the_state():
    def loop(reducer):
        model, optimizer, diloco = make(reducer=reducer, **SETTINGS)
        train_steps(model, optimizer, reducer.replica, 1, 20)
        again = DiLoCo(Tiny(), None, reducer=reducer, **SETTINGS)
        again.load_state_dict(copy.deepcopy(diloco.state_dict()))
        diloco.leave()
        return diloco.stats.totals(), again.stats.totals()

    (saved, loaded), _ = local.run(2, loop)
    assert saved == loaded and saved["rounds"] > 3 and saved["bytes_sent"] > 0


def test_paused_hooks_neither_join_nor_count_steps():
    model, optimizer, diloco = make(reducer=(script := Script()), **SETTINGS)
    with diloco.paused():
        train_steps(model, optimizer, 0, 1, 3)
    assert diloco.step_count == 0 and not script.asked
    train_steps(model, optimizer, 0, 4, 5)
    assert diloco.step_count == 2
