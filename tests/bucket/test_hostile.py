"""A folder and a store that others change too: what lies there and is not an object, and refusals that come and go."""

import os
import random
import threading

import pytest

from diloco import ConfigError, DiLoCoError
from diloco.bucket.rounds import folder, record_name
from diloco.bucket.store import FORBIDDEN, UNDECIPHERED, Create, Delete, List, Read, Size, Write, too_large
from diloco.bucket.store import backend as stores
from diloco.bucket.store import store as store_module
from diloco.bucket.store.backend import STAGING, Failure, Folder, Refused, open_store
from diloco.bucket.store.contract import probe
from diloco.bucket.store.store import Store
from tests.support.members import Member, until
from tests.support.players import Player, World, one_member

HEX = "0" * 64


def plant(root, index):
    """Whatever can lie in a folder, where round `index` of every fragment belongs."""
    for fragment in range(3):
        place = root / folder(fragment, index)
        place.mkdir(parents=True)
        (place / "closed.0").mkdir()  # where the record belongs
        (place / "closed.1").symlink_to("nowhere")
        os.mkfifo(place / f"d-pipe-{HEX}")
        (place / f"d-root-{HEX}").symlink_to("/")
        (place / f"d-zero-{HEX}").symlink_to("/dev/zero")
        (place / f"d-shadow-{HEX}").symlink_to("/etc/shadow")
        (place / "elsewhere").symlink_to("/")
        (root / os.fsdecode(os.fsencode(str(place / "name-")) + b"\xff\xfe")).write_bytes(b"x")
    (root / "members").mkdir(exist_ok=True)
    (root / os.fsdecode(os.fsencode(str(root / "members" / "m-")) + b"\xff")).write_bytes(b"x")
    (root / "members" / "z" / "000000").mkdir(parents=True)


@pytest.mark.slow
def test_what_is_not_a_file_in_a_folder_stops_nobody(tmp_path):
    plant(tmp_path, 2)
    a = Member(tmp_path, "a")
    until(lambda: min(a.held) > 3, a)
    late = Member(tmp_path, "b")  # it finds the record of round 2 behind the directory and the link, as a did
    until(lambda: min(late.held) >= min(a.held) > 3, a, late)
    for member in (a, late):
        member.stop().end()
    named = [event["object"] for event in a.reduce.events() if event["event"] == "invalid"]
    assert len(named) == len(set(named))  # each once
    deltas = {f"{folder(0, 2)}d-{kind}-{HEX}" for kind in ("pipe", "root", "zero", "shadow")}
    strange = {f"{folder(0, 2)}elsewhere", f"{folder(0, 2)}name-\\xdcff\\xdcfe", "members/m-\\xdcff",
               "members/z/000000"}  # fmt: skip
    assert {record_name(0, 2, 0), record_name(0, 2, 1)} | deltas | strange <= set(named)


def test_a_folder_reads_what_is_not_a_file_as_an_empty_object_and_lists_it(tmp_path):
    store = Folder(tmp_path)
    (tmp_path / "x" / "folder").mkdir(parents=True)
    (tmp_path / "x" / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "x" / "pipe")
    assert store.attempt(Create("x/good", b"12345")) is True
    assert store.attempt(List("x/")) == {"x/folder": 0, "x/link": 0, "x/pipe": 0, "x/good": 5}
    for name in ("folder", "link", "pipe"):
        assert store.attempt(Read(f"x/{name}", 10)) == b"" and store.attempt(Size(f"x/{name}")) == 0
        assert store.attempt(Create(f"x/{name}", b"new")) is False
    store.attempt(Delete("x/folder"))  # as the collector does, with whatever has the name of an object
    assert (tmp_path / "x" / "folder").is_dir()
    assert store.attempt(Read("x/good", 4)) == too_large(5) and store.attempt(Read("x/good", 0, first=2)) == b"12"
    assert store.attempt(Read("x/good", 0, first=9, at=3)) == b"45" and store.attempt(Read("x/good", 0, 9, at=9)) == b""
    assert store.attempt(Read("x/none", 9)) is None and store.attempt(List("y/")) == {}


def test_a_file_that_may_not_be_deleted_stays_and_nobody_tries_again(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b"1")

    def refuse(*_, **__):  # in a directory of another user; some systems say so of directories too
        raise PermissionError

    monkeypatch.setattr(stores.Path, "unlink", refuse)
    assert open_store(str(tmp_path)).attempt(Delete("x")) is None


