"""Random damage to everything that is read from a store. Nothing of it may raise, hang or stay in memory.

`make fuzz` tries a hundred times as much: 30,000 objects, 20,000 names. FUZZ_SEED=1 tries others.
"""

import hashlib
import json
import os
import random
import re
import resource
from contextlib import suppress
from pathlib import Path

import pytest

from diloco.bucket.members import incarnations, read_member, read_members
from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import (
    is_record,
    member_of,
    place_of,
    read_delta,
    read_head,
    read_heads,
    read_record,
    snapshot_index,
)
from diloco.bucket.rules import superfluous
from diloco.bucket.run import read_run
from diloco.bucket.shares import read_share
from diloco.bucket.snapshots import check_header, read_snapshot
from diloco.bucket.store.envelope import HEADER, MAGIC, PREFIX, Envelope, Invalid
from diloco.errors import ConfigError, DiLoCoError
from tests.support.players import Player, World, complete
from tests.support.sharing import crowd, small_pieces, together

MORE = int(os.environ.get("FUZZ", "1"))
KEY = b"k" * 32
MEMBERS = 10
"""One object in so many is also given to a member that takes part, which takes longer."""
ODD = [None, True, -1, 0, 1, 1 << 70, 10**400, 1e308, -0.5, "", "x", "\ud800", "\0", "a" * 70_000, [], {}, [[]], [None],
       {"name": []}, [{}] * 50, "{digest}", "../../etc/passwd", "0" * 64, "\x1b[2J"]  # fmt: skip
RAW = [b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 5000, b'"\\ud800"', b"\xff\xfe"]
"""What JSON does not allow, or not everybody reads."""


@pytest.fixture(scope="module")
def world():
    """A signed run with everything in it that members put: shares, heads, pieces, snapshots."""
    with pytest.MonkeyPatch.context() as patch:
        small_pieces(patch)
        patch.setattr("diloco.bucket.snapshots.EVERY", 4)
        world = World(1, values=6)
        world.key = KEY
        together(crowd(world, key=KEY), 6)
        world.check = lambda: None  # records are damaged on purpose
        world.holds = lambda *state: None
        yield world


