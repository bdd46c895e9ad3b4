"""Save at any step, also with rounds under way; resume; the trajectory is the same (invariant 7)."""

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from diloco import SGD, Balanced, DiLoCo, Mismatch, Sequential, Strided
from diloco.reduce import local
from tests.support.models import Tiny, adamw, anchors, flat, steps
from tests.support.processes import run

SETTINGS = {"sync_every": 8, "overlap": 5, "fragments": Balanced(4), "keep_local": 0.25}  # two or three in flight


def _start(replica, reduce=None):
    model = Tiny()
    optimizer = adamw(model)
    return model, optimizer, DiLoCo(model, optimizer, reduce=reduce, **SETTINGS)  # type: ignore[arg-type]


def _save(model, optimizer, diloco):
    buffer = io.BytesIO()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "diloco": diloco.state_dict()}
    torch.save(state, buffer)
    return buffer.getvalue()


def _resume(saved, replica, first, last, reduce=None):
    model, optimizer, diloco = _start(replica, reduce)
    state = torch.load(io.BytesIO(saved), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    diloco.load_state_dict(state["diloco"])
    with diloco:
        for _ in steps(model, optimizer, replica, first, last):
            pass
    return flat(model), anchors(diloco)


def _uninterrupted(replica, last, reduce=None):
    """One run that saves after every step."""
    model, optimizer, diloco = _start(replica, reduce)
    saves = {}
    with diloco:
        for step in steps(model, optimizer, replica, 1, last):
            saves[step] = _save(model, optimizer, diloco)
    return flat(model), anchors(diloco), saves


def _in_processes(rank, at):
    weights, anchor, saves = _uninterrupted(rank, 30)
    under_way = sum(
        bool(p["flight"]) for p in torch.load(io.BytesIO(saves[at]))["diloco"]["shard 0 of 1"]["parts"].values()
    )
    again, anchor_again = _resume(saves[at], rank, at + 1, 30)
    return torch.equal(weights, again) and torch.equal(anchor, anchor_again), under_way


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 13, 21])
def test_7_a_resumed_run_on_real_processes_is_the_uninterrupted_one_bit_for_bit(at):
    for same, under_way in run(2, _in_processes, at):
        assert same
        assert (under_way > 1) == (at > 10)


@pytest.mark.slow
def test_7_saving_at_any_step_resumes_to_the_same_trajectory():
    """Before the first send, after it, and at each step of a whole sync_every with two or three in flight."""
    last = 21
    whole = local.run(2, lambda reduce: _uninterrupted(reduce.replica, last, reduce))
    for at in range(1, last):
        again = local.run(2, lambda reduce: _resume(whole[reduce.replica][2][at], reduce.replica, at + 1, last, reduce))  # noqa: B023
        for (weights, anchor), (expected, expected_anchor, _) in zip(again, whole, strict=True):
            assert torch.equal(anchor, expected_anchor), at
            assert torch.equal(weights, expected), at


def _with_dcp(rank, folder):
    """torch.distributed.checkpoint, one folder per replica, as a Stateful."""
    path = f"{folder}/{rank}"
    model, optimizer, diloco = _start(rank)
    with diloco:
        for step in steps(model, optimizer, rank, 1, 30):
            if step == 13:
                dcp.save({"diloco": diloco}, checkpoint_id=path, no_dist=True)
                rest = model.state_dict(), optimizer.state_dict()
                torch.save(rest, f"{path}/rest")
    expected = anchors(diloco)
    model, optimizer, diloco = _start(rank)
    dcp.load({"diloco": diloco}, checkpoint_id=path, no_dist=True)
    for part, state in zip((model, optimizer), torch.load(f"{path}/rest"), strict=True):
        part.load_state_dict(state)
    with diloco:
        for _ in steps(model, optimizer, rank, 14, 30):
            pass
    return torch.equal(expected, anchors(diloco))


@pytest.mark.slow
def test_the_state_survives_torch_distributed_checkpoint(tmp_path):
    assert run(2, _with_dcp, str(tmp_path)) == [True, True]