def test_a_directory_of_another_user_is_listed_without_what_lies_in_it(tmp_path, monkeypatch):
    store, scandir = open_store(str(tmp_path)), os.scandir
    for name in ("x/closed/in", "x/open/in", "x/z"):
        store.attempt(Create(name, b"1"))

    def refuse(path):  # as mode 000 does, for everybody but root
        if str(path).endswith("closed"):
            raise PermissionError
        return scandir(path)

    monkeypatch.setattr(stores.os, "scandir", refuse)
    assert store.attempt(List("x/")) == {"x/closed": 0, "x/open": 0, "x/open/in": 1, "x/z": 1}
    with pytest.raises(Refused):  # nobody can take part without what was asked for
        store.attempt(List("x/closed/"))


def test_a_file_of_another_user_is_forbidden(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b"1")

    def refuse(*_):  # as it is for everybody but root
        raise PermissionError

    monkeypatch.setattr(stores.os, "open", refuse)
    assert Folder(tmp_path).attempt(Read("x", 9)) == FORBIDDEN


def test_an_object_that_the_store_refuses_to_read_is_named_once_and_the_round_closes_without_it():
    """A file with mode 000, of another user; or an object of another owner."""
    world, a = one_member()
    refused = {f"{folder(f, 1)}d-zz-{HEX}" for f in range(2)} | {"members/zz/000000"}
    for name in refused:
        world.objects[name] = b"secret"
    attempt = world.attempt
    world.attempt = lambda o: FORBIDDEN if isinstance(o, Read) and o.name in refused else attempt(o)
    go_on(a, 20)
    assert min(a.held) > 3 and sorted(named(a)) == sorted(refused)


class Hostile(World):
    """A store that shows what is not there, and alters what it was given: always the same way, or now and then."""

    def __init__(self):
        super().__init__(1)
        self.chance, self.altered = random.Random(1), {}

    def check(self):
        pass

    def attempt(self, operation):
        answer = super().attempt(operation)
        if isinstance(operation, List):
            ghosts = (f"{folder(0, 1)}d-ghost-{HEX}", f"{folder(0, 1)}closed.x", "members/ghost/000007",
                      "members/\x1b[2J", f"anchors/0000/00000099-{HEX}", "rounds/../../etc/passwd")  # fmt: skip
            answer |= {name: 5 for name in ghosts if name.startswith(operation.prefix) and name > operation.after}
        if not isinstance(operation, Read) or not isinstance(answer, bytes):
            return answer
        if "/d-b-" in operation.name:  # what b sends reaches nobody as it was
            ways = (answer[:-3], answer[:20], b"", flipped(answer), too_large(1 << 40), FORBIDDEN, UNDECIPHERED,
                    next(iter(self.objects.values())))  # fmt: skip
            return self.altered.setdefault(operation.name, ways[len(self.altered) % len(ways)])
        return flipped(answer) if self.chance.random() < 0.1 and "closed" in operation.name else answer


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def test_a_hostile_store_stops_nobody_and_what_it_shows_is_named_once():
    world = Hostile()
    a = Player(world, "a", key=b"k" * 32)
    b = Player(world, "b", key=b"k" * 32)
    for _ in range(480):  # snapshots on demand are few, and here each round of b needs one
        for player in (a, b):
            player.turn()
            player.step()
        world.now += 1.0
    assert a.held[0] > 8 and a.reduce.session.rejected > 8
    objects = named(a)
    assert len(objects) == len(set(objects)) and not any("\x1b" in name for name in objects)
    assert {f"{folder(0, 1)}d-ghost-{HEX}", f"{folder(0, 1)}closed.x"} & set(objects)
    assert len([name for name in objects if "/d-b-" in name]) > 3


def go_on(player, seconds, most=2000):
    for _ in range(seconds):
        player.step()
        for job in player.jobs:
            for _ in range(2 * most):
                if not player.go(job):
                    break
        player.world.now += 1.0


def named(player):
    return [event["object"] for event in player.reduce.events() if event["event"] == "invalid"]


def test_what_a_killed_process_left_is_deleted_a_day_later(tmp_path):
    (tmp_path / STAGING).mkdir()
    old, young = tmp_path / STAGING / "old", tmp_path / STAGING / "young"
    for left in (old, young):
        left.write_bytes(b"half an object")
    os.utime(old, times=(1, 1))
    Folder(tmp_path).attempt(Create("x", b"1"))
    assert not old.exists() and young.exists() and stores.LEFT_OVER >= 3600


