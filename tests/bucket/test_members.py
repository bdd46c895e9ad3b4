"""Who takes part: what a member says about itself, whom a round waits for, and how long a member waits."""

from collections import Counter
from dataclasses import asdict

import pytest

from diloco.bucket.members import (
    SAMPLE,
    SELDOM,
    STEPS,
    STUCK,
    Member,
    MemberOptions,
    Members,
    Roll,
    Timing,
    read_member,
    read_members,
    register,
)
from diloco.bucket.store import Read
from diloco.bucket.store.envelope import Envelope, Invalid
from diloco.errors import DiLoCoError
from tests.support.players import World, complete, one_member


def fields_of(member):
    return asdict(member)


def read(**changes):
    """The entry of member x with some fields as another writer might put them."""
    sealed = Envelope("r").seal("members/x/000000", "member", {"member": fields_of(Member("x", 0)) | changes})
    return read_member(Envelope("r").open(sealed.name, "member", sealed.body, 0))


def test_a_member_is_read_as_it_was_written():
    member = Member("x", 3, 7, (0, 5), ((0, 0), (1, 9)), False, True, 0.5, {"loss": -1.5})
    body = member.sealed(Envelope("r"))
    assert read_member(Envelope("r").open(member.object_name, "member", body, 0)) == member


@pytest.mark.parametrize("changes", [
    {"held": 3}, {"held": [-1]}, {"held": [True]}, {"wants": 3}, {"wants": [3]}, {"wants": ["ab"]}, {"wants": [[1]]},
    {"wants": [[1, 2, 3]]}, {"wants": [[-1, 2]]}, {"wants": [[1, 2.5]]},
    {"published": [1]}, {"published": {"loss": "low"}}, {"phases": "0z"}, {"phases": 3},
    {"joining": 1}, {"left": None}, {"incarnation": -1}, {"incarnation": 1}, {"counter": -1}, {"step_seconds": -0.1},
    {"name": "y"}, {"more": 1},
], ids=repr)  # fmt: skip
def test_an_entry_that_is_not_one_of_a_member_is_refused(changes):
    assert read() == Member("x", 0)
    with pytest.raises(Invalid):
        read(**changes)


def test_who_missed_a_round_is_waited_for_again_once_it_delivers():
    members = Members("a", ttl=10.0)
    members.update([Member("b", 0, joining=False), Member("c", 0, joining=False)], 0.0)
    assert set(members.awaited(1.0, everyone=False)) == {"b", "c"}  # no closed round was seen: all that live
    members.closed(["a", "c"])
    assert set(members.awaited(1.0, everyone=False)) == {"c"}
    members.delivered("b")
    assert set(members.awaited(1.0, everyone=False)) == {"b", "c"}
    for now in (5.0, 10.0):
        members.update([], now)
    assert not members.awaited(10.1, everyone=True)


def test_nobody_dies_while_the_store_cannot_be_read():
    members, entry = Members("a", ttl=10.0), Member("b", 0, joining=False)
    members.update([entry], 0.0)
    members.update([entry], 1.0)
    assert set(members.alive(60.0)) == {"b"}
    members.update([entry], 60.0)  # its next heartbeat is not read yet
    assert set(members.alive(61.0)) == {"b"} and not members.is_gone("b", 0, 61.0)
    for now in (64.0, 68.0, 72.0):
        members.update([entry], now)
    assert not members.alive(72.0) and members.is_gone("b", 0, 72.0)


def test_the_dead_are_noticed_even_if_every_look_is_slow():
    members, entry = Members("a", ttl=10.0), Member("b", 0, joining=False)
    for look in range(10):
        members.update([entry], 6.0 * look)
    assert not members.alive(54.0) and members.is_gone("b", 0, 54.0)


@pytest.mark.parametrize(
    ("step", "poll", "expected"), [(0.01, None, 0.2), (1.0, None, 1.0), (60.0, None, 5.0), (1.0, 0.05, 0.05)]
)
def test_a_member_looks_once_a_step_but_neither_all_the_time_nor_too_seldom(step, poll, expected):
    now = iter([0.0, step, 2 * step])
    timing = Timing(MemberOptions(poll=poll), 10, lambda: next(now))
    for _ in range(3):
        timing.stepped()
    assert timing.poll == expected


