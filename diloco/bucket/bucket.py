"""Reduce through a folder or an object store: members come and go, and no server has to run.

One thread for each fragment and one for the members do everything that touches the store. The training thread asks them
under one lock, which is never held during store operations or heavy computation. It waits only to join, to finish, and
in strict pace. With DDP inside a member, `ranks` stands between the core and what is asked here.
"""

import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from diloco.bucket.deltas import layout_of
from diloco.bucket.members import check_name, register
from diloco.bucket.priority import PriorityLock
from diloco.bucket.protocol import FragmentProtocol
from diloco.bucket.ranks import Asked, Other, ranks_of
from diloco.bucket.round_store import RoundStore
from diloco.bucket.run import UNSHARDED, Run, backend_of_shard, contract_of, find_or_create, read_run, starting_state
from diloco.bucket.session import Session
from diloco.bucket.snapshots import Snapshots
from diloco.bucket.store.backend import Backend, Failure, open_store, probe
from diloco.bucket.store.envelope import Envelope
from diloco.bucket.store.operations import Task, Write, together
from diloco.bucket.store.store import Closed, Store
from diloco.bucket.timing import MemberOptions, Pace, Timing
from diloco.codec import Codec
from diloco.errors import ConfigError, DiLoCoError
from diloco.formats import GATHER
from diloco.reduce import Contract, Delta, Dropped, Jump, Round, State
from diloco.reduce.thread import start_threads

log = logging.getLogger("diloco")
RUN_CHECK = 60.0
"""Seconds between two checks that the store still holds the run."""
MISSING = 2
"""Checks in a row that must not find it before it counts as lost: a store may answer wrongly once."""
PATIENCE = 60.0
"""Seconds that finish() waits for the last rounds of all fragments to be closed, beyond the time in which a dead member
is noticed."""


