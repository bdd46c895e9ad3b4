"""The loops and models people have: compiled, accumulation, scalers, bf16, other defaults, odd parameters."""

import importlib

import pytest
import torch
from torch import nn

from diloco import Balanced, DiLoCo
from diloco.codecs import codec
from diloco.exchange import local
from tests.support.models import Tiny, adamw, anchors, batch, flat, loss_of, make, train, train_steps
from tests.support.processes import run


def _plain(reducer):
    return train(reducer.replica, 20, sync_every=5, reducer=reducer)


def _compiled(rank):
    result = train(rank, 20, model=torch.compile(Tiny(), backend="eager"), sync_every=5)
    return result["weights"], result["fragments"], torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_a_compiled_model_is_synced_without_recompiling_and_has_the_same_names():
    for (weights, fragments, graphs), plain in zip(run(2, _compiled), local.run(2, _plain), strict=True):
        torch.testing.assert_close(weights, plain["weights"])
        assert fragments == plain["fragments"]
        assert graphs == 1


@pytest.mark.parametrize("hook", [True, False])
def test_without_with_the_hook_joins_and_a_call_of_step_is_the_same_as_the_hook(hook):
    def loop(reducer):
        model = Tiny()
        optimizer = adamw(model)
        diloco = DiLoCo(model, optimizer if hook else None, sync_every=5, reducer=reducer)
        if not hook:
            diloco.join()
        for step in range(1, 21):
            train_steps(model, optimizer, reducer.replica, step, step)
            if not hook:
                diloco.step()
        diloco.finish()
        return flat(model)

    for weights, plain in zip(local.run(2, loop), local.run(2, _plain), strict=True):
        assert torch.equal(weights, plain["weights"])


def test_with_gradient_accumulation_a_step_is_an_optimizer_step():
    def loop(reducer):
        model, optimizer, diloco = make(sync_every=5, reducer=reducer)
        with diloco:
            for micro in range(1, 41):
                (loss_of(model, reducer.replica, micro) / 2).backward()
                if micro % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return diloco.step_count, flat(model), {round.sent_step for round in diloco.stats.last}

    one, two = local.run(2, loop)
    assert one[0] == 20
    assert torch.equal(one[1], two[1])
    assert {5, 10, 15, 20} <= one[2]


@pytest.mark.filterwarnings("ignore:.*finished while others still train")
@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_grad_scaler_skips_do_not_hang_or_part_the_replicas(fused):
    def loop(reducer):
        model, optimizer, diloco = make(
            optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=fused), sync_every=5, reducer=reducer
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        with diloco:
            for step in range(1, 31):
                scaler.scale(loss_of(model, reducer.replica, step)).backward()
                if reducer.replica == 1 and step in (3, 12, 13):
                    model.head.weight.grad.fill_(float("inf"))  # this replica skips these steps
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return diloco.step_count, flat(model)

    one, two = local.run(2, loop)
    assert one[0] == 30
    assert two[0] == (30 if fused else 27)  # a fused optimizer fires its hook also on a skipped step
    assert torch.equal(one[1], two[1])
    assert torch.isfinite(one[1]).all()


def test_bf16_parameters_have_fp32_anchors():
    def loop(reducer):
        model, optimizer, diloco = make(Tiny().bfloat16(), sync_every=5, fragments=Balanced(1), reducer=reducer)
        with diloco:
            train_steps(model, optimizer, reducer.replica, 1, 20)
        return anchors(diloco), torch.cat([p.detach().flatten() for p in model.parameters()])

    (exact, weights), (exact_too, _) = local.run(2, loop)
    assert exact.dtype == torch.float32 and torch.equal(exact, exact_too)
    assert torch.equal(weights, exact.bfloat16())
    assert not torch.equal(exact, exact.bfloat16().float())  # the anchors hold what bf16 cannot


class Masked(nn.Module):
    """Twelve blocks in a Sequential, a small list of heads, a mask of -inf, a cache, a running mean, own `weight`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))
        self.module = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        return sum(head(self.module(self.blocks(x)) * self.weight).sum() for head in self.heads)


def test_ordinary_oddities_of_models_are_handled():
    def loop(reducer):
        model = Masked()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with DiLoCo(model, optimizer, sync_every=3, reducer=reducer) as diloco:
            for step in range(7):
                model(torch.full((2, 8), float(step + reducer.replica))).backward()
                optimizer.step()
                optimizer.zero_grad()
            model.mean = model.mean + 1 + reducer.replica  # another tensor than was there at the start
            model.cache += reducer.replica
        return model, {piece.name for fragment in diloco.fragments for piece in fragment}, len(diloco.fragments)

    (one, names, fragments), (two, *_) = local.run(2, loop)
    assert names == {name for name, _ in Masked().named_parameters()}  # `weight` and `module.weight` are two
    assert fragments == 4 + 1  # the blocks, three to a fragment; the rest is smaller than one of these
    assert one.mean.tolist() == [1.5, 1.5] and two.cache.tolist() == [2.0] * 3  # not persistent, so not averaged
    assert torch.equal(flat(one), flat(two))


def _set_default(rank, name, default):
    """As a script that sets it and then imports the codecs, which make their tables."""
    getattr(torch, name)(default)
    e3m0 = importlib.reload(codec).E3M0()
    x = torch.linspace(-1, 1, 64, dtype=torch.float32, device="cpu")
    return (e3m0.decode(e3m0.encode(x), 64) - x).abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "default"), [("set_default_dtype", torch.float64),
                                               ("set_default_dtype", torch.bfloat16),
                                               ("set_default_device", "meta")])  # fmt: skip
def test_a_default_that_is_set_before_the_codecs_are_imported_changes_none(name, default):
    assert run(1, _set_default, name, default)[0] < 0.25


def test_float64_parameters_start_with_the_same_values_on_all_replicas():
    def loop(reducer):
        model = Tiny(reducer.replica).double()
        with torch.no_grad():
            for p in model.parameters():
                p.div_(3)  # no fp32 value
        DiLoCo(model, reducer=reducer).join()
        return [p.detach().clone() for p in model.parameters()]

    for one, two in zip(*local.run(2, loop), strict=True):
        assert one.dtype == torch.float64 and torch.equal(one, two)


def test_replicas_train_with_another_default_device():
    def loop(reducer):
        model = Tiny()
        optimizer = adamw(model)
        data = [batch(reducer.replica, step) for step in range(6)]
        torch.set_default_device("meta")
        try:
            with DiLoCo(model, optimizer, sync_every=3, reducer=reducer):
                for x, y in data:
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        finally:
            torch.set_default_device(None)
        return flat(model)

    assert len(local.run(1, loop)[0])


def test_another_default_dtype_changes_nothing():
    expected = local.run(4, lambda reducer: train(reducer.replica, 12, sync_every=4, reducer=reducer)["weights"])[0]
    torch.set_default_dtype(torch.float64)
    try:
        result = local.run(4, _float32_loop)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)


def _float32_loop(reducer):
    torch.set_default_dtype(torch.float32)
    model = Tiny()
    torch.set_default_dtype(torch.float64)
    return train(reducer.replica, 12, model=model, sync_every=4, reducer=reducer)["weights"]
