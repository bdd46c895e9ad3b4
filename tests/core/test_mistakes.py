"""Mistakes around the loop: each is refused or warned of, with what to do."""

import atexit

import pytest
import torch
from torch import nn

from diloco import SGD, Balanced, Bucket, ConfigError, DiLoCo, Mismatch, Nesterov, TopK, run_replicas
from tests.support.commands import Command, ended
from tests.support.fake_reduce import Script
from tests.support.models import Tiny, adamw, steps


def _alone(act):
    return run_replicas(1, act)[0]


def _extended(model):
    model.layers.append(nn.Linear(16, 16))


def _replaced(model):
    model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight))


def _adapted(model):
    """As adapters do: everything is frozen, and small matrices are added."""
    model.requires_grad_(False)
    model.adapter = nn.Parameter(torch.zeros(2, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_extended, r"parameter layers\.6\.weight and 1 more are trained, but not there when DiLoCo was made"),
        (_replaced, r"parameter head\.weight is trained, but not there"),
        (_adapted, "parameter adapter is trained, but not there"),
    ],
)
@pytest.mark.parametrize("late", ["join", "send", "finish"])
def test_parameters_that_come_after_construction_are_refused(change, message, late):
    def loop(reduce):
        model = Tiny()
        optimizer = adamw(model)
        diloco = DiLoCo(model, optimizer, sync_every=5, fragments=Balanced(1), reduce=reduce)
        if late != "join":
            list(steps(model, optimizer, 0, 1, 4))
        change(model)
        diloco._step() if late == "send" else getattr(diloco, late)()  # the fragment is due after step 5

    with pytest.raises(ConfigError, match=message):
        _alone(loop)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(ConfigError, match=r"the optimizer holds no parameter of this model: make it from model\.param"):
        _alone(lambda reduce: DiLoCo(Tiny(), adamw(Tiny()), reduce=reduce).join())


def test_an_optimizer_must_hold_all_that_is_trained_and_nothing_else():
    model, strange = Tiny(), nn.Linear(3, 2)
    part = torch.optim.SGD(model.layers.parameters())
    with pytest.raises(ConfigError, match=r"parameter embedding\.weight and 3 more are trained .* in no optimizer"):
        _alone(lambda reduce: DiLoCo(model, part, reduce=reduce).join())
    both = torch.optim.SGD([*model.parameters(), *strange.parameters()])
    with pytest.raises(ConfigError, match=r"shape \(2, 3\) that the model does not have"):
        _alone(lambda reduce: DiLoCo(model, both, reduce=reduce).join())


def test_all_optimizers_together_hold_the_model_and_may_hold_frozen_parameters():
    model = Tiny()
    model.head.requires_grad_(False)
    rest = [p for name, p in model.named_parameters() if not name.startswith("layers.")]
    both = [torch.optim.SGD(model.layers.parameters()), torch.optim.SGD(rest)]
    _alone(lambda reduce: DiLoCo(model, both, reduce=reduce).join())


def test_a_second_diloco_on_one_model_is_refused_until_the_first_has_left():
    def loop(reduce):
        model = Tiny()
        optimizer = adamw(model)
        first = DiLoCo(model, optimizer, sync_every=5, reduce=reduce)
        first.join()
        second = DiLoCo(model, sync_every=5, reduce=reduce)
        with pytest.raises(ConfigError, match="this model has a DiLoCo already: finish"):
            second.join()
        list(steps(model, optimizer, 0, 1, 2))
        first.finish()
        second.join()

    _alone(loop)


def test_one_that_never_joined_leaves_the_model_to_the_one_that_has_it():
    model = nn.Linear(2, 2)
    first = DiLoCo(model, reduce=Script(), fragments=Balanced(1))
    other = DiLoCo(model, reduce=Script(), fragments=Balanced(1))
    first.join()
    other.leave()
    with pytest.raises(ConfigError, match="has a DiLoCo already"):
        DiLoCo(model, reduce=Script(), fragments=Balanced(1)).join()
    first.leave()


