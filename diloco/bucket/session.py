"""State shared by all fragments of a member while it takes part: its own entry, the other members, the unit of work,
and events."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from diloco.bucket.effects import Phase
from diloco.bucket.members import STEPS, Member, MemberOptions, Members, Roll, Superseded, Timing, write_member
from diloco.bucket.round_store import Listing
from diloco.bucket.rules import waits_for_everyone
from diloco.bucket.store.envelope import HEADER, PREFIX, Envelope, Invalid, rounded
from diloco.bucket.store.operations import Task, create
from diloco.errors import Mismatch
from diloco.exchange.contract import SameData

UNIT = "unit"
REJECTED = 10_000
"""Maximum names of unusable objects to remember."""


class Session:
    def __init__(
        self,
        envelope: Envelope,
        entry: Member,
        timing: Timing,
        rounds: int | None,
        max_work: float,
        shares_from: int,
    ) -> None:
        """`rounds`: the last index of every fragment. `max_work`: the most work that counts for one delta.
        `shares_from`: minimum members of a round in which each averages a share."""
        self.envelope, self.entry, self.timing = envelope, entry, timing
        self.rounds, self.max_work, self.shares_from = rounds, max_work, shares_from
        self.clock = timing.clock
        self.members = Members(entry.name, timing.options.ttl)
        self.listing, self._roll = Listing(timing), Roll()
        self.rejected = 0  # objects
        self._rejected: set[str] = set()
        self._held: dict[int, int] = {}
        self._wants: dict[int, int] = {}
        self.phases: Callable[[], Iterable[Phase]] = tuple  # of all fragments
        self._stuck: set[str] = set()
        self._same_data = SameData()
        self._events: deque[dict[str, Any]] = deque(maxlen=10_000)
        self._events_lock = threading.Lock()

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def options(self) -> MemberOptions:
        return self.timing.options

    def awaited(self, index: int, now: float) -> dict[str, Member]:
        """The members that a round waits for."""
        return self.members.awaited(now, waits_for_everyone(index))

    def straggler_timeout(self, index: int, now: float) -> float:
        return self.timing.straggler_timeout(self.awaited(index, now).values(), waits_for_everyone(index))

    def crowded(self, now: float) -> bool:
        """Whether rounds probably have so many members that each averages a share."""
        return 1 + len(self.members.alive(now)) >= self.shares_from

    @property
    def somebody_joins(self) -> bool:
        return any(member.joining or member.wants for member in self.members.alive(self.clock()).values())

    def tick(self) -> Task[None]:
        """Write this member's heartbeat and read the others'."""
        self._update_entry()
        yield from write_member(self.envelope, self.entry)
        members = yield from self._roll.read(self.envelope, self.reject, self.members.active)
        self.members.all_seen = self._roll.through
        self.members.ttl = self.options.ttl + (self._roll.spread - 1) * self.options.heartbeat
        if any(m.name == self.name and m.incarnation > self.entry.incarnation for m in members):
            raise Superseded(f"another process has joined the run as {self.name!r}: give each member a different name")
        for member in self.members.update((m for m in members if m.name != self.name), self.clock()):
            self.event("left" if member.left else "member", member=member.name)
        stuck = self.members.stuck(self.clock())
        for name in sorted(stuck - self._stuck):
            self.event("stuck", member=name)
        self._stuck = stuck

    def holds(self, fragment: int, index: int) -> None:
        self._held[fragment] = index
        if index >= self._wants.get(fragment, 0):
            self._wants.pop(fragment, None)

    def compare(self, digests: Mapping[str, int]) -> None:
        """Look for members that train on the same data."""
        self._same_data.compare(digests, len(self._held))

    def want(self, fragment: int, index: int | None) -> None:
        """Ask the others for a snapshot of at least this index; None: no longer."""
        self._wants.pop(fragment, None)
        if index is not None:
            self._wants[fragment] = index

    def leave(self) -> Task[None]:
        self._update_entry()
        self.entry = replace(self.entry, left=True, joining=False)
        yield from write_member(self.envelope, self.entry)

    def _update_entry(self) -> None:
        published = {**self.entry.published, **self.timing.published, STEPS: float(self.timing.steps)}
        self.entry = replace(
            self.entry,
            counter=self.entry.counter + 1,
            held=tuple(self._held[f] for f in sorted(self._held)),
            wants=tuple(sorted(self._wants.items())),
            phases="".join(f"{list(Phase).index(phase):x}" for phase in self.phases()),
            step_seconds=rounded(self.timing.step_seconds),
            published={key: rounded(value) for key, value in published.items()},
        )

    def agree(self, unit: str) -> Task[None]:
        """Agree on the unit of work, which the first delta of the run decides. It has its own object, read before a
        delta is put, so that no member has to judge the deltas and records of others by it. Raises Mismatch."""
        body = self.envelope.seal(UNIT, "unit", {"unit": unit}).body
        data = yield from create(UNIT, body, PREFIX.size + HEADER)
        try:
            agreed = self.envelope.open(UNIT, "unit", data, 0).text("unit")
            if agreed not in ("tokens", "steps"):
                raise Invalid("it is neither tokens nor steps")
        except Invalid as reason:  # not written by a member: there is nothing to compare with
            return self.reject(UNIT, reason)
        if agreed != unit:
            raise Mismatch(f"the run weighs deltas by {agreed}, {self.name!r} by {unit}: call diloco.count(tokens) "
                           "before every step on all members, or on none")  # fmt: skip

    def event(self, event: str, **values: Any) -> None:
        with self._events_lock:
            self._events.append({"event": event, **values})

    def drain_events(self) -> list[dict[str, Any]]:
        """The events since the last call."""
        with self._events_lock:
            events = list(self._events)
            self._events.clear()
        return events

    def reject(self, name: str, reason: Invalid) -> None:
        """Report an unusable object by name, once."""
        name = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in name[:300])
        if name not in self._rejected and len(self._rejected) < REJECTED:
            self._rejected.add(name)
            self.rejected += 1
            self.event("invalid", object=name, reason=str(reason)[:300])
