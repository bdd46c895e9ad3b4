"""How much one delta counts in a round: pure functions of its record, which every member computes alike."""

import pytest

from diloco.bucket.round_store import RECORD as WHOLE_RECORD
from diloco.bucket.rounds import MOST, Contribution, Entry, Record, record_name
from diloco.bucket.rules import entries_of
from diloco.bucket.store.envelope import Envelope


def contribution(member, tokens=1.0, digest="d", fingerprint=7):
    return Contribution(member, digest, fingerprint, tokens, None, 0)  # type: ignore[arg-type]


def closed(*tokens):
    """A record of members with this work."""
    entries = tuple(Entry(chr(97 + k), "0" * 64, work) for k, work in enumerate(tokens))
    return Record(0, 1, "", 7, "a", entries)


def test_shares_follow_work_up_to_the_limit_of_the_run():
    assert closed(10.0, 30.0).shares == [0.25, 0.75]
    assert closed(1.0, 2.0, 4.0).shares == [1 / 7, 2 / 7, 4 / 7]
    assert closed(0.0).shares == [0.0]
    assert [e.tokens for e in entries_of([contribution("a", 10.0)], 8.0, own_digest="d")] == [8.0]


def test_the_mean_of_learning_rates_is_weighed_by_work():
    entries = tuple(Entry(name, "0" * 64, work, rate) for name, work, rate in (("a", 1.0, 0.1), ("b", 3.0, 0.2)))
    assert Record(0, 1, "", 7, "a", entries).lr == pytest.approx(0.175)


def test_a_record_has_room_for_thousands():
    names = [f"{k:063d}" for k in range(MOST + 5)]
    entries = entries_of([contribution(name, digest=name * 2) for name in names], 9.0, own_digest=names[-1] * 2)
    fields, payload = Record(0, 1, "", 7, "a", entries).sealed()
    assert len(Envelope("r").seal(record_name(0, 1, 0), "record", fields, payload).body) < WHOLE_RECORD
