"""The rules of a round: each test fails when its rule is broken. Numbers are those of the guarantees that a
rule serves (docs/bucket-protocol.md)."""

from dataclasses import replace

import pytest

from diloco.bucket import rules
from diloco.bucket.round_store import RECORD
from diloco.bucket.rounds import (
    MOST,
    Branched,
    Contribution,
    Entry,
    Record,
    delta_name,
    heads_name,
    pieces_name,
    record_name,
    share_name,
    snapshot_folder,
)
from diloco.bucket.store.envelope import Envelope, Invalid


def record(digest, voids="", entries=(), fingerprint=7):
    return Record(0, 1, "", fingerprint, "a", tuple(entries), digest=digest, voids=voids)


def delta(member, digest="d", tokens=1.0, fingerprint=7, lr=0.5):
    return Contribution(member, digest, fingerprint, tokens, None, 0, lr)


# 1, 4: one record per round, forever.


def test_the_first_valid_attempt_is_the_record():
    first, second = record("1"), record("2")
    assert rules.record_of_round([Invalid("x"), first, second], ()) == (first, True)
    assert rules.record_of_round([first], ()) == (first, False)
    assert rules.record_of_round([Branched("x"), first], ()) == (first, True)
    assert rules.record_of_round([Invalid("x")], ()) == (None, False)


def test_only_an_attempt_that_names_the_record_as_void_replaces_it():
    first = record("1")
    assert rules.record_of_round([first, record("2", voids="9"), record("3", voids="1")], ())[0] == record("3", "1")
    assert rules.record_of_round([first, record("2", voids="9")], ())[0] == first


def test_a_record_that_is_known_to_be_wrong_does_not_count():
    assert rules.record_of_round([record("1"), record("2")], {"1"})[0] == record("2")
    replaced = [record("1"), record("2", voids="1")]
    assert rules.record_of_round(replaced, {"2"})[0] is None
    assert rules.record_of_round([*replaced, record("3", voids="2")], {"2"})[0] == record("3", voids="2")


@pytest.mark.parametrize(("lacking", "followed", "may"), [(900, False, True), (899, False, False), (9e9, True, False)])
def test_a_record_is_replaced_only_after_long_and_if_nobody_has_followed_it(lacking, followed, may):
    assert rules.may_replace(lacking, followed) is may


def test_nothing_that_a_later_member_needs_is_superfluous_and_no_record_ever():
    digest = "0" * 64
    of = {
        index: [delta_name(0, index, "a", digest), f"{delta_name(0, index, 'a', digest)}.p0",
                share_name(0, index, 3, 0), heads_name(0, index, digest), pieces_name(0, index, "a", digest, 0)]
        for index in (4, 5)
    }  # fmt: skip
    records = [record_name(0, index, 0) for index in (1, 4, 5)]
    snapshots = {index: f"{snapshot_folder(0)}{index:08d}-{digest}" for index in (3, 4)}
    other = [delta_name(1, 1, "a", digest), "members/a/000000", "run.json", "rounds/00000/001/0000/x"]
    names = [*of[4], *of[5], *records, *snapshots.values(), f"{snapshots[3]}.p1", *other]
    assert rules.superfluous(names, 0, 4) == [*of[4], snapshots[3], f"{snapshots[3]}.p1"]


# 2: equal bits.


@pytest.mark.parametrize("change", [{"tokens": 2.0}, {"lr": 0.4}], ids=["tokens", "lr"])
def test_a_record_must_say_of_its_deltas_what_they_are(change):
    truth = Entry("a", "d", 1.0, 0.5)
    deltas = {"d": delta("a")}
    assert rules.is_truthful(record("1", entries=[truth]), deltas, max_work=9.0)
    assert not rules.is_truthful(record("1", entries=[replace(truth, **change)]), deltas, max_work=9.0)


def test_a_record_counts_work_up_to_the_limit_of_the_run():
    entry = Entry("a", "d", 5.0, 0.5)
    assert rules.is_truthful(record("1", entries=[entry]), {"d": delta("a", tokens=8.0)}, max_work=5.0)
    assert not rules.is_truthful(record("1", entries=[entry]), {"d": delta("a", tokens=8.0)}, max_work=9.0)


def test_each_member_has_a_vote_for_each_state_that_it_trained_from():
    others = [delta("b", fingerprint=8), delta("c", fingerprint=8), delta("d", fingerprint=9)]
    deltas = [delta("a"), delta("a", "e"), *others]
    assert rules.count_votes(deltas, 7) == (1, 2) and rules.count_votes(deltas, 8) == (2, 1)


