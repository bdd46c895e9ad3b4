"""The bucket with its threads, over real folders: members come, go, are slow, die and return."""

import threading
import time

import pytest
import torch

from diloco import Balanced, ConfigError, DiLoCo, DiLoCoError, NotFinite
from diloco.bucket import Bucket
from diloco.bucket.members import Superseded
from diloco.bucket.store.backend import Failure, open_store, probe
from diloco.bucket.store.operations import Create, Delete, List, Oversized, Read, Size, Write
from diloco.bucket.store.store import Store
from tests.support.models import Tiny, adamw, anchors, flat, steps


class Member(threading.Thread):
    """One member: a model, a loop, a reducer, in a thread."""

    def __init__(
        self, url, name, count, *, seed=0, pause=0.005, saved=None, die_at=None, backend=None, gate=None, **options
    ):
        super().__init__(daemon=True)
        self.model = Tiny(seed)
        self.optimizer = adamw(self.model)
        options = {"heartbeat": 0.5, "poll": 0.02} | options
        self.reduce = Bucket(str(url), name, backend=backend, **options)
        self.diloco = DiLoCo(self.model, self.optimizer, sync_every=10, overlap=2, fragments=Balanced(3),
                             reduce=self.reduce)  # fmt: skip
        if saved:
            self.model.load_state_dict(saved[0])
            self.diloco.load_state_dict(saved[1])
        self.count, self.pause, self.die_at, self.number = count, pause, die_at, ord(name[0])
        self.gate = gate
        self.error, self.begun, self.seconds, self.done = None, None, [], 0
        self.states = {}
        self.start()

    def run(self):
        try:
            self.diloco.join()
            self.begun = [part.state.index for part in self.diloco._fragments]
            if self.gate:
                self.gate.wait(30)
                time.sleep(2 * 0.5)  # two heartbeats: all know each other
            began = time.perf_counter()
            for step in steps(self.model, self.optimizer, self.number, 1, self.count):
                self.seconds.append(time.perf_counter() - began)
                self.done = step
                self.states |= {(p.number, p.state.index): p.state.fingerprint() for p in self.diloco._fragments}
                if step == self.die_at:
                    return self.vanish()
                time.sleep(self.pause)
                began = time.perf_counter()
            self.diloco.finish()
            self.states |= {(p.number, p.state.index): p.state.fingerprint() for p in self.diloco._fragments}
        except BaseException as error:
            self.error = error

    def vanish(self):
        """As after kill -9: no word to the others."""
        self.reduce._end_threads()

    def save(self):
        return {k: v.clone() for k, v in self.model.state_dict().items()}, self.diloco.state_dict()

    def end(self, seconds=60):
        self.join(seconds)
        assert not self.is_alive(), "it hangs"
        if self.error:
            raise self.error
        return self

    @property
    def longest(self):
        """Seconds of the longest step."""
        return max(self.seconds)

    @property
    def rounds(self):
        return list(self.diloco.stats.last)

    @property
    def held(self):
        return [part.state.index for part in self.diloco._fragments]


def agree(*members):
    """Members that held the same round held the same bits."""
    together = {}
    for member in members:
        for key, fingerprint in member.states.items():
            assert together.setdefault(key, fingerprint) == fingerprint
    return together


def until(what, seconds=30):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)


def test_equal_members_are_in_all_rounds_and_hold_the_same_bits(tmp_path):
    gate = threading.Barrier(3)
    members = [Member(tmp_path, name, 60, seed=seed, gate=gate, grace=2.0) for seed, name in enumerate("abc")]
    for member in members:
        member.end()
    assert len({member.reduce.run.id for member in members}) == 1
    assert sum(member.reduce.run.created for member in members) == 1
    agree(*members)
    full = [round.members == 3 and round.counted for member in members for round in member.rounds]
    assert sum(full) >= 0.75 * len(full)  # all, but where a busy machine starts one late


def test_strict_pace_has_all_members_in_every_round(tmp_path):
    gate = threading.Barrier(2)
    members = [Member(tmp_path, name, 30, pace="strict", pause=0.003 * k, gate=gate) for k, name in enumerate("ab")]
    for member in members:
        member.end()
    agree(*members)
    rounds = [round for member in members for round in member.rounds]
    assert len(rounds) >= 12 and all(round.members == 2 and round.counted for round in rounds)