def entry(world, name, incarnation=0, **fields):
    member = Member(name, incarnation, joining=False, **fields)
    world.objects[member.object_name] = member.sealed(Envelope("r"))
    return member


def look(world, roll, rejected=None):
    reads, attempt = [], world.attempt
    world.attempt = lambda o: (reads.append(o.name) if isinstance(o, Read) else None, attempt(o))[1]
    found = complete(world, roll.read(Envelope("r"), lambda name, _: rejected.append(name) if rejected else None))
    world.attempt = attempt
    return [member.name for member in found], reads


def test_of_many_members_some_are_read_at_a_time_and_each_in_its_turn():
    world, roll = World(), Roll()
    for k in range(2 * SAMPLE + 5):
        entry(world, f"m{k:03d}")
    seen, through = zip(*[(look(world, roll)[0], roll.through) for _ in range(3)], strict=True)
    assert through == (False, False, True)
    assert max(map(len, seen)) == SAMPLE and len({name for each in seen for name in each}) == 2 * SAMPLE + 5
    assert roll.spread == 3
    assert len(complete(world, read_members(Envelope("r"), lambda *_: None))) == 2 * SAMPLE + 5


def test_the_dead_are_read_seldom_and_delay_no_look_at_the_living():
    """Members that were killed and never came back, as spot machines with names of their own do."""
    world, roll = World(), Roll()
    for k in range(10 * SAMPLE):
        entry(world, f"m{k:03d}")
    spreads, looks = [], []
    for beat in range(200):
        for name in ("a", "b"):
            entry(world, name, counter=beat)
        looks.append(look(world, roll))
        spreads.append(roll.spread)
    assert spreads[0] == 11 and set(spreads[100:]) == {1}
    assert all({"a", "b"} <= set(names) and len(names) <= 2 + SELDOM for names, _ in looks[100:])
    assert len({name for names, _ in looks[150:] for name in names}) == 10 * SAMPLE + 2  # one may only have slept
    entry(world, "m000", counter=1)
    active = complete(world, roll.read(Envelope("r"), lambda *_: None, {"m000"}))
    assert "m000" in [member.name for member in active] and "m000" in look(world, roll)[0]


def test_who_has_left_is_not_read_again_until_it_comes_back():
    world, roll = World(), Roll()
    entry(world, "a", left=True)
    assert look(world, roll) == (["a"], ["members/a/000000"])
    assert look(world, roll) == ([], [])
    entry(world, "a", 1)
    assert look(world, roll)[0] == ["a"]


@pytest.mark.parametrize("first", [4, 900_000], ids=["at once", "much later"])
def test_forty_garbage_incarnations_hide_nobody_and_the_next_one_follows_the_last_valid(first):
    """More than are read at a time. Once the true one is found it is read at every look, also while garbage is tried
    again."""
    world, roll, looks, rejected = World(), Roll(), [], [""]
    garbage = {f"members/b/{first + k:06d}" for k in range(40)}
    misnamed = {"members/b/x", "members/b/٣٣٣٣٣٣"}
    world.objects |= dict.fromkeys(garbage | misnamed, b"garbage")
    for beat in range(400):
        entry(world, "b", 3, counter=beat)
        looks.append(look(world, roll, rejected))
    assert all(names == ["b"] for names, _ in looks[40:]) and set(rejected[1:]) == garbage | misnamed
    tries = Counter(path for _, reads in looks for path in reads if path in garbage)
    assert set(tries) == garbage and 3 < max(tries.values()) < 16
    assert [m.incarnation for m in complete(world, read_members(Envelope("r"), lambda *_: None))] == [3]
    entry(world, "b", 2)
    assert complete(world, register(Envelope("r"), "b", 1.0)).incarnation == (44 if first == 4 else 4)
    assert "members/b/000002" not in world.objects and "members/b/000003" in world.objects


