"""Several ranks in a replica: DDP, and FSDP2 with shards of any size."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from diloco import Balanced, Collective, ConfigError, DiLoCo, Float32, Mismatch, NotFinite
from diloco.bucket import Bucket
from diloco.flat import shard_id
from tests.support.models import Tiny, adamw, anchors, flat, loss_of, steps
from tests.support.processes import run

pytestmark = pytest.mark.slow  # processes


def _ddp(rank):
    """Two replicas of two DDP ranks: each rank carries half of the traffic."""
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    within = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = Tiny()
    wrapped = DistributedDataParallel(model, process_group=within[rank // 2])
    optimizer = adamw(model)
    reduce = Collective(across[rank % 2], ddp_ranks=within[rank // 2])
    with DiLoCo(wrapped, optimizer, sync_every=5, codec=Float32(), reduce=reduce) as diloco:
        for step in range(1, 12):
            loss_of(wrapped, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flat(model), diloco.stats.bytes_sent


def test_ddp_inside_a_replica_shares_the_traffic_and_trains_as_one_larger_batch():
    results = run(4, _ddp)
    weights = [r[0] for r in results]
    assert all(torch.equal(w, weights[0]) for w in weights)
    expected, sent = run(2, _pairs_of_batches)[0]
    torch.testing.assert_close(weights[0], expected, rtol=1e-4, atol=1e-5)
    assert results[0][1] < 0.55 * sent


def _pairs_of_batches(rank):
    model = Tiny()
    optimizer = adamw(model)
    with DiLoCo(model, optimizer, sync_every=5, codec=Float32()) as diloco:
        for step in range(1, 12):
            ((loss_of(model, 2 * rank, step) + loss_of(model, 2 * rank + 1, step)) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flat(model), diloco.stats.bytes_sent


def _fsdp(rank, codec):
    """Two replicas of two shards each: only ranks with the same shard talk."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = Tiny(width=15)  # 15 rows do not divide by two
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = adamw(model)
    with torch.no_grad():
        loss_of(model, 0, 0)  # FSDP2 then shows the root's parameters gathered, and frees them later
    reduce = Collective(mesh.get_group("replica"), shards=mesh.get_group("shard"))
    with DiLoCo(model, optimizer, sync_every=5, overlap=2, codec=codec, reduce=reduce) as diloco:
        for _ in steps(model, optimizer, rank // 2, 1, 15):
            pass
        with torch.no_grad():
            loss_of(model, 0, 0)
        saved = copy.deepcopy(diloco.state_dict())
        shard = optimizer.param_groups[0]["params"][-1].to_local().detach()
        shard.neg_()
        diloco.load_state_dict(saved)
        with pytest.raises(Mismatch, match="load the model"):
            diloco.join()
        shard.neg_()
    whole = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    return whole, [len(p["anchor"]) for p in next(iter(saved.values()))["parts"].values()], list(saved)


def _unsharded(rank, codec):
    model = Tiny(width=15)
    optimizer = adamw(model)
    with DiLoCo(model, optimizer, sync_every=5, overlap=2, codec=codec) as diloco:
        for _ in steps(model, optimizer, rank, 1, 15):
            pass
    return flat(model), [len(p.state.anchor) for p in diloco._fragments]


def test_fsdp2_inside_a_replica_gives_the_anchors_of_unsharded_replicas():
    sharded, unsharded = run(4, _fsdp, Float32()), run(2, _unsharded, Float32())
    for weights, _, _ in sharded:
        torch.testing.assert_close(weights, unsharded[0][0], rtol=1e-4, atol=1e-5)
    sizes = [a + b for a, b in zip(sharded[0][1], sharded[1][1], strict=True)]
    assert sizes == unsharded[0][1]  # the two shards of a fragment are the fragment
    assert [r[2] for r in sharded] == [["shard 0 of 2"], ["shard 1 of 2"]] * 2


def _tensor_parallel(rank, ranks):
    """The shard that each of these ranks of eight would have: two replicas of two FSDP2 times two tensor ranks."""
    names = []
    for each in ranks:
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=each, world_size=8, store=FakeStore())
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replica", "dp", "tp"))
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        parallelize_module(model[1], mesh["tp"], ColwiseParallel())
        fully_shard(model, mesh=mesh["dp"])
        names.append(str(shard_id(model.parameters())))
    return names


def test_with_tensor_parallelism_every_rank_has_a_shard_of_its_own():
    assert run(1, _tensor_parallel, (0, 1, 5)) == [["shard 0 of 4", "shard 1 of 4", "shard 1 of 4"]]


