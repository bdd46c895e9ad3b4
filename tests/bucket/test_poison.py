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
def test_a_liar_among_four_harms_little_with_the_closest_and_is_limited_without():
    honest = trained("mean")
    for attack in ATTACKS.values():
        assert trained("closest", *attack) < 1.05 * honest
    start = (OPTIMA[:3] ** 2).sum(1).mean().item()
    held = {name: trained("mean", *attack) for name, attack in ATTACKS.items()}
    assert held["turned and blown up"] == held["a million times"]  # it counts the same however large it is
    assert max(held.values()) < 2 * honest < start / 2


def deltas(*rows, tokens=(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)):
    """A record of members that say these rows, and what they say, encoded."""
    said = torch.tensor(rows)
    names = "abcdefgh"[: len(rows)]
    norms = said.double().norm(dim=1).tolist()
    entries = tuple(Entry(name, name, work, norm) for name, work, norm in zip(names, tokens, norms, strict=False))
    payloads = {name: Float32().encode(row) for name, row in zip(names, said, strict=True)}
    return Record(0, 1, Link(), 7, "a", entries), payloads, said.shape[1]


def test_the_closest_leave_out_the_quarter_that_is_farthest_from_the_middle():
    record, payloads, n = deltas([1.0, 2.0], [2.0, 1.0], [1.5, 1.5], [-2.0, -1.0])
    assert record.clips == [1.0] * 4
    assert mean_of(record, payloads, Float32(), n, "closest").values().tolist() == [1.5, 1.5]
    record, payloads, n = deltas(*[[1.0]] * 6, [9.0], [-9.0])
    assert mean_of(record, payloads, Float32(), n, "closest").values().tolist() == [1.0]


def test_the_closest_count_by_their_work_and_fewer_than_four_are_averaged():
    record, payloads, n = deltas([1.0, 1.0], [1.0, 1.0], [1.0, 0.5], [-1.0, -1.0], tokens=(1.0, 1.0, 0.5, 1.0))
    found = mean_of(record, payloads, Float32(), n, "closest").values().tolist()
    assert found == pytest.approx([1.0, (1.0 + 1.0 + 0.25) / 2.5])
    record, payloads, n = deltas([1.0, 2.0], [2.0, 1.0], [-9.0, -9.0])
    few = mean_of(record, payloads, Float32(), n, "closest").values()
    assert torch.equal(few, mean_of(record, payloads, Float32(), n).values())


def test_the_closest_are_the_same_bits_however_many_threads_compute_them():
    """And the same as added up one pair at a time in plain Python."""
    from diloco.bucket.closest import _added

    values = torch.randn(70_001, generator=torch.Generator().manual_seed(0)).double().square()
    plain = values.tolist()
    while len(plain) > 1:
        half = len(plain) // 2
        plain = [plain[k] + plain[half + k] for k in range(half)] + plain[2 * half :]
    assert _added(values) == plain[0]
    rows = torch.randn(5, 200_000, generator=torch.Generator().manual_seed(1)).tolist()
    record, payloads, n = deltas(*rows)
    threads, found = torch.get_num_threads(), []
    for count in (1, 2, 7):
        torch.set_num_threads(count)
        found.append(mean_of(record, payloads, Float32(), n, "closest").values())
    torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_the_merge_is_a_setting_of_the_run():
    with pytest.raises(ConfigError, match="give mean or closest"):
        Bucket("memory://merge", "a", merge="median")


def test_the_closest_of_sparse_deltas_are_refused(tmp_path):
    reduce = Bucket(str(tmp_path), "a", merge="closest")
    with pytest.raises(ConfigError, match="merge='closest' with a sparse codec"):
        reduce.join({"sync_every": 4}, [State(0, torch.zeros(4), torch.zeros(0))], [TopK()])