def _behind(replica, saves, reduce, last):
    """Replica 1 lost the last step: it comes back one round of a fragment behind."""
    model, optimizer, diloco = _start(replica, reduce)
    at = last - replica
    state = torch.load(io.BytesIO(saves[replica][at]), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    diloco.load_state_dict(state["diloco"])
    before = [p.state.index for p in diloco._fragments]
    history = {}
    with diloco:
        after = [p.state.index for p in diloco._fragments]
        counted = [p.counted.work for p in diloco._fragments]
        for _ in steps(model, optimizer, replica, at + 1, 30):
            history |= {(p.number, p.state.index): p.state.fingerprint() for p in diloco._fragments}
    return before, after, history, flat(model), counted


@pytest.mark.slow
@pytest.mark.parametrize("last", [13, 21])  # fragment 0, sent after 8 and 16, is applied 5 steps later
def test_8_a_replica_that_comes_back_a_round_behind_gets_it_from_one_that_is_ahead(last):
    saves = [r[2] for r in local.run(2, lambda reduce: _uninterrupted(reduce.replica, 24, reduce))]
    ahead, behind = local.run(2, lambda reduce: _behind(reduce.replica, saves, reduce, last))
    assert ahead[4][0] == last - 5 and behind[4][0] == last - 1  # its work is given up, so it must not weigh
    assert behind[0] != ahead[0]
    assert behind[1] == ahead[1] == ahead[0]
    both = ahead[2].keys() & behind[2].keys()
    assert {k: ahead[2][k] for k in both} == {k: behind[2][k] for k in both}
    assert torch.equal(ahead[3], behind[3])


@pytest.mark.slow
def test_8_replicas_that_come_back_a_step_apart_send_again_in_the_order_of_the_first_time():
    """After step 24 fragments 2, 3 and 0 are under way, in this order; after step 23 only 2 and 3."""
    saves = [r[2] for r in local.run(2, lambda reduce: _uninterrupted(reduce.replica, 24, reduce))]
    one, two = run(2, _a_step_apart, [{24: saves[0][24]}, {23: saves[1][23]}])
    assert torch.equal(one[3], two[3])


@pytest.mark.slow
@pytest.mark.parametrize("last", [13, 21])
def test_8_real_processes_give_one_that_is_behind_the_outer_state_too(last):
    saves = [r[2] for r in local.run(2, lambda reduce: _uninterrupted(reduce.replica, last, reduce))]
    saves = [{last: saves[0][last]}, {last - 1: saves[1][last - 1]}]
    parts = torch.load(io.BytesIO(saves[0][last]))["diloco"]["shard 0 of 1"]["parts"]
    assert parts["0"]["outer"].any()  # otherwise there is nothing to give
    ahead, behind = run(2, _a_round_apart, saves, last)
    assert behind[0] != behind[1] == ahead[1] == ahead[0]
    both = ahead[2].keys() & behind[2].keys()
    assert {k: ahead[2][k] for k in both} == {k: behind[2][k] for k in both}
    assert torch.equal(ahead[3], behind[3])


def _a_round_apart(rank, saves, last):
    return _behind(rank, saves, None, last)


def _a_step_apart(rank, saves):
    return _behind(rank, saves, None, 24)


def test_a_state_of_another_model_is_refused():
    def other(reduce):
        small = DiLoCo(Tiny(width=8), None, reduce=reduce, **SETTINGS)
        with pytest.raises(
            Mismatch, match=r"fragment 0 has \(anchor, outer state\) of \(\d+, \d+\) values in the saved"
        ):
            small.load_state_dict(DiLoCo(Tiny(), None, reduce=reduce, **SETTINGS).state_dict())
        few = DiLoCo(Tiny(), None, reduce=reduce, **(SETTINGS | {"fragments": Balanced(3)}))
        with pytest.raises(Mismatch, match="4 fragments, this model 3"):
            few.load_state_dict(small.state_dict())
        other = DiLoCo(Tiny(width=8), None, reduce=reduce, **(SETTINGS | {"fragments": Strided(3)}))
        same_sizes = DiLoCo(Tiny(width=8), None, reduce=reduce, **(SETTINGS | {"fragments": Sequential(3)}))
        with pytest.raises(Mismatch, match="fragment 0 holds other parameters"):
            other.load_state_dict(same_sizes.state_dict())
        with pytest.raises(Mismatch, match="outer rule"):
            DiLoCo(Tiny(width=8), None, reduce=reduce, outer=SGD(), **SETTINGS).load_state_dict(small.state_dict())
        with pytest.raises(Mismatch, match="is of shard 1 of 2, this process is shard 0 of 1"):
            small.load_state_dict({"shard 1 of 2": {}})

    local.run(1, other)


def _loaded_while_running(replica, reduce=None):
    model, optimizer, diloco = _start(replica, reduce)
    saved = b""
    with diloco:
        for step in steps(model, optimizer, replica, 1, 14):
            if step == 11:
                saved = _save(model, optimizer, diloco)
        state = torch.load(io.BytesIO(saved), weights_only=True)
        for part, name in ((model, "model"), (optimizer, "optimizer"), (diloco, "diloco")):
            part.load_state_dict(state[name])
        for _ in steps(model, optimizer, replica, 12, 30):
            pass
    return flat(model)


@pytest.mark.slow
def test_a_state_loaded_into_a_running_diloco_gives_up_what_is_under_way():
    expected = local.run(2, lambda reduce: _uninterrupted(reduce.replica, 30, reduce))[0][0]
    together = local.run(2, lambda reduce: _loaded_while_running(reduce.replica, reduce))
    assert all(torch.equal(weights, expected) for weights in [*together, *run(2, _loaded_while_running)])


def test_two_runs_one_after_the_other_in_one_process():
    def loop(reduce):
        return [_uninterrupted(reduce.replica, 12, reduce)[0] for _ in range(2)]

    first, second = local.run(2, loop)[0]
    assert torch.equal(first, second)


def _saved_at_13(reduce):
    model, optimizer, diloco = _start(reduce.replica, reduce)
    diloco.join()
    list(steps(model, optimizer, reduce.replica, 1, 13))
    saved = _save(model, optimizer, diloco)
    diloco.leave()
    return saved


@pytest.mark.filterwarnings("ignore:replica 0 loads a state that replica 1 saved")  # there is only one here
@pytest.mark.parametrize("of_model", ["another replica", "none"])
def test_a_state_with_weights_that_were_not_saved_with_it_is_refused(of_model):
    saves = [torch.load(io.BytesIO(saved)) for saved in local.run(2, _saved_at_13)]

    def resume(reduce):
        model, optimizer, diloco = _start(reduce.replica, reduce)
        if of_model == "another replica":
            model.load_state_dict(saves[0]["model"])
        diloco.load_state_dict(saves[1]["diloco"])
        list(steps(model, optimizer, reduce.replica, 14, 14))  # the optimizer's hook joins, before the step

    with pytest.raises(Mismatch, match="load the model that this replica saved"):
        local.run(1, resume)


def _variants():
    bf16, tied, base = Tiny().bfloat16(), Tiny(tied=True), Tiny()
    base.layers.requires_grad_(False)
    odd = Tiny()
    buffer = torch.randn(odd.norm.weight.numel() + 1)
    odd.norm.weight = nn.Parameter(buffer[1:])  # a view that does not begin at a word of 64 bits
    return {"bf16": bf16, "tied": tied, "frozen base": base, "odd view": odd}


@pytest.mark.parametrize("kind", ["bf16", "tied", "frozen base", "odd view"])
def test_a_state_may_be_loaded_before_its_weights_and_takes_note_of_none_but_its_own(kind):
    def loop(reduce):
        model = _variants()[kind]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        diloco = DiLoCo(model, optimizer, reduce=reduce, **SETTINGS)
        list(steps(model, optimizer, 0, 1, 9))
        saved = torch.load(io.BytesIO(_save(model, optimizer, diloco)))
        diloco.leave()
        model = _variants()[kind]
        diloco = DiLoCo(model, reduce=reduce, **SETTINGS)
        diloco.load_state_dict(saved["diloco"])
        model.load_state_dict(saved["model"])
        diloco.join()
        diloco.leave()
        with torch.no_grad():
            next(p for p in model.parameters() if p.requires_grad).view(-1)[-1] += 1
        third = DiLoCo(model, reduce=reduce, **SETTINGS)
        third.load_state_dict(saved["diloco"])
        with pytest.raises(Mismatch, match="load the model"):
            third.join()

    local.run(1, loop)


def test_what_moves_the_weights_after_all_was_loaded_is_not_refused():
    """As optimizer.train() of a schedule-free optimizer does before the first step."""
    saved = torch.load(io.BytesIO(local.run(1, _saved_at_13)[0]))

    def resume(reduce):
        model, optimizer, diloco = _start(0, reduce)
        for part, name in ((model, "model"), (optimizer, "optimizer"), (diloco, "diloco")):
            part.load_state_dict(saved[name])
        with torch.no_grad():
            model.head.weight.mul_(0.5)
        diloco.join()

    local.run(1, resume)
