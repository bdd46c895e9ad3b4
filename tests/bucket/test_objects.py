"""Objects that are not what they should be: each is left alone, counted and named, and the round closes without it."""

import hashlib
import json

import numpy as np
import pytest

from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import MOST, Entry, delta_fields, delta_name, folder, read_record, record_name
from diloco.bucket.store.envelope import (
    HEADER,
    PART,
    PREFIX,
    PROTOCOL,
    Envelope,
    Invalid,
    get,
    put,
    read_secret,
    refuses,
)
from diloco.errors import ConfigError, Mismatch
from tests.support.players import Player, World, complete, one_member

KEY = b"k" * 32


def delta_of(world, index=1, *, run=None, key=KEY, payload=None, **changes):
    """A delta of member x for fragment 0, as x would put it."""
    fingerprint = world.states[0, index - 1]
    fields = delta_fields(0, index, "x", fingerprint, 8.0) | changes
    payload = np.array([-5.0], np.float32).tobytes() if payload is None else payload
    return Envelope(run or world.run, key).seal(delta_name(0, index, "x"), "delta", fields, payload)


def renamed(sealed, name):
    return name, sealed.body


def flip(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def wrong_protocol(world):
    sealed = delta_of(world)
    header = sealed.body[PREFIX.size : -4].replace(b'"protocol":%d' % PROTOCOL, b'"protocol":9')
    name = delta_name(0, 1, "x", hashlib.sha256(header).hexdigest())
    signature = Envelope(world.run, KEY)._sign(world.run, name, header)
    return name, PREFIX.pack(b"DLCO", len(header), signature) + header + sealed.body[-4:]


def of_another_round(world):
    sealed = delta_of(world, 1)
    return sealed.name.replace(folder(0, 1), folder(0, 2)), sealed.body


BAD = {
    "cut off": lambda w: (delta_of(w).name, delta_of(w).body[:20]),
    "payload cut off": lambda w: (delta_of(w).name, delta_of(w).body[:-1]),
    "too large": lambda w: (delta_of(w).name, delta_of(w).body + bytes(HEADER)),
    "wrong checksum": lambda w: (delta_of(w).name, flip(delta_of(w).body, -2 % len(delta_of(w).body))),
    "no JSON": lambda w: (delta_of(w).name, flip(delta_of(w).body, PREFIX.size)),
    "another header": lambda w: renamed(delta_of(w), delta_name(0, 1, "x", "0" * 64)),
    "wrong protocol": wrong_protocol,
    "wrong shape": lambda w: (s := delta_of(w, payload=bytes(8))) and (s.name, s.body),
    "nan": lambda w: (s := delta_of(w, payload=np.array([np.nan], np.float32).tobytes())) and (s.name, s.body),
    "inf": lambda w: (s := delta_of(w, payload=np.array([np.inf], np.float32).tobytes())) and (s.name, s.body),
    "not signed": lambda w: (s := delta_of(w, key=None)) and (s.name, s.body),
    "forged": lambda w: (s := delta_of(w, key=b"other")) and (s.name, s.body),
    "of another run": lambda w: (s := delta_of(w, run="other")) and (s.name, s.body),
    "of another member": lambda w: (s := delta_of(w, member="y")) and (s.name, s.body),
    "tokens of -1": lambda w: (s := delta_of(w, tokens=-1)) and (s.name, s.body),
    "tokens as text": lambda w: (s := delta_of(w, tokens="many")) and (s.name, s.body),
    "a fingerprint too large": lambda w: (s := delta_of(w, fingerprint=1 << 70)) and (s.name, s.body),
}


def until_closed(player, index):
    for _ in range(20):
        player.step()
        player.turn()
        player.world.now += 1.0
        if player.held[0] >= index:
            return
    raise AssertionError("the round was not closed")


def entries(world, index):
    name = record_name(0, index, 0)
    opened = Envelope(world.run, KEY).open(name, "record", world.objects[name], None)
    return read_record(opened, 0, index, None).entries


def test_a_good_delta_of_a_stranger_is_counted():
    world, a = one_member(key=KEY)
    sealed = delta_of(world)
    world.objects[sealed.name] = sealed.body
    until_closed(a, 1)
    assert [e.member for e in entries(world, 1)] == ["a", "x"]
    assert a.reduce.session.rejected == 0


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_delta_is_ignored_counted_and_named_and_the_round_closes_without_it(kind):
    world, a = one_member(key=KEY)
    name, body = BAD[kind](world)
    world.objects[name] = body
    until_closed(a, 1)
    assert [e.member for e in entries(world, 1)] == ["a"]
    named = [e for e in a.reduce.events() if e["event"] == "invalid"]
    assert [e["object"] for e in named] == [name] and named[0]["reason"]
    assert a.reduce.session.rejected == 1


def test_a_delta_of_an_earlier_round_is_not_taken_for_one_of_this():
    world, a = one_member(key=KEY)
    name, body = of_another_round(world)
    until_closed(a, 1)
    world.objects[name] = body
    until_closed(a, 2)
    assert [e.member for e in entries(world, 2)] == ["a"]
    assert any(e.get("object") == name for e in a.reduce.events())


def test_a_member_with_another_key_or_none_is_told_so():
    world = World()
    world.key = KEY
    Player(world, "a", key=KEY).turn()
    with pytest.raises(ConfigError, match="key"):
        Player(world, "b").turn()
    with pytest.raises(ConfigError, match="not signed with the key"):
        Player(world, "b", key=b"other").turn()


RECORD = {"fragment": 0, "index": 1, "previous": "p", "fingerprint": 7, "by": "a", "voids": "",
          "heads": ""}  # fmt: skip
FOLLOWS = "p"
GOOD = [["a", "0" * 64, 100.0, 0.1], ["b", "1" * 64, 300.0, 0.3]]


def record(entries=GOOD, follows=FOLLOWS, **changes):
    payload = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    sealed = Envelope("r").seal(record_name(0, 1, 0), "record", RECORD | changes, payload)
    return read_record(Envelope("r").open(sealed.name, "record", sealed.body, None), 0, 1, follows)


def test_a_good_record_is_read_as_it_was_written():
    opened = record()
    assert opened.entries == (Entry("a", "0" * 64, 100.0, 0.1), Entry("b", "1" * 64, 300.0, 0.3))
    fields, payload = opened.sealed()
    assert fields == RECORD and json.loads(payload) == GOOD
    assert opened.members == {"a": 0.25, "b": 0.75}
    assert opened.lr == 0.25 * 0.1 + 0.75 * 0.3


BAD_ENTRIES = [
    [], None, b"{", b"[" * 5000, [["a"]], [1], GOOD[::-1], [GOOD[0], GOOD[0]], [["a", "0" * 64, 1.0]],
    [["a", "0" * 64, -1.0, 0.0]], [["a", "0" * 64, 1e301, 0.0]], [["a", "0" * 64, 1.0, -1.0]],
    [["a", "0" * 64, 1.0, 1e300]], [["../a", "0" * 64, 1.0, 0.0]], [["a", "0" * 63, 1.0, 0.0]],
    [[f"m{k:04d}", "0" * 64, 1.0, 0.0] for k in range(MOST + 1)],
]  # fmt: skip


@pytest.mark.parametrize("changes", [
    {"index": 2}, {"previous": "q"}, {"heads": "x"}, {"heads": None},
    {"fingerprint": -1}, {"fingerprint": True}, {"by": None}, *({"entries": entries} for entries in BAD_ENTRIES),
], ids=lambda changes: repr(changes)[:40])  # fmt: skip
def test_a_bad_record_is_rejected(changes):
    with pytest.raises(Invalid):
        record(**changes)


def test_a_large_payload_lies_in_parts_which_are_put_first_and_each_is_checked():
    world, envelope, payload = World(), Envelope("r"), bytes(range(256)) * (2 * PART // 256) + b"end"
    sealed = envelope.seal("anchors/x-{digest}", "snapshot", {}, payload)
    assert [len(part) for part in sealed.parts] == [PART, PART, 3] and len(sealed.body) < 1000
    complete(world, put(sealed))
    assert list(world.objects) == [f"{sealed.name}.p{k}" for k in range(3)] + [sealed.name]
    opened = complete(world, get(envelope, sealed.name, "snapshot", len(payload)))
    assert opened.payload == payload
    world.objects[f"{sealed.name}.p1"] = flip(world.objects[f"{sealed.name}.p1"], 77)
    with pytest.raises(Invalid, match="part 1"):
        complete(world, get(envelope, sealed.name, "snapshot", len(payload)))
    del world.objects[f"{sealed.name}.p1"]
    assert complete(world, get(envelope, sealed.name, "snapshot", len(payload))) is None


def test_a_header_has_a_limit_both_where_it_is_written_and_where_it_is_read():
    envelope = Envelope("r")
    room = HEADER - len(envelope.seal("x", "delta", {"more": ""}).body) + PREFIX.size
    full = envelope.seal("x", "delta", {"more": "m" * room})
    assert envelope.open("x", "delta", full.body, 0).header["more"] == "m" * room
    with pytest.raises(ValueError, match=f"header has {HEADER + 1} bytes"):
        envelope.seal("x", "delta", {"more": "m" * (room + 1)})
    header = full.body[PREFIX.size :].replace(b'"more":"m', b'"more":"mm')
    with pytest.raises(Invalid, match="too long"):
        envelope.open("x", "delta", PREFIX.pack(b"DLCO", len(header), bytes(32)) + header, 0)


def test_what_is_told_is_finite_and_others_take_it():
    world = World()
    a, b = Player(world, "a"), Player(world, "b")
    for player in (a, b):
        player.turn()
    a.reduce.publish(loss=1.0, step=2)
    a.reduce.publish(loss=float("nan"), far=-1e35, never=float("inf"))
    for player in (a, b):
        player.turn()
    published = b.reduce.session.members.alive(world.now)["a"].published
    assert published["step"] == 2 and published["far"] == -1e30 and not {"loss", "never"} & set(published)
    assert b.reduce.session.rejected == 0


def counting(world, name, tokens):
    player = Player(world, name)
    player.turn()
    for _ in range(20):
        if tokens:
            player.diloco.count(tokens)
        player.step()
        player.turn()
        world.now += 1.0
    return player


def test_one_that_counts_tokens_and_one_that_does_not_are_not_averaged():
    world = World()
    a = counting(world, "a", 4096)
    with pytest.raises(Mismatch, match=r"by tokens, 'b' by steps"):
        counting(world, "b", 0)
    assert not [name for name in world.objects if "/d-b-" in name]
    held = a.held
    again = counting(world, "c", 512)
    assert again.held > held


def test_garbage_in_place_of_the_unit_stops_nobody():
    world = World()
    world.objects["unit"] = b"garbage"
    a = counting(world, "a", 0)
    assert min(a.held) > 2 and [e["object"] for e in a.reduce.events() if e["event"] == "invalid"] == ["unit"]


def test_a_secret_comes_from_a_file_and_is_long_enough(tmp_path):
    (tmp_path / "secret").write_text("k" * 32 + "\n")
    (tmp_path / "short").write_text("correct horse battery staple")
    assert read_secret(tmp_path / "secret") == b"k" * 32 and read_secret(None) is None
    with pytest.raises(ConfigError, match=r"at least 32.*openssl rand"):
        read_secret(tmp_path / "short")
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(tmp_path / "none")


def test_a_secret_that_others_can_read_is_warned_about_once(tmp_path, caplog):
    for mode in (0o600, 0o640, 0o604):
        path = tmp_path / f"{mode:o}"
        path.write_text("k" * 32)
        path.chmod(mode)
        for _ in range(2):
            read_secret(path)
    assert [message.split()[-1] for message in caplog.messages] == [f"{tmp_path}/640", f"{tmp_path}/604"]


def test_what_a_reader_raises_refuses_the_object_and_nothing_else():
    @refuses
    def read(error):
        raise error

    for error in (TypeError("unhashable"), OverflowError(), RecursionError(), KeyError("x")):
        with pytest.raises(Invalid, match=type(error).__name__):
            read(error)
    with pytest.raises(Invalid, match="as it is"):
        read(Invalid("as it is"))
    with pytest.raises(MemoryError):  # says nothing about the object
        read(MemoryError())


def test_an_object_that_is_different_at_every_look_is_not_read_for_ever():
    """A attempt like that counts as empty for now: whether it is valid cannot be told."""
    rounds = RoundStore.reader(0, Envelope("0" * 16))
    world = World()
    answers = (f"garbage {k}".encode() for k in range(1000))
    world.attempt = lambda operation: [next(answers) for _ in operation.operations]
    assert complete(world, rounds.record(1, "")) == (None, 0, False, "")


def test_a_name_that_somebody_has_taken_is_not_put_for_ever():
    world = World()
    sealed = Envelope("0" * 16).seal("x-{digest}", "snapshot", {}, b"1")
    world.objects[sealed.name] = b"garbage"
    assert complete(world, put(sealed)) is False
