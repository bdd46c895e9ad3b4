"""Replicas that meet without a process group that holds them all: processes of one launcher, and jobs of their own."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import diloco
from diloco import Collective, ConfigError, DiLoCo, Float32, PeerLost
from diloco.exchange import local
from diloco.exchange.world import LAUNCHED
from tests.support.commands import ended, start_ranks
from tests.support.models import Tiny, flat, make, train, train_steps
from tests.support.pages import blocks
from tests.support.processes import run
from tests.support.ranks import whole
from tests.support.s3 import free_port

SETTINGS = {"sync_every": 4, "overlap": 1}
(SHOWN,) = (block.text for block in blocks("docs/frameworks.md") if "Collective(at=" in block.text)


def _be_replica(folder):
    os.environ["SLURM_STEP_ID"] = "0"
    reduce = diloco.replica(timeout=60)
    assert LAUNCHED.isdisjoint(os.environ) and "SLURM_STEP_ID" not in os.environ
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # as a framework may do now
    result = train(reduce.replica, 9, reducer=reduce, **SETTINGS)
    torch.save(result["weights"], folder / f"{reduce.replica} of {reduce.replicas}.pt")


@pytest.mark.slow
def test_a_process_that_torchrun_started_becomes_a_replica_with_no_rank_left(tmp_path):
    for code, _, err in [ended(process) for process in start_ranks(tmp_path, 2, _be_replica, tmp_path)]:
        assert code == 0, err
    one, two = (torch.load(tmp_path / f"{m} of 2.pt") for m in range(2))
    expected = local.run(2, lambda reduce: train(reduce.replica, 9, reducer=reduce, **SETTINGS)["weights"])
    assert torch.equal(one, two) and torch.equal(one, expected[0])


def test_a_process_that_nobody_started_with_others_says_how_to_start_it(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"start it with `torchrun .* or `srun .*at='host:port'"):
        diloco.replica()


def _job(rank, folder, port):
    """Two jobs of two ranks, each with a default process group of its own."""
    dist.destroy_process_group()
    job = rank // 2
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"job-{job}"), 2), rank=rank % 2, world_size=2)
    names = {"Collective": Collective, "torch": torch}
    exec(SHOWN.replace("first-host:29400", f"127.0.0.1:{port}").replace("replica=0", f"replica={job}"), names)
    model = Tiny()
    wrapped, optimizer, diloco = make(DistributedDataParallel(model), codec=Float32(), reducer=names["reduce"],
                                      **SETTINGS)  # fmt: skip
    with diloco:
        train_steps(wrapped, optimizer, rank, 1, 7)
    reducer = Collective(at=f"127.0.0.1:{port}", replica=job, replicas=2, timeout=60, shards=dist.group.WORLD)
    sharded = fully_shard(Tiny(), mesh=init_device_mesh("cpu", (2,)))
    _, optimizer, sharded_diloco = make(sharded, codec=Float32(), reducer=reducer, **SETTINGS)
    with sharded_diloco:
        train_steps(sharded, optimizer, rank, 1, 7)
    return flat(model), whole(sharded), diloco.stats.bytes_sent


@pytest.mark.slow
def test_jobs_of_their_own_meet_rank_by_rank_with_ddp_and_with_fsdp2_inside(tmp_path):
    results = run(4, _job, tmp_path, free_port(), seconds=150)
    for replicated, sharded, _ in results:
        assert torch.equal(replicated, results[0][0]) and torch.equal(sharded, results[0][1])
    torch.testing.assert_close(results[0][0], results[0][1], rtol=1e-4, atol=1e-5)
    rounds = 1 + 2 + 1  # of the whole model: at the steps 1 to 4 and 5 to 7, some fragments, and a last one
    assert results[0][2] < 0.6 * rounds * 4 * len(results[0][0])  # each rank of a replica sends its half


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"at": "here:1"}, "pass the number of this replica, from 0, and how many there are"),
        ({"at": "here:1", "replica": 2, "replicas": 2}, "replica=2, replicas=2: with at=, pass the number"),
        ({"replica": 0, "replicas": 2}, "need at="),
    ],
)
def test_a_meeting_point_without_a_place_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Collective(**settings)


def test_an_address_that_is_none_or_where_nobody_comes_is_named():
    model = Tiny()
    with pytest.raises(ConfigError, match=r"at='nowhere': .*of the first process of replica 0"):
        DiLoCo(model, reducer=Collective(at="nowhere", replica=0, replicas=2)).join()
    port = free_port()
    with pytest.raises(PeerLost, match=rf"2 replicas did not meet at 127.0.0.1:{port} within 1 s"):
        DiLoCo(model, reducer=Collective(at=f"127.0.0.1:{port}", replica=0, replicas=2, timeout=1)).join()


@pytest.mark.slow
def test_a_port_that_is_taken_is_said_at_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first, second = start_ranks(tmp_path, 2, diloco.replica, port=taken.getsockname()[1])
        code, _, err = ended(first)
        second.kill()
    assert code == 1
    assert "is in use by another program, so 2 processes cannot meet there" in err, err
