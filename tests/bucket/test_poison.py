"""One of four members lies about its work or its delta. Each has its own data; the loss is that of the honest ones."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from diloco import SGD, Float32, TopK
from diloco.bucket import Bucket
from diloco.bucket.rounds import Entry, Link, Record, mean_of
from diloco.errors import ConfigError
from diloco.reduce import State
from tests.support.players import SETTINGS, Player, World

N = 16
OPTIMA = torch.randn(4, N, generator=torch.Generator().manual_seed(0)) + 5.0
ATTACKS = {"turned and blown up": (-9.9, 1.0), "32 times the tokens": (-1.0, 32.0), "a million times": (-1e6, 1.0)}


class Trainer(Player):
    """A member that trains towards the optimum of its own data; what it sends is multiplied."""

    def __init__(self, world, k, factor=1.0, work=1.0, **options):
        model = nn.Linear(N, 1, bias=False)
        nn.init.zeros_(model.weight)
        super().__init__(
            world, "abcd"[k], model=model, settings=SETTINGS | {"outer": SGD(0.7), "sync_every": 8}, **options
        )
        self.optimum, send = OPTIMA[k], self.reduce.send

        def altered(fragment, index, delta):
            def made():
                made = delta()
                return replace(made, values=made.values * factor, weight=made.weight * work)

            send(fragment, index, made)

        self.reduce.send = altered

    def step(self):
        with torch.no_grad():
            self.model.weight += 0.1 * (self.optimum - self.model.weight)
        self.diloco.step()


def trained(merge, factor=1.0, work=1.0):
    """The mean loss of the honest members on the anchor, after some rounds in which all take part."""
    world = World(1)
    members = [Trainer(world, k, *((factor, work) if k == 3 else ()), merge=merge) for k in range(4)]
    for member in (*members, *members):
        member.turn()
    for _ in range(120):
        for member in members:
            member.step()
            member.turn()
        world.now += 0.1
    assert world.closed(0) > 10
    anchor = members[0].diloco._fragments[0].state.anchor
    return ((anchor - OPTIMA[:3]) ** 2).sum(1).mean().item()


@pytest.mark.slow
def test_a_liar_among_four_harms_little_with_the_trimmed_mean_and_is_limited_without():
    honest = trained("mean")
    for attack in ATTACKS.values():
        assert trained("trimmed", *attack) < 1.05 * honest
    start = (OPTIMA[:3] ** 2).sum(1).mean().item()
    blown_up = [trained("mean", *ATTACKS[name]) for name in ("turned and blown up", "a million times")]
    assert blown_up[0] == blown_up[1] < start / 2  # it counts the same however large it is, and the run goes on


def test_a_trimmed_mean_leaves_the_extremes_of_each_value_out():
    said = torch.tensor([[1.0, -0.0], [2.0, 0.0], [3.0, -0.0], [-3.0, -0.0]])
    entries = tuple(Entry(name, name, 1.0, 1.0) for name in "abcd")
    payloads = {name: Float32().encode(row) for name, row in zip("abcd", said, strict=True)}
    found = mean_of(Record(0, 1, Link(), 7, "a", entries), payloads, Float32(), 2, "trimmed").values()
    assert found.tolist() == [1.5, 0.0] and not torch.signbit(found).any()
    three = Record(0, 1, Link(), 7, "a", entries[:3])
    few = mean_of(three, payloads, Float32(), 2, "trimmed").values()
    assert torch.equal(few, mean_of(three, payloads, Float32(), 2).values())


def test_the_merge_is_a_setting_of_the_run():
    with pytest.raises(ConfigError, match="give mean or trimmed"):
        Bucket("memory://merge", "a", merge="median")


def test_a_trimmed_mean_of_sparse_deltas_is_refused(tmp_path):
    reduce = Bucket(str(tmp_path), "a", merge="trimmed")
    with pytest.raises(ConfigError, match="merge='trimmed' with a sparse codec"):
        reduce.join({"sync_every": 4}, [State(0, torch.zeros(4), torch.zeros(0))], [TopK()])
