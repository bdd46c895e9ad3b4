"""Members of a bucket without threads: the production code, driven one store operation at a time.

A `World` holds a store in memory, a clock, and puts that are still in flight. A `Player` is one incarnation of a
member: a model (by default of one parameter per fragment), the real core, the real reducer. The test decides when each
store operation happens; a player may die before, during or after it.
"""

import copy
from collections import Counter
from typing import Any

import torch
from torch import nn

from diloco import SGD, Balanced, DiLoCo, Float32
from diloco.bucket import Bucket
from diloco.bucket.rounds import Branched, read_record, record_name
from diloco.bucket.store import All, Create, Delete, List, Pause, Read, Size, Work, Write, advance, too_large
from diloco.bucket.store.envelope import Envelope, Invalid
from diloco.exchange.reducer import Jump, Round

FRAGMENTS = 2
SYNC_EVERY = 2
GARBAGE = b"garbage"
SETTINGS = {"sync_every": SYNC_EVERY, "overlap": 1, "outer": SGD(1.0), "codec": Float32()}


class Violation(AssertionError):
    """A guarantee is broken."""


class World:
    def __init__(self, fragments=FRAGMENTS, values=1):
        """`values`: of each fragment; with more than one, members average shares from two of them on."""
        self.fragments, self.values = fragments, values
        self.objects: dict[str, bytes] = {}
        self.limbo: list[Create] = []  # puts whose caller does not know what has become of them
        self.now = 0.0
        self.records: dict[tuple[int, int], str] = {}  # (fragment, index): digest of the record, once there is one
        self.states: dict[tuple[int, int], int] = {}  # (fragment, index): fingerprint
        self.steps: Counter[str] = Counter()  # of all lives of each member
        self.work: dict[int, Counter[str]] = {}  # of them that rounds of each fragment have counted
        self._read: dict[str, tuple[bytes, str, Any]] = {}  # a valid record, and what it was read from
        self.run, self.key = "", None
        self.stale: dict[str, int] | None = None  # what listings answer instead of what is there
        self.honest = False  # nobody's deltas are made up, so that their steps can be counted
        self.tolerant = False  # of records that are deleted: to see what comes of it

    def attempt(self, operation):
        match operation:
            case Create(name, data):
                won = name not in self.objects
                self.objects.setdefault(name, data)
                return won
            case Write(name, data):
                self.objects[name] = data
                return None
            case Read(name, limit, first):
                data = self.objects.get(name)
                if data is None or first is not None:
                    return data if data is None else data[operation.at :][:first]
                return data if len(data) <= limit else too_large(len(data))
            case Size(name):
                return len(self.objects[name]) if name in self.objects else None
            case List(prefix, after):
                names = self.names() if self.stale is None else self.stale
                return {n: size for n, size in names.items() if n.startswith(prefix) and n > after}
            case Delete(name):
                self.objects.pop(name, None)
                return None
            case Work():
                return operation.perform()
            case Pause():
                return None
            case All(operations):
                return [self.attempt(each) for each in operations]
        raise TypeError(operation)

    def names(self):
        return {name: len(data) for name, data in self.objects.items()}

    def check(self):
        """Guarantee 1: one record per round, forever. 6: a delta is in at most one record, once, and so is a step."""
        counted = set()
        for fragment in range(self.fragments):
            previous, index = "", 1
            work = self.work[fragment] = Counter()
            while True:
                record = self.record(fragment, index, previous)
                digest = self.records.get((fragment, index))
                replaced = record is not None and record.voids == digest
                if digest and (record is None or record.digest != digest) and not replaced and not self.tolerant:
                    raise Violation(f"the record of fragment {fragment}, round {index} is gone or another")
                if replaced and digest:  # what followed it does not count either
                    self.records = {key: link for key, link in self.records.items() if key < (fragment, index)
                                    or key[0] != fragment}  # fmt: skip
                if record is None:
                    break
                self.records[fragment, index] = record.digest
                digests = [e.digest for e in record.entries]
                if counted & set(digests):
                    raise Violation("a delta counts twice")
                counted |= set(digests)
                work.update({e.member: e.tokens for e in record.entries})
                if self.honest and any(work[name] > steps for name, steps in self.steps.items()):
                    raise Violation(f"steps count twice: {dict(work)} of {dict(self.steps)}")
                previous, index = record.digest, index + 1

    def record(self, fragment, index, previous, attempt=0, voided=None):
        """`voided`: only what stands in for this record counts."""
        while (data := self.objects.get(name := record_name(fragment, index, attempt))) is not None:
            body, link, record = self._read.get(name, (None, None, None))
            if body is data and link == previous and (not voided or record.voids == voided.digest):
                return self.record(fragment, index, previous, attempt + 1, record) or record
            try:
                record = read_record(
                    Envelope(self.run, self.key).open(name, "record", data, None), fragment, index, previous
                )
            except Invalid as reason:
                if data != GARBAGE and not isinstance(reason, Branched):
                    raise Violation(f"a member has written {name}, which is not valid: {reason}") from reason
                attempt += 1
                continue
            if voided is not None and record.voids != voided.digest:
                attempt += 1
                continue
            self._read[name] = data, previous, record
            return self.record(fragment, index, previous, attempt + 1, record) or record
        return None

    def closed(self, fragment):
        """The newest round that was closed."""
        return max((i for f, i in self.records if f == fragment), default=0)

    def holds(self, fragment, index, fingerprint):
        """Guarantee 2 and 7: who holds the same round holds the same bits, whoever computed them and when."""
        if self.states.setdefault((fragment, index), fingerprint) != fingerprint:
            raise Violation(f"two members hold other bits after round {index} of fragment {fragment}")