def test_a_slow_member_is_in_some_rounds_carries_the_rest_and_costs_the_others_nothing(tmp_path):
    fast = [Member(tmp_path, name, 300, pause=0.004) for name in "ab"]
    slow = Member(tmp_path, "s", 24, pause=0.1)
    for member in (*fast, slow):
        member.end()
    agree(*fast, slow)
    assert any(r.counted for r in slow.rounds) and any(not r.counted for r in slow.rounds)
    # Never for a step of the slow one, which a hundred rounds would show; a busy machine may hold up a step or two.
    assert all(sum(seconds > 0.09 for seconds in member.seconds) < 10 for member in fast)


def test_a_member_that_dies_is_not_waited_for_and_one_that_comes_is_in(tmp_path):
    gate = threading.Barrier(2)
    a = Member(tmp_path, "a", 400, gate=gate)
    b = Member(tmp_path, "b", 400, die_at=40, gate=gate)
    b.end()
    c = Member(tmp_path, "c", 80, seed=7)
    a.end()
    c.end()
    agree(a, b, c)
    assert all(index > 0 for index in c.begun)
    assert any(r.counted and r.members == 2 for r in c.rounds)
    assert any(r.members == 2 for r in a.rounds[:9]) and a.longest < 2


def test_all_die_and_one_returns_with_its_checkpoint(tmp_path):
    members = [Member(tmp_path, name, 200, die_at=45) for name in "ab"]
    for member in members:
        member.end()
    held = [max(pair) for pair in zip(*(member.held for member in members), strict=True)]
    back = Member(tmp_path, "a", 60, saved=members[0].save())
    back.end()
    agree(*members, back)
    assert not back.reduce.run.created
    assert all(now > then for now, then in zip(back.held, held, strict=True))
    alone = Member(tmp_path, "n", 1, seed=3).end()  # nothing but the bucket
    agree(back, alone)


def test_leaving_is_known_at_once_and_finish_waits_for_nobody_that_has_left(tmp_path):
    gate = threading.Barrier(2)
    a, b = (Member(tmp_path, name, 60, pace="strict", heartbeat=0.2, gate=gate) for name in "ab")
    until(lambda: a.done > 15 and b.done > 15)
    b.reduce.leave()
    a.end(20)  # in strict pace it would wait for b until it is known to be gone
    assert a.done == 60


def test_two_processes_under_one_name_the_older_one_stops(tmp_path):
    first = Member(tmp_path, "a", 10_000, heartbeat=0.1)
    until(lambda: first.done > 5)
    second = Member(tmp_path, "a", 20)
    second.end()
    with pytest.raises(Superseded, match="another process has joined the run as 'a'"):
        first.end()


def test_nan_in_a_delta_resets_the_member_and_harms_nobody(tmp_path):
    a, b = Member(tmp_path, "a", 120), Member(tmp_path, "b", 120)
    until(lambda: b.done > 20)
    with torch.no_grad():
        b.model.head.weight[0, 0] = float("nan")  # after the next step it is in every parameter and in AdamW's moments
    a.end()
    b.end()
    agree(a, b)
    assert torch.isfinite(anchors(a.diloco)).all() and torch.isfinite(anchors(b.diloco)).all()
    assert any(event["event"] == "not finite" for event in b.reduce.events())
    assert flat(b.model).isfinite().all() and sum(round.counted for round in b.rounds[-9:]) > 4  # it trains on


def test_a_member_whose_numbers_overflow_again_and_again_says_so(tmp_path):
    gate = threading.Event()
    a = Member(tmp_path, "a", 400, gate=gate)
    a.optimizer.register_step_post_hook(lambda *_: a.model.head.weight.data.fill_(float("nan")))
    gate.set()
    with pytest.raises(NotFinite, match="inf or nan again, after going back to the anchors"):
        a.end()


class Flaky:
    """A store that fails as told."""

    def __init__(self, backend):
        self.backend, self.down = backend, threading.Event()

    def attempt(self, operation):
        if self.down.is_set():
            raise Failure("500")
        return self.backend.attempt(operation)


def test_while_the_store_is_gone_training_goes_on_and_rounds_catch_up(tmp_path):
    store = Flaky(open_store(str(tmp_path)))
    a = Member(tmp_path, "a", 400, backend=store)
    until(lambda: a.done > 50)
    store.down.set()
    before, at = a.done, list(a.held)
    until(lambda: a.done > before + 100)
    assert max(now - then for now, then in zip(a.held, at, strict=True)) <= 1
    store.down.clear()
    a.end()
    assert min(a.held) > max(at) + 5 and a.longest < 2


