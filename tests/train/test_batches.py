"""The order of training: each window once per epoch, the same for any number of replicas, and resumable."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.train.data.batches import Batches, permuted


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
def test_the_order_is_a_permutation(size, seed, epoch):
    assert np.array_equal(np.sort(permuted(np.arange(size), size, seed, epoch)), np.arange(size))


@given(size=st.integers(2**33, 2**60), places=st.lists(st.integers(0, 2**33), min_size=2, max_size=20, unique=True))
def test_the_order_of_a_huge_corpus_needs_no_table(size, places):
    out = permuted(np.array(places), size, seed=1, epoch=0)
    assert len(set(out.tolist())) == len(places) and out.min() >= 0 and out.max() < size


def test_the_order_looks_random_and_differs_by_seed_and_epoch():
    size = 10_000
    orders = [permuted(np.arange(size), size, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        steps = np.diff(order)
        assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.05
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
        assert len(np.unique(steps)) > 0.5 * size  # an affine order would have two
    assert (orders[0] == orders[1]).mean() < 0.01 and (orders[0] == orders[2]).mean() < 0.01


def _batches(tokens, replica=0, replicas=1, sequences=1, context=4, seed=0):
    return Batches(tokens, replica=replica, replicas=replicas, sequences=sequences, context=context, seed=seed)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(windows=st.integers(1, 200), context=st.integers(1, 9), replicas=st.integers(1, 5), sequences=st.integers(1, 7))
def test_each_epoch_visits_each_window_once_and_replicas_share_none(windows, context, replicas, sequences):
    tokens = np.arange(windows * context + 1, dtype=np.uint16)
    if windows < replicas * sequences:
        with pytest.raises(ConfigError, match="fewer than one batch"):
            _batches(tokens, 0, replicas, sequences, context)
        return
    loaders = [_batches(tokens, m, replicas, sequences, context) for m in range(replicas)]
    row: list[int] = []
    while len(row) < 3 * windows:
        row += [int(w) for loader in loaders for w in loader.take()]
    for epoch in range(3):
        assert sorted(row[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


@pytest.mark.parametrize(("replicas", "accumulate"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 4)])
def test_a_step_takes_the_same_windows_for_any_number_of_replicas(replicas, accumulate):
    tokens = np.arange(4 * 101 + 1, dtype=np.uint16)
    alone = _batches(tokens, sequences=8)
    loaders = [_batches(tokens, m, replicas, 8 // replicas // accumulate) for m in range(replicas)]
    for _ in range(30):
        together = [w for _ in range(accumulate) for loader in loaders for w in loader.take()]
        assert together == alone.take().tolist()


def test_targets_are_the_inputs_one_later():
    x, y = _batches(np.arange(1001, dtype=np.uint16), sequences=3, context=10).next()
    assert x.shape == y.shape == (3, 10) and x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1) and (x[:, 0] % 10 == 0).all()
    assert x.is_contiguous() and y.is_contiguous()


@settings(max_examples=25, deadline=None)
@given(position=st.integers(0, 60), replica=st.integers(0, 1), seed=st.integers(0, 99))
def test_batches_resume_at_any_position(position, replica, seed):
    tokens = np.arange(4 * 50 + 1, dtype=np.uint16)
    first = _batches(tokens, replica, 2, 3, seed=seed)
    for _ in range(position):
        first.next()
    saved = json.loads(json.dumps(first.state_dict()))
    second = _batches(tokens, replica, 2, 3, seed=seed)
    second.load_state_dict(saved)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first.next(), second.next(), strict=True))
