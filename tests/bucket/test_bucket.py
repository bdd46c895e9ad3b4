"""Members come, go, are slow, die and return: on real threads over real folders, or on a virtual clock where it is a
matter of time."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from diloco import Balanced, ConfigError, DiLoCo, DiLoCoError, Float32, Mismatch
from diloco.bucket import Bucket
from diloco.bucket.machine import AHEAD
from diloco.bucket.members import MemberOptions, Phase, Superseded
from diloco.bucket.store import Create, Read, Size, Write
from diloco.bucket.store.backend import Failure, open_store
from diloco.exchange.reducer import Round, State
from tests.support.fake_reducer import job
from tests.support.members import PATIENT, Member, until
from tests.support.models import Tiny, adamw, steps
from tests.support.players import Paced, World, live

pytestmark = pytest.mark.slow  # members train for many rounds


def rounds_of(member):
    """(fragment, index, who was in it, whether the own delta counted) of each round that it took."""
    return [
        (f, o.state.index, set(o.members), o.counted) for f, o in member.player.reduce.outcomes if isinstance(o, Round)
    ]


def test_a_slow_member_is_in_some_rounds_carries_the_rest_and_costs_the_others_nothing():
    """A step of the slow one is longer than the straggler timeout, yet the others make as many steps and rounds as
    without it."""
    made = {}
    for slow in (False, True):
        world = World(1)
        fast = [Paced(world, name, 0.1, straggler_timeout=1.0) for name in "ab"]
        members = [*fast, Paced(world, "s", 1.1, straggler_timeout=1.0, begins=1.0)] if slow else fast
        live(world, members, 120.0)
        made[slow] = [(member.steps, len(member.rounds)) for member in fast]
    assert made[True] == made[False] and min(made[True][0]) > 50
    counted = [counted for *_, counted in rounds_of(members[-1])]
    assert 5 < sum(counted) < len(counted) - 5


def test_a_member_that_dies_is_not_waited_for_and_one_that_comes_is_in():
    """The rounds of a take 2 s, and at least 5 s where they wait for the straggler timeout."""
    world = World(1)
    a, b = Paced(world, "a", 0.1, straggler_timeout=5.0), Paced(world, "b", 0.1, dies=20.0)
    c = Paced(world, "c", 0.1, begins=50.0)
    live(world, (a, b, c), 80.0)
    names = [(now, set(round.members)) for now, round in a.taken]
    assert all(who == {"a", "b"} for now, who in names if now < 20.0)
    assert all(who == {"a"} for now, who in names if 20.0 < now < 50.0)
    waits = [later for (now, _), (later, _) in pairwise(names) if later - now > 4.0]
    assert len([late for late in waits if late < 50.0]) == 2 and max(late for late in waits if late < 50.0) < 31.0
    assert all(who == {"a", "c"} for now, who in names if now > 65.0)
    assert [round.counted for round in c.rounds[-5:]] == [True] * 5


def test_leaving_is_known_at_once_and_finish_waits_for_nobody_that_has_left(tmp_path, monkeypatch):
    monkeypatch.setattr(MemberOptions, "ttl", 1e6)  # silence alone would keep a waiting for b

    def leave():
        until(lambda: any(round.members == 2 for round in a.rounds), a)
        b.reduce.leave()

    gate = threading.Barrier(2)
    a = Member(tmp_path, "a", 60, straggler_timeout=2 * PATIENT, gate=gate)
    b = Member(tmp_path, "b", 60, straggler_timeout=2 * PATIENT, gate=gate, at={16: leave}, die_at=16)
    b.end()
    a.end()
    assert a.done == 60 and {round.members for round in a.rounds} == {1, 2}


def test_two_that_finish_with_different_fragments_in_flight_do_not_wait_for_each_other(tmp_path):
    """Each would wait for what the other sends only after its own round."""
    answers = threading.Event()
    answers.set()

    class Gated:
        def __init__(self):
            self._store = open_store(str(tmp_path))

        def __getattr__(self, name):
            return getattr(self._store, name)

        def attempt(self, operation):
            answers.wait(PATIENT)
            return self._store.attempt(operation)

    def member(name):
        model = Tiny(0)
        optimizer = adamw(model)
        options = {"heartbeat": 0.2, "poll": 0.02, "straggler_timeout": 2 * PATIENT, "backend": Gated()}
        bucket = Bucket(str(tmp_path), name, **options)
        diloco = DiLoCo(model, optimizer, sync_every=10, overlap=4, fragments=Balanced(2), reducer=bucket)
        diloco.join()

        def train(first, last):
            for _ in steps(model, optimizer, ord(name), first, last):
                if last > first:
                    until(lambda: {*bucket.phases} <= {Phase.IDLE, Phase.READY})

        return diloco, train

    def others(diloco):
        return diloco.reducer.session.members.alive(time.monotonic()).values()

    a, train_a = member("a")
    train_a(1, 24)
    b, train_b = member("b")
    train_b(1, 9)
    until(lambda: all([m.joining for m in others(it)] == [False] for it in (a, b)))
    answers.clear()  # neither sees what the other sends after its last step
    train_a(25, 25)
    train_b(10, 10)
    assert [it.in_flight for it in (a, b)] == [1, 1]
    answers.set()
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(it.finish) for it in (a, b)]:
            done.result(PATIENT)
    assert a.indices[0] > 2 and a.indices[1] > 2


def test_a_flush_that_nobody_answers_ends_in_time_and_counts_what_is_lost(tmp_path):
    lost = []
    member = Member(tmp_path, "a", 17, quorum=2, at={17: lambda: lost.append(member.diloco.flush(0.2))}, die_at=17)
    member.end()
    assert lost == [17]
    with pytest.raises(DiLoCoError, match="has left"):
        member.diloco.finish()


def test_two_processes_under_one_name_the_older_one_stops(tmp_path):
    first = Member(tmp_path, "a", 10_000, heartbeat=0.1)
    until(lambda: first.done > 5, first)
    second = Member(tmp_path, "a", 20)
    second.end()
    with pytest.raises(Superseded, match="another process has joined the run as 'a'"):
        first.end()


class Flaky:
    """A store that fails while it is down."""

    def __init__(self, backend):
        self.backend, self.down, self.tries = backend, threading.Event(), 0

    def attempt(self, operation):
        self.tries += 1
        if self.down.is_set():
            raise Failure("500")
        return self.backend.attempt(operation)


def test_while_the_store_is_gone_training_goes_on_and_rounds_catch_up(tmp_path):
    store = Flaky(open_store(str(tmp_path)))
    a = Member(tmp_path, "a", backend=store)
    until(lambda: min(a.held) > 0, a)
    store.down.set()
    steps, held = a.done, a.held
    until(lambda: a.done > steps + 60, a)
    assert all(now - then <= AHEAD for now, then in zip(a.held, held, strict=True))  # what was there already
    store.down.clear()
    until(lambda: min(a.held) > max(held) + AHEAD, a)
    a.stop().end()


class Reading(Flaky):
    """A store that serves a snapshot only after a few heartbeats of its reader."""

    def __init__(self, backend):
        super().__init__(backend)
        self.beats, self.given, self.changed = 0, [], threading.Condition()

    def attempt(self, operation):
        with self.changed:
            if isinstance(operation, Write) and operation.name.startswith("members/"):
                self.beats += 1
                self.changed.notify_all()
            if isinstance(operation, Read) and operation.name.startswith("anchors/") and operation.first is None:
                self.given.append(self.changed.wait_for(lambda: self.beats >= 3, PATIENT))
        return super().attempt(operation)


def test_the_heartbeat_runs_while_a_member_reads_a_large_snapshot(tmp_path):
    """Otherwise the others would count it as dead, and delete what it reads."""
    Member(tmp_path, "a", 30).end()
    store = Reading(open_store(str(tmp_path)))
    Member(tmp_path, "b", 5, seed=3, backend=store).end()
    assert store.given and all(store.given)


class LooksFirst(Flaky):
    """Looks whether the name is free, and writes afterwards: of eight at once, all find it free."""

    def __init__(self, backend):
        super().__init__(backend)
        self.looked = threading.Barrier(8)

    def attempt(self, operation):
        if isinstance(operation, Create):
            if self.backend.attempt(Size(operation.name)) is not None:
                return False
            self.looked.wait(PATIENT)
            self.backend.attempt(Write(operation.name, operation.data))
            return True
        return super().attempt(operation)


def test_a_store_that_looks_before_it_puts_is_refused(tmp_path):
    store = LooksFirst(open_store(str(tmp_path)))
    with pytest.raises(ConfigError, match="no create-only puts"):
        Bucket(str(tmp_path), "a", backend=store).join(job([], []))


def test_wrong_addresses_are_refused_with_what_is_allowed(tmp_path):
    with pytest.raises(ConfigError, match="s3://"):
        open_store("ftp://x")
    with pytest.raises(ConfigError, match="no folder"):
        Bucket(str(tmp_path / "typo"), "a", join_only=True)
    with pytest.raises(ConfigError, match="no run in the bucket"):
        Member(tmp_path, "a", 1, join_only=True).end()
    with pytest.raises(ConfigError, match="member name"):
        Bucket(str(tmp_path), "A b")


def test_a_member_that_compares_other_things_than_the_run_is_refused(tmp_path):
    def join(name, contract):
        bucket = Bucket(str(tmp_path), name)
        try:
            bucket.join(job([State(0, torch.zeros(3), torch.zeros(0))], [Float32()], contract))
        finally:
            bucket.leave()

    join("a", {"sync_every": 10, "codec": "Float32()"})
    with pytest.raises(Mismatch, match="dtypes is absent on the run"):
        join("b", {"sync_every": 10, "codec": "Float32()", "dtypes": {"x": "float32"}})
    with pytest.raises(Mismatch, match=r"codec is Float32\(\) on the run, absent on this member"):
        join("c", {"sync_every": 10})
