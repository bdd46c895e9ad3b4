"""What averaged shares are: the mean of the deltas, cut, encoded again and checked, without a store."""

from dataclasses import replace

import pytest
import torch

import diloco.bucket.rounds as rounds_
from diloco import E3M0, Float32, TwoBit
from diloco.bucket.rounds import (
    Entry,
    Layout,
    Record,
    delta_fields,
    delta_name,
    layout_of,
    member_of,
    pieces_name,
    record_name,
    seal_delta,
    share_name,
)
from diloco.bucket.shares import (
    GROUP,
    add_group,
    encoded_share,
    mean_in_parts,
    read_share,
    seal_share,
)
from diloco.bucket.store.envelope import Envelope, Invalid
from diloco.codecs.codec import pack

KEY = b"k" * 32


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Fragments of 6 values in pieces of 2."""
    monkeypatch.setattr(rounds_, "LEAST", 4)
    monkeypatch.setattr(rounds_, "UNIT", 2)


def shared_record(count, layout, seed=0, scale=1.0):
    """A record of so many members, and their pieces."""
    generator = torch.Generator().manual_seed(seed)
    packed = [layout.pack(torch.randn(layout.n, generator=generator) * scale)[0] for _ in range(count)]
    envelope, contributions, entries = Envelope("r"), {}, []
    for k, payloads in enumerate(packed):
        fields = delta_fields(0, 1, f"m{k:03d}", 7, float(k + 1), 1.0)
        sealed = seal_delta(envelope, layout, fields, payloads)
        contributions[sealed.head.digest] = sealed.contribution
        entries.append(Entry(f"m{k:03d}", sealed.head.digest, float(k + 1), 1.0))
    return Record(0, 1, "", 7, "m000", tuple(entries), "ab" * 32, "cd" * 32), contributions


def averaged(record, contributions, layout):
    payloads = []
    for share in range(len(layout.cuts)):
        total = torch.zeros(layout.count(share))
        for at in range(0, len(record.entries), GROUP):
            pieces = [contributions[e.digest].payloads[share] for e in record.entries[at : at + GROUP]]
            add_group(total, layout.codec, pieces, record.shares[at : at + GROUP])
        payloads.append(pack(layout.mean_codec, total))
    return payloads


@pytest.mark.parametrize("count", [4, GROUP, 2 * GROUP + 3])
def test_averaged_shares_are_the_mean_of_the_deltas_encoded_again(count):
    layout = Layout(24, E3M0(), (slice(0, 8), slice(8, 16), slice(16, 24)))
    record, contributions = shared_record(count, layout)
    expected = mean_in_parts(record, contributions, layout)
    for share, payload in enumerate(averaged(record, contributions, layout)):
        values = encoded_share(payload, share, layout).values()
        assert torch.allclose(values, E3M0().decode(pack(E3M0(), expected[share].values()), 8), rtol=0.5)
        sealed = seal_share(Envelope("r"), record, share, 0, payload)
        opened = Envelope("r").open(sealed.name, "share", sealed.body, None)
        assert torch.equal(read_share(opened, record, share, layout).values(), values)
    exact = replace(layout, codec=Float32())
    record, contributions = shared_record(count, exact)
    expected = mean_in_parts(record, contributions, exact)
    for share, payload in enumerate(averaged(record, contributions, exact)):
        assert torch.allclose(payload.view(torch.float32), expected[share].values(), atol=1e-6)


def bad_shares(record, layout, payload):
    other = replace(record, digest="ef" * 32)
    return {
        "of another record": seal_share(Envelope("r"), other, 0, 0, payload),
        "another share": seal_share(Envelope("r"), record, 1, 0, payload),
        "too short": seal_share(Envelope("r"), record, 0, 0, payload[:-1]),
        "not finite": seal_share(Envelope("r"), record, 0, 0, torch.full((4,), float("inf")).view(torch.uint8)),
    }


@pytest.mark.parametrize("how", ["of another record", "another share", "too short", "not finite"])
def test_a_share_that_cannot_be_right_does_not_count(how):
    layout = Layout(8, Float32(), (slice(0, 4), slice(4, 8)))
    record, contributions = shared_record(5, layout)
    payload = averaged(record, contributions, layout)[0]
    sealed = bad_shares(record, layout, payload)[how]

    def read():
        opened = Envelope("r").open(sealed.name, "share", sealed.body, Float32().nbytes(4))
        return read_share(opened, record, 0, layout)

    with pytest.raises(Invalid):
        read()


def test_large_deltas_are_cut_at_blocks_and_small_ones_are_not(monkeypatch):
    monkeypatch.undo()
    assert not layout_of(E3M0(), 1000).cut
    for n in (70_000, 1_000_001, 42_000_000):
        layout = layout_of(E3M0(), n)
        assert [cut.start for cut in layout.cuts[1:]] == [cut.stop for cut in layout.cuts[:-1]]
        assert layout.cuts[0].start == 0 and layout.cuts[-1].stop == n and 2 <= len(layout.cuts) <= 16
        assert all(cut.start % rounds_.UNIT == 0 for cut in layout.cuts)
        assert layout.nbytes <= E3M0().nbytes(n) + len(layout.cuts)
    assert len(layout_of(Float32(), 200_000_000).cuts) > 16  # no piece is larger than an object may be
    assert layout_of(TwoBit(), 1 << 20).mean_codec == E3M0()


def test_names_of_pieces_heads_and_shares_are_not_taken_for_deltas():
    assert member_of(share_name(0, 1, 2, 0)) is None
    assert member_of(pieces_name(0, 1, "a", "0" * 64, 0)) is None
    assert member_of(delta_name(0, 123_456, "a", "0" * 64)) == "a"
    assert record_name(3, 123_456, 0) == "rounds/00123/456/0003/closed.0"


def test_equal_deltas_have_equal_digests_and_zeros_none():
    layout = Layout(8, TwoBit(), (slice(0, 4), slice(4, 8)))
    rows = {"a": torch.ones(8), "b": torch.ones(8), "c": torch.arange(8.0), "d": torch.zeros(8), "e": torch.zeros(8)}
    contributions = [rounds_.Contribution(name, "", 7, 1.0, layout.pack(row)[0], 0) for name, row in rows.items()]
    digests = rounds_.digests_of(contributions, layout)
    assert digests["a"] == digests["b"] != digests["c"] and digests["d"] == digests["e"] == 0
    assert all(digests[name] for name in "abc")
