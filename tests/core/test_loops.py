"""The loops and models people have: compiled, accumulation, scalers, bf16, other optimizers, odd parameters."""

import importlib

import pytest
import torch
from torch import nn

from diloco import SGD, DiLoCo, Float32, codec
from diloco.reduce import local
from tests.support.models import Tiny, adamw, batch, flat, loss_of, steps, train
from tests.support.processes import run


def _compiled(rank):
    model = Tiny()
    compiled = torch.compile(model, backend="eager")
    optimizer = adamw(model)
    with DiLoCo(compiled, optimizer, sync_every=5) as diloco:
        for step in range(1, 21):
            loss_of(compiled, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return flat(model), [p.name for f in diloco._fragments for p in f.pieces], frames


@pytest.mark.slow
def test_a_compiled_model_is_synced_without_recompiling_and_has_the_same_names(plain):
    for (weights, names, graphs), (expected, expected_names) in zip(run(2, _compiled), plain, strict=True):
        torch.testing.assert_close(weights, expected)
        assert names == expected_names
        assert graphs == 1


@pytest.fixture(scope="module")
def plain():
    """What each replica of an ordinary loop ends with: its weights, and the names of what is synced."""
    return run(2, _plain_names)


def _plain_names(rank):
    model = Tiny()
    optimizer = adamw(model)
    with DiLoCo(model, optimizer, sync_every=5) as diloco:
        for _ in steps(model, optimizer, rank, 1, 20):
            pass
    return flat(model), [p.name for f in diloco._fragments for p in f.pieces]


def _accumulated(rank):
    model = Tiny()
    optimizer = adamw(model)
    with DiLoCo(model, optimizer, sync_every=5, overlap=1) as diloco:
        for micro in range(1, 41):
            (loss_of(model, rank, micro) / 2).backward()
            if micro % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return diloco.step_count, flat(model), {r.sent_step for r in diloco.stats.last}


@pytest.mark.slow
def test_with_gradient_accumulation_a_step_is_an_optimizer_step():
    one, two = run(2, _accumulated)
    assert one[0] == 20
    assert torch.equal(one[1], two[1])
    assert {5, 10, 15, 20} <= one[2]


def _scaled(rank, fused):
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with DiLoCo(model, optimizer, sync_every=5, overlap=1) as diloco:
        for step in range(1, 31):
            scaler.scale(loss_of(model, rank, step)).backward()
            if rank == 1 and step in (3, 12, 13):
                model.head.weight.grad.fill_(float("inf"))  # this replica skips these steps
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return diloco.step_count, flat(model)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_grad_scaler_skips_do_not_hang_or_part_the_replicas(fused):
    one, two = run(2, _scaled, fused)
    assert one[0] == 30
    assert two[0] == (30 if fused else 27)  # a fused optimizer fires its hook also on a skipped step
    assert torch.equal(one[1], two[1])
    assert torch.isfinite(one[1]).all()


def _bf16(rank):
    model = Tiny().bfloat16()
    optimizer = adamw(model)
    with DiLoCo(model, optimizer, sync_every=5, overlap=1) as diloco:
        for _ in steps(model, optimizer, rank, 1, 20):
            pass
        kinds = {p.state.anchor.dtype for p in diloco._fragments} | {p.state.outer.dtype for p in diloco._fragments}
    exact = torch.cat([span.of(p.state.anchor).flatten() for p in diloco._fragments for span in p.view.spans])
    local = torch.cat([span.rows().flatten() for p in diloco._fragments for span in p.view.spans])
    return kinds, exact, local


@pytest.mark.slow
def test_bf16_parameters_have_fp32_anchors():
    one, two = run(2, _bf16)
    assert one[0] == {torch.float32}
    assert torch.equal(one[1], two[1])
    assert one[2].dtype is torch.bfloat16
    assert torch.equal(one[2], one[1].bfloat16())
    assert not torch.equal(one[1], one[1].bfloat16().float())  # the anchors hold what bf16 cannot


def _sgd(rank):
    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    return train(rank, 20, optimizer=make, sync_every=5)["weights"]


@pytest.mark.slow
def test_sgd_inside():
    one, two = run(2, _sgd)
    assert torch.equal(one, two)


def _muon(rank):
    model = Tiny()
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]
    with DiLoCo(model, optimizers, sync_every=5, overlap=1) as diloco:
        for step in range(1, 21):
            loss_of(model, rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return diloco.step_count, flat(model)


@pytest.mark.slow
def test_muon_for_matrices_and_adamw_for_the_rest_count_as_one_step():
    one, two = run(2, _muon)
    assert one[0] == 20
    assert torch.equal(one[1], two[1])


def _without_with(rank, hook):
    model = Tiny()
    optimizer = adamw(model)
    diloco = DiLoCo(model, optimizer if hook else None, sync_every=5)
    for _ in steps(model, optimizer, rank, 1, 20):
        if not hook:
            diloco.step()
    diloco.finish()
    return flat(model)


@pytest.mark.slow
@pytest.mark.parametrize("hook", [True, False])
def test_without_with_the_first_step_joins_and_calling_step_oneself_is_the_same_as_the_hook(plain, hook):
    for weights in run(2, _without_with, hook):
        assert torch.equal(weights, plain[0][0])


def _tokens(rank):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with DiLoCo(model, optimizer, sync_every=1, overlap=0, codec=Float32(), outer=SGD(1.0)) as diloco:
        diloco.count(3000 if rank else 1000)
        model.weight.grad = torch.full((1, 1), -4.0 * rank)  # replica 1 goes to 4, replica 0 stays
        optimizer.step()
        return model.weight.item(), dict(diloco.stats.last[0].__dict__)


@pytest.mark.slow
def test_replicas_weigh_by_the_tokens_they_counted():
    for value, _ in run(2, _tokens):
        assert value == 3.0


def test_a_step_leaves_a_graph_that_is_still_alive_detectably_changed():
    """Parameters are written in place, not through .data: a backward over the old values fails instead of lying."""

    def loop(reduce):
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, optimizer, sync_every=1, overlap=0, reduce=reduce) as diloco:
            x = model(torch.ones(1, 3, requires_grad=True)) ** 2
            diloco._step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                x.sum().backward()

    local.run(1, loop)


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
    def loop(reduce):
        model = Masked()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with DiLoCo(model, optimizer, sync_every=3, reduce=reduce) as diloco:
            for step in range(7):
                model(torch.full((2, 8), float(step + reduce.replica))).backward()
                optimizer.step()
                optimizer.zero_grad()
            model.mean = model.mean + 1 + reduce.replica  # another tensor than was there at the start
            names = {p.name for f in diloco._fragments for p in f.pieces}
        return model, names, len(diloco._fragments), [p.name for p in diloco._buffers[0].pieces]

    (one, names, fragments, buffers), (two, *_) = local.run(2, loop)
    assert names == {name for name, _ in Masked().named_parameters()}  # `weight` and `module.weight` are two
    assert fragments == 4 + 1  # the blocks, three to a fragment; the rest is smaller than one of these
    assert buffers == ["mean"]
    assert one.mean.tolist() == [1.5, 1.5]
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
    def loop(reduce):
        model = Tiny(reduce.replica).double()
        with torch.no_grad():
            for p in model.parameters():
                p.div_(3)  # no fp32 value
        DiLoCo(model, reduce=reduce).join()
        return [p.detach().clone() for p in model.parameters()]

    for one, two in zip(*local.run(2, loop), strict=True):
        assert one.dtype == torch.float64 and torch.equal(one, two)


def test_replicas_train_with_another_default_device():
    def loop(reduce):
        model = Tiny()
        optimizer = adamw(model)
        data = [batch(reduce.replica, step) for step in range(6)]
        torch.set_default_device("meta")
        try:
            with DiLoCo(model, optimizer, sync_every=3, reduce=reduce):
                for x, y in data:
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        finally:
            torch.set_default_device(None)
        return flat(model)

    assert len(local.run(1, loop)[0])


def test_another_default_dtype_changes_nothing():
    expected = local.run(4, lambda reduce: train(reduce.replica, 12, sync_every=4, reduce=reduce)["weights"])[0]
    torch.set_default_dtype(torch.float64)
    try:
        result = local.run(4, _float32_loop)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)


def _float32_loop(reduce):
    torch.set_default_dtype(torch.float32)
    model = Tiny()
    torch.set_default_dtype(torch.float64)
    optimizer = adamw(model)
    with DiLoCo(model, optimizer, sync_every=4, reduce=reduce):
        for _ in steps(model, optimizer, reduce.replica, 1, 12):
            pass
    return flat(model)
