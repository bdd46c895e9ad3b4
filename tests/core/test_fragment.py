"""Fragments cover the model exactly, whatever the model."""

import math
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from diloco import Balanced, ConfigError, Sequential, Strided
from diloco.core import fragment as rules
from diloco.core.tensors import find_layers, trainable
from tests.support.models import Tiny

shapes = st.dictionaries(
    st.text("abc.0123", min_size=1, max_size=6), st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1
)
FRAGMENTERS = [Strided(2), Sequential(2), Balanced(3)]


def fragments_of(model, fragmenter):
    parameters = trainable(model)
    return fragmenter.split({n: tuple(p.shape) for n, p in parameters.items()}, find_layers(model, parameters))


def sizes(fragments, shape):
    return [sum((p.stop - p.start) * math.prod(shape[p.name][1:]) for p in fragment) for fragment in fragments]


def check_exact_cover(fragments, shape):
    rows = {name: [] for name in shape}
    for fragment in fragments:
        assert fragment
        for piece in fragment:
            assert piece.start < piece.stop
            rows[piece.name] += range(piece.start, piece.stop)
    for name, covered in rows.items():
        expected = (shape[name][0] if math.prod(shape[name][1:]) else 0) if shape[name] else 1
        assert sorted(covered) == list(range(expected)), name


@pytest.mark.parametrize("fragmenter", FRAGMENTERS, ids=repr)
def test_every_row_of_every_parameter_is_in_exactly_one_fragment(fragmenter):
    model = Tiny(layers=7)
    check_exact_cover(fragments_of(model, fragmenter), {n: tuple(p.shape) for n, p in model.named_parameters()})


@given(shapes, st.integers(1, 12), st.data())
def test_any_shapes_are_cut_exactly(shape, count, data):
    names = list(shape)
    where = {n: data.draw(st.integers(0, 2), label=n) for n in names}
    layers = [[n for n in names if where[n] == i] for i in range(2)]
    layers = [layer for layer in layers if sum(math.prod(shape[n]) for n in layer)]
    check_exact_cover([f for f in Balanced(count).split(shape, layers) if f], shape)
    if not any(0 in s for s in shape.values()):
        check_exact_cover(Strided(1).split(shape, layers), shape)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=6), st.integers(1, 60))
def test_cutting_below_a_limit_keeps_it(tensors, limit):
    pieces = rules.cut_below(tensors, limit)
    widest = max((width for _, width in tensors), default=1)
    for piece in pieces:
        assert sum((b - a) * tensors[i][1] for i, a, b in piece) <= max(limit, widest)
    assert sum((b - a) * tensors[i][1] for piece in pieces for i, a, b in piece) == sum(r * w for r, w in tensors)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=6), st.integers(60, 200))
def test_cutting_below_a_limit_gives_as_few_pieces_as_equal_ones_allow(tensors, limit):
    fewest = len(rules.cut_below(tensors, limit))
    for fewer in range(1, min(fewest, 20)):
        pieces = rules.cut(tensors, fewer)
        assert max(sum((b - a) * tensors[i][1] for i, a, b in piece) for piece in pieces) > limit


