"""Snapshots: which are used, which is the newest, and when one is due."""

import json

import pytest
import torch

import diloco.bucket.snapshots as snapshots_
import diloco.bucket.store.envelope as envelope_
from diloco import Float32
from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import Entry, Record, delta_name, layout_of, place_of, record_name, snapshot_index
from diloco.bucket.rules import superfluous
from diloco.bucket.snapshots import KEEP, Snapshots, read_snapshot, seal_snapshot
from diloco.bucket.store import Read, advance
from diloco.bucket.store.envelope import DIGEST, PREFIX, Envelope, Invalid
from diloco.exchange.reducer import State
from tests.support.players import World, complete, one_member
from tests.support.sharing import together

ENVELOPE = Envelope("r")


def state(index, anchor=(1.0, 2.0), outer=(3.0,)):
    return State(index, torch.tensor(anchor), torch.tensor(outer))


def snapshots(rejected=None):
    reject = lambda name, _: (rejected if rejected is not None else []).append(name)  # noqa: E731
    rounds = RoundStore(0, layout_of(Float32(), 2), ENVELOPE, reject)
    return Snapshots(rounds, ENVELOPE, 0, state(0), "", reject)


START = "p"


def close(world, index, fingerprint=7, previous=START):
    """Put a record; returns its digest."""
    record = Record(0, index, previous, fingerprint, "a", (Entry("a", "0" * 64, 1.0),))
    sealed = ENVELOPE.seal(record_name(0, index, 0), "record", *record.sealed())
    world.objects[sealed.name] = sealed.body
    return sealed.digest


def read(sealed):
    return read_snapshot(ENVELOPE.open(sealed.name, "snapshot", sealed.body, None), 0, 2, 1)


def changed(**changes):
    """A snapshot whose header says something else; None: it does not say it."""
    good = seal_snapshot(ENVELOPE, 0, state(4), "record")
    header, _ = json.JSONDecoder().raw_decode(good.body[PREFIX.size :].decode("latin-1"))
    header = {key: value for key, value in (header | changes).items() if value is not None}
    return ENVELOPE.seal(f"anchors/0000/00000004-{DIGEST}", "snapshot", header, good.body[-12:])


@pytest.mark.parametrize("outer", [(3.0,), (0.0,)])
def test_a_snapshot_is_read_as_it_was_written(outer):
    loaded = read(seal_snapshot(ENVELOPE, 0, state(4, outer=outer), "record"))
    assert loaded.index == 4 and loaded.anchor.tolist() == [1.0, 2.0] and loaded.outer.tolist() == list(outer)
    assert read(changed()).index == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_snapshot_with_inf_or_nan_anywhere_is_refused(bad):
    for spoiled in (state(4, anchor=(1.0, bad)), state(4, outer=(bad,))):
        with pytest.raises(Invalid, match="non-finite"):
            read(seal_snapshot(ENVELOPE, 0, spoiled, "record"))


@pytest.mark.parametrize("changes", [
    {"zero": 0}, {"record": None}, {"zero": True}, {"fragment": 1}, {"index": 5}, {"index": -1}, {"anchor": 1},
    {"outer": 2}, {"fingerprint": 7}, {"fingerprint": None},
], ids=repr)  # fmt: skip
def test_a_snapshot_whose_header_does_not_fit_is_refused(changes):
    with pytest.raises(Invalid):
        read(changed(**changes))


def test_the_newest_is_the_newest_valid_one():
    world, rejected = World(), []
    writer, reader = snapshots(), snapshots(rejected)
    digests = {}
    for index in (5, 3):
        digest = digests[index] = close(world, index)
        complete(world, writer.store(state(index), digest))
        assert writer.newest == 5
    bad = "anchors/0000/00000009-" + "0" * 64
    world.objects[bad] = b"garbage"
    complete(world, reader.refresh())
    assert reader.newest == 5 and rejected == [bad]
    loader = snapshots()
    loaded, link = complete(world, loader.load())
    assert loaded.index == loader.newest == 5 and link == digests[5]
    assert complete(world, snapshots().load(6)) is None


def test_the_header_of_a_snapshot_in_many_parts_is_read_whole(monkeypatch):
    for module in (envelope_, snapshots_):
        monkeypatch.setattr(module, "PART", 4)
    large, world, rejected = State(99_999_999, torch.ones(400), torch.ones(400)), World(), []
    rounds = RoundStore(0, layout_of(Float32(), 400), ENVELOPE, lambda name, reason: None)
    reader = Snapshots(rounds, ENVELOPE, 0, large, "", lambda name, reason: rejected.append(reason))
    sealed = seal_snapshot(ENVELOPE, 0, large, "f" * 64)
    world.objects[sealed.name] = sealed.body
    loaded = complete(world, reader.peek(sealed.name))
    assert not rejected and len(loaded.header["sha256"]) == 800


def test_a_snapshot_that_does_not_belong_to_what_was_closed_is_not_used():
    """One names a record that is not there; from the bits of another the run did not go on."""
    world, rejected = World(), []
    reader = snapshots(rejected)
    digest = close(world, 3)
    complete(world, reader.store(state(3), digest))
    forged = seal_snapshot(ENVELOPE, 0, state(99_999_999), "0" * 64)
    fourth = close(world, 4, state(3).fingerprint(), digest)
    other = seal_snapshot(ENVELOPE, 0, state(4, anchor=(9.0, 9.0)), fourth)
    following = Record(0, 5, fourth, 12345, "a", (Entry("a", "0" * 64, 1.0),))
    record = ENVELOPE.seal(record_name(0, 5, 0), "record", *following.sealed())
    for sealed in (forged, other, record):
        world.objects[sealed.name] = sealed.body
    loaded, _ = complete(world, reader.load())
    assert loaded.index == 3 and {forged.name, other.name} <= set(rejected)
    complete(world, reader.refresh())
    assert reader.newest == 3