@pytest.mark.parametrize(("others", "outvoted"), [((7, 8), False), ((8, 8), True), ((8, 9), False), ((8,), False)])
def test_a_record_is_void_if_more_agree_on_one_other_state_and_counts_at_a_tie(others, outvoted):
    deltas = [delta("a"), *(delta(name, fingerprint=f) for name, f in zip("bc", others, strict=False))]
    assert rules.is_outvoted(7, deltas) is outvoted


# 5: one living member makes progress, and one that is gone costs little.


def test_a_round_expects_who_was_in_the_last_one_and_now_and_then_all():
    assert rules.expected({"a", "b", "c"}, {"a", "z"}, everyone=False) == {"a"}
    assert rules.expected({"a", "b", "c"}, {"a", "z"}, everyone=True) == {"a", "b", "c"}
    assert rules.expected({"a", "b"}, None, everyone=False) == {"a", "b"}
    assert [index for index in range(1, 13) if rules.waits_for_everyone(index)] == [4, 8, 12]


@pytest.mark.parametrize(
    ("present", "waited", "quorum", "may"),
    [("ab", 0, 1, True), ("abc", 0, 1, True), ("a", 0, 1, False), ("a", 9, 1, False), ("a", 10, 1, True),
     ("a", 99, 2, False), ("ab", 0, 3, False), ("ac", 10, 2, True)],
)  # fmt: skip
def test_a_round_closes_when_all_are_there_or_time_is_over_and_never_below_the_quorum(present, waited, quorum, may):
    assert rules.may_close(set(present), "ab", waited, 10.0, quorum) is may


def test_turns_start_at_another_member_each_time_and_pass_over_who_is_away():
    order = ["a", "b", "c", "d"]
    assert [rules.turns(order, name, ())(1) for name in order] == [3, 0, 1, 2]
    assert rules.turns(order, "d", {"a", "b"})(1) == 1 and rules.turns(order, "d", {"a", "b", "c"})(1) == 0
    assert rules.turns(order, "z", {"c", "d"})(1) == 2
    assert [rules.turns(order, "b", {"d"})(start) for start in range(6)] == [1, 0, 2, 1, 1, 0]


# 6: a delta counts once.


def test_of_several_deltas_of_a_member_one_counts_and_none_against_other_bits():
    several = [delta("b", "p", 2.0), delta("a", "q", 1.0), delta("b", "r", 9.0), delta("c", "s", 5.0, fingerprint=8),
               delta("a", "t", 7.0)]  # fmt: skip
    assert [d.digest for d in rules.one_per_member(several, 7, own_digest="q")] == ["q", "r"]


def test_a_record_of_too_many_still_has_the_delta_of_the_member_that_writes_it():
    names = [f"{k:063d}" for k in range(MOST + 5)]
    deltas = [delta(name, digest=name, tokens=10.0) for name in names]
    entries = rules.entries_of(deltas, 8.0, own_digest=names[-1])
    assert len(entries) == MOST and entries[-1].member == names[-1] and entries[0].tokens == 8.0
    assert [e.member for e in entries] == sorted(e.member for e in entries)
    whole = [Entry(e.member, e.member + "0", e.tokens) for e in entries]
    sealed = Envelope("r").seal(record_name(0, 1, 0), "record", *replace(record("1"), entries=tuple(whole)).sealed())
    assert len(sealed.body) < RECORD


# 2, 3: where a member may start.


def test_a_member_starts_from_a_snapshot_only_if_the_run_continued_from_it():
    own, after = record("1"), record("2", fingerprint=5)
    assert rules.link_after(3, 5, own, after, branched=False, outvoted=False) == own.digest
    assert rules.link_after(3, 5, own, None, branched=False, outvoted=False) == own.digest
    assert rules.link_after(0, 5, None, after, branched=True, outvoted=False) == ""
    assert rules.link_after(3, 6, own, after, branched=False, outvoted=True) == own.digest
    for index, fingerprint, named, following, branched in (
        (3, 5, None, after, False), (3, 5, own, None, True), (3, 6, own, after, False), (0, 6, None, after, False),
    ):  # fmt: skip
        with pytest.raises(Invalid):
            rules.link_after(index, fingerprint, named, following, branched, outvoted=False)


def test_up_to_eight_rounds_behind_a_member_keeps_its_work():
    assert rules.too_far(3) == 12
