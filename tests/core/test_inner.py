"""The inner optimizers: Muon beside torch's own, who trains which parameter, and shards."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from diloco import muon
from diloco.core.muon import Muon, adamw, orthogonal
from tests.support.models import Tiny, flat, loss_of
from tests.support.processes import run


def matrices():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((24, 8), (8, 24), (24, 8))]


def test_muon_is_torchs_up_to_its_rounding_to_bf16():
    ours, theirs = matrices(), matrices()
    optimizer = Muon(ours, lr=0.01, weight_decay=0.1)
    oracle = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        optimizer.step()
        oracle.step()
    for p, q, start in zip(ours, theirs, matrices(), strict=True):
        moved = (p - start).norm()
        assert (p - q).norm() < 0.03 * moved
    oracle.load_state_dict(optimizer.state_dict())


def test_an_orthogonal_direction_has_singular_values_near_one_for_wide_and_tall_matrices():
    coefficients = torch.optim.Muon(matrices()).defaults["ns_coefficients"]
    for shape in ((3, 6, 17), (2, 17, 6)):
        direction = orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(2)), coefficients, 5)
        values = torch.linalg.svdvals(direction)
        assert direction.shape == shape and values.min() > 0.5 and values.max() < 1.5


def test_muon_trains_the_matrices_of_the_layers_and_adamw_the_rest():
    model = Tiny(tied=True)
    first, second = muon(model, lr=0.01, weight_decay=0.1)
    trained = [{id(p) for group in o.param_groups for p in group["params"]} for o in (first, second)]
    assert isinstance(first, Muon) and trained[0] == {id(layer.weight) for layer in model.layers}
    assert not trained[0] & trained[1] and trained[0] | trained[1] == {id(p) for p in model.parameters()}
    decay = {id(p): group["weight_decay"] for group in second.param_groups for p in group["params"]}
    assert decay[id(model.embedding.weight)] == 0.1 and decay[id(model.norm.weight)] == 0.0
    assert len(muon(torch.nn.Linear(3, 3), 0.01)) == len(adamw(model, 0.01)) == 1


def _trained(rank, sharded):
    model = Tiny(width=15)  # 15 rows do not divide by two
    if sharded:
        mesh = dist.init_device_mesh("cpu", (2,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizers = muon(model, lr=0.01, weight_decay=0.1)
    for step in range(1, 6):
        loss_of(model, 0, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()]) if sharded else flat(model)


@pytest.mark.slow
def test_muon_moves_shards_as_it_moves_whole_matrices():
    sharded = run(2, _trained, True)
    assert torch.equal(*sharded)
    torch.testing.assert_close(sharded[0], _trained(0, False), rtol=1e-4, atol=1e-5)
