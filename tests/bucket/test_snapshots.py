"""Snapshots: which are used, which is the newest, and when one is due."""

import json

import pytest
import torch

from diloco.bucket.snapshots import Snapshots, read_snapshot, seal_snapshot
from diloco.bucket.store.envelope import DIGEST, Envelope, Invalid
from diloco.reduce import State
from tests.support.players import World, complete

ENVELOPE = Envelope("r")


def state(index, anchor=(1.0, 2.0), outer=(3.0,)):
    return State(index, torch.tensor(anchor), torch.tensor(outer))


def snapshots(rejected=None):
    reject = lambda name, _: (rejected if rejected is not None else []).append(name)  # noqa: E731
    return Snapshots(ENVELOPE, 0, state(0), "", reject)


def read(sealed):
    return read_snapshot(ENVELOPE.open(sealed.name, "snapshot", sealed.body, None), 0, 2, 1)


def changed(**changes):
    """A snapshot whose header says something else."""
    good = seal_snapshot(ENVELOPE, 0, state(4), "record")
    header, _ = json.JSONDecoder().raw_decode(good.body[40:].decode("latin-1"))
    return ENVELOPE.seal(f"anchors/0000/00000004-{DIGEST}", "snapshot", header | changes, good.body[-12:])


@pytest.mark.parametrize("outer", [(3.0,), (0.0,)])
def test_a_snapshot_is_read_as_it_was_written(outer):
    found = read(seal_snapshot(ENVELOPE, 0, state(4, outer=outer), "record"))
    assert found.index == 4 and found.anchor.tolist() == [1.0, 2.0] and found.outer.tolist() == list(outer)
    assert read(changed()).index == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_snapshot_with_inf_or_nan_anywhere_is_refused(bad):
    for spoiled in (state(4, anchor=(1.0, bad)), state(4, outer=(bad,))):
        with pytest.raises(Invalid, match="inf or nan"):
            read(seal_snapshot(ENVELOPE, 0, spoiled, "record"))


@pytest.mark.parametrize(
    "changes",
    [
        {"zero": 0},
        {"record": None},
        {"zero": True},
        {"fragment": 1},
        {"index": 5},
        {"index": -1},
        {"anchor": 1},
        {"outer": 2},
        {"fingerprint": 7},
    ],
    ids=repr,
)
def test_a_snapshot_whose_header_does_not_fit_is_refused(changes):
    with pytest.raises(Invalid):
        read(changed(**changes))


def test_the_newest_is_the_newest_valid_one():
    world, rejected = World(), []
    writer, reader = snapshots(), snapshots(rejected)
    for index in (5, 3):
        complete(world, writer.store(state(index), "record"))
        assert writer.newest == 5
    bad = "anchors/0000/00000009-" + "0" * 64
    world.objects[bad] = b"garbage"
    complete(world, reader.refresh())
    assert reader.newest == 5 and rejected == [bad]
    found, record = complete(world, snapshots().load())
    assert found.index == 5 and record == "record"
    assert complete(world, snapshots().load(6)) is None


def test_one_is_due_when_it_is_wanted_and_not_there_and_the_closer_of_the_round_puts_it():
    world, held = World(), state(5)
    own = snapshots()
    own.consider(held, "record", wanted=-1, first=True, now=0.0, grace=1.0)
    complete(world, own.tick())
    assert not world.objects
    own.consider(held, "record", wanted=0, first=True, now=0.0, grace=1.0)
    complete(world, own.tick())
    assert own.newest == 5 and len(world.objects) == 1
    other = snapshots()
    for now, there in ((0.0, False), (1.0, False), (1.5, True)):  # unless nobody has put one during the grace
        other.consider(held, "record", wanted=5, first=False, now=now, grace=1.0)
        assert (other._waiting is not None) == there