def test_an_overlap_that_each_rank_would_choose_for_itself_is_refused_with_ddp_inside():
    class Ranks(Script):
        ddp_ranks = (0, 1)

    with pytest.raises(ConfigError, match='overlap="auto" with DDP inside a replica'):
        DiLoCo(nn.Linear(2, 2), overlap="auto", reduce=Ranks(), fragments=Balanced(1))


def test_finishing_without_a_step_warns():
    with pytest.warns(UserWarning, match="after no step at all.*call step"):
        _alone(lambda reduce: DiLoCo(Tiny(), None, reduce=reduce).finish())


def test_one_fragment_by_layers_is_hinted_at_and_one_that_was_asked_for_is_not():
    chain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with pytest.warns(UserWarning, match=r"Strided\(layers=3\) makes one fragment .*Balanced\(4\)"):
        _alone(lambda reduce: DiLoCo(chain, reduce=reduce))
    _alone(lambda reduce: DiLoCo(chain, reduce=reduce, fragments=Balanced(1)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": Tiny().parameters()}, "model is a generator: give the module itself"),
        ({"sync_every": 0}, "sync_every=0: give a whole number of steps, at least 1"),
        ({"sync_every": 2.5}, "sync_every=2.5: give a whole number"),
        ({"sync_every": "10"}, "sync_every='10': give a whole number"),
        ({"overlap": 0.5}, "overlap=0.5: give a whole number of steps, at least 0"),
        ({"outer": torch.optim.SGD([torch.zeros(1)])}, r"outer is torch\.optim\.SGD.*diloco\.SGD\(lr=1\.0\)"),
        ({"reduce": object()}, r"reduce is a object: give a reducer, as in Collective\(group\)"),
    ],
)
def test_arguments_of_another_kind_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        _alone(lambda reduce: DiLoCo(**{"model": Tiny(), "reduce": reduce} | settings))


def test_an_empty_state_is_named():
    with pytest.raises(Mismatch, match="the saved state is empty"):
        _alone(lambda reduce: DiLoCo(Tiny(), reduce=reduce).load_state_dict({}))


def test_a_state_of_another_member_of_a_bucket_is_warned_of(tmp_path):
    saved = DiLoCo(Tiny(), reduce=Bucket(str(tmp_path), "lab")).state_dict()
    DiLoCo(Tiny(), reduce=Bucket(str(tmp_path), "lab")).load_state_dict(saved)
    with pytest.warns(UserWarning, match="replica office loads a state that replica lab saved"):
        DiLoCo(Tiny(), reduce=Bucket(str(tmp_path), "office")).load_state_dict(saved)


def test_repr_and_fragments_say_what_is_synced():
    def loop(reduce):
        diloco = DiLoCo(Tiny(), sync_every=7, overlap=2, fragments=Balanced(3), reduce=reduce)
        return repr(diloco), diloco.fragments

    text, fragments = _alone(loop)
    assert text == (
        "DiLoCo(3,264 parameters in 3 fragments, sync_every=7, overlap=2, keep_local=0, codec=E3M0(), "
        "outer=Nesterov(lr=None, momentum=None, follow=True), reduce=Local, step 0, 0 rounds)"
    )
    assert len(fragments) == 3
    assert fragments[0][0].name == "embedding.weight"


def test_a_sparse_codec_with_outer_momentum_is_told_of_plain_sgd():
    def loop(reduce, outer):
        return repr(DiLoCo(Tiny(), codec=TopK(), outer=outer, fragments=Balanced(3), reduce=reduce))

    with pytest.warns(UserWarning, match=r"TopK\(\) with Nesterov\(lr=None.*outer=SGD\(lr=1.0\)"):
        _alone(lambda reduce: loop(reduce, Nesterov()))
    text = _alone(lambda reduce: loop(reduce, SGD()))  # a warning is an error in tests
    assert "codec=TopK(), outer=SGD(lr=1.0), feedback=0.95, reduce=Local" in text


def _end(name):
    """Train, call the method of DiLoCo if there is one of that name, and end as an interpreter does."""

    def loop(reduce):
        model = Tiny()
        optimizer = adamw(model)
        diloco = DiLoCo(model, optimizer, sync_every=5, reduce=reduce)
        list(steps(model, optimizer, 0, 1, 3))
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
