"""How much one delta counts in a round: pure functions of its record, which every member computes alike."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from diloco import SGD
from diloco.bucket.round_store import RECORD as WHOLE_RECORD
from diloco.bucket.rounds import MOST, Contribution, Entry, Link, Record, record_name
from diloco.bucket.rules import entries_of
from diloco.bucket.store.envelope import Envelope
from tests.support.players import SETTINGS, Player, World

N = 16
OPTIMA = torch.randn(4, N, generator=torch.Generator().manual_seed(0)) + 5.0


def contribution(member, tokens=1.0, digest="d", norm=1.0, fingerprint=7):
    return Contribution(member, digest, fingerprint, tokens, norm, None, 0)  # type: ignore[arg-type]


def closed(*pairs, usual=0.0, index=1):
    """A record of members with these (tokens, norm)."""
    entries = tuple(Entry(chr(97 + k), "0" * 64, *pair) for k, pair in enumerate(pairs))
    return Record(0, index, Link("", usual), 7, "a", entries)


def test_shares_follow_work_up_to_a_limit():
    assert closed((10.0, 1.0), (30.0, 1.0)).shares == [0.25, 0.75]
    assert closed((1.0, 1.0), (1e15, 1.0)).shares == [1 / 11, 10 / 11]
    assert closed((2.0, 1.0), (2.0, 1.0), (2.0, 1.0), (64.0, 1.0)).shares == [0.25] * 4
    assert closed(*[(2.0, 1.0)] * 8, (64.0, 1.0)).shares == [0.1] * 8 + [0.2]
    assert closed((0.0, 1.0)).shares == [0.0]
    assert [e.tokens for e in entries_of([contribution("a", 10.0)], 8.0, own_digest="d")] == [8.0]


def test_the_sum_of_learning_rates_is_weighed_by_work_up_to_a_limit():
    rates = (0.1, 0.1, 0.2, 1e6)
    entries = tuple(Entry(chr(97 + k), "0" * 64, 1.0, 1.0, rate) for k, rate in enumerate(rates))
    record = Record(0, 1, Link(), 7, "a", entries)
    assert record.lr == pytest.approx((0.1 + 0.1 + 0.2 + 0.2) / 4)


def test_norms_count_up_to_a_limit_from_the_first_round_on():
    three = ((1.0, 1.0), (1.0, 1.2), (1.0, 1.1))
    assert closed(*three, (1.0, 1000.0)).clips == [1.0, 1.0, 1.0, 1.2 / 1000.0]
    assert closed((1.0, 1.0), (1.0, 1000.0)).clips == [1.0, 0.01]  # of two, the smaller one is the measure
    assert closed(*three, usual=10.0).clips == [1.0, 1.0, 1.0]
    assert closed((1.0, 1000.0), usual=1.0, index=8).clips == [1.0] and closed((1.0, 0.0)).clips == [1.0]
    assert closed((1.0, 1000.0), usual=1.0, index=9).clips == [0.01]  # alone, against what was usual
    assert closed((1.0, 5.0), (1.0, 5.0), (1.0, 5.0), usual=1.0).clips == [1.0] * 3  # what most have is usual


def test_one_delta_counts_a_third_of_what_the_others_count_together_but_no_less_than_usual_and_at_most_twice():
    """Norm times work, so that who claims both has no more of it."""
    for members, limit in ((3, 1.0), (4, 1.0), (5, 4 / 3), (7, 2.0), (50, 2.0)):
        honest = [(1.0, 1.0)] * (members - 1)
        large, works, both = (closed(*honest, liar) for liar in ((1.0, 1e6), (1e6, 1.0), (1e6, 1e6)))
        for record, norm in ((large, 1e6), (works, 1.0), (both, 1e6)):
            counts = record.shares[-1] * record.clips[-1] * norm / record.shares[0]
            assert counts == pytest.approx(limit)


def test_what_is_usual_follows_from_the_records_alone_and_one_member_cannot_raise_it():
    assert closed((1.0, 3.0), (1.0, 1000.0)).link.usual == 3.0
    usual = 1.0
    for _ in range(100):
        usual = closed((1.0, 1.0), (1.0, 1e6), usual=usual, index=20).link.usual
    assert usual == 1.0
    assert closed((1.0, 5.0), (1.0, 5.0), usual=1.0).link.usual == 2.0
    assert closed((1.0, 0.0), (1.0, 0.0), (1.0, 4.0)).link.usual == 4.0  # who did nothing is no measure


def test_a_record_has_room_for_thousands():
    names = [f"{k:063d}" for k in range(MOST + 5)]
    entries = entries_of([contribution(name, digest=name * 2) for name in names], 9.0, own_digest=names[-1] * 2)
    fields, payload = Record(0, 1, Link(), 7, "a", entries).sealed()
    assert len(Envelope("r").seal(record_name(0, 1, 0), "record", fields, payload).body) < WHOLE_RECORD


class Trainer(Player):
    """A member that trains towards the optimum of its own data; what it sends is multiplied."""

    def __init__(self, world, k, factor=1.0, work=1.0):
        model = nn.Linear(N, 1, bias=False)
        nn.init.zeros_(model.weight)
        super().__init__(world, "abcd"[k], model=model, settings=SETTINGS | {"outer": SGD(0.7), "sync_every": 8})
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


def trained(factor=1.0, work=1.0):
    """The mean loss of the first three of four members on the anchor, after some rounds; the fourth is broken."""
    world = World(1)
    members = [Trainer(world, k, *((factor, work) if k == 3 else ())) for k in range(4)]
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
def test_one_broken_machine_of_four_slows_the_run_down_and_does_not_take_it_over():
    sound, start = trained(), (OPTIMA[:3] ** 2).sum(1).mean().item()
    turned, huge, worked = trained(-9.9), trained(-1e6), trained(-1.0, 32.0)
    assert turned == huge  # it counts the same however large it is
    assert max(turned, worked) < 2 * sound < start / 2
