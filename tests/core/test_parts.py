"""A model that is a list of modules, such as the stages of a pipeline that one rank holds."""

import pytest
import torch
from torch import nn

from diloco import ConfigError, DiLoCo, run_replicas
from diloco.core.tensors import find_layers, trainable, unwrap
from tests.support.fake_reducer import Script
from tests.support.models import Tiny, adamw, flat, loss_of, train

SETTINGS = {"sync_every": 4, "overlap": 1}


def in_parts(model):
    """Two stages, each with the path that its layers have in the whole model."""
    first, second = nn.Module(), nn.Module()
    first.embedding, second.norm, second.head = model.embedding, model.norm, model.head
    first.layers = nn.ModuleDict({str(i): model.layers[i] for i in range(5)})
    second.layers = nn.ModuleDict({"5": model.layers[5]})
    return [first, second]


def train_parts(reducer, wrap):
    model = Tiny()
    parts = [wrap(part) for part in in_parts(model)]
    optimizers = [adamw(part) for part in parts]
    with DiLoCo(parts, optimizers, reducer=reducer, **SETTINGS) as diloco:
        for step in range(1, 10):
            loss_of(model, reducer.replica, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return flat(model), diloco.step_count


@pytest.mark.parametrize("wrap", [lambda part: part, lambda part: torch.compile(part, backend="eager")])
def test_parts_are_trained_with_the_bits_of_the_whole_model(wrap):
    expected = run_replicas(2, lambda reducer: train(reducer.replica, 9, reducer=reducer, **SETTINGS)["weights"])
    for weights, steps in run_replicas(2, lambda reducer: train_parts(reducer, wrap)):
        assert torch.equal(weights, expected[0]) and steps == 9


def test_the_layers_of_all_parts_are_one_list_also_where_a_part_has_a_single_one():
    model = unwrap(in_parts(Tiny()))
    layers = find_layers(model, trainable(model))
    assert [layer[0] for layer in layers] == [f"{int(i == 5)}.layers.{i}.weight" for i in range(6)]


def test_a_part_that_is_in_another_diloco_is_refused():
    parts = in_parts(Tiny())
    first = DiLoCo(parts, reducer=Script())
    first.join()
    with pytest.raises(ConfigError, match="this model already has a DiLoCo"):
        DiLoCo(parts[1:], reducer=Script()).join()
    first.leave()
    DiLoCo(parts[1:], reducer=Script()).join()