def test_an_entry_that_its_owner_has_written_over_is_found_again():
    world, roll = World(), Roll()
    entry(world, "b", 3)
    world.objects["members/b/000004"] = b"half an entry"
    assert [look(world, roll)[0] for _ in range(2)] == [[], ["b"]]
    entry(world, "b", 4)
    found = [complete(world, roll.read(Envelope("r"), lambda *_: None)) for _ in range(SAMPLE + 2)]
    assert max(member.incarnation for member in found[-1]) == 4


def test_a_store_that_does_not_give_back_what_was_put_is_refused_with_a_sentence():
    world = World()
    attempt = world.attempt
    world.attempt = lambda o: b"something else" if isinstance(o, Read) else attempt(o)
    with pytest.raises(DiLoCoError, match="or the store alters objects"):
        complete(world, register(Envelope("r"), "b", 1.0))


def test_who_makes_no_steps_is_not_awaited_although_it_lives():
    members = Members("a", ttl=10.0)
    for now in range(0, int(STUCK) + 20, 5):
        steps = {"b": float(now), "c": 7.0}
        members.update([Member(n, 0, now, joining=False, published={STEPS: steps[n]}) for n in "bc"], float(now))
        awaited = set(members.awaited(float(now), everyone=True))
        assert awaited == ({"b"} if now > STUCK else {"b", "c"})
    assert members.stuck(float(now)) == {"c"}
    for later in (4.0, 8.0, 12.0):
        members.update([], now + later)
    assert members.stuck(now + 12.0) == set()  # nobody has a heartbeat


def put_entry(world, member, **more):
    sealed = Envelope(world.run).seal(member.object_name, "member", {"member": fields_of(member)} | more)
    world.objects[sealed.name] = sealed.body


def test_who_makes_no_steps_is_named_once():
    world, a = one_member(1)
    for beat in range(int(STUCK / 5) + 20):
        put_entry(world, Member("b", 0, beat, joining=False, published={STEPS: 7.0}))
        a.finish_tick(0)
        world.now += 5.0
    stuck = [event for event in a.reduce.events() if event["event"] == "stuck"]
    assert stuck == [{"event": "stuck", "member": "b"}]


@pytest.mark.parametrize(("more", "read"), [(1 << 10, True), (16 << 10, False)])
def test_a_long_entry_is_not_read(more, read):
    """Of a thousand of them, memory would be full."""
    world, a = one_member(1)
    put_entry(world, Member("b", 0, joining=False), more="m" * more)
    a.finish_tick(0)
    events = {event["event"]: event for event in a.reduce.events()}
    assert ("b" in a.reduce.session.members.alive(world.now)) == read
    assert read or "too large" in events["invalid"]["reason"]


def test_a_leave_is_told_once_and_a_snapshot_of_the_future_keeps_nobody_from_others():
    members = Members("a", ttl=10.0)
    assert members.update([Member("b", 0, 1, joining=False), Member("c", 0, 1, joining=False)], 0.0)
    assert members.update([Member("b", 0, 2, joining=False, left=True)], 1.0) == [
        Member("b", 0, 2, joining=False, left=True)
    ]
    assert members.update([Member("b", 0, 2, joining=False, left=True)], 2.0) == []
    members.update([Member("c", 0, 2, ((0, 7)), wants=((0, 7),)), Member("d", 0, 1, wants=((0, 1 << 40), (1, 3)))], 3.0)
    assert [members.wanted(f, 9, 3.0) for f in (0, 1, 2)] == [7, 3, -1]
    assert members.wanted(0, 6, 3.0) == -1


def test_unless_it_waits_for_everyone_a_round_waits_no_longer_than_the_own_steps_take():
    now = iter(k * 0.1 for k in range(9))
    timing = Timing(MemberOptions(), 10, lambda: next(now))
    for _ in range(3):
        timing.stepped()
    slow = Member("b", 0, step_seconds=0.1, published={"upload_seconds": 12.0, "poll_seconds": 0.2})
    assert timing.straggler_timeout([slow], everyone=True) == pytest.approx(12.4)
    assert timing.straggler_timeout([slow], everyone=False) == pytest.approx(1.2)
    timing.uploaded(0, 3.0)
    assert timing.straggler_timeout([slow], everyone=False) == pytest.approx(4.2)
