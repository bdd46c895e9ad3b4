"""The invariants of the algorithm, each a theorem, on real processes joined by gloo. Test names begin with its number.

1. The anchors have the same bits on all members that hold the same round, with any codec, fragments and overlap.
2. sync_every 1, one fragment, SGD inside, outer lr 1 without momentum, fp32: data-parallel SGD up to rounding.
3. One replica, outer lr 1 without momentum, fp32, overlap 0: plain training up to rounding; with keep_local 1 exactly.
4. One fragment, overlap 0, keep_local 0, fp32: DiLoCo (Algorithm 1 of arXiv 2311.08105).
5. A delta is taken against the anchor, never against the merged local value; the inner optimizer's state stays local.
6. Every trained parameter is in exactly one fragment, and every fragment is sent once in sync_every steps.
7. Saved at any step, also with rounds in flight, and resumed: the same trajectory.
8. A failed round is never half applied. On resume a replica that is behind takes the state of one that is ahead.
9. The anchors are what is evaluated and exported; finish() ends with the local values equal to the anchors.
"""

from collections import ChainMap

import numpy as np
import pytest
import torch
from torch import nn

from diloco import E3M0, SGD, Balanced, BFloat16, DiLoCo, Float32, Nesterov, Sequential, Strided
from diloco.exchange import local
from tests.support.models import Tiny, adamw, anchors, flat, loss_of, make, steps, train, train_steps
from tests.support.processes import run

pytestmark = pytest.mark.slow  # processes

MEAN = {"codec": Float32(), "outer": SGD(lr=1.0)}  # plain averaging
SETTINGS = [
    {"sync_every": 10, "overlap": 3, "codec": E3M0()},
    {"sync_every": 7, "overlap": 6, "codec": E3M0(), "fragments": Balanced(5), "keep_local": 0.5},  # 5 in flight
    {"sync_every": 5, "overlap": 0, "codec": BFloat16(), "fragments": Sequential(2)},
    {"sync_every": 3, "overlap": 2, "codec": E3M0(), "fragments": Balanced(8)},  # more fragments than steps
    {"sync_every": 6, "overlap": 1, "codec": BFloat16(), "fragments": Balanced(1), "outer": SGD(0.7)},
]


def _train(rank, count, settings):
    return train(rank, count, **settings)


def _train_with_all_settings(rank, count):
    return [train(rank, count, **settings) for settings in SETTINGS]


@pytest.mark.parametrize("replicas", [2, 4])
def test_1_anchors_are_bit_identical_on_all_replicas_after_every_step(replicas):
    for settings, first, *others in zip(SETTINGS, *run(replicas, _train_with_all_settings, 20), strict=True):
        assert len({tuple(h) for h in first["history"]}) > 3, settings  # they moved
        for other in others:
            assert other["history"] == first["history"], settings
            assert torch.equal(other["weights"], first["weights"]), settings


def _train_with_own_overlap(rank, count, overlaps):
    history = train(rank, count, sync_every=10, overlap=overlaps[rank], fragments=Balanced(3))["history"]
    return dict(ChainMap(*history))


