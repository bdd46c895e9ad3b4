"""Leases: every window of an epoch goes to one member, is counted once, and is taken again if its holder dies."""

import random
import threading
from collections import Counter
from contextlib import nullcontext

import pytest

from diloco.bucket import leases as module
from diloco.bucket.leases import Leases, Ranges, audit, ranges_of, read_names, read_ranges
from diloco.bucket.members import Member, MemberOptions, Timing
from diloco.bucket.run import Session
from diloco.bucket.store.backend import open_store
from diloco.bucket.store.envelope import Envelope
from diloco.bucket.store.store import Store

RUN = Envelope("0123456789abcdef")


def test_ranges_that_make_no_sense_are_none():
    assert read_ranges({"windows": 10, "size": 3, "corpus": "x"}) == Ranges(10, 3)
    for note in (None, [], {}, {"windows": 10}, {"windows": 10, "size": 0}, {"windows": "many", "size": 1},
                 {"windows": 1 << 60, "size": 1}, {"windows": 2, "size": 3}):  # fmt: skip
        assert read_ranges(note) is None


class Player:
    """A member whose life is decided by the test: no threads, one clock for all."""

    def __init__(self, place, name, incarnation, ranges, clock):
        timing = Timing(MemberOptions(), 10, lambda: clock[0])
        self.session = Session(RUN, Member(name, incarnation, joining=False), timing, None, 1e9, 100)
        self.session.members.all_seen = True
        self.store, self.lock, self.step = Store(open_store(str(place))), threading.Condition(), 0
        self.leases = Leases(self.session, ranges, self.lock, self.tick)
        self.trained = []  # (step, epoch, window), not counted yet

    def tick(self):
        self.run(self.leases.tick())

    def run(self, task):
        return self.store.run(task, nullcontext())

    def train(self, count=3):
        self.step += 1
        for epoch, first, end in self.leases.take(count, self.step):
            self.trained += [(self.step, epoch, window) for window in range(first, end)]

    def see(self, entries, now):
        """Read the last entry of every member that ever was."""
        self.session.members.update([e for name, e in entries.items() if name != self.session.name], now)

    def counted(self, total):
        """A round has counted all steps."""
        for _, epoch, window in self.trained:
            total[epoch, window] += 1
        self.trained.clear()
        self.leases.trained(self.step)
        self.tick()


def test_ranges_are_of_a_sync_and_few():
    assert ranges_of(100, 30).count == 4 and ranges_of(100, 30).bounds(3) == (90, 100)
    assert ranges_of(10**9, 10).count == module.MOST
    with pytest.raises(ValueError, match="windows in ranges"):
        Ranges(10**9, 10)


@pytest.mark.parametrize("seed", range(3))
def test_every_window_is_counted_and_twice_only_if_its_holder_died(tmp_path, seed):
    """50 kills, joins and departures of up to 8 members within one epoch."""
    chance, clock, ranges = random.Random(seed), [0.0], Ranges(607, 10)
    total, killed, living, incarnations = Counter(), set(), [], Counter()
    entries, events = {}, 0
    while True:
        clock[0] += 1.0
        what = chance.random() if events < 50 else 1.0
        if len(living) < 2 or (what < 0.15 and len(living) < 8):
            name = f"m{chance.randrange(20)}"
            if all(player.session.name != name for player in living):
                living.append(Player(tmp_path, name, incarnations[name], ranges, clock))
                incarnations[name] += 1
                events += 1
        elif what < 0.25:
            player = living.pop(chance.randrange(len(living)))
            if chance.random() < 0.5:  # by a kill, perhaps between a round and the object that says so
                held = {(lease.epoch, lease.number) for lease in player.leases._open}
                if chance.random() < 0.3:
                    for _, epoch, window in player.trained:
                        total[epoch, window] += 1
                killed |= held
            else:  # with a notice: a round counts its last steps
                player.counted(total)
                player.run(player.leases.release())
            events += 1
        for player in living:
            entry = player.session.entry
            entries[entry.name] = Member(entry.name, entry.incarnation, int(clock[0]), joining=False)
        for player in living:
            if events >= 50 or chance.random() < 0.5:  # a new member is not known to all at once
                player.see(entries, clock[0])
        player = chance.choice(living)
        player.train()
        if chance.random() < 0.4:
            player.counted(total)
        if events >= 50:
            for player in living:
                player.train()
                player.counted(total)
            clock[0] += 5.0
        if events >= 50:
            known = read_names(living[0].store.perform(module.List(module.LEASES)))
            if all((0, n) in known and known[0, n].is_done(*ranges.bounds(n)) for n in range(ranges.count)):
                break
    windows = {window: total[0, window] for window in range(ranges.windows)}
    assert min(windows.values()) == 1
    twice = {window // ranges.size for window, times in windows.items() if times > 1}
    assert twice <= {number for epoch, number in killed if epoch == 0}
    found = living[0].run(audit(RUN, ranges, living[0].session.reject))[0]
    assert twice <= set(found.again) <= {number for epoch, number in killed if epoch == 0}
    assert found.once + len(found.again) == ranges.count and not found.open
    assert all(len(holders) > 1 for holders in found.again.values())


def test_work_that_was_given_up_is_trained_again_and_named(tmp_path):
    player = Player(tmp_path, "a", 0, Ranges(20, 10), [0.0])
    player.train(4)
    player.train(4)
    player.leases.trained(1, lost=(1, 2))  # the second step was lost with a jump
    player.tick()
    player.trained.clear()
    total = Counter()
    while total[0, 0] == 0:
        player.train(4)
        player.counted(total)
    (first, *_) = player.run(audit(RUN, Ranges(20, 10), player.session.reject))
    assert list(first.again.values()) == [("a/0", "a/0")]


def test_training_goes_on_without_leases_while_the_store_is_silent_and_counts_them(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    player = Player(tmp_path, "a", 0, Ranges(100, 5), [0.0])
    player.train(3)
    player.leases._wake = lambda: None
    for _ in range(10):
        player.train(3)
    assert player.leases.unleased > 0
    assert len(player.trained) + player.leases.unleased == 33
    before = player.leases.unleased
    player.tick()
    player.train(3)
    assert player.leases.unleased == before


def test_what_is_no_lease_does_not_stop_a_member(tmp_path):
    player, ranges = Player(tmp_path, "a", 0, Ranges(20, 10), [0.0]), Ranges(20, 10)
    (tmp_path / "leases/000000").mkdir(parents=True)
    for name in ("000000.00", "000001.99", "1.to-5", "000001.00.to-7x"):
        (tmp_path / "leases/000000" / name).write_bytes(b"x")
    player.train(5)
    assert len(player.trained) == 5
    assert player.run(audit(RUN, ranges, player.session.reject))[0].ranges == 2
