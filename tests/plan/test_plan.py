"""The simulator follows the paper's rules, obeys its bounds, and agrees with closed forms."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.bucket.rounds import layout_of
from diloco.codecs.codec import codec_named
from diloco.codecs.formats import gathers
from diloco.core.fragment import Balanced, Sequential, Strided
from diloco.exchange import mean
from diloco.plan import methods
from diloco.plan import simulate as simulation
from diloco.plan.methods import count_values, model_of_preset
from diloco.plan.simulate import Group, Method, simulate, utilization
from diloco.plan.traffic import CODECS, round_bytes, round_trips
from diloco.runs.presets import PRESETS
from studies.paper import tables as paper

rates = st.floats(1e5, 1e13)


@st.composite
def streamings(draw: st.DrawFn) -> Method:
    layers = draw(st.integers(1, 12))
    values = draw(st.lists(st.integers(1, 10**9), min_size=layers, max_size=layers))
    groups = draw(st.integers(1, layers))
    fragments = [[(layer, float(values[layer])) for layer in range(f, layers, groups)] for f in range(groups)]
    sync_every = draw(st.integers(1, 30))
    overlap = draw(st.integers(0, min(sync_every - 1, 8)))
    return methods.streaming(fragments, layers, sync_every, overlap, paper.bits4, by_fragment=draw(st.booleans()))


def reference(layers, seconds, bits, rate, sends, overlap, steps):
    """The paper's rules written down again, layer by layer, without shortcuts."""
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


def closed_streaming(step_seconds, rounds, sync_every, overlap):
    """Utilization if rounds of these seconds never overlap: training waits for what exceeds `overlap` steps."""
    waited = math.fsum(max(0.0, seconds - overlap * step_seconds) for seconds in rounds)
    return sync_every * step_seconds / (sync_every * step_seconds + waited)


@given(st.data())
def test_the_fast_simulation_is_the_papers_rules(data):
    layers, steps = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 25))
    due = [data.draw(st.sets(st.integers(0, layers - 1))) for _ in range(steps + 1)]
    overlap, seconds = data.draw(st.integers(0, 4)), data.draw(st.floats(0.01, 10))
    rate, values = data.draw(rates), data.draw(st.integers(1, 10**9))
    method = Method(layers, lambda t: [(i, values) for i in sorted(due[t], reverse=True)], paper.bits4, 1, overlap)
    ours = simulate(method, Group(seconds), rate, steps)[0]
    assert ours == pytest.approx(
        reference(layers, seconds, 4 * values, rate, lambda t: due[t], overlap, steps), rel=1e-9
    )


