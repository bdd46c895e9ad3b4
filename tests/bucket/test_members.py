"""Who takes part: what a member says about itself, whom a round waits for, and how long a member waits."""

from dataclasses import asdict

import pytest

from diloco.bucket.members import Member, Members, read_member
from diloco.bucket.store.envelope import Envelope, Invalid
from diloco.bucket.timing import LONGEST_PATIENCE, MemberOptions, Timing


def read(**changes):
    """The entry of member x with some fields as another writer might put them."""
    fields = asdict(Member("x", 0))
    fields["told"] = fields.pop("published")
    sealed = Envelope("r").seal("members/x/000000", "member", {"member": fields | changes})
    return read_member(Envelope("r").open(sealed.name, "member", sealed.body, 0))


def test_a_member_is_read_as_it_was_written():
    mine = Member("x", 3, 7, (0, 5), ((0, 0), (1, 9)), False, True, 0.5, {"loss": -1.5})
    body = mine.sealed(Envelope("r"))
    assert read_member(Envelope("r").open(mine.object_name, "member", body, 0)) == mine


@pytest.mark.parametrize(
    "changes",
    [
        {"held": 3},
        {"held": [-1]},
        {"held": [True]},
        {"wants": 3},
        {"wants": [3]},
        {"wants": ["ab"]},
        {"wants": [[1]]},
        {"wants": [[1, 2, 3]]},
        {"wants": [[-1, 2]]},
        {"wants": [[1, 2.5]]},
        {"told": [1]},
        {"told": {"loss": "low"}},
        {"joining": 1},
        {"left": None},
        {"incarnation": -1},
        {"incarnation": 1},
        {"counter": -1},
        {"step_seconds": -0.1},
        {"name": "y"},
        {"more": 1},
    ],
    ids=repr,
)
def test_an_entry_that_is_not_one_of_a_member_is_refused(changes):
    assert read() == Member("x", 0)
    with pytest.raises(Invalid):
        read(**changes)


def test_who_missed_a_round_is_waited_for_again_once_it_delivers():
    members = Members("a", ttl=10.0)
    members.saw([Member("b", 0, joining=False), Member("c", 0, joining=False)], 0.0)
    assert set(members.awaited(1.0, everyone=False)) == {"b", "c"}  # no closed round was seen: all that live
    members.closed(["a", "c"])
    assert set(members.awaited(1.0, everyone=False)) == {"c"}
    members.delivered("b")
    assert set(members.awaited(1.0, everyone=False)) == {"b", "c"}
    assert not members.awaited(10.1, everyone=True)


def test_only_another_member_that_was_never_seen_is_a_stranger_until_the_members_are_read():
    members = Members("a", ttl=10.0)
    members.saw([Member("b", 0)], 0.0)
    for known in ("a", "b"):
        members.delivered(known)
        assert not members.stranger
    members.delivered("c")
    members.delivered("b")
    assert members.stranger
    members.saw([], 1.0)
    assert not members.stranger


@pytest.mark.parametrize(
    ("step", "poll", "expected"), [(0.01, None, 0.2), (1.0, None, 1.0), (60.0, None, 5.0), (1.0, 0.05, 0.05)]
)
def test_a_member_looks_once_a_step_but_neither_all_the_time_nor_too_seldom(step, poll, expected):
    now = iter([0.0, step, 2 * step])
    timing = Timing(MemberOptions(poll=poll), 10, lambda: next(now))
    for _ in range(3):
        timing.stepped()
    assert timing.poll == expected


def test_a_snapshot_is_waited_for_two_rounds_of_the_slowest_and_some_heartbeats():
    timing = Timing(MemberOptions(heartbeat=3.0), 10, lambda: 0.0)
    assert timing.patience([]) == 12.0
    assert timing.patience([Member("b", 0, step_seconds=s) for s in (0.5, 2.0)]) == 52.0
    assert timing.patience([Member("b", 0, step_seconds=100.0)]) == LONGEST_PATIENCE