def _tiny_shards(rank):
    """More shards than rows: some ranks hold nothing of a parameter."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 3))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(
        model,
        optimizer,
        sync_every=2,
        fragments=Balanced(3),
        reduce=Collective(mesh.get_group("replica"), shards=mesh.get_group("shard")),
    ) as d:
        for step in range(6):
            model(torch.full((2, 1), float(step + rank // 2))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return anchors(d), [p.view.size for p in d._fragments]


def test_empty_shards_take_part():
    results = run(4, _tiny_shards)
    assert 0 in results[1][1]
    for shard in (0, 1):
        assert torch.equal(results[shard][0], results[shard + 2][0])


def _forgot_the_group(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = Tiny()
    fully_shard(model, mesh=mesh)
    with pytest.raises(ConfigError, match=r'reduce=Collective\(mesh.get_group\("replica"\), shards='):
        DiLoCo(model, adamw(model))
    return True


def test_sharded_parameters_without_a_group_are_refused_with_the_line_to_write():
    assert run(2, _forgot_the_group) == [True, True]


def _sharded_model(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = Tiny()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model, adamw(model), Collective(mesh.get_group("replica"), shards=mesh.get_group("shard"))


def _anchors_under_fsdp(rank):
    model, optimizer, reduce = _sharded_model(rank)
    with DiLoCo(model, optimizer, sync_every=5, overlap=1, reduce=reduce) as diloco:
        for _ in steps(model, optimizer, rank // 2, 1, 8):
            pass

        def loss():
            with torch.no_grad():
                return loss_of(model, 0, 99).item()

        before = loss()
        with diloco.anchors():
            inside = loss()
        after = loss()
        with diloco.anchors():
            again = loss()
    return before, inside, after, again


def test_anchors_are_what_a_sharded_model_evaluates_and_are_gone_afterwards():
    """FSDP2 keeps the root's gathered parameters after a forward without a backward."""
    results = run(4, _anchors_under_fsdp)
    for before, inside, after, again in results:
        assert before == after != inside == again
    assert len({inside for _, inside, _, _ in results}) == 1


def _fault_in_one_shard(rank):
    model, optimizer, reduce = _sharded_model(rank)
    diloco = DiLoCo(model, optimizer, sync_every=4, overlap=1, fragments=Balanced(1), reduce=reduce)
    try:
        with diloco:
            for step in range(1, 9):
                loss_of(model, rank // 2, step).backward()
                if step == 4 and rank == 3:
                    with torch.no_grad():
                        model.layers[2].weight.to_local()[-1, -1] = float("inf")
                optimizer.step()
                optimizer.zero_grad()
    except NotFinite as error:
        return str(error), diloco._fragments[0].state.index
    return None


def test_a_fault_in_one_shard_ends_the_round_on_every_rank():
    for message, index in run(4, _fault_in_one_shard):
        assert "layers.2.weight on replica 1" in message
        assert index == 0


def _members(rank, url):
    """Two members of two shards each: ranks with the same shard meet in the bucket."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = Tiny(width=15)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = adamw(model)
    with pytest.raises(ConfigError, match="wait for each other crosswise"):
        DiLoCo(model, reduce=Bucket(url, f"m{rank // 2}", pace="strict")).join()
    reduce = Bucket(url, f"m{rank // 2}", heartbeat=0.5, poll=0.02)
    states = {}
    with DiLoCo(model, optimizer, sync_every=5, overlap=2, codec=Float32(), reduce=reduce) as diloco:
        for _ in steps(model, optimizer, rank // 2, 1, 1000):
            states |= {(part.number, part.state.index): part.state.fingerprint() for part in diloco._fragments}
            met = min(diloco.indices) >= 3 and any(round.members == 2 for round in diloco.stats.last)
            enough = torch.tensor(float(met))
            dist.all_reduce(enough, dist.ReduceOp.MIN, group=mesh.get_group("shard"))  # both ranks end at one step
            if enough:
                break
    return states, diloco.stats.last


def test_fsdp2_inside_a_member_of_a_bucket_meets_shard_by_shard(tmp_path):
    results = run(4, _members, str(tmp_path / "run"))
    for one, other in ((0, 2), (1, 3)):  # who holds the same shard after the same round holds the same bits
        (mine, rounds), (theirs, _) = results[one], results[other]
        common = mine.keys() & theirs.keys()
        assert len(common) > 5 and all(mine[key] == theirs[key] for key in common)
        assert any(round.members == 2 for round in rounds)
    assert results[0][0] != results[1][0]
    with pytest.raises(Mismatch, match="members are sharded"):
        DiLoCo(Tiny(width=15), reduce=Bucket(str(tmp_path / "run"), "whole")).join()
