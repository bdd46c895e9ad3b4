"""Members of a bucket in virtual time: the library's own tasks, in one thread, over a store in memory that counts.

Each member has the real reducer and the real protocol. Its training is a clock: steps of a given length, and deltas of
random values. Requests take a latency and the time that their bytes need on the member's link.
"""

import bisect
import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from diloco.bucket import Bucket
from diloco.bucket.rounds import PIECES, place_of
from diloco.bucket.store import All, Create, Delete, List, Operation, Pause, Read, Size, Work, Write, advance
from diloco.bucket.store.store import CONNECTIONS
from diloco.codecs.codec import E3M0
from diloco.core.memory import Memory
from diloco.core.next_state import NextState
from diloco.core.outer import SGD
from diloco.core.schedule import Schedule
from diloco.exchange.reducer import Delta, Join, Jump, Round, State
from tests.support.players import joining

LATENCY = 0.05
ENTRY, PAGE = 280, 1000
"""Bytes of a name in the answer to a LIST, beyond the name itself (as S3 writes it), and names in one answer."""


@dataclass(frozen=True)
class Plan:
    members: int
    fragments: int = 1
    values: int = 1 << 16  # of a fragment
    stand_for: int = 1 << 16  # values of a fragment whose transfer times are to be had
    sync_every: int = 100
    step: float = 1.0  # seconds
    rate: float = 125e6  # bytes a second, each way


