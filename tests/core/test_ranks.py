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
from diloco.core.checks import check_overlap_of_copies
from diloco.core.tensors import shard_id
from tests.support.models import Tiny, adamw, anchors, fingerprints, flat, loss_of, make, steps, train_steps
from tests.support.processes import run
from tests.support.ranks import groups, shard, whole

pytestmark = pytest.mark.slow  # processes


def _ddp(rank):
    """Each rank carries half of its replica's traffic."""
    across, within = groups(rank)
    model = Tiny()
    wrapped, reducer = DistributedDataParallel(model, process_group=within), Collective(across, ddp_ranks=within)
    with DiLoCo(wrapped, optimizer := adamw(model), sync_every=5, codec=Float32(), reducer=reducer) as diloco:
        train_steps(wrapped, optimizer, rank, 1, 11)
    return flat(model), diloco.stats.bytes_sent


def _counted_apart(rank):
    """Each rank has counted other tokens: the replica's weight is their sum, on all of its ranks."""
    across, within = groups(rank)
    model = Tiny()
    wrapped = DistributedDataParallel(model, process_group=within)
    optimizer = adamw(model)
    with pytest.raises(ConfigError, match=r"with a Collective for one process.*Pass DDP's group as ddp_ranks"):
        DiLoCo(wrapped, adamw(model), reducer=Collective(across)).join()
    reducer = Collective(across, ddp_ranks=within)
    with DiLoCo(wrapped, optimizer, sync_every=5, codec=Float32(), reducer=reducer) as diloco:
        for step in range(1, 12):
            diloco.count((1, 0, 0, 10)[rank])
            train_steps(wrapped, optimizer, rank, step, step)
        share = diloco.stats.last[-1].share
    return flat(model), share


def test_a_replica_weighs_what_all_of_its_ranks_have_counted():
    results = run(4, _counted_apart)
    weights = [weights for weights, _ in results]
    assert all(torch.equal(w, weights[0]) for w in weights)
    assert [share for _, share in results] == pytest.approx([1 / 11, 1 / 11, 10 / 11, 10 / 11])


def _pairs_of_batches(rank):
    model, optimizer, diloco = make(sync_every=5, codec=Float32())
    with diloco:
        for step in range(1, 12):
            ((loss_of(model, 2 * rank, step) + loss_of(model, 2 * rank + 1, step)) / 2).backward()
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


SETTINGS = {"sync_every": 5, "overlap": 2, "codec": Float32()}


def _fsdp(rank):
    """Only ranks with the same shard exchange deltas."""
    model = Tiny(width=15)  # 15 rows do not divide by two
    reducer = shard(model)
    model, optimizer, diloco = make(model, reducer=reducer, **SETTINGS)
    with torch.no_grad():
        loss_of(model, 0, 0)  # FSDP2 then shows the root's parameters gathered, and frees them later
    with diloco:
        train_steps(model, optimizer, rank // 2, 1, 15)
        with torch.no_grad():
            loss_of(model, 0, 0)
        saved = copy.deepcopy(diloco.state_dict())
        values = optimizer.param_groups[0]["params"][-1].to_local().detach()
        values.neg_()
        diloco.load_state_dict(saved)
        with pytest.raises(Mismatch, match="load the model"):
            diloco.join()
        values.neg_()
    return whole(model), *_sizes(saved)


def _sizes(saved):
    ((name, state),) = saved.items()
    return name, [len(fragment["anchor"]) for fragment in state["fragments"].values()]


def _unsharded(rank):
    model, optimizer, diloco = make(Tiny(width=15), **SETTINGS)
    with diloco:
        train_steps(model, optimizer, rank, 1, 15)
    return flat(model), *_sizes(diloco.state_dict())


def test_fsdp2_inside_a_replica_gives_the_anchors_of_unsharded_replicas():
    sharded, (expected, _, sizes) = run(4, _fsdp), run(2, _unsharded)[0]
    for weights, _, _ in sharded:
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    # The two shards of a fragment are the fragment.
    assert [a + b for a, b in zip(sharded[0][2], sharded[1][2], strict=True)] == sizes
    assert [name for _, name, _ in sharded] == ["shard 0 of 2", "shard 1 of 2"] * 2


def _tensor_parallel(rank, ranks):
    """The shard that each of these ranks of eight would have: two replicas of two FSDP2 times two tensor ranks."""
    names = []
    for fake in ranks:
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=fake, world_size=8, store=FakeStore())
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replica", "dp", "tp"))
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        parallelize_module(model[1], mesh["tp"], ColwiseParallel())
        fully_shard(model, mesh=mesh["dp"])
        names.append(str(shard_id(model.parameters())))
        parameters = list(model.parameters())
        check_overlap_of_copies(parameters[2:3], 4)
        with pytest.raises(ConfigError, match="several ranks of a replica hold"):
            check_overlap_of_copies(parameters, 4)
    return names