def test_a_snapshot_of_another_branch_is_not_used():
    """A key holder has put a second record of round 3, behind the first, and a snapshot that names it."""
    world, rejected = World(), []
    reader = snapshots(rejected)
    digest = close(world, 3)
    follow = Record(0, 4, digest, state(3).fingerprint(), "a", (Entry("a", "0" * 64, 1.0),))
    second = Record(0, 3, "q", 7, "b", (Entry("b", "0" * 64, 1.0),))
    good = seal_snapshot(ENVELOPE, 0, state(3), digest)
    forged_record = ENVELOPE.seal(record_name(0, 3, 1), "record", *second.sealed())
    forged = seal_snapshot(ENVELOPE, 0, state(3, anchor=(2.0, 1.0)), forged_record.digest)
    follows = ENVELOPE.seal(record_name(0, 4, 0), "record", *follow.sealed())
    for sealed in (good, forged_record, forged, follows):
        world.objects[sealed.name] = sealed.body
    loaded, _ = complete(world, reader.load())
    assert loaded.anchor.tolist() == [1.0, 2.0] and (forged.name in rejected or good.name > forged.name)
    del world.objects[good.name]
    assert complete(world, snapshots(rejected).load()) is None and forged.name in rejected


def test_what_is_deleted_while_it_is_read_is_looked_for_again():
    """Two newer ones were put, and the one that is being read was collected."""
    world = World()
    digest = close(world, 3)
    complete(world, snapshots().store(state(3), digest))
    (old,) = [name for name in world.objects if name.startswith("anchors/")]
    task = snapshots().load()
    answer = None
    while not (isinstance(operation := task.send(answer), Read) and operation.name == old and operation.first is None):
        answer = world.attempt(operation)
    del world.objects[old]
    digest = close(world, 5)
    complete(world, snapshots().store(state(5), digest))

    def rest():
        return (yield from _resumed(task, world.attempt(operation)))

    assert complete(world, rest())[0].index == 5


def _resumed(task, answer):
    while True:
        try:
            operation = advance(task, answer)
        except StopIteration as stop:
            return stop.value
        answer = yield operation


def test_what_is_superfluous_is_kept_for_an_hour_and_while_somebody_joins():
    world, writer = World(), snapshots()
    for index in (1, 2, 3, 4):
        digest = close(world, index)
        world.objects[delta_name(0, index, "a", "0" * 64)] = b"delta"
        complete(world, writer.store(state(index), digest))

    def kept():
        return {place_of(name)[1] for name in world.objects if "/d-" in name}

    complete(world, writer.collect(0.0, busy=False))
    assert kept() == {1, 2, 3, 4}
    complete(world, writer.collect(KEEP, busy=True))
    assert kept() == {1, 2, 3, 4}
    complete(world, writer.collect(KEEP, busy=False))
    assert kept() == {4} and [snapshot_index(name) for name in world.objects if snapshot_index(name)] == [3, 4]


@pytest.mark.parametrize("name", ["rounds/x/0000/d-a-", "rounds/00000/001/0000/x/d-a-", "rounds/٠٠٠٠٠/٠٠١/0000/d-a-"])
def test_a_name_that_is_not_one_of_ours_harms_no_collection(name):
    assert superfluous([name + "0" * 64, delta_name(0, 1, "a", "0" * 64)], 0, 9) == [delta_name(0, 1, "a", "0" * 64)]


@pytest.mark.parametrize(
    ("members", "stride", "first"), [(1, 1, 100), (2, 1, 100), (2, 16, 112), (4, 1, 50), (4, 16, 64)]
)
def test_one_is_due_after_two_hundred_deltas_at_a_multiple_of_the_stride(members, stride, first, monkeypatch):
    monkeypatch.setattr(snapshots_, "STRIDE", stride)
    writer, due = snapshots(), []
    writer.newest = 0
    for index in range(1, 120):
        writer.consider(state(index), "record", members, wanted=-1, now=0.0, timeout=0.0)
        due += [index] * (writer._waiting is not None)
    assert due[0] == first


def test_one_is_due_when_it_is_wanted_and_not_there_and_the_closer_of_the_round_puts_it():
    world, held = World(), state(5)
    writer = snapshots()
    writer.consider(held, "record", 1, wanted=-1, now=0.0, timeout=0.0)
    complete(world, writer.tick(5, 0.0, False))
    assert not world.objects
    writer.consider(held, "record", 1, wanted=0, now=0.0, timeout=0.0)
    complete(world, writer.tick(5, 0.0, False))
    assert writer.newest == 5 and len(world.objects) == 1
    other = snapshots()
    for now, due in ((0.0, False), (1.0, False), (1.5, True)):  # nobody has put one during the straggler timeout
        other.consider(held, "record", 1, wanted=5, now=now, timeout=1.0)
        assert (other._waiting is not None) == due


def test_who_closed_the_last_round_puts_its_snapshot_at_once():
    _, a = one_member(1)
    timeouts = []
    a.reduce._fragments[0].snapshots.consider = lambda *arguments: timeouts.append(arguments[-1])
    together((a,), 3)
    assert timeouts and not any(timeouts)