class Shelf:
    """The store: names in order, so that a listing costs what it lists."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self._names: list[str] = []

    def put(self, name: str, data: bytes) -> None:
        if name not in self.objects:
            bisect.insort(self._names, name)
        self.objects[name] = data

    def delete(self, name: str) -> None:
        if self.objects.pop(name, None) is not None:
            del self._names[bisect.bisect_left(self._names, name)]

    def listed(self, prefix: str, after: str) -> dict[str, int]:
        at, found = bisect.bisect_left(self._names, max(prefix, after)), {}
        while at < len(self._names) and self._names[at].startswith(prefix):
            if self._names[at] > after:
                found[self._names[at]] = len(self.objects[self._names[at]])
            at += 1
        return found


class Member(Bucket):
    def __init__(self, world: "World", name: str, number: int) -> None:
        super().__init__("memory://unused", name, backend=world)  # type: ignore[arg-type]
        self.world, self.count, self.steps, self.number = world, Counter[tuple[str, str]](), 0, number
        self._clock = lambda: world.now
        plan = world.plan
        self.states = [State(0, torch.zeros(plan.values), torch.zeros(0)) for _ in range(plan.fragments)]
        self.sent_at = [0] * plan.fragments
        self.in_flight: list[bool] = [False] * plan.fragments
        self.rounds: list[tuple[int, Round]] = []

    def train(self) -> None:
        """One step, as the core makes it: take what has arrived, send what is due."""
        self.steps += 1
        for f in range(len(self.states)):
            while (outcome := self.poll(f, self.states[f].index + 1)) is not None:
                self._apply(f, outcome)
            scheduled = self.world.schedule.sends_at(f, self.steps)
            if self.should_send(f, self.steps - self.sent_at[f], scheduled):
                self._send_delta(f)

    def _apply(self, f: int, outcome: object) -> None:
        self.in_flight[f] = False
        if isinstance(outcome, Jump):
            self.states[f] = outcome.state
        if isinstance(outcome, Round):
            self.states[f] = self.world.same(f, outcome.state)
            self.rounds.append((f, outcome))

    def _send_delta(self, f: int) -> None:
        work, self.sent_at[f], self.in_flight[f] = self.steps - self.sent_at[f], self.steps, True
        fingerprint, world = self.states[f].fingerprint(), self.world

        def made() -> Delta:
            values = torch.randn(world.plan.values, generator=world.generator) * 0.01
            return Delta(values, float(work), False, fingerprint, lr=1.0)

        self.send(f, self.states[f].index + 1, made)

    def _wake(self, fragment: int) -> None:
        self.world.wake(self, fragment + 1)


class World:
    """A backend for all members, and their clock."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.now, self.shelf = plan, 0.0, Shelf()
        self.schedule = Schedule(plan.sync_every, plan.fragments)
        self.generator, self.memory = torch.Generator().manual_seed(0), Memory()
        self.members: list[Member] = []
        self._known: dict[tuple[int, int], State] = {}
        self._events: list[tuple[float, int, Any]] = []
        self._number = 0
        self._sleeps: dict[tuple[str, int], Any] = {}  # member and job: what ends its pause

    def at(self, when: float, what: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, what))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.now = until

    def same(self, fragment: int, state: State) -> State:
        """Members that hold the same round hold the same bits; so one copy is enough."""
        known = self._known.setdefault((fragment, state.index), state)
        if known.fingerprint() != state.fingerprint():
            raise AssertionError(f"two members hold other bits after round {state.index} of fragment {fragment}")
        self._known.pop((fragment, state.index - 3), None)
        return known

    def join(self, name: str) -> None:
        member = Member(self, name, len(self.members))
        self.members.append(member)
        job = Join(
            contract={"sync_every": self.plan.sync_every, "fragments": self.plan.fragments},
            states=list(member.states),
            codecs=[E3M0()] * self.plan.fragments,
            advance=lambda fragment, state, *, lr, last: NextState(state, SGD(1.0), self.memory, lr),
            sync_every=self.plan.sync_every,
        )

        def joined(states: list[State | None]) -> None:
            member._entering = False
            for f, state in enumerate(states):
                member.states[f] = self.same(f, state or member.states[f])
            for job in range(1 + self.plan.fragments):
                self._tick(member, job)

        self._drive(member, joining(member, job), joined)

    def trains(self, member: Member, when: float) -> None:
        def step() -> None:
            member.train()
            self.at(self.now + self.plan.step * (1 + 0.01 * (member.number % 5) / 5), step)

        self.at(when, step)

    def _tick(self, member: Member, job: int) -> None:
        def ended(_: object) -> None:
            pause = member._options.heartbeat if job == 0 else member._fragments[job - 1].pause
            again = [lambda: self._tick(member, job)]
            self._sleeps[member.name, job] = again
            self.at(self.now + pause, lambda: again.pop()() if again else None)

        self._drive(member, member.ticks()[job](), ended)

    def wake(self, member: Member, job: int) -> None:
        if again := self._sleeps.get((member.name, job)):
            self.at(self.now, again.pop())

    def _drive(self, member: Member, task: Any, ended: Any, answer: Any = None) -> None:
        """Let a task go on until it asks for something, and answer when the store has done it."""
        while True:
            try:
                operation = advance(task, answer)
            except StopIteration as stop:
                ended(stop.value)
                return
            if not isinstance(operation, Work):
                break
            answer = operation.perform()

        def done() -> None:
            each = operation.operations if isinstance(operation, All) else [operation]
            answers = [self._attempt(member, o) for o in each]
            self._drive(member, task, ended, answers if isinstance(operation, All) else answers[0])

        self.at(self.now + self._seconds(operation), done)

    def _seconds(self, operation: Operation) -> float:
        if isinstance(operation, Pause):
            return operation.seconds
        each = [o for o in (operation.operations if isinstance(operation, All) else [operation]) if not _is_work(o)]
        larger = self.plan.stand_for / self.plan.values
        moved = sum(self._nbytes(o) * (larger if _is_values(o) else 1) for o in each)
        return LATENCY * -(-len(each) // CONNECTIONS) + moved / self.plan.rate

    def _nbytes(self, operation: Operation) -> int:
        match operation:
            case Create(data=data) | Write(data=data):
                return len(data)
            case Read(name, _, first):
                return first or len(self.shelf.objects.get(name, b""))
        return 0

    def _attempt(self, member: Member, operation: Operation) -> Any:
        count, objects = member.count, self.shelf.objects
        name = getattr(operation, "name", getattr(operation, "prefix", ""))
        kind = "life" if name.startswith("members/") else "values" if _is_values(operation) else "beside"
        match operation:
            case Work():
                return operation.perform()
            case Create(name, data) | Write(name, data):
                count["PUT", kind] += 1
                count["up", kind] += len(data)
                if isinstance(operation, Write) or name not in objects:
                    self.shelf.put(name, data)
                return None
            case Read(name, _, first):
                data = objects.get(name)
                if data is not None and first is not None:
                    data = data[operation.at : operation.at + first]
                count["GET", kind] += 1
                count["down", kind] += len(data or b"")
                return data
            case Size(name):
                count["HEAD", kind] += 1
                return len(objects[name]) if name in objects else None
            case List(prefix, after):
                found = self.shelf.listed(prefix, after)
                count["LIST", kind] += max(1, -(-len(found) // PAGE))
                count["listed", kind] += sum(len(each) + ENTRY for each in found)
                return found
            case Delete(name):
                return self.shelf.delete(name)
        return None

    def forget(self, index: int) -> None:
        """Delete the objects of rounds before this one, but records: they would be collected in an hour."""
        for name in [n for n in self.shelf.objects if (place := place_of(n)) and place[1] < index]:
            if "/closed." not in name:
                self.shelf.delete(name)


def _is_work(operation: Operation) -> bool:
    return isinstance(operation, Work)


def _is_values(operation: Operation) -> bool:
    """Pieces, averaged shares and whole deltas: what grows with the fragment."""
    name = getattr(operation, "name", "")
    return name.startswith(PIECES) or (name.startswith("rounds/") and name.rpartition("/")[2][0] == "s")


def crowd(plan: Plan, rounds: int) -> Iterator[World]:
    """All members join and train in step; yields the world after each further round of all fragments."""
    world = World(plan)
    for number in range(plan.members):
        world.at(0.01 * number, lambda number=number: world.join(f"m{number:04d}"))
    begin = 20.0 + 0.01 * plan.members
    world.run(begin)
    for member in world.members:
        world.trains(member, begin)
    for k in range(1, rounds + 1):
        world.run(begin + (k + 0.9) * plan.sync_every * plan.step)
        world.forget(min(state.index for member in world.members for state in member.states) - 1)
        yield world
