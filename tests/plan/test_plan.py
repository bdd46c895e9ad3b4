"""The simulator is the paper's, obeys its bounds, and agrees with what can be derived without it."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.bucket.deltas import layout_of
from diloco.cli.plan import PlanConfig, main
from diloco.codec import codec_named
from diloco.errors import ConfigError
from diloco.fragment import Balanced, Sequential, Strided
from diloco.plan import methods as method
from diloco.plan import simulate as simulation
from diloco.plan.failures import Fleet, outcome
from diloco.plan.model import count_values, model_of_layers, model_of_preset
from diloco.plan.simulate import Group, Method, required_rates, simulate, utilization
from diloco.plan.traffic import CODECS, Link, break_even, round_bytes, round_trips
from diloco.presets import PRESETS
from diloco.reduce import mean
from studies.paper import tables as paper

rates = st.floats(1e5, 1e13)
patient = settings(deadline=None)  # a shared machine pauses
few = settings(deadline=None, max_examples=30)


@st.composite
def streamings(draw: st.DrawFn) -> Method:
    layers = draw(st.integers(1, 12))
    values = draw(st.lists(st.integers(1, 10**9), min_size=layers, max_size=layers))
    groups = draw(st.integers(1, layers))
    fragments = [[(layer, float(values[layer])) for layer in range(f, layers, groups)] for f in range(groups)]
    sync_every = draw(st.integers(1, 30))
    overlap = draw(st.integers(0, min(sync_every - 1, 8)))
    return method.streaming(fragments, layers, sync_every, overlap, paper.bits4, by_fragment=draw(st.booleans()))


def reference(layers, seconds, bits, rate, sends, overlap, steps):
    """The paper's rules written down once more, layer by layer, without skipping anything."""
    clock = net = 0.0
    need: dict[tuple[int, int], float] = {}
    for t in range(1, steps + 1):
        for layer in range(layers):
            clock = max(clock, need.pop((t, layer), 0.0)) + seconds / (3 * layers)
        due = sends(t)
        for layer in reversed(range(layers)):
            clock += 2 * seconds / (3 * layers)
            if layer in due:
                net = max(clock, net) + bits / rate
                need[t + 1 + overlap, layer] = net
    return steps * seconds / max([clock, *need.values()])


def closed_step(step_seconds, layers, sync_seconds):
    """Seconds of a step whose gradients are all sent, layer by layer in equal messages, before the next forward pass.

    With a = 2T/3L (backward pass of a layer) and s (its message): T/3 + a + s + (L − 1)·max(a, s).
    """
    backward, message = 2 * step_seconds / (3 * layers), sync_seconds / layers
    return step_seconds / 3 + backward + message + (layers - 1) * max(backward, message)


def closed_data_parallel(step_seconds, layers, sync_seconds):
    """Utilization; `sync_seconds` is what the complete model takes on the link."""
    return step_seconds / closed_step(step_seconds, layers, sync_seconds)


def closed_diloco(step_seconds, layers, sync_seconds, sync_every):
    """Utilization: one step in `sync_every` is as in data-parallel."""
    longest = closed_step(step_seconds, layers, sync_seconds)
    return sync_every * step_seconds / ((sync_every - 1) * step_seconds + longest)


def closed_streaming(step_seconds, rounds, sync_every, overlap):
    """Utilization with rounds of these seconds, one after another, never two in flight: overlap ≤ sync_every // rounds.

    Each has `overlap` steps; the time beyond them is waited for.
    """
    waited = math.fsum(max(0.0, seconds - overlap * step_seconds) for seconds in rounds)
    return sync_every * step_seconds / (sync_every * step_seconds + waited)


@given(st.data())
@patient
def test_the_fast_simulation_is_the_papers_rules(data):
    layers, steps = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 25))
    due = [data.draw(st.sets(st.integers(0, layers - 1))) for _ in range(steps + 1)]
    overlap, seconds = data.draw(st.integers(0, 4)), data.draw(st.floats(0.01, 10))
    rate, values = data.draw(rates), data.draw(st.integers(1, 10**9))
    each = Method(layers, lambda t: [(i, values) for i in sorted(due[t], reverse=True)], paper.bits4, 1, overlap)
    ours = simulate(each, Group(seconds), Link.same(rate), steps)[0]
    assert ours == pytest.approx(
        reference(layers, seconds, 4 * values, rate, lambda t: due[t], overlap, steps), rel=1e-9
    )