class Bucket:
    """Averages over the members that meet in a bucket.

    Args:
        url: a folder, or s3://, gs://, az:// (credentials are taken from the environment, as usual for each store).
        name: name of this member. Keep it when the member returns. If two processes use one name, the older one stops.
        ddp_ranks: with DDP inside this member, its ranks: the first one uses the store, and all take the same after the
            same step. Each counts its own tokens.
        key: a secret that all members share: all objects are signed with it, and objects that are not are ignored.
        encrypt: a secret with which all objects are encrypted.
        join_only: refuse to create a new run.
        pace: "decoupled" never waits for the others; "strict" waits for all members in every round.
        quorum: the fewest members of a round.
        grace: seconds that a round waits for expected members after its first delta. Default: from step and upload
            times.
        rounds: index at which every fragment ends. Default: never.
        max_work: the most work (tokens, or steps) that counts for one delta.
        shares_from: from this many members of a round on, each averages a share of the fragment, and reads the others'
            shares instead of all deltas: 1 byte a parameter in E3M0 whatever their number. A setting of the run.
        note: JSON values that later members find with the run, if this member creates it.
        heartbeat: seconds between two signs of life. A member is dead after five without one (at least 10 s).
        poll: seconds between two looks at an open round. Default: the step time, from 0.2 to 5.
        backend: used instead of the one that the URL names.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        ddp_ranks: dist.ProcessGroup | None = None,
        key: bytes | None = None,
        encrypt: bytes | None = None,
        join_only: bool = False,
        pace: Pace = "decoupled",
        quorum: int = 1,
        grace: float | None = None,
        rounds: int | None = None,
        max_work: float = float("inf"),
        shares_from: int = GATHER + 1,
        note: Mapping[str, object] = MappingProxyType({}),
        heartbeat: float = 5.0,
        poll: float | None = None,
        backend: Backend | None = None,
    ) -> None:
        if pace not in ("decoupled", "strict") or quorum < 1 or (grace is not None and not 0 <= grace < float("inf")):
            raise ConfigError(f"pace={pace!r}, quorum={quorum}, grace={grace}: give the pace 'decoupled' or 'strict', "
                              "a quorum of at least 1, and a grace of 0 seconds or more")  # fmt: skip
        if shares_from < 2:
            raise ConfigError(f"shares_from={shares_from}: give at least 2 members")
        self.url, self.name = url, check_name(name)
        self._shares_from = shares_from
        self._key, self._join_only, self._rounds, self._max_work = key, join_only, rounds, max_work
        self._note, self._encrypt = dict(note), encrypt
        self._options = MemberOptions(pace, quorum, grace, heartbeat, poll)
        self._root = self._backend = backend if backend is not None else open_store(url, create=not join_only)
        self._lock = PriorityLock()
        self._store, self._wakes = Store(self._backend), list[threading.Event]()
        self._threads: list[threading.Thread] = []
        self._protocols: list[FragmentProtocol] = []
        self._error: BaseException | None = None
        self._entering = self._last_sent = False
        self._finishing: float | None = None  # since when
        self._trained: set[int] = set()  # fragments with rounds of their own, unlike buffers
        self._reached: dict[int, int] = {}  # round of each fragment that the core has taken
        self._ranks = ranks_of(
            ddp_ranks, Asked(self._join, self._due, self._send, self._take, self._settle, self._arrived, self._waits)
        )
        self.ddp_ranks = self._ranks.ranks if self._ranks else ()
        self._clock = time.monotonic
        self.session: Session | None = None
        self.run: Run | None = None
        self._run_checked, self._run_missing = -math.inf, 0

    def join(self, contract: Contract, states: Sequence[State], codecs: Sequence[Codec]) -> list[State | None]:
        entered = (self._ranks.join if self._ranks else self._join)(contract, states, codecs)
        self._reached = {f: (new or own).index for f, (own, new) in enumerate(zip(states, entered, strict=True))}
        return entered

    def due(self, fragment: int, steps: int, slot: bool) -> bool:
        self._trained.add(fragment)
        return (self._ranks.due if self._ranks else self._due)(fragment, steps, slot)

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        (self._ranks.send if self._ranks else self._send)(fragment, index, delta)

    def take(self, fragment: int, index: int) -> Round | Jump | Dropped | None:
        outcome = (self._ranks.take if self._ranks else self._take)(fragment, index)
        if isinstance(outcome, (Round, Jump)):
            self._reached[fragment] = (outcome.state if isinstance(outcome, Jump) else outcome).index
        return outcome

    def settle(self) -> bool:
        return self._ranks.settle() if self._ranks else self._settle()

    def _join(self, contract: Contract, states: Sequence[State], codecs: Sequence[Codec]) -> list[State | None]:
        self._end_threads()
        probe(self._root)  # Probe first: it fails at once, where a retried operation would hang.
        shard = str(contract.get("shard", UNSHARDED))
        self._backend = backend_of_shard(shard, self._root, self._key, self._encrypt, self._options.strict)
        self._store, self._error = Store(self._backend, report=self._event), None
        self._store.run(self.introducing(contract, states, codecs), self._lock)
        self._start_threads(0, 1)  # the others must know that somebody joins while it reads a large snapshot
        try:
            entered = self._store.run(self.entering(states), self._lock)
        except BaseException:
            self._end_threads()
            raise
        self._start_threads(1, len(self._protocols))
        return entered

    def introducing(self, contract: Contract, states: Sequence[State], codecs: Sequence[Codec]) -> Task[None]:
        """Find or create the run, and become one of its members."""
        agreed = contract_of(contract, self._rounds, self._max_work, self._shares_from)
        proposal = Run(secrets.token_hex(8), agreed, (), self._note, created=True)
        self.run = yield from find_or_create(proposal, self._key, states, self._join_only)
        envelope = Envelope(self.run.id, self._key)
        mine = yield from register(envelope, self.name, float(secrets.randbits(48)))
        sync_every = contract.get("sync_every")
        assert isinstance(sync_every, int)
        timing = Timing(self._options, sync_every, self._clock)
        agreed = self._rounds, self._max_work, self._shares_from
        self.session = session = Session(envelope, mine, timing, *agreed)
        self._protocols = []
        for f, (state, codec, initial) in enumerate(zip(states, codecs, self.run.snapshots, strict=True)):
            layout = layout_of(codec, len(state.anchor))
            rounds = RoundStore(f, layout, envelope, session.reject)
            snapshots = Snapshots(rounds, envelope, f, state, initial, session.reject, layout.nbytes)
            self._protocols.append(FragmentProtocol(f, layout, rounds, snapshots, session))

    def entering(self, states: Sequence[State]) -> Task[list[State | None]]:
        """Take the state of the run."""
        session = self.session
        assert session is not None
        entered = yield from together([starting_state(c, s) for c, s in zip(self._protocols, states, strict=True)])
        session.mine = replace(session.mine, joining=False)
        yield from session.tick()
        self._entering, self._finishing, self._last_sent = True, None, False
        return entered

    def _due(self, fragment: int, steps: int, slot: bool) -> bool:
        with self._lock:
            self._check()
            self._entering = False
            if fragment == 0 and self.session is not None:
                self.session.timing.stepped()
            return self._protocols[fragment].due(steps, slot)

    def _send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        with self._lock:
            self._check()
            self._last_sent |= self._finishing is not None
            self._protocols[fragment].send(index, delta)
            self._wake(fragment)

    def _take(self, fragment: int, index: int) -> Round | Jump | Dropped | None:
        protocol = self._protocols[fragment]
        with self._lock:
            while True:
                self._check()
                outcome = protocol.take(index)
                if outcome is not None or not self._must_wait(protocol):
                    break
                waited = 0.0 if self._finishing is None else self._clock() - self._finishing
                if waited > self._options.ttl + PATIENCE:
                    protocol.give_up()
                    return Dropped()
                self._lock.wait(1.0)
            if outcome is None and self._options.strict and protocol.expects_outcome:
                for other in self._crossing_calls(protocol):
                    other.answer_call = True  # it is sent at the next step
            if outcome is not None:
                self._wake(fragment)  # there is room for the next one
            return outcome

    def _arrived(self, fragment: int) -> Round | Jump | Dropped | None:
        """What `_take` would give, without waiting."""
        with self._lock:
            self._check()
            outcome = self._protocols[fragment].take(self._protocols[fragment].held + 1)
            if outcome is not None:
                self._wake(fragment)
            return outcome

    def _waits(self, fragment: int) -> bool:
        with self._lock:
            return self._must_wait(self._protocols[fragment])

    def applied(self, fragment: int, state: State) -> None:
        if isinstance(self._ranks, Other):
            return
        with self._lock:
            self._protocols[fragment].applied(state)
            self._wake(fragment)

    def _settle(self) -> bool:
        with self._lock:
            self._check()
            self._finishing = self._clock()
            if self._run_missing >= MISSING:
                self._warn_lost()
        return False  # the others may go on

    def leave(self) -> None:
        """Tell the others. If the store does not answer, they find out by themselves."""
        if self._ranks:
            self._ranks.leave()
        if self.session is None or not self._threads:
            return
        self._end_threads()
        for operation in self.session.leave():
            assert isinstance(operation, Write)
            last = threading.Thread(target=self._try, args=(operation,), daemon=True)
            last.start()
            last.join(5.0)

    @property
    def ended(self) -> bool:
        """Whether every fragment that is trained has reached the last round of the run."""
        with self._lock:
            self._check()
            rounds, held = self._rounds, [self._reached.get(f, 0) for f in self._trained]
            return rounds is not None and bool(held) and min(held) >= rounds

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes that went through the store since joining, and the number of requests."""
        return {"sent": self._store.sent, "received": self._store.received, "requests": self._store.requests}

    def publish(self, **values: float) -> None:
        """Numbers for whoever watches: loss, steps, … Values that are inf or nan are left out, and others are limited
        to ±1e30, because members refuse larger ones."""
        if self.session is None:
            return
        with self._lock:
            published = {**self.session.mine.published, **values}
            published = {k: min(max(float(v), -1e30), 1e30) for k, v in published.items() if math.isfinite(v)}
            self.session.mine = replace(self.session.mine, published=published)

    def events(self) -> list[dict[str, Any]]:
        """What happened since the last call: members, jumps, snapshots, objects that were not used and why."""
        return self.session.drain_events() if self.session else []

    def ticks(self) -> list[Callable[[], Task[None]]]:
        """What the background repeats: one task for the members, then one for each fragment."""
        assert self.session is not None
        return [self._heartbeat, *(protocol.tick for protocol in self._protocols)]

    def _heartbeat(self) -> Task[None]:
        """Someone may empty the store, or begin another run in it, while members of this one go on."""
        assert self.session is not None and self.run is not None
        yield from self.session.tick()
        if self._clock() - self._run_checked < RUN_CHECK:
            return
        self._run_checked, run = self._clock(), None
        with contextlib.suppress(ConfigError):
            run = yield from read_run(self._key)
        self._run_missing = self._run_missing + 1 if run is None or run.id != self.run.id else 0
        if self._run_missing == MISSING:
            self._event("run lost", run=self.run.id)
            self._warn_lost()

    def _warn_lost(self) -> None:
        assert self.run is not None
        log.warning("run %s is no longer in the store: its run.json was deleted or replaced. Nobody can join this run, "
                    "and only its members hold its result. Keep their checkpoints, stop them, and start again in an "
                    "empty store", self.run.id)  # fmt: skip

    def _must_wait(self, protocol: FragmentProtocol) -> bool:
        if self._entering and not protocol.caught_up:
            return True
        if not protocol.expects_outcome:
            return False
        if not self._options.strict:
            return self._finishing is not None
        return self._last_sent or not self._crossing_calls(protocol)

    def _crossing_calls(self, protocol: FragmentProtocol) -> list[FragmentProtocol]:
        """Fragments of ours that others wait for, while we wait for this one of theirs: members that joined out of
        phase would wait forever. Members in phase never call for another fragment before the round that is waited for
        is closed; so if a look since the call found it open, they are out of phase."""
        others = [self._protocols[f] for f in self._trained if self._protocols[f] is not protocol]
        return [other for other in others if other.called_since < protocol.open_at]

    def _event(self, event: str, **values: Any) -> None:
        if self.session is not None:
            self.session.event(event, **values)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _wake(self, fragment: int) -> None:
        if len(self._wakes) > fragment + 1:
            self._wakes[fragment + 1].set()

    def _start_threads(self, first: int, count: int) -> None:
        """Attend to some of the ticks: the first one is that of the members."""
        ticks = self.ticks()[first : first + count]
        wakes = [threading.Event() for _ in ticks]
        self._wakes += wakes
        pauses = [lambda: self._options.heartbeat, *(lambda p=p: p.pause for p in self._protocols)]
        attended = zip(ticks, wakes, pauses[first : first + count], strict=True)
        self._threads += start_threads([partial(self._attend, self._store, *each) for each in attended], "bucket")

    def _attend(
        self, store: Store, tick: Callable[[], Task[None]], wake: threading.Event, pause: Callable[[], float]
    ) -> None:
        try:
            while not store.closing.is_set():
                store.run(tick(), self._lock.behind)
                with self._lock.behind:
                    self._lock.notify_all()
                    if self.session is not None and self.session.members.stranger:
                        self._wakes[0].set()
                wake.wait(pause())
                wake.clear()
        except Closed:
            pass
        except BaseException as error:
            with self._lock.behind:
                self._error = self._error or error
                self._lock.notify_all()

    def _end_threads(self) -> None:
        self._store.close()
        for wake in self._wakes:
            wake.set()
        deadline = self._clock() + 5.0  # for all together
        for thread in self._threads:
            thread.join(max(deadline - self._clock(), 0.0))
        self._threads, self._wakes = [], []

    def _try(self, operation: Write) -> None:
        with contextlib.suppress(Failure, DiLoCoError):
            self._backend.attempt(operation)