def complete(world, task):
    """Run a task to its end, alone; returns its result."""
    answer = None
    while True:
        try:
            operation = advance(task, answer)
        except StopIteration as stop:
            return stop.value
        answer = world.attempt(operation)


class Driven(Bucket):
    """The reducer, joined by hand."""

    def __init__(self, world, name, **options):
        super().__init__("", name, backend=world, heartbeat=2.0, poll=0.5, **options)
        self._clock = lambda: world.now
        self.world, self.indices, self.anchors = world, {}, {}
        self.outcomes = []

    def join(self, job):
        self._entering = False
        for fragment, (mine, entered) in enumerate(zip(job.states, self.entered, strict=True)):
            self._holds(fragment, entered or mine)
        return self.entered

    def _holds(self, fragment, state):
        self.indices[fragment] = state.index
        self.anchors[fragment, state.index] = state.anchor.clone()  # the core uses the memory again
        self.world.holds(fragment, state.index, state.fingerprint())

    def poll(self, fragment, index):
        outcome = super().poll(fragment, index)
        if isinstance(outcome, Round) and outcome.state.index != self.indices[fragment] + 1:
            raise Violation(
                f"round {outcome.state.index} after {self.indices[fragment]}"
            )  # guarantee 3: in order, once
        if isinstance(outcome, (Round, Jump)):
            self._holds(fragment, outcome.state)
        if outcome is not None:
            self.outcomes.append((fragment, outcome))
        return outcome


def mean_of(player, index, fragment=0):
    """The mean delta of a round, up to rounding: the outer optimizer is SGD(1)."""
    anchors = player.reduce.anchors
    return anchors[fragment, index - 1] - anchors[fragment, index]


def joining(reducer, job):
    """The part of a bucket's `join` that uses the store, as a task."""
    yield from reducer.introducing(job)
    return (yield from reducer.entering(job.states))


def job_of(diloco):
    """What the core hands over when it joins."""
    return diloco.replica.offer(diloco.schedule.sync_every, diloco.codec)