@pytest.mark.slow
@given(st.floats(0.01, 30), st.integers(1, 120), st.integers(1, 10**11), rates, st.integers(2, 300))
@patient
def test_closed_forms_of_data_parallel_and_diloco(seconds, layers, parameters, rate, sync_every):
    pieces, group, link = model_of_layers(parameters, layers).pieces(), Group(seconds), Link.same(rate)
    sync = 16 * parameters / rate
    gradients = method.data_parallel(pieces, paper.bits16)
    expected = closed_data_parallel(seconds, layers, sync)
    assert simulate(gradients, group, link, 7)[0] == pytest.approx(expected, rel=1e-9)
    assert utilization(gradients, group, link)[0] == pytest.approx(expected, rel=1e-9)
    deltas = method.diloco(pieces, sync_every, paper.bits16)
    expected = closed_diloco(seconds, layers, sync, sync_every)
    assert simulate(deltas, group, link, 3 * sync_every)[0] == pytest.approx(expected, rel=1e-9)
    assert utilization(deltas, group, link)[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@given(st.floats(0.01, 30), st.lists(st.integers(1, 10**9), min_size=1, max_size=12), rates, st.data())
@patient
def test_closed_form_of_streaming_in_turn(seconds, values, rate, data):
    sync_every = data.draw(st.integers(len(values), 200))
    overlap = data.draw(st.integers(0, min(sync_every // len(values), sync_every - 1)))
    fragments = [[(0, float(n))] for n in values]
    each = method.streaming(fragments, 1, sync_every, overlap, paper.bits4, by_fragment=True)
    expected = closed_streaming(seconds, [4 * n / rate for n in values], sync_every, overlap)
    assert utilization(each, Group(seconds), Link.same(rate))[0] == pytest.approx(expected, rel=1e-9)


def least_rate(bits, sync_every, step_seconds):
    """Bits a second below which no overlap reaches full utilization: all bits must pass within `sync_every` steps."""
    return bits / (sync_every * step_seconds)


def near(each, seconds, factor):
    """A rate that is `factor` times the least that could suffice: there queues build up slowly."""
    return factor * least_rate(4 * each.values(), each.period, seconds)


@given(streamings(), st.floats(0.01, 10), st.floats(0.2, 5), st.floats(1, 2))
@patient
def test_more_bandwidth_never_lowers_utilization(each, seconds, factor, more):
    rate = near(each, seconds, factor)
    link, group, steps = Link.same(np.array([rate, rate * more])), Group(seconds), 3 * each.period
    slow, fast = simulate(each, group, link, steps)
    assert fast >= slow * (1 - 1e-12)
    slow, fast = utilization(each, group, link)
    assert fast >= slow * (1 - 1e-9)


@given(streamings(), st.floats(0.01, 10), st.floats(0.2, 5))
@patient
def test_more_overlap_and_fewer_bits_never_lower_utilization(each, seconds, factor):
    link = Link.same(near(each, seconds, factor))

    def with_(overlap, nbytes):
        other = Method(each.layers, each.sends, nbytes, each.period, overlap, each.reduce, each.by_fragment, each.first)
        return utilization(other, Group(seconds), link)[0]

    before = with_(each.overlap, paper.bits4)
    assert with_(each.overlap + 1, paper.bits4) >= before * (1 - 1e-9)
    assert before >= with_(each.overlap, paper.bits16) * (1 - 1e-9)


@given(streamings(), st.floats(0.01, 10), st.floats(0.2, 5), st.integers(2, 9))
@patient
def test_never_above_the_bound(each, seconds, factor, replicas):
    rate = near(each, seconds, factor)
    bits = 2 * (replicas - 1) / replicas * 4 * each.values()
    share = utilization(each, Group(seconds, replicas), Link.same(rate))[0]
    assert 0 < share <= min(1.0, rate / least_rate(bits, each.period, seconds)) * (1 + 1e-12)


def test_the_bound_is_reached_when_overlap_is_the_spacing():
    fragments = [[(0, 1e6)] for _ in range(20)]
    each = method.streaming(fragments, 1, 100, 5, paper.bits4, by_fragment=True)
    enough = least_rate(4 * 20e6, 100, 0.3)
    assert utilization(each, Group(0.3), Link.same(enough))[0] == pytest.approx(1.0)
    assert utilization(each, Group(0.3), Link.same(enough / 2))[0] == pytest.approx(0.5)
    # With more overlap the queue just below it takes thousands of periods to build up; without end, it does.
    longer = method.streaming(fragments, 1, 100, 50, paper.bits4, by_fragment=True)
    assert utilization(longer, Group(0.3), Link.same(enough * 0.9999))[0] == pytest.approx(0.9999, rel=1e-9)


@given(streamings(), st.floats(0.01, 10))
@few
def test_exact_at_zero_and_infinite_bandwidth(each, seconds):
    zero, full = utilization(each, Group(seconds), Link.same(np.array([0.0, math.inf])))
    assert zero == 0 and full == pytest.approx(1.0, abs=1e-12)
    assert utilization(each, Group(seconds, replicas=1), Link.same(0.0))[0] == pytest.approx(1.0, abs=1e-12)
    assert simulate(each, Group(seconds), Link.same(0.0), 2 * each.period)[0] == 0


@pytest.mark.slow
@given(streamings(), st.floats(0.01, 1), st.floats(1e8, 1e11))
@few
def test_a_run_without_end_is_the_limit_of_long_runs(each, seconds, rate):
    group, link, periods = Group(seconds), Link.same(rate), 200
    long = simulate(each, group, link, periods * each.period, begin=each.first)[0]
    longest = sum(n for t in range(each.first, each.first + each.period) for _, n in each.sends(t)) * 4 / rate
    slack = ((each.overlap + 2) * seconds + longest) / (periods * each.period * seconds)
    assert utilization(each, group, link)[0] == pytest.approx(long, rel=slack + 1e-3)


def count_steps(monkeypatch):
    """A list that gets every step that is simulated from here on."""
    steps, advance = [], simulation._advance
    monkeypatch.setattr(simulation, "_advance", lambda state, step: (steps.append(step), advance(state, step)))
    return steps


def test_a_prediction_takes_milliseconds(monkeypatch):
    """A run without end is simulated until two periods are alike: here the first two."""
    each = method.streaming(model_of_layers(1e11, 108).fragments("strided:3"), 108, 100, 1, CODECS["e3m0"])
    steps = count_steps(monkeypatch)
    utilization(each, Group(4.9), Link.same(1e9))
    assert len(steps) == 2 * 100


@given(st.integers(1, 10**7), st.integers(2, 12), st.sampled_from(sorted(CODECS)))
@patient
def test_traffic_is_that_of_the_reducer(n, replicas, codec):
    real = codec_named(codec)
    up, down = round_bytes(n, CODECS[codec], replicas)
    assert up == down
    size, second = -(-n // replicas), mean.codec_of_mean(real, None)
    part = real.nbytes(n) if mean.gathers(real, replicas) else real.nbytes(size) + second.nbytes(size)
    assert up == (replicas - 1) * part
    layout, bucket = layout_of(real, n), round_bytes(n, CODECS[codec], replicas, "bucket")
    if mean.gathers(real, replicas) or not layout.cut:
        assert bucket == (real.nbytes(n), (replicas - 1) * real.nbytes(n))
    else:
        delta, shares = layout.nbytes, sum(second.nbytes(layout.count(k)) for k in range(len(layout.cuts)))
        wanted = delta + shares / replicas, (replicas - 1) / replicas * (delta + shares)
        assert bucket == pytest.approx(wanted, abs=2 * len(layout.cuts))


def test_through_a_bucket_many_members_move_hardly_more_than_four():
    few, many = (round_bytes(42_000_000, CODECS["e3m0"], m, "bucket") for m in (4, 1024))
    assert many[1] < 4 / 3 * few[1] and many[0] < few[0]
    assert [round_trips(m, "bucket") for m in (3, 4)] == [3.0, 6.0]


def test_top_k_takes_fewer_bytes_than_e3m0_up_to_the_break_even():
    most = break_even("topk")
    assert most == 35
    n, topk, e3m0 = 10**8, CODECS["topk"], CODECS["e3m0"]
    assert round_bytes(n, topk, most) < round_bytes(n, e3m0, most)
    assert round_bytes(n, topk, most + 1) > round_bytes(n, e3m0, most + 1)


def test_sparse_deltas_take_the_round_trips_of_a_gathering():
    assert round_trips(8, nbytes=CODECS["topk"]) == round_trips(8, nbytes=CODECS["e3m0"]) - 1


@pytest.mark.parametrize("text", ["strided:3", "sequential:2", "strided:1", "balanced:7"])
def test_fragments_are_those_of_the_library(text):
    model, shape = model_of_preset("35m"), PRESETS["35m"]
    shapes = {"embed": (shape.vocabulary, shape.width)}
    shapes |= {f"layers.{i}": (shape.layer_parameters,) for i in range(shape.layers)} | {"norm": (shape.width,)}
    kind, count = text.split(":")
    fragmenter = {"strided": Strided, "sequential": Sequential, "balanced": Balanced}[kind](int(count))
    real = fragmenter.split(shapes, [[f"layers.{i}"] for i in range(shape.layers)])
    width = {name: math.prod(s[1:]) for name, s in shapes.items()}
    expected = [sum((piece.stop - piece.start) * width[piece.name] for piece in fragment) for fragment in real]
    assert [count_values(fragment) for fragment in model.fragments(text)] == expected
    assert sum(expected) == model.parameters == shape.parameters


def test_unequal_speeds_wait_for_the_slowest():
    each = method.streaming([[(0, 1.0)]], 1, 1, 0, paper.bits4, by_fragment=True)
    group = Group(0.1, replicas=2, speeds=(1.0, 0.5))
    assert utilization(each, group, Link.same(math.inf))[0] == pytest.approx((0.5 + 1.0) / 2)


def test_jitter_costs_what_waiting_for_the_slowest_step_costs():
    each = method.streaming([[(0, 1.0)]], 1, 1, 0, paper.bits4, by_fragment=True)
    group = Group(0.1, replicas=4, jitter=0.1)
    # E[max of 4 normals] is 1.0294 standard deviations.
    assert utilization(each, group, Link.same(math.inf))[0] == pytest.approx(1 / 1.10294, rel=0.02)
    smooth = method.streaming([[(0, 1.0)]], 1, 50, 5, paper.bits4, by_fragment=True)
    assert utilization(smooth, group, Link.same(math.inf))[0] > 0.97


def test_round_trips_codec_time_and_slow_uplinks_cost_what_they_take():
    each = method.streaming([[(0, 2e6)]], 1, 10, 0, paper.bits4, by_fragment=True)
    link = Link(up=1e6, down=8e6)
    assert utilization(each, Group(1.0), link)[0] == pytest.approx(10 / 18)
    assert utilization(each, Group(1.0, round_trip=0.5), link)[0] == pytest.approx(10 / 19)
    assert utilization(each, Group(1.0, codec_ns=1000), link)[0] == pytest.approx(10 / 20)
    assert utilization(each, Group(1.0, hook_ns=500), link)[0] == pytest.approx(10 / 19)
    gradients = method.data_parallel([2e6], paper.bits4)  # its all-reduce has neither codec nor hook
    slow = Group(1.0, codec_ns=1000, hook_ns=500)
    assert utilization(gradients, slow, link)[0] == utilization(gradients, Group(1.0), link)[0]
    store = method.streaming([[(0, 2e6)]], 1, 10, 0, paper.bits4, by_fragment=True, reduce="bucket")
    assert utilization(store, Group(1.0), link)[0] == pytest.approx(10 / 19)
    assert utilization(store, Group(1.0, replicas=3), link)[0] == pytest.approx(10 / 20)


def test_the_rate_needed_keeps_the_ratio_of_up_to_down():
    each = method.streaming([[(0, 2e6)]], 1, 10, 0, paper.bits4, by_fragment=True, reduce="bucket")
    link, group = Link(up=1e6, down=1e7), Group(1.0, replicas=3)
    rate = required_rates(each, group, [0.9], link)[0]
    # 10 steps of 1 s leave 10/9 s for 8e6 bits up at this rate and 16e6 down at ten times it.
    assert rate == pytest.approx((8e6 + 1.6e6) * 0.9, rel=1e-6)
    assert utilization(each, group, link.scaled(np.array([rate])))[0] == pytest.approx(0.9, rel=1e-6)


@pytest.mark.parametrize("least", [1, 3, 4])
def test_goodput_agrees_with_a_simulated_year(least):
    rng, mtbf, restart, replicas = np.random.default_rng(0), 5000.0, 600.0, 4
    away = np.zeros((replicas, 2_000_000), dtype=bool)
    for row in away:
        at = 0.0
        while (at := at + rng.exponential(mtbf)) < len(row):
            row[int(at) : int(at + restart)] = True
            at += restart
    there = replicas - away.sum(axis=0)
    expected = np.where(there >= least, there, 0).mean() / replicas
    fleet = Fleet(chips=replicas, mtbf=mtbf, restart=restart, quorum=least)
    assert outcome(fleet, replicas, elastic=False).goodput == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_replicas_that_fail_cost_less_if_the_others_do_not_wait_for_them(capsys):
    def goodput(**given):
        plan = {"model": "1b", "step_seconds": "1", "link": ("1gbit",), "codec_ns": 0.0, "hook_ns": 0.0, "replicas": 8}
        main(PlanConfig(**plan, json=True, **given))
        return json.loads(capsys.readouterr().out)["methods"][-1]["goodput"]

    assert goodput() == goodput(reduce="bucket", quorum=4) == 1
    waiting = goodput(mtbf="1d", save_every=500)
    # Eight replicas, each away for 600 s a day; after each failure half of 500 steps are lost.
    assert waiting == pytest.approx(1 / (1 + 8 / 86_400 * (600 + 250)), rel=3e-3)
    assert waiting < goodput(mtbf="1d", reduce="bucket", quorum=4, grace="30s") < 1


def test_an_overlap_as_long_as_sync_every_is_refused():
    with pytest.raises(ConfigError, match=r"give 0 .* to 9"):
        method.streaming([[(0, 1.0)]], 1, 10, 10, paper.bits4)