def test_with_tensor_parallelism_every_rank_has_a_shard_of_its_own():
    assert run(1, _tensor_parallel, (0, 1, 5)) == [["shard 0 of 4", "shard 1 of 4", "shard 1 of 4"]]


def _tiny_shards(rank):
    """More shards than rows: some ranks hold nothing of a parameter."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 3))
    reducer = shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=2, fragments=Balanced(3), reducer=reducer) as diloco:
        for step in range(6):
            model(torch.full((2, 1), float(step + rank // 2))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return anchors(diloco), _sizes(diloco.state_dict())[1]


def test_empty_shards_take_part():
    results = run(4, _tiny_shards)
    assert 0 in results[1][1]
    for rank in (0, 1):
        assert torch.equal(results[rank][0], results[rank + 2][0])


def _anchors_under_fsdp(rank):
    model = Tiny()
    reducer = shard(model)
    model, optimizer, diloco = make(model, sync_every=5, overlap=1, reducer=reducer)

    def loss():
        with torch.no_grad():
            return loss_of(model, 0, 99).item()

    with diloco:
        train_steps(model, optimizer, rank // 2, 1, 8)
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


def _inf_in_one_shard(rank):
    model = Tiny()
    reducer = shard(model)
    model, optimizer, diloco = make(model, sync_every=4, overlap=1, fragments=Balanced(1), reducer=reducer)
    try:
        for step in range(1, 9):
            loss_of(model, rank // 2, step).backward()
            if step == 4 and rank == 3:
                with torch.no_grad():
                    model.layers[2].weight.to_local()[-1, -1] = float("inf")
            optimizer.step()
            optimizer.zero_grad()
    except NotFinite as error:
        return str(error), diloco.indices
    finally:
        diloco.leave()
    return None


def test_inf_in_one_shard_ends_the_round_on_every_rank():
    for message, indices in run(4, _inf_in_one_shard):
        assert "layers.2.weight on replica 1" in message
        assert indices == [0]


def _members(rank, url):
    """Two members of two shards each: ranks with the same shard meet in the bucket."""
    model = Tiny(width=15)
    shard(model)
    reducer = Bucket(url, f"m{rank // 2}", heartbeat=0.5, poll=0.02)
    model, optimizer, diloco = make(model, reducer=reducer, **SETTINGS)
    states, (_, within) = {}, groups(rank)
    with diloco:
        for _ in steps(model, optimizer, rank // 2, 1, 1000):
            states |= fingerprints(diloco)
            met = min(diloco.indices) >= 3 and any(round.members == 2 for round in diloco.stats.last)
            enough = torch.tensor(float(met))
            dist.all_reduce(enough, dist.ReduceOp.MIN, group=within)  # both ranks end at one step
            if enough:
                break
    return states, diloco.stats.last


def test_fsdp2_inside_a_member_of_a_bucket_meets_shard_by_shard(tmp_path):
    results = run(4, _members, str(tmp_path / "run"))
    for one, other in ((0, 2), (1, 3)):  # who holds the same shard after the same round holds the same bits
        (states, rounds), (other_states, _) = results[one], results[other]
        common = states.keys() & other_states.keys()
        assert len(common) > 5 and all(states[key] == other_states[key] for key in common)
        assert any(round.members == 2 for round in rounds)
    assert results[0][0] != results[1][0]
    with pytest.raises(Mismatch, match="members are sharded"):
        DiLoCo(Tiny(width=15), reducer=Bucket(str(tmp_path / "run"), "whole")).join()