class Player:
    def __init__(self, world, name, checkpoint=None, start=0.0, rate=1.0, model=None, settings=SETTINGS, **options):
        self.world, self.name, self.rate = world, name, rate
        self.model = model
        if model is None:
            self.model = nn.Linear(world.values, world.fragments, bias=False)
            options.setdefault("shares_from", 2 if world.values > 1 else 4)
            nn.init.constant_(self.model.weight, start)
        self.reduce = Driven(world, name, **options)
        self.diloco = DiLoCo(self.model, reducer=self.reduce, fragments=Balanced(world.fragments), **settings)
        if checkpoint is not None:
            self.model.load_state_dict(checkpoint["model"])
            self.diloco.load_state_dict(copy.deepcopy(checkpoint["diloco"]))
        self.tasks: dict[int, Any] = {-1: joining(self.reduce, job_of(self.diloco))}  # job: generator
        self.wanted: dict[int, Any] = {}  # job: what it waits for
        self.joined = False

    def save(self):
        return copy.deepcopy({"model": self.model.state_dict(), "diloco": self.diloco.state_dict()})

    @property
    def jobs(self):
        """What may go on: joining, or the members (0) and each fragment (1, 2, …)."""
        return range(-1, 0) if not self.joined else range(1 + self.world.fragments)

    def want(self, job):
        """The next operation of a job; a tick begins if none is under way."""
        if job not in self.tasks:
            self.tasks[job] = self.reduce.ticks()[job]()
        if job not in self.wanted:
            self._send(job, None)
        return self.wanted.get(job)

    def go(self, job, fate="done"):
        """Let the store do what a job wants. Fates: done; lost (done, but the caller does not hear of it and tries
        again later); refused (nothing is stored and the caller is told that something is there); slow (on its way, and
        the caller tries again). Returns whether the job has more to do."""
        operation = self.want(job)
        if operation is None:
            return False
        if isinstance(operation, All):
            answers = [self._perform(each, fate) for each in operation.operations]
            if fate in ("lost", "slow"):
                return True
            answer = answers
        else:
            answer = self._perform(operation, fate)
            if fate in ("lost", "slow"):
                return True
        self._send(job, answer)
        return job in self.tasks

    def _perform(self, operation, fate):
        puts = isinstance(operation, Create)
        if puts and fate == "slow":
            self.world.limbo.append(operation)
            return None
        if puts and fate == "refused":
            return None
        if fate == "slow":
            return None
        answer = self.world.attempt(operation)
        if isinstance(operation, (Create, Delete)):
            self.world.check()
        return answer

    def _send(self, job, answer):
        self.wanted.pop(job, None)
        try:
            self.wanted[job] = advance(self.tasks[job], answer)
        except StopIteration as stop:
            del self.tasks[job]
            if job == -1:
                self.reduce.entered = stop.value
                self.world.run = self.reduce.run.id
                self.joined = True
                self.diloco.join()

    def finish_tick(self, job):
        for _ in range(2000):
            if not self.go(job):
                return
        raise Violation("stuck: a tick does not end")

    def turn(self):
        """A fair turn: everything that is under way ends, and a whole tick of each follows."""
        if not self.joined:
            self.finish_tick(-1)
        for job in self.jobs:
            if job in self.tasks:
                self.finish_tick(job)
            self.finish_tick(job)

    def step(self):
        self.world.steps[self.name] += 1
        with torch.no_grad():
            self.model.weight += self.rate
        self.diloco.step()

    @property
    def held(self):
        return [part.state.index for part in self.diloco._fragments]


def one_member(fragments=FRAGMENTS, **options):
    """A world with one member, which has joined."""
    world = World(fragments)
    world.key = options.get("key")
    player = Player(world, "a", **options)
    player.turn()
    return world, player


def meet(*players):
    """Let players join, and see each other."""
    for player in (*players, *players):
        player.turn()


def train(world, players, turns, seconds=0.5):
    """Steps of all players, each followed by a fair turn."""
    for _ in range(turns):
        for player in players:
            player.step()
            player.turn()
        world.now += seconds


class Paced:
    """A player with a clock: its steps take a while, and its deltas travel for a while.

    Args:
        step, upload: seconds of a step, and of a delta on its way.
        begins, dies: when it joins, and when it vanishes without a word.
    """

    TICK = 0.05

    def __init__(self, world, name, step, upload=0.0, begins=0.0, dies=float("inf"), settings=None, **options):
        self.player = Player(world, name, settings=SETTINGS | {"sync_every": 20} | (settings or {}), **options)
        self.world, self.step, self.upload = world, step, upload
        self.next_step = self.begins = begins
        self.dies = dies
        self.next_beat = 0.0
        self.next_poll = [0.0] * world.fragments
        self.arrives = [None] * world.fragments
        self.steps = 0
        self.taken = []  # (when, round)

    def go_on(self):
        now, player = self.world.now, self.player
        if not self.begins <= now < self.dies:
            return
        if not player.joined:
            player.finish_tick(-1)
        if now >= self.next_beat:
            player.finish_tick(0)
            self.next_beat = now + 2.0
        if now >= self.next_step:
            player.step()
            self.steps += 1
            self.next_step = round(now + self.step, 6)
        for fragment in range(self.world.fragments):
            self._poll(fragment, now)
        rounds = [outcome for _, outcome in player.reduce.outcomes if isinstance(outcome, Round)]
        self.taken += [(now, round) for round in rounds[len(self.taken) :]]

    def _poll(self, fragment, now):
        while now >= self.next_poll[fragment]:
            operation = self.player.want(1 + fragment)
            each = operation.operations if isinstance(operation, All) else ()
            if any(isinstance(o, Create) and ("/d-" in o.name or "pieces/" in o.name) for o in each):
                self.arrives[fragment] = self.arrives[fragment] or now + self.upload
                if now < self.arrives[fragment]:
                    return
                self.arrives[fragment] = None
            if not self.player.go(1 + fragment):
                self.next_poll[fragment] = now + 0.5

    @property
    def rounds(self):
        return [round for _, round in self.taken]


def live(world, members, seconds):
    """Let time pass for all of them."""
    end = world.now + seconds
    while world.now < end:
        for member in members:
            member.go_on()
        world.now = round(world.now + Paced.TICK, 6)  # sums of 0.05 would drift
