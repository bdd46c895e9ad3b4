"""The format of every kind of object is frozen: members of one protocol read each other's objects."""

import hashlib
import zlib

import pytest
import torch

import diloco.bucket.rounds as rounds_
from diloco import Float32
from diloco.bucket.members import Member
from diloco.bucket.rounds import Entry, Record, delta_fields, layout_of, record_name, seal_delta, seal_heads
from diloco.bucket.shares import seal_share
from diloco.bucket.snapshots import seal_snapshot
from diloco.bucket.store.envelope import PROTOCOL, Cipher, Envelope
from diloco.exchange.reducer import State

ENVELOPE = Envelope("0123456789abcdef", b"k" * 32)
HEX = "ab" * 32


def objects(monkeypatch):
    """One object of each kind, by kind."""
    layout, values = layout_of(Float32(), 6), torch.arange(6.0)
    fields = delta_fields(1, 1002, "a", 7, 20.0, 0.5)
    payloads, _ = layout.pack(values)
    whole = seal_delta(ENVELOPE, layout, fields, payloads)
    monkeypatch.setattr(rounds_, "LEAST", 4)
    monkeypatch.setattr(rounds_, "UNIT", 2)
    layout = layout_of(Float32(), 6)
    payloads, _ = layout.pack(values)
    cut = seal_delta(ENVELOPE, layout, fields, payloads)
    entry = Entry("a", cut.head.digest, 20.0, 0.5)
    record = Record(1, 1002, HEX, 7, "a", (entry,), "cd" * 32, heads=HEX)
    name = record_name(1, 1002, 0)
    member = Member("a", 3, 4, (1, 2), ((0, 9),), False, False, 0.5, {"loss": 1.5}, "03")
    return {
        "delta": whole.head,
        "head": cut.head,
        "pieces": cut.objects[0],
        "heads": seal_heads(ENVELOPE, record, [cut.contribution]),
        "record": ENVELOPE.seal(name, "record", *record.sealed()),
        "share": seal_share(ENVELOPE, record, 2, 1, payloads[0]),
        "snapshot": seal_snapshot(ENVELOPE, 1, State(1002, values, values), HEX),
        "member": ENVELOPE.seal(member.object_name, "member", {"member": member.__dict__}),
        "unit": ENVELOPE.seal("unit", "unit", {"unit": "tokens"}),
    }


FROZEN = {
    "delta": "8c18e40753b12c24",
    "head": "d04a0e9959c56045",
    "pieces": "ce2ce74d794bb46e",
    "heads": "e863980eebdfc739",
    "record": "d9119c62a71e0445",
    "share": "dd25e3880bc89593",
    "snapshot": "b1a04b3ab023ec9f",
    "member": "bfdeff852cec6402",
    "unit": "d3a709ecfd92863e",
}


@pytest.mark.parametrize("kind", FROZEN)
def test_a_format_changes_only_with_the_number_of_the_protocol(kind, monkeypatch):
    sealed = objects(monkeypatch)[kind]
    content = sealed.name.encode() + sealed.body
    if kind == "heads":  # compressed, which versions of zlib do differently
        content = zlib.decompress(ENVELOPE.open(sealed.name, "heads", sealed.body, None).payload)
    digest = hashlib.sha256(content).hexdigest()[:16]
    assert (PROTOCOL, digest) == (8, FROZEN[kind]), "members of protocol 8 write other bytes: raise PROTOCOL"


def test_members_of_one_protocol_decrypt_each_others_objects():
    sealed = bytes.fromhex("2190ea335948195571cddb65c4922eb753aacf9a6ada301b094010694362fd39f467a4")
    assert Cipher(b"s" * 32).open("rounds/x", sealed) == b"payload"