@given(st.integers(1, 40), st.integers(1, 9))
def test_the_two_patterns_hold_each_layer_once_and_have_equally_many_fragments(layers, size):
    one, two = rules.strided(layers, size), rules.sequential(layers, size)
    assert sorted(chain(*one)) == sorted(chain(*two)) == list(range(layers))
    assert len(one) == len(two) == -(-layers // size)
    assert max(map(len, one)) <= size


def test_strided_is_the_papers_pattern():
    assert Strided() == Strided(3)
    assert rules.strided(24, 3) == [[p, p + 8, p + 16] for p in range(8)]
    fragments = fragments_of(Tiny(layers=6), Strided(3))
    assert {p.name for p in fragments[1]} == {f"layers.{i}.{w}" for i in (1, 3, 5) for w in ("weight", "bias")}


def test_what_is_not_a_layer_goes_apart_and_no_larger_than_the_largest_layer_fragment():
    model = Tiny(width=8, layers=6)  # embedding and head: 400 values each; a fragment of three layers: 216
    shape = {n: tuple(p.shape) for n, p in model.named_parameters()}
    fragments = fragments_of(model, Strided(3))
    layered = [f for f in fragments if any(p.name.startswith("layers.") for p in f)]
    assert len(layered) == 2
    assert all(p.name.startswith("layers.") for f in layered for p in f)
    assert max(sizes(fragments, shape)) == 216
    assert len(fragments) == 2 + 4  # 816 values in four pieces of at most 216


def test_tied_weights_are_in_one_fragment_once():
    names = [p.name for f in fragments_of(Tiny(tied=True), Balanced(1)) for p in f]
    assert "embedding.weight" in names
    assert "head.weight" not in names


def test_frozen_parameters_are_in_no_fragment_and_lora_alone_is_enough():
    model = Tiny()
    model.requires_grad_(False)
    for layer in model.layers:
        layer.adapter = nn.Parameter(torch.zeros(2, 16))
    names = [p.name for f in fragments_of(model, Strided(3)) for p in f]
    assert sorted(names) == [f"layers.{i}.adapter" for i in range(6)]


def test_a_model_without_a_list_of_layers_is_cut_into_equal_pieces():
    model = nn.Bilinear(8, 8, 40)
    shape = {n: tuple(p.shape) for n, p in model.named_parameters()}
    fragments = fragments_of(model, Strided(3))
    assert len(fragments) == 4
    assert max(sizes(fragments, shape)) - min(sizes(fragments, shape)) <= 2 * 64  # a row has 64


def test_layers_are_found_in_the_largest_list_also_through_compile_and_nesting():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.small = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)])
            self.body = Tiny()

    model = torch.compile(Outer(), backend="eager")
    layers = find_layers(model, trainable(model))
    assert layers == [[f"body.layers.{i}.weight", f"body.layers.{i}.bias"] for i in range(6)]


class Counted(dict):
    """Parameters by name; counts how often one is looked at."""

    looks = 0

    def __iter__(self):
        for name in super().__iter__():
            self.looks += 1
            yield name


def test_finding_the_layers_looks_at_each_name_once_however_many_layers_there_are():
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(1, 1) for _ in range(200))})
    names = Counted(model.named_parameters())
    layers = find_layers(model, names)
    assert layers == [[f"layers.{i}.weight", f"layers.{i}.bias"] for i in range(200)]
    assert names.looks <= 4 * len(names)


def test_a_plain_sequential_counts_as_layers():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    assert [p.name for p in fragments_of(model, Sequential(2))[0]] == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Strided(0), "layers=0: give a whole number of at least 1"),
        (lambda: Sequential(0), "layers=0: give a whole number of at least 1"),
        (lambda: Balanced(-1), "fragments=-1"),
        (lambda: trainable(nn.Linear(2, 2, device="meta")), "weight has no values yet"),
        (lambda: trainable(nn.LazyLinear(2)), "weight has no values yet"),
        (lambda: trainable(nn.Linear(2, 2).requires_grad_(False)), "no parameter of the model has requires_grad"),
        (lambda: trainable(nn.Linear(2, 2, dtype=torch.complex64)), "weight is torch.complex64"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(act, message):
    with pytest.raises(ConfigError, match=message):
        act()


@pytest.mark.parametrize(("text", "expected"), [
    ("strided:3", Strided(3)),
    ("strided:1", Strided(1)),
    ("sequential:2", Sequential(2)),
    ("balanced:7", Balanced(7)),
])  # fmt: skip
def test_a_fragmenter_has_a_name(text, expected):
    assert rules.fragmenter(text) == expected


@pytest.mark.parametrize("text", ["woven:3", "strided:0", "strided:", "balanced:-1", "balanced:²", "strided"])
def test_a_wrong_name_of_a_fragmenter_says_what_is_allowed(text):
    with pytest.raises(ConfigError, match=r"give strided:N, sequential:N or balanced:N with N"):
        rules.fragmenter(text)


def test_a_large_embedding_beside_adapters_is_not_cut_into_hundreds():
    """LoRA of rank 16 on a model of 1B with its embedding and head trained."""
    layers = [[f"layers.{i}.{side}" for side in "ab"] for i in range(16)]
    shapes = {name: (2048, 32) for layer in layers for name in layer} | {
        "embed": (128_256, 2048),
        "head": (128_256, 2048),
    }
    fragments = Strided(3).split(shapes, layers)
    assert fragments[:6] == Strided(3).split({n: s for n, s in shapes.items() if "layers" in n}, layers)
    assert 6 + 20 <= len(fragments) <= 6 + 4 * 6 + 1
    sizes = [sum((p.stop - p.start) * 2048 for p in fragment) for fragment in fragments[6:]]
    assert sum(sizes) == 2 * 128_256 * 2048 and max(sizes) <= 1.1 * min(sizes)
