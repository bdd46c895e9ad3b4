"""The run in a bucket, and this member's part in it: what all its fragments share."""

import contextlib
import json
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from diloco.bucket.carriers import Carrier
from diloco.bucket.members import (
    MEMBERS,
    STEPS,
    UPLOAD,
    Member,
    MemberOptions,
    Members,
    Phase,
    Roll,
    Superseded,
    Timing,
    incarnations,
    write_member,
)
from diloco.bucket.round_store import Listing
from diloco.bucket.rounds import snapshot_index
from diloco.bucket.rules import waits_for_everyone
from diloco.bucket.snapshots import seal_snapshot
from diloco.bucket.store import Fetch, List, Read, Size, Task, Work, create, together
from diloco.bucket.store.backend import Backend, Below, patiently
from diloco.bucket.store.envelope import (
    HEADER,
    PART,
    PREFIX,
    Envelope,
    Invalid,
    Opened,
    encrypted,
    open_encrypted,
    put,
    refuses,
    rounded,
)
from diloco.bucket.store.store import Store
from diloco.errors import ConfigError, DiLoCoError, Mismatch
from diloco.exchange.contract import SameData, compare
from diloco.exchange.reducer import Contract, Shard, State

log = logging.getLogger("diloco")
NAME, UNIT = "run.json", "unit"
SHARD = "shard-{}"
"""Where ranks of sharded replicas meet those with the same shard. Each shard has separate rounds, as each fragment has,
so the ranks of one replica need not agree on anything."""


LEAST_DEADLINE, LONGEST_UPLOAD = 2.0, 30.0
"""Seconds for a payload from its owner, beyond the time that a delta takes it to the store, and the most that counts of
that time."""
REJECTED = 10_000
"""Maximum names of unusable objects to remember."""


@dataclass(frozen=True)
class Run:
    id: str
    contract: Contract
    snapshots: tuple[str, ...]
    note: Mapping[str, Any]  # settings published by the member that created the run
    created: bool  # by this member


def read_run(key: bytes | None) -> Task[Run | None]:
    """The run in the bucket. Raises ConfigError if run.json is unusable."""
    data = yield Read(NAME, PREFIX.size + HEADER + PART)
    if data is None:
        return None
    try:
        signed = Envelope("").open(NAME, "run", data, None).header.get("signed")
        if signed is not (key is not None):
            raise ConfigError("the run is not signed: omit --key-file" if key is not None else
                              "the run is signed: pass its secret with --key-file")  # fmt: skip
        return _opened_run(Envelope("", key).open(NAME, "run", data, None))
    except Invalid as reason:
        raise ConfigError(f"{NAME} in the bucket is unusable: {reason}") from None


@refuses
def _opened_run(opened: Opened) -> Run:
    value, run = json.loads(opened.payload), opened.text("run")
    contract, snapshots, note = value["contract"], value["snapshots"], value["note"]
    if not isinstance(note, dict) or not isinstance(contract, dict) or not isinstance(snapshots, list):
        raise Invalid("its contract, snapshots or note are malformed")
    if any(snapshot_index(name) != 0 for name in snapshots):
        raise Invalid("one of its snapshots is not an initial one")
    if not re.fullmatch("[0-9a-f]{16}", run):
        raise Invalid("its run id is malformed")
    return Run(run, contract, tuple(snapshots), note, created=False)


def find_or_create(proposal: Run, key: bytes | None, states: Sequence[State], join_only: bool) -> Task[Run]:
    """The run in the bucket; if there is none, create the proposed one. Raises Mismatch if the contracts differ."""
    run = yield from read_run(key)
    if run is None:
        if join_only:
            raise ConfigError("there is no run in the bucket: check the address, or omit --join-only to start one")
        members = incarnations((yield List(MEMBERS)))
        run = yield from _create_run(proposal, key, states)
        if run.created and members:
            log.warning("the store had entries of members (%s) but no %s, so this member has started a new run. If "
                        "they are still training, someone deleted their run: stop them, or use another address",
                        ", ".join(sorted(members)[:8]), NAME)  # fmt: skip
    compare([run.contract, json.loads(json.dumps(proposal.contract))], ("the run", "this member"))
    if len(run.snapshots) != len(states):
        raise Mismatch(f"the run has {len(run.snapshots)} fragments, this member {len(states)}")
    return run


