"""What all fragments of a member share: who it is, who else is there, how long to wait, what happened."""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from diloco.bucket.members import Member, Members, Superseded, read_members, write_member
from diloco.bucket.store.envelope import HEADER, PREFIX, Envelope, Invalid
from diloco.bucket.store.operations import Task, create
from diloco.errors import Mismatch

Pace = Literal["decoupled", "strict"]
LONGEST_GRACE = 30.0
ALL_EVERY = 4
"""Rounds, of which one waits for all that live."""
UNIT = "unit"
UPLOAD, POLL = "upload_seconds", "poll_seconds"
"""What a member tells of itself, beside its step time, for the others' grace."""


def poll_of(step_seconds: float) -> float:
    return min(max(step_seconds, 0.2), 5.0)


@dataclass(frozen=True)
class MemberOptions:
    """How this member takes part. Members may differ in it."""

    pace: Pace = "decoupled"
    quorum: int = 1
    grace: float | None = None
    heartbeat: float = 5.0
    poll: float | None = None

    @property
    def strict(self) -> bool:
        return self.pace == "strict"

    @property
    def ttl(self) -> float:
        return max(10.0, 5 * self.heartbeat)


@dataclass
class Session:
    envelope: Envelope
    mine: Member
    options: MemberOptions
    sync_every: int
    rounds: int | None  # the last index of every fragment
    max_work: float  # work that may count of one delta
    clock: Callable[[], float] = time.monotonic
    members: Members = field(init=False)
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=32))  # seconds
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=10_000))
    rejected: int = 0

    def __post_init__(self) -> None:
        self.members = Members(self.mine.name, self.options.ttl)
        self._named: set[tuple[str, str]] = set()
        self._held: dict[int, int] = {}
        self._uploads: dict[int, deque[float]] = {}  # seconds of the last ones of each fragment
        self._wants: dict[int, int] = {}
        self._events_lock = threading.Lock()

    @property
    def me(self) -> str:
        return self.mine.name

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.steps) if self.steps else 0.0

    @property
    def poll(self) -> float:
        return self.options.poll or poll_of(self.step_seconds)

    def uploaded(self, fragment: int, seconds: float) -> None:
        """The own delta took so long, from its first put until the store had all of it. The others must know: a delta
        counts only if they wait for as long."""
        self._uploads.setdefault(fragment, deque(maxlen=8)).append(seconds)
        longest = max(statistics.median(each) for each in self._uploads.values())
        self.mine = replace(self.mine, published={**self.mine.published, UPLOAD: longest, POLL: self.poll})

    def awaited(self, index: int) -> dict[str, Member]:
        """Whom a round waits for. Now and then for all that live: else one that was late once, and always comes a
        little after the others, would find every round closed by members that no longer wait for it."""
        return self.members.awaited(self.clock(), self.options.strict or index % ALL_EVERY == 0)

    def grace(self, index: int) -> float:
        """How long a round waits after its first delta: enough that the slowest it waits for, which has to notice it,
        end its step and upload its own, is in."""
        if self.options.strict:
            return float("inf")
        if self.options.grace is not None:
            return self.options.grace
        others = self.awaited(index).values()
        step = max([self.step_seconds, *(m.step_seconds for m in others)])
        poll = max([self.poll, *(m.published.get(POLL, poll_of(m.step_seconds)) for m in others)])
        upload = max([self.mine.published.get(UPLOAD, 0.0), *(m.published.get(UPLOAD, 0.0) for m in others)])
        return min(2 * step + poll + upload, LONGEST_GRACE)

    def patience(self) -> float:
        """How long to wait for a snapshot that another member is asked for: it puts one after its next round."""
        steps = [m.step_seconds for m in self.members.alive(self.clock()).values()]
        return min(2 * self.sync_every * max(steps, default=0.0) + 4 * self.options.heartbeat, 300.0)

    def agree(self, unit: str) -> Task[None]:
        """What all deltas of the run weigh by: what the first one does, for ever. An object of its own, found before a
        delta is put, so that nobody has to judge the deltas and records of others by it. Raises Mismatch."""
        body = self.envelope.seal(UNIT, "unit", {"unit": unit}).body
        data = yield from create(UNIT, body, PREFIX.size + HEADER)
        try:
            run = self.envelope.open(UNIT, "unit", data, 0).text("unit")
        except Invalid as reason:  # not written by a member: then there is nothing to compare with
            return self.reject(UNIT, reason)
        if run != unit:
            raise Mismatch(f"the deltas of the run weigh by {run}, those of {self.me!r} by {unit}: call "
                           "diloco.count(tokens) before every step on all members, or on none")  # fmt: skip

    def event(self, event: str, **values: Any) -> None:
        with self._events_lock:
            self.events.append({"event": event, **values})

    def drain(self) -> list[dict[str, Any]]:
        with self._events_lock:
            out = list(self.events)
            self.events.clear()
        return out

    def reject(self, name: str, reason: Invalid) -> None:
        """An object that is not used: counted and named, once."""
        if (name, str(reason)) not in self._named:
            self._named.add((name, str(reason)))
            self.rejected += 1
            self.event("invalid", object=name, reason=str(reason))

    def holds(self, fragment: int, index: int) -> None:
        self._held[fragment] = index
        if index >= self._wants.get(fragment, 0):
            self._wants.pop(fragment, None)

    def want(self, fragment: int, index: int) -> None:
        self._wants[fragment] = index

    def tick(self) -> Task[None]:
        """Say that one is alive, and look who is."""
        self._bring_up_to_date()
        yield from write_member(self.envelope, self.mine)
        found = yield from read_members(self.envelope, self.reject)
        for other in found:
            if other.name == self.me and other.incarnation > self.mine.incarnation:
                raise Superseded(
                    f"another process has joined the run as {self.me!r}: give each member a name of its own"
                )
        for new in self.members.saw((m for m in found if m.name != self.me), self.clock()):
            self.event("left" if new.left else "member", member=new.name)

    def leave(self) -> Task[None]:
        self._bring_up_to_date()
        self.mine = replace(self.mine, left=True, joining=False)
        yield from write_member(self.envelope, self.mine)

    def _bring_up_to_date(self) -> None:
        self.mine = replace(
            self.mine,
            counter=self.mine.counter + 1,
            held=tuple(self._held[f] for f in sorted(self._held)),
            wants=tuple(sorted(self._wants.items())),
            step_seconds=self.step_seconds,
        )