class Refusing(Flaky):
    def attempt(self, operation):
        if self.down.is_set():
            raise ConfigError("access is refused")
        return self.backend.attempt(operation)


def test_refused_access_stops_the_member_with_the_reason(tmp_path):
    store = Refusing(open_store(str(tmp_path)))
    a = Member(tmp_path, "a", 10_000, backend=store)
    until(lambda: a.done > 5)
    store.down.set()
    with pytest.raises(DiLoCoError, match="refused"):
        a.end(20)


@pytest.mark.parametrize("url", ["folder", "memory://x"])
def test_a_store_does_what_the_protocol_asks_of_it(url, tmp_path):
    store = open_store(str(tmp_path / url) if url == "folder" else url)
    probe(store)
    attempt = store.attempt
    assert attempt(Create("a/b", b"one")) is True
    assert attempt(Create("a/b", b"two")) is False
    assert attempt(Read("a/b", 3)) == b"one"
    assert attempt(Read("a/b", 2)) == Oversized(3)
    assert attempt(Read("a/b", 0, first=2)) == b"on"
    assert attempt(Read("a/b", 0, first=200)) == b"one"
    assert attempt(Read("a/c", 9)) is None and attempt(Size("a/c")) is None and attempt(Read("c", 0, first=2)) is None
    attempt(Write("a/b", b"three"))
    assert attempt(Size("a/b")) == 5
    assert attempt(List("a/")) == {"a/b": 5} and attempt(List("b/")) == {}
    attempt(Delete("a/b"))
    attempt(Delete("a/b"))
    assert attempt(List("a/")) == {}


class Overwrites(Flaky):
    """As `rclone serve s3` does: create-only is accepted and not kept."""

    def attempt(self, operation):
        if isinstance(operation, Create):
            self.backend.attempt(Write(operation.name, operation.data))
            return True
        return super().attempt(operation)


class LooksFirst(Flaky):
    def attempt(self, operation):
        if isinstance(operation, Create):
            if self.backend.attempt(Size(operation.name)) is not None:
                return False
            time.sleep(0.05)
            self.backend.attempt(Write(operation.name, operation.data))
            return True
        return super().attempt(operation)


@pytest.mark.parametrize("kind", [Overwrites, LooksFirst])
def test_a_store_without_create_only_puts_is_refused(kind, tmp_path):
    store = kind(open_store(str(tmp_path)))
    with pytest.raises(ConfigError, match="no create-only puts"):
        Bucket(str(tmp_path), "a", backend=store).join({"sync_every": 1}, [], [])


def test_wrong_addresses_are_refused_with_what_is_allowed(tmp_path):
    with pytest.raises(ConfigError, match="s3://"):
        open_store("ftp://x")
    with pytest.raises(ConfigError, match="no folder"):
        Bucket(str(tmp_path / "typo"), "a", join_only=True)
    with pytest.raises(ConfigError, match="no run in the bucket"):
        Member(tmp_path, "a", 1, join_only=True).end()
    with pytest.raises(ConfigError, match="member name"):
        Bucket(str(tmp_path), "A b")


def test_operations_are_repeated_until_they_succeed(tmp_path):
    store = Flaky(open_store(str(tmp_path)))
    store.down.set()
    threading.Timer(0.5, store.down.clear).start()
    client = Store(store)
    began = time.monotonic()
    client.perform(Write("x", b"y"))
    assert time.monotonic() - began > 0.4
    assert client.sent == 1


def test_what_waits_to_be_repeated_goes_on_as_soon_as_anything_succeeds(tmp_path):
    store = Flaky(open_store(str(tmp_path)))
    store.down.set()
    client = Store(store)
    waiting = [threading.Thread(target=client.perform, args=(Write(f"{k}", b"y"),), daemon=True) for k in range(6)]
    for thread in waiting:
        thread.start()
    time.sleep(3.5)  # by now they pause for seconds
    store.down.clear()
    client.perform(Write("x", b"y"))
    deadline = time.monotonic() + 0.3
    for thread in waiting:
        thread.join(max(deadline - time.monotonic(), 0))
    assert not any(thread.is_alive() for thread in waiting)