def _create_run(proposal: Run, key: bytes | None, states: Sequence[State]) -> Task[Run]:
    """Put the initial snapshots, then create run.json, which names them. If several members do so at once, one wins,
    and all take the snapshots of its run.json: equal seeds do not give equal bits on different machines."""
    envelope = Envelope(proposal.id, key)
    snapshots = yield Work(lambda: [seal_snapshot(envelope, f, state, "") for f, state in enumerate(states)])
    yield from together([put(snapshot) for snapshot in snapshots])
    names = [snapshot.name for snapshot in snapshots]
    value = {"contract": proposal.contract, "snapshots": names, "note": proposal.note}
    payload = json.dumps(value, sort_keys=True).encode()
    body = envelope.seal(NAME, "run", {"signed": key is not None}, payload).body
    yield from create(NAME, body, PREFIX.size + HEADER + PART)
    run = yield from read_run(key)
    if run is None:
        raise DiLoCoError(f"{NAME} disappeared right after it was created: something deletes objects in the bucket")
    return replace(run, created=run.id == proposal.id)


def contract_of(contract: Contract, rounds: int | None, max_work: float, shares_from: int) -> dict[str, Any]:
    """The settings that members of a bucket must agree on, beyond those of all replicas."""
    return {
        **contract,
        "rounds": rounds,
        "members from which on each averages a share": shares_from,
        "most tokens of a delta": max_work if max_work < float("inf") else None,
    }


def find_run(url: str, key: bytes | None = None, *, encrypt: bytes | None = None, create: bool = False) -> Run | None:
    """The run in a bucket, if there is one. `create`: create the folder if it does not exist."""
    backend = open_encrypted(url, encrypt, create=create)
    patiently(lambda: backend.attempt(Size(NAME)), url)
    return Store(backend).run(read_run(key), contextlib.nullcontext())


def below(url: str, shard: int) -> str:
    """The bucket of one shard of a run."""
    return f"{url.rstrip('/')}/{SHARD.format(shard)}"


def backend_of_shard(shard: Shard, bucket: Backend, key: bytes | None, encrypt: bytes | None) -> Backend:
    """Where this rank meets others: the bucket itself, or the part of its shard. All members must have the same number
    of shards. The contract compares the numbers; this detects sharded and unsharded members in one bucket."""
    elsewhere = encrypted(Below(bucket, SHARD.format(0)) if shard == Shard() else bucket, encrypt)
    with contextlib.suppress(ConfigError):  # an unusable run.json does not count: anyone may have put it there
        if Store(elsewhere).run(read_run(key), contextlib.nullcontext()) is not None:
            ranks = "are sharded" if shard == Shard() else "have one rank"
            raise Mismatch(f"the bucket holds a run whose members {ranks}, this one is {shard}: use the same number of "
                           "ranks on all members")  # fmt: skip
    if shard == Shard():
        return encrypted(bucket, encrypt)
    return encrypted(Below(bucket, SHARD.format(shard.index)), encrypt)


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
        self.carrier = Carrier(self.event)
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

    def source(self, owner: str, digest: str, size: int) -> Fetch | None:
        """How to get a payload from its owner in about the time that its delta took to the store, over the same uplink;
        None if that member cannot be asked."""
        member = self.members.alive(self.clock()).get(owner)
        if member is None or not member.address or owner == self.name:
            return None
        upload = member.published.get(UPLOAD, self.timing.upload_seconds)
        deadline = LEAST_DEADLINE + min(max(upload, 0.0), LONGEST_UPLOAD)
        return Fetch(partial(self.carrier.fetch, owner, member.address, digest, size, deadline))

    def crowded(self, now: float) -> bool:
        """Whether rounds probably have so many members that each averages a share."""
        return 1 + len(self.members.alive(now)) >= self.shares_from

    @property
    def somebody_joins(self) -> bool:
        """Members that ask for a snapshot do not count: one that is always behind would prevent all deletion."""
        return any(member.joining for member in self.members.alive(self.clock()).values())

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
        self.carrier.keep(self.members.alive(self.clock()).keys())
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