class Refusing:
    """Allows everything, but for a while nothing, and some objects never."""

    def __init__(self, inner=None):
        self.inner, self.now, self.never, self.refusing = inner, 0.0, set(), threading.Event()
        self.meanwhile = lambda: None

    def attempt(self, operation):
        self.now += 1.0
        if self.refusing.is_set() or getattr(operation, "name", "") in self.never:
            self.meanwhile()
            raise Refused("403 Forbidden")
        return self.inner.attempt(operation) if self.inner else b"there"


def store_of(backend, events):
    return Store(backend, clock=lambda: backend.now, report=lambda event, **values: events.append(event))


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(store_module.random, "uniform", lambda low, high: 0.0)
    monkeypatch.setattr(stores, "PAUSES", (0.0,) * 4)


def test_a_moment_of_refusals_is_waited_out_and_said_and_a_long_one_is_the_end(no_pauses):
    backend, events = Refusing(), []
    store = store_of(backend, events)
    backend.refusing.set()
    with pytest.raises(ConfigError, match="403"):
        store.perform(Read("x", 9))  # nothing was ever allowed
    backend.refusing.clear()
    store.perform(Read("x", 9))
    backend.refusing.set()
    end = backend.now + 100
    backend.meanwhile = lambda: backend.refusing.clear() if backend.now > end else None
    store.perform(Write("x", b""))
    assert events == ["store refuses", "store answers"]
    end = backend.now + 2 * store_module.REFUSED
    backend.refusing.set()
    with pytest.raises(ConfigError, match="403"):
        store.perform(Write("x", b""))


def test_a_member_that_may_read_but_not_write_says_so_and_ends(no_pauses):
    backend, events = Refusing(), []
    store = store_of(backend, events)
    store.perform(Read("y", 9))
    backend.never, backend.meanwhile = {"beat"}, lambda: store.perform(Read("y", 9))
    with pytest.raises(ConfigError, match="403"):
        store.perform(Write("beat", b""))
    assert events == ["store takes no writes"]


def test_a_refusal_after_a_long_outage_ends_nobody(no_pauses):
    class Down(Refusing):
        def attempt(self, operation):
            self.now += 1.0
            if self.now < 2 * store_module.REFUSED:
                raise Failure("no route")
            if self.now < 2 * store_module.REFUSED + 2:
                raise Refused("the token has expired")
            return b"there"

    backend = Down()
    store = store_of(backend, [])
    store._succeeded = 0.0
    store.perform(Write("beat", b""))
    assert backend.now >= 2 * store_module.REFUSED + 2


def test_one_refused_object_is_left_alone_while_the_store_does_the_rest(no_pauses):
    backend, events = Refusing(), []
    store = store_of(backend, events)
    store.perform(Read("y", 9))
    backend.never, backend.meanwhile = {"x"}, lambda: store.perform(Read("y", 9))
    assert store.perform(Read("x", 9)) == FORBIDDEN
    before = backend.now
    assert store.perform(Read("x", 9, patient=True)) == FORBIDDEN
    assert backend.now - before > store_module.REFUSED  # a final answer is asked for longer
    before = backend.now
    assert store.perform(Size("x")) == 0 and store.perform(Delete("x")) is None
    assert backend.now - before < 2 * 2 * store_module.REFUSALS + 1
    assert events == []  # and nobody says that the store does not answer


def test_a_folder_that_is_never_listed_is_said_once_while_the_store_does_the_rest(no_pauses):
    events, answers, tries = [], {}, []

    class Unlisted(Refusing):
        def attempt(self, operation):
            self.now += 1.0
            if not isinstance(operation, List):
                return b"there"
            tries.append(operation)
            if len(tries) % 50:
                store.perform(Read("y", 9))
                raise Failure("it cannot be listed")
            return answers

    backend = Unlisted()
    store = store_of(backend, events)
    store.perform(Read("y", 9))
    assert store.perform(List("rounds/")) is answers and events == ["store does not list"]
    assert store.perform(List("rounds/")) is answers and events == ["store does not list"] * 2


def test_the_probe_is_repeated_when_the_store_fails_or_replies_are_lost(no_pauses, tmp_path):
    inner, tries = open_store(str(tmp_path)), []

    class Losing:
        def attempt(self, operation):
            tries.append(operation)
            if len(tries) == 3:
                raise Failure("500")
            answer = inner.attempt(operation)
            return False if isinstance(operation, Create) and len(tries) < 30 else answer

    probe(Losing())
    assert len({operation.name for operation in tries}) > 2

    class Dead:
        def attempt(self, operation):
            raise Failure("500")

    with pytest.raises(DiLoCoError, match="does not answer"):
        probe(Dead())
