"""What all fragments of a member share for as long as it takes part: its own entry among the members, the other
members, the unit of work, and what happened."""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diloco.bucket.listing import Listing
from diloco.bucket.members import STEPS, Member, Members, Roll, Superseded, write_member
from diloco.bucket.store.envelope import HEADER, PREFIX, Envelope, Invalid
from diloco.bucket.store.operations import Task, create
from diloco.bucket.timing import MemberOptions, Timing
from diloco.errors import Mismatch
from diloco.reduce.contract import SameData

ALL_EVERY = 4
"""One round in this many waits for all living members."""
UNIT = "unit"
REJECTED = 10_000
"""Names of objects that are remembered because they are not used."""


class Session:
    def __init__(
        self,
        envelope: Envelope,
        mine: Member,
        timing: Timing,
        rounds: int | None,
        max_work: float,
        shares_from: int,
    ) -> None:
        """`rounds`: the last index of every fragment. `max_work`: the most work that counts for one delta.
        `shares_from`: the fewest members of a round of which each averages a share."""
        self.shares_from = shares_from
        self.envelope, self.mine, self.timing, self.rounds, self.max_work = envelope, mine, timing, rounds, max_work
        self.clock = timing.clock
        self.members = Members(mine.name, timing.options.ttl)
        self.listing, self._roll = Listing(timing), Roll()
        self.rejected = 0  # objects
        self._rejected: set[str] = set()
        self._held: dict[int, int] = {}
        self._wants: dict[int, int] = {}
        self._stuck: set[str] = set()
        self._same_data = SameData()
        self._events: deque[dict[str, Any]] = deque(maxlen=10_000)
        self._events_lock = threading.Lock()

    @property
    def me(self) -> str:
        return self.mine.name

    @property
    def options(self) -> MemberOptions:
        return self.timing.options

    def awaited(self, index: int) -> dict[str, Member]:
        """The members that a round waits for. Now and then these are all that live: otherwise a member that was late
        once, and always comes a little after the others, would find every round closed, because the others no longer
        wait for it."""
        return self.members.awaited(self.clock(), self.options.strict or index % ALL_EVERY == 0)

    def grace(self, index: int) -> float:
        return self.timing.grace(self.awaited(index).values(), index % ALL_EVERY == 0)

    @property
    def crowded(self) -> bool:
        """Whether rounds are expected to have so many members that each averages a share."""
        return 1 + len(self.members.alive(self.clock())) >= self.shares_from

    @property
    def somebody_joins(self) -> bool:
        return any(member.joining or member.wants for member in self.members.alive(self.clock()).values())

    def tick(self) -> Task[None]:
        """Show that this member is alive, and find out who else is."""
        self._update_own_entry()
        yield from write_member(self.envelope, self.mine)
        found = yield from self._roll.read(self.envelope, self.reject, self.members.heard)
        self.members.all_seen = self._roll.through
        self.members.ttl = self.options.ttl + (self._roll.spread - 1) * self.options.heartbeat
        for other in found:
            if other.name == self.me and other.incarnation > self.mine.incarnation:
                raise Superseded(
                    f"another process has joined the run as {self.me!r}: give each member a name of its own"
                )
        for new in self.members.saw((m for m in found if m.name != self.me), self.clock()):
            self.event("left" if new.left else "member", member=new.name)
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
        """Ask the others for a snapshot of at least this index, or no longer."""
        self._wants.pop(fragment, None)
        if index is not None:
            self._wants[fragment] = index

    def leave(self) -> Task[None]:
        self._update_own_entry()
        self.mine = replace(self.mine, left=True, joining=False)
        yield from write_member(self.envelope, self.mine)

    def _update_own_entry(self) -> None:
        self.mine = replace(
            self.mine,
            counter=self.mine.counter + 1,
            held=tuple(self._held[f] for f in sorted(self._held)),
            wants=tuple(sorted(self._wants.items())),
            step_seconds=self.timing.step_seconds,
            published={**self.mine.published, **self.timing.published, STEPS: float(self.timing.steps)},
        )

    def agree(self, unit: str) -> Task[None]:
        """All deltas of a run weigh by the same unit, which the first delta decides. It is an object of its own, looked
        up before a delta is put, so that no member has to judge the deltas and records of others by it. Raises
        Mismatch."""
        body = self.envelope.seal(UNIT, "unit", {"unit": unit}).body
        data = yield from create(UNIT, body, PREFIX.size + HEADER)
        try:
            agreed = self.envelope.open(UNIT, "unit", data, 0).text("unit")
            if agreed not in ("tokens", "steps"):
                raise Invalid("it is neither tokens nor steps")
        except Invalid as reason:  # not written by a member: there is nothing to compare with
            return self.reject(UNIT, reason)
        if agreed != unit:
            raise Mismatch(f"the deltas of the run weigh by {agreed}, those of {self.me!r} by {unit}: call "
                           "diloco.count(tokens) before every step on all members, or on none")  # fmt: skip

    def event(self, event: str, **values: Any) -> None:
        with self._events_lock:
            self._events.append({"event": event, **values})

    def drain_events(self) -> list[dict[str, Any]]:
        """What happened since the last call."""
        with self._events_lock:
            out = list(self._events)
            self._events.clear()
        return out

    def reject(self, name: str, reason: Invalid) -> None:
        """An object is not used: count it and report it by name, once."""
        name = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in name[:300])
        if name not in self._rejected and len(self._rejected) < REJECTED:
            self._rejected.add(name)
            self.rejected += 1
            self.event("invalid", object=name, reason=str(reason)[:300])
