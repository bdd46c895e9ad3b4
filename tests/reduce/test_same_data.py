"""Replicas that train on the same data are told so, once; nobody else is."""

import warnings
from itertools import chain

import pytest
import torch

from diloco import Balanced, Collective
from diloco.exchange import local
from tests.support.models import Tiny, adamw, train
from tests.support.processes import run
from tests.support.ranks import shard


def still(model):
    return torch.optim.SGD(model.parameters(), lr=0.0)


def _train(reducer, data, optimizer=adamw, model=None):
    train(data, 12, model=model, optimizer=optimizer, sync_every=3, fragments=Balanced(4), reducer=reducer)


def _messages(act, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act(*args)
    return [str(w.message) for w in caught if "same data" in str(w.message)]


def _process(rank, data, optimizer):
    return _messages(_train, Collective(), data[rank], optimizer)


def _threads(data, optimizer):
    return _messages(local.run, len(data), lambda reducer: _train(reducer, data[reducer.replica], optimizer))


@pytest.mark.slow
def test_two_processes_on_the_same_data_are_named_once():
    (message,) = chain.from_iterable(run(4, _process, [0, 5, 2, 5], adamw))
    assert "replicas 1 and 3 sent identical updates" in message and "own shard" in message


def test_two_replicas_on_the_same_data_are_named_once():
    (message,) = _threads([7, 7], adamw)
    assert "replicas 0 and 1 sent identical updates" in message


@pytest.mark.parametrize(("data", "optimizer"), [([1, 2], adamw), ([1, 2, 3, 4], adamw), ([7, 7], still), ([7], adamw)])
def test_no_warning_for_different_data_for_a_model_that_does_not_move_and_for_one_replica(data, optimizer):
    assert not _threads(data, optimizer)


class Unused(Tiny):
    """With a layer that no batch reaches. AdamW's weight decay moves it alike on all replicas."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(60, 60)

    def forward(self, x):
        return super().forward(x) + 0 * self.unused.weight.sum()


def test_a_fragment_that_only_decays_proves_nothing():
    assert not _messages(local.run, 2, lambda reducer: _train(reducer, reducer.replica, model=Unused()))


def _shards(rank, data):
    model = Tiny()
    reducer = shard(model)
    return _messages(_train, reducer, data[rank // 2], adamw, model)


@pytest.mark.slow
def test_shards_count_as_one_replica():
    assert len(list(chain.from_iterable(run(4, _shards, [7, 7])))) == 1