@pytest.mark.slow
@given(st.floats(0.01, 30), st.lists(st.integers(1, 10**9), min_size=1, max_size=12), rates, st.data())
def test_closed_form_of_streaming_in_turn(seconds, values, rate, data):
    sync_every = data.draw(st.integers(len(values), 200))
    overlap = data.draw(st.integers(0, min(sync_every // len(values), sync_every - 1)))
    fragments = [[(0, float(n))] for n in values]
    method = methods.streaming(fragments, 1, sync_every, overlap, paper.bits4, by_fragment=True)
    expected = closed_streaming(seconds, [4 * n / rate for n in values], sync_every, overlap)
    assert utilization(method, Group(seconds), rate)[0] == pytest.approx(expected, rel=1e-9)


def least_rate(bits, sync_every, step_seconds):
    """Bits per second below which no overlap reaches full utilization: all bits must pass in `sync_every` steps."""
    return bits / (sync_every * step_seconds)


def near(method, seconds, factor):
    """`factor` times the lowest sufficient rate: near it, queues build up slowly."""
    return factor * least_rate(4 * method.values(), method.period, seconds)


@given(streamings(), st.floats(0.01, 10), st.floats(0.2, 5), st.floats(1, 2))
def test_more_bandwidth_more_overlap_and_fewer_bits_never_lower_utilization(method, seconds, factor, more):
    rate, group = near(method, seconds, factor), Group(seconds)
    share, faster = utilization(method, group, np.array([rate, rate * more]))
    slow, fast = simulate(method, group, np.array([rate, rate * more]), 3 * method.period)
    assert fast >= slow * (1 - 1e-12) and faster >= share * (1 - 1e-9)
    assert utilization(replace(method, overlap=method.overlap + 1), group, rate)[0] >= share * (1 - 1e-9)
    assert share >= utilization(replace(method, nbytes=paper.bits16), group, rate)[0] * (1 - 1e-9)


@given(streamings(), st.floats(0.01, 10), st.floats(0.2, 5), st.integers(2, 9))
def test_never_above_the_bound(method, seconds, factor, replicas):
    rate = near(method, seconds, factor)
    bits = 2 * (replicas - 1) / replicas * 4 * method.values()
    share = utilization(method, Group(seconds, replicas), rate)[0]
    assert 0 < share <= min(1.0, rate / least_rate(bits, method.period, seconds)) * (1 + 1e-12)


def test_the_bound_is_reached_when_overlap_is_the_spacing():
    fragments = [[(0, 1e6)] for _ in range(20)]
    method = methods.streaming(fragments, 1, 100, 5, paper.bits4, by_fragment=True)
    enough = least_rate(4 * 20e6, 100, 0.3)
    assert utilization(method, Group(0.3), enough)[0] == pytest.approx(1.0)
    assert utilization(method, Group(0.3), enough / 2)[0] == pytest.approx(0.5)
    # With more overlap the queue just below that rate takes thousands of periods to build up.
    longer = methods.streaming(fragments, 1, 100, 50, paper.bits4, by_fragment=True)
    assert utilization(longer, Group(0.3), enough * 0.9999)[0] == pytest.approx(0.9999, rel=1e-9)


@given(streamings(), st.floats(0.01, 10))
def test_exact_at_zero_and_infinite_bandwidth(method, seconds):
    zero, full = utilization(method, Group(seconds), np.array([0.0, math.inf]))
    assert zero == 0 and full == pytest.approx(1.0, abs=1e-12)
    assert utilization(method, Group(seconds, replicas=1), 0.0)[0] == pytest.approx(1.0, abs=1e-12)
    assert simulate(method, Group(seconds), 0.0, 2 * method.period)[0] == 0


def count_steps(monkeypatch):
    """A list of the steps simulated from here on."""
    steps, advance = [], simulation._advance
    monkeypatch.setattr(simulation, "_advance", lambda state, step: (steps.append(step), advance(state, step)))
    return steps


@given(st.integers(1, 10**7), st.integers(2, 12), st.sampled_from(sorted(CODECS)))
def test_traffic_is_that_of_the_reducer(n, replicas, codec):
    real = codec_named(codec)
    up, down = round_bytes(n, CODECS[codec], replicas)
    assert up == down
    size, second = -(-n // replicas), mean.codec_of_mean(real, None)
    part = real.nbytes(n) if gathers(replicas) else real.nbytes(size) + second.nbytes(size)
    assert up == (replicas - 1) * part
    layout, bucket = layout_of(real, n), round_bytes(n, CODECS[codec], replicas, "bucket")
    if gathers(replicas) or not layout.cut:
        assert bucket == (real.nbytes(n), (replicas - 1) * real.nbytes(n))
    else:
        delta, shares = layout.nbytes, sum(second.nbytes(layout.count(k)) for k in range(len(layout.cuts)))
        expected = delta + shares / replicas, (replicas - 1) / replicas * (delta + shares)
        assert bucket == pytest.approx(expected, abs=2 * len(layout.cuts))


def test_through_a_bucket_many_members_move_hardly_more_than_four():
    few, many = (round_bytes(42_000_000, CODECS["e3m0"], m, "bucket") for m in (4, 1024))
    assert many[1] < 4 / 3 * few[1] and many[0] < few[0]
    assert [round_trips(m, "bucket") for m in (3, 4)] == [3.0, 6.0]


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


def test_round_trips_codec_time_and_a_bucket_cost_what_they_take():
    method = methods.streaming([[(0, 2e6)]], 1, 10, 0, paper.bits4, by_fragment=True)
    link = 1e6
    assert utilization(method, Group(1.0), link)[0] == pytest.approx(10 / 18)
    assert utilization(method, Group(1.0, round_trip=0.5), link)[0] == pytest.approx(10 / 19)
    assert utilization(method, Group(1.0, codec_ns=1000), link)[0] == pytest.approx(10 / 20)
    assert utilization(method, Group(1.0, hook_ns=500), link)[0] == pytest.approx(10 / 19)
    assert utilization(method, Group(1.0, copy_ns=1000), link)[0] == pytest.approx(10 / 20)
    hidden = replace(method, overlap=9)  # training waits for no copy
    assert utilization(hidden, Group(1.0, copy_ns=500), link)[0] == pytest.approx(1.0)
    gradients = methods.data_parallel([2e6], paper.bits4)  # its all-reduce has neither codec nor hook
    slow = Group(1.0, codec_ns=1000, hook_ns=500)
    assert utilization(gradients, slow, link)[0] == utilization(gradients, Group(1.0), link)[0]
    store = methods.streaming([[(0, 2e6)]], 1, 10, 0, paper.bits4, by_fragment=True, reduce="bucket")
    assert utilization(store, Group(1.0), link)[0] == pytest.approx(10 / 26)  # puts its delta, then gets the other
    assert utilization(store, Group(1.0, replicas=3), link)[0] == pytest.approx(10 / 34)