def test_1_replicas_with_different_overlaps_agree_on_every_round():
    """All send at the same step, each applies at its own delay (paper, section 2.3)."""
    one, two = run(2, _train_with_own_overlap, 45, [1, 9])
    both = one.keys() & two.keys()  # the slower one ends with rounds in flight that the other has applied
    assert {key: one[key] for key in both} == {key: two[key] for key in both}
    assert max(index for _, index in both) >= 3
    assert len(one) > len(both)


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_2_syncing_every_step_with_sgd_is_data_parallel():
    settings = {"optimizer": _sgd, "sync_every": 1, "overlap": 0, "fragments": Balanced(1), **MEAN}
    results = run(3, _train, 20, settings)
    model = Tiny()
    optimizer = _sgd(model)
    for step in range(1, 21):
        sum(loss_of(model, replica, step) / 3 for replica in range(3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(results[0]["weights"], flat(model), rtol=0, atol=1e-6)


def _plain(count, replica=0):
    model = Tiny()
    train_steps(model, adamw(model), replica, 1, count)
    return flat(model)


def _keeping(rank):
    """keep_local=1: no merge at all, so leave without finish(), which merges with 0."""
    model, optimizer, diloco = make(sync_every=10, overlap=2, keep_local=1.0)
    train_steps(model, optimizer, rank, 1, 120)
    assert diloco.stats.rounds > 40
    return flat(model)


def test_3_one_replica_that_takes_its_own_mean_is_plain_training():
    (result,) = run(1, _train, 300, {"sync_every": 10, "overlap": 0, **MEAN})
    assert (result["weights"] - _plain(300)).abs().max() <= 1e-5


@pytest.mark.parametrize("replicas", [1, 2])
def test_3_replicas_that_keep_their_local_values_train_alone_bit_for_bit(replicas):
    for rank, result in enumerate(run(replicas, _keeping)):
        assert torch.equal(result, _plain(120, rank))


def _layers_over_time(rank):
    """After each step: which fragments of layers were just applied, and a layer of each."""
    model, optimizer, diloco = make(sync_every=6, overlap=2, fragments=Strided(3), codec=E3M0())
    seen, before = [], [0, 0]
    for _ in steps(model, optimizer, rank, 1, 40):
        now = diloco.indices[:2]
        applied = [a != b for a, b in zip(before, now, strict=True)]
        seen.append((applied, [model.layers[i].weight.detach().clone() for i in (0, 1)]))
        before = now
    return seen


def test_3_without_keep_local_a_fragment_is_equal_on_all_replicas_when_it_was_applied_and_only_then():
    one, two = run(2, _layers_over_time)
    equal = [[torch.equal(a, b) for a, b in zip(x[1], y[1], strict=True)] for x, y in zip(one, two, strict=True)]
    assert equal == [applied for applied, _ in one] == [applied for applied, _ in two]
    assert sum(map(sum, equal)) >= 10


def test_4_one_fragment_without_overlap_is_diloco_as_in_algorithm_1():
    settings = {"sync_every": 10, "overlap": 0, "fragments": Balanced(1), "codec": Float32()}
    results = run(2, _train, 60, {**settings, "outer": Nesterov(0.4, 0.9)})
    models = [Tiny(), Tiny()]
    optimizers = [adamw(m) for m in models]
    parameter = nn.Parameter(flat(models[0]))
    outer = torch.optim.SGD([parameter], lr=0.4, momentum=0.9, nesterov=True)
    for start in range(1, 61, 10):
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train_steps(model, optimizer, replica, start, start + 9)
        parameter.grad = torch.stack([parameter.detach() - flat(m) for m in models]).mean(0)
        outer.step()
        for model in models:
            nn.utils.vector_to_parameters(parameter.detach().clone(), model.parameters())
    torch.testing.assert_close(results[0]["weights"], parameter.detach(), rtol=1e-5, atol=1e-6)


def _merged(rank):
    """Two rounds by hand, with keep_local: the second delta must be against the anchor, not against the merge."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    values = []
    with DiLoCo(model, optimizer, sync_every=2, overlap=1, keep_local=0.5, **MEAN):  # type: ignore[arg-type]
        for _ in range(5):
            model.weight.grad = torch.full((1, 1), -1.0 - 2 * rank)  # replica 0 goes up by 1, replica 1 by 3
            optimizer.step()
            values.append(model.weight.item())
    return values


def test_5_the_delta_is_taken_against_the_anchor_and_merging_keeps_its_share():
    # Sent after step 2: locals 2 and 6, anchor 0 → 4. Applied after step 3: locals 3 and 9 → 3.5 and 6.5.
    # Sent after step 4: locals 4.5 and 9.5, anchor 4 → 7. Applied after step 5: locals 5.5 and 12.5 → 6.25 and 9.75.
    one, two = run(2, _merged)
    assert one == [1, 2, 3.5, 4.5, 6.25]
    assert two == [3, 6, 6.5, 9.5, 9.75]


def _states(rank):
    model, optimizer, diloco = make(sync_every=4, overlap=1, fragments=Strided(3))
    with diloco:
        train_steps(model, optimizer, rank, 1, 12)
        fragments = diloco.state_dict()["shard 0 of 1"]["fragments"].values()
        momenta = [fragment["outer"].clone() for fragment in fragments]
        count = {s["step"].item() for s in optimizer.state.values()}
        moment = optimizer.state[model.head.weight]["exp_avg"].clone()
    return momenta, count, moment


def test_5_outer_state_is_per_fragment_and_the_inner_state_is_local_and_never_reset():
    (momenta, count, moment), (_, _, other_moment) = run(2, _states)
    assert len(momenta) > 2
    assert all(m.abs().sum() > 0 for m in momenta)
    assert count == {12}
    assert not torch.equal(moment, other_moment)


def test_6_every_send_ends_once_and_every_fragment_sends_once_per_sync_every():
    for result in run(2, _train, 43, SETTINGS[1]):
        rounds = list(result["stats"].last)
        seen = [(r.fragment, r.index) for r in rounds]
        assert len(set(seen)) == len(seen)
        regular = [r for r in rounds if r.sent_step < 43 and r.applied_step < 43]
        for fragment in range(5):
            sends = [r.sent_step for r in regular if r.fragment == fragment]
            assert sends == list(range(sends[0], sends[-1] + 1, 7))
        assert all(r.applied_step == r.sent_step + 6 for r in regular)
        in_flight = [sum(r.sent_step <= t < r.applied_step for r in regular) for t in range(14, 36)]
        assert max(in_flight) == 5


def _anchors_and_local(rank):
    model, optimizer, diloco = make(sync_every=5, overlap=1, fragments=Balanced(1))  # anchors in the model's order
    with diloco:
        train_steps(model, optimizer, rank, 1, 23)
        before = flat(model)
        with diloco.anchors():
            shared = flat(model)
        assert torch.equal(shared, anchors(diloco)) and torch.equal(flat(model), before)
    assert torch.equal(flat(model), anchors(diloco))
    return before, shared, flat(model)


def test_9_anchors_are_shown_and_taken_out_again_and_finish_ends_with_local_equal_to_anchor():
    (before, shared, final), (before_too, shared_too, final_too) = run(2, _anchors_and_local)
    assert not torch.equal(before, before_too)  # the replicas are apart
    assert torch.equal(shared, shared_too)  # what is evaluated is common
    assert torch.equal(final, final_too)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5])
def test_replicas_in_one_process_give_the_bits_of_real_processes(replicas):
    settings = SETTINGS[1]
    together = local.run(replicas, lambda reducer: train(reducer.replica, 30, reducer=reducer, **settings))
    apart = run(replicas, _train, 30, settings)
    assert [r["history"] for r in together] == [r["history"] for r in apart]
    assert torch.equal(together[0]["weights"], apart[0]["weights"])
    assert together[0]["stats"].rounds == apart[0]["stats"].rounds


STEPS, VALUES, PERIOD, PARTS = 50, 40, 10, 4


def _increments(replica):
    return np.random.default_rng(replica).standard_normal((STEPS, VALUES)).astype(np.float32)


def _papers_rule():
    """Algorithm 2 with Nesterov momentum for two replicas, in numpy: what both hold after each step."""
    lr, momentum = np.float32(0.4), np.float32(0.9)
    local = np.zeros((2, VALUES), np.float32)
    anchor, velocity, sent, history = local[0].copy(), local[0].copy(), {}, []
    for step in range(1, STEPS + 1):
        local += [_increments(m)[step - 1] for m in range(2)]
        for part in range(PARTS):
            rows = slice(part * VALUES // PARTS, (part + 1) * VALUES // PARTS)
            if part in sent and sent[part][0] == step - 1:
                delta = sent.pop(part)[1]
                velocity[rows] = momentum * velocity[rows] + delta
                anchor[rows] -= lr * (momentum * velocity[rows] + delta)
                local[:, rows] = anchor[rows]
            since = step - part * PERIOD // PARTS
            if since > 0 and since % PERIOD == 0:
                first, second = anchor[rows] - local[:, rows]
                sent[part] = step, first * np.float32(0.5) + second * np.float32(0.5)
        history.append(local.copy())
    return history


def test_at_a_constant_learning_rate_nesterov_is_the_papers_rule_bit_for_bit():
    """Also where the first rounds of the fragments are longer than the others."""

    def loop(reducer):
        model = nn.ParameterList([nn.Parameter(torch.zeros(VALUES))])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"sync_every": PERIOD, "fragments": Balanced(PARTS), "codec": Float32(), "outer": Nesterov(0.4, 0.9)}
        diloco = DiLoCo(model, optimizer, **settings, reducer=reducer)
        diloco.join()
        history = []
        for increment in _increments(reducer.replica):
            with torch.no_grad():
                model[0] += torch.from_numpy(increment)
            optimizer.step()
            history.append(model[0].detach().numpy().copy())
        diloco.leave()
        return history

    for step, (one, two, expected) in enumerate(zip(*local.run(2, loop), _papers_rule(), strict=True), 1):
        assert np.array_equal(np.stack([one, two]), expected), f"after step {step}"
