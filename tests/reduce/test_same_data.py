"""Replicas that train on the same data are told so, once; nobody else is."""

import warnings
from itertools import chain

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from diloco import Balanced, Bucket, Collective, DiLoCo
from diloco.reduce import local
from tests.support.models import Tiny, adamw, steps
from tests.support.processes import run


def still(model):
    return torch.optim.SGD(model.parameters(), lr=0.0)


def _train(reduce, data, optimizer=adamw, model=None):
    model = model or Tiny()
    inner = optimizer(model)
    with DiLoCo(model, inner, sync_every=3, fragments=Balanced(4), reduce=reduce):
        for _ in steps(model, inner, data, 1, 12):
            pass


def _messages(act, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act(*args)
    return [str(w.message) for w in caught if "same data" in str(w.message)]


def _process(rank, data, optimizer):
    return _messages(_train, Collective(), data[rank], optimizer)


def _threads(data, optimizer):
    return _messages(local.run, len(data), lambda reduce: _train(reduce, data[reduce.replica], optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("data", [[7, 7], [0, 5, 2, 5]])
def test_two_replicas_on_the_same_data_are_named_once(data):
    pair = [m for m, shard in enumerate(data) if data.count(shard) == 2]
    for said in (chain.from_iterable(run(len(data), _process, data, adamw)), _threads(data, adamw)):
        messages = list(said)
        assert len(messages) == 1
        assert f"replicas {pair[0]} and {pair[1]} sent identical updates" in messages[0]
        assert "own shard" in messages[0]


@pytest.mark.slow
@pytest.mark.parametrize(("data", "optimizer"), [([1, 2], adamw), ([1, 2, 3, 4], adamw), ([7, 7], still), ([7], adamw)])
def test_no_warning_for_different_data_for_a_model_that_does_not_move_and_for_one_replica(data, optimizer):
    assert not any(run(len(data), _process, data, optimizer))
    assert not _threads(data, optimizer)


class Unused(Tiny):
    """With a layer that no batch reaches. AdamW's weight decay moves it alike on all replicas."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(60, 60)

    def forward(self, x):
        return super().forward(x) + 0 * self.unused.weight.sum()


def test_a_fragment_that_only_decays_proves_nothing():
    def loop(reduce):
        _train(reduce, reduce.replica, model=Unused())

    assert not _messages(local.run, 2, loop)


def _shards(rank, data):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = Tiny()
    fully_shard(model, mesh=mesh["shard"])
    reduce = Collective(mesh.get_group("replica"), shards=mesh.get_group("shard"))
    return _messages(_train, reduce, data[rank // 2], adamw, model)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "warned"), [([7, 7], 1), ([1, 2], 0)])
def test_shards_count_as_one_replica(data, warned):
    assert len(list(chain.from_iterable(run(4, _shards, data)))) == warned


def _member(rank, data, folder):
    # In strict pace the members take the same steps between rounds.
    reduce = Bucket(str(folder), f"member-{rank}", quorum=2, heartbeat=0.2, poll=0.02, pace="strict")
    return _messages(_train, reduce, data[rank])


@pytest.mark.slow
@pytest.mark.parametrize(("data", "warned"), [([7, 7], 1), ([1, 2], 0)])
def test_members_of_a_bucket_on_the_same_data_are_named_by_each(data, warned, tmp_path):
    for messages in run(2, _member, data, tmp_path / "run"):
        assert len(messages) == warned
        assert all("replicas member-0 and member-1 sent identical updates" in message for message in messages)