def mutated(value, chance):
    """The same JSON with one or two places changed."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice([*value])
        changed = {k: v for k, v in value.items() if k != key or chance.random() < 0.9}
        return changed | {chance.choice([key, key, key, "x"]): mutated(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.6:
        k = chance.randrange(len(value))
        return [*value[:k], mutated(value[k], chance), *value[k + chance.randrange(2) :]]
    return chance.choice(ODD)


def damaged(name, body, chance):
    """An object that a member with the secret could have put: other header, other payload, or other bytes."""
    if not body.startswith(MAGIC):  # a piece: the digest in its head no longer fits
        return name, chance.choice([b"", body[: len(body) // 2], body + b"x", chance.randbytes(len(body))])
    length = PREFIX.unpack_from(body)[1]
    header, payload = json.loads(body[PREFIX.size : PREFIX.size + length]), body[PREFIX.size + length :]
    envelope, kind = Envelope(header["run"], KEY), header["kind"]
    if chance.random() < 0.3 and payload:
        try:
            payload = json.dumps(mutated(json.loads(payload), chance)).encode()
        except ValueError:
            payload = chance.choice([b"", payload[:-1], payload + b"x", chance.randbytes(len(payload))])
        header |= json.loads(envelope.header(kind, {}, [payload] if payload else []))
    else:
        header = mutated(header, chance)
    raw = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    if chance.random() < 0.1:
        at = chance.randrange(len(raw))
        raw = raw[:at] + chance.choice(RAW) + raw[at + chance.randrange(20) :]
    raw = raw[: HEADER + 10]
    if chance.random() < 0.9 and len(name.rpartition("-")[2]) == 64:
        name = name[:-64] + hashlib.sha256(raw).hexdigest()
    return name, PREFIX.pack(MAGIC, len(raw), envelope._sign(envelope.run, name, raw)) + raw + payload


def member(world):
    """One that has just joined."""
    player = Player(world, "e", key=KEY)
    player.turn()
    return player


def takes_part(player):
    """For a moment, with everything in the store read again, as if it had changed in between."""
    for _ in range(3):
        player.step()
        player.turn()
        player.world.now += 30.0


def watches(world):
    """What `diloco watch` reads."""
    with suppress(ConfigError):
        run = complete(world, read_run(KEY))
        complete(world, read_members(Envelope(run.id, KEY), lambda name, reason: None))


def interpret(envelope, name, body, record, layout):
    """What is made of an object once it is known to be signed, whether or not a member would get so far."""
    readers = {
        "record": lambda opened: read_record(opened, 0, 1, ""),
        "delta": lambda opened: (read_head(opened, body, 0, 1, layout), read_delta(opened, 0, 1, layout)),
        "heads": lambda opened: read_heads(opened, envelope, record, layout),
        "share": lambda opened: read_share(opened, record, 0, layout),
        "snapshot": lambda opened: (check_header(opened, 0, 6, 6), read_snapshot(opened, 0, 6, 6)),
        "member": read_member,
    }
    for kind, read in readers.items():
        for size in (None, 0, 24):
            with suppress(Invalid):
                read(envelope.open(name, kind, body, size))


def memory():
    """In MB, now: the peak may be that of another test."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def test_no_object_stops_a_member_that_reads_it(world):
    chance, objects = random.Random(int(os.environ.get("FUZZ_SEED", "0"))), dict(world.objects)
    kinds = {}
    for name in sorted(objects):
        kinds.setdefault(re.sub("[0-9a-f]{8,}|[0-9]+", "", name), []).append(name)
    player = member(world)
    envelope, layout = player.reduce.session.envelope, player.reduce._fragments[0].rounds.layout
    record = complete(world, RoundStore.reader(0, envelope).record(1, "")).record
    before, count = 0.0, 300 * MORE
    for k in range(count):
        name = chance.choice(kinds[chance.choice([*kinds])])
        name, body = damaged(name, objects[name], chance)
        try:
            interpret(envelope, name, body, record, layout)
            if k % MEMBERS == 0:
                world.objects = dict(objects)
                player = member(world)
                world.objects[name] = body
                watches(world)
                takes_part(player)
                with suppress(DiLoCoError):  # a member that cannot join says so
                    member(world)
        except Exception as error:
            raise AssertionError(f"{k}: {name}: {body[:2000]!r}") from error
        before = before or (memory() if k >= count // 3 else 0.0)
    world.objects = objects
    assert memory() < before + 100


def test_no_name_stops_a_member_that_lists_it(world):
    chance, objects = random.Random(1), dict(world.objects)
    parts = ["rounds", "pieces", "anchors", "members", "closed.0", "closed.", "closed.99999999999999999999", "d-a-",
             "..", "", ".", "00000", "001", "0000", "٣", "000001", "0" * 64, "d-a-" + "0" * 64, "s0000.0", "heads-",
             "\udcff", "\n", "\x1b[2J", "a" * 300, ".p0", "x.p99999999999999999999", "99999999", "-1", "run.json",
             "unit"]  # fmt: skip
    total, at_once = 200 * MORE, 100
    for _ in range(total // at_once):
        names = {"/".join(chance.choices(parts, k=chance.randint(1, 6))) for _ in range(at_once)}
        real = chance.choices(sorted(objects), k=20)
        names |= {name[: chance.randrange(len(name))] + chance.choice(parts) for name in real}
        for name in names:
            place_of(name), member_of(name), is_record(name), snapshot_index(name)
        superfluous(names, 0, 3), incarnations(names)
        world.objects = dict(objects)
        player = member(world)
        world.objects |= {name: b"" for name in names if name not in objects}
        watches(world)
        takes_part(player)
        member(world)
    world.objects = objects
