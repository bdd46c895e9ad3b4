"""The reducer through a folder or an object store: members come and go, and no server has to run.

One background thread per fragment and one for the members do everything that touches the store. The training thread
talks to them under one lock, which is never held during store operations or heavy computation. It waits only to join,
to finish, and for a lease.
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

from diloco.bucket.carriers import check_announced
from diloco.bucket.fragment import Fragment
from diloco.bucket.leases import Leases, Ranges
from diloco.bucket.members import MemberOptions, Phase, Timing, check_name, register
from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import layout_of
from diloco.bucket.run import Run, Session, backend_of_shard, contract_of, find_or_create, read_run
from diloco.bucket.snapshots import Snapshots
from diloco.bucket.store import Task, together
from diloco.bucket.store.backend import Backend, open_store
from diloco.bucket.store.contract import probe
from diloco.bucket.store.envelope import Envelope
from diloco.bucket.store.store import Closed, Store
from diloco.codecs.formats import GATHER
from diloco.errors import ConfigError, DiLoCoError
from diloco.exchange.reducer import Called, Delta, Dropped, Identity, Join, Outcome, State, advanced
from diloco.exchange.thread import start_threads

log = logging.getLogger("diloco")
RUN_CHECK = 60.0
"""Seconds between two checks that the store still holds the run."""
MISSING = 2
"""Consecutive checks that must miss the run before it counts as lost: a store may answer wrongly once."""
PATIENCE = 60.0
"""Seconds that finish() waits for the last rounds, beyond the time it takes to notice a dead member."""
LONGEST_YIELD = 0.05
"""Seconds for which other threads let the training thread pass. Bounded, in case that thread has ended."""


class PriorityLock(threading.Condition):
    """A lock that the training thread gets first: it uses `with lock:`, all other threads use `with lock.behind:`.

    Python's locks are not fair: a thread that releases one and immediately wants it again gets it, because a waiting
    thread needs the interpreter first. Threads that follow many rounds would keep the training thread waiting.
    """

    def __init__(self) -> None:
        super().__init__()
        self.passed = threading.Event()
        self.passed.set()
        self.behind = Behind(self)

    def __enter__(self) -> bool:
        self.passed.clear()
        entered = super().__enter__()
        self.passed.set()
        return entered


class Behind:
    """The same lock, for threads that let the training thread pass."""

    def __init__(self, lock: PriorityLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.passed.wait(LONGEST_YIELD)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Bucket:
    """Averages over the members that meet in a bucket.

    Args:
        url: a folder, or s3://, gs://, az:// (credentials come from the environment, as usual for each store).
        name: name of this member. Keep it when the member returns. If two processes use one name, the older one stops.
        key: a secret that all members share. It signs all objects, and unsigned ones are ignored.
        encrypt: a secret that encrypts all objects.
        join_only: never create a new run.
        quorum: minimum members of a round.
        straggler_timeout: seconds that a round waits for late members after its first delta. Default: from step and
            upload times.
        rounds: index at which every fragment ends. Default: never.
        max_work: maximum work (tokens or steps) that counts for one delta.
        shares_from: with at least this many members in a round, each averages a share of the fragment and reads the
            others' shares instead of all deltas: 1 byte per parameter with E3M0, however many members. A setting of
            the run.
        note: JSON values stored with the run for later members, if this member creates it.
        heartbeat: seconds between two heartbeats. A member is dead after five missing ones (at least 10 s).
        poll: seconds between two looks at an open round. Default: the step time, from 0.2 to 5.
        announce: HOST:PORT where the others reach this member. They then read its deltas and shares from there instead
            of the store. A name is resolved here, once: if it has another address elsewhere, give that one. Of several
            ranks, each listens on the port after that of the rank before it.
        backend: a store to use instead of the one at the URL.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        key: bytes | None = None,
        encrypt: bytes | None = None,
        join_only: bool = False,
        quorum: int = 1,
        straggler_timeout: float | None = None,
        rounds: int | None = None,
        max_work: float = float("inf"),
        shares_from: int = GATHER + 1,
        note: Mapping[str, object] = MappingProxyType({}),
        heartbeat: float = 5.0,
        poll: float | None = None,
        announce: str | None = None,
        backend: Backend | None = None,
    ) -> None:
        if quorum < 1 or (straggler_timeout is not None and not 0 <= straggler_timeout < float("inf")):
            raise ConfigError(f"quorum={quorum}, straggler_timeout={straggler_timeout}: use a quorum of at least 1 "
                              "and a straggler timeout of 0 seconds or more")  # fmt: skip
        if shares_from < 2:
            raise ConfigError(f"shares_from={shares_from}: use at least 2 members")
        self.url, self.name = url, check_name(name)
        self._shares_from = shares_from
        self._announced = None if announce is None else check_announced(announce, key is not None)
        self._key, self._join_only, self._rounds, self._max_work = key, join_only, rounds, max_work
        self._note, self._encrypt = dict(note), encrypt
        self._options = MemberOptions(quorum, straggler_timeout, heartbeat, poll)
        self._root = self._backend = backend if backend is not None else open_store(url, create=not join_only)
        self._lock = PriorityLock()
        self._store, self._wakes = Store(self._backend), list[threading.Event]()
        self._threads: list[threading.Thread] = []
        self._fragments: list[Fragment] = []
        self._error: BaseException | None = None
        self._entering = False
        self._ends: float | None = None  # when to stop waiting for the last rounds
        self._trained: set[int] = set()  # fragments with rounds, unlike buffers
        self.identity = Identity(self.name)
        self._clock = time.monotonic
        self.session: Session | None = None
        self.run: Run | None = None
        self._run_checked, self._run_missing = -math.inf, 0

    def join(self, job: Join) -> list[State | None]:
        self._end_threads()
        probe(self._root)  # Probe first: it fails at once, where a retried operation would hang.
        self._backend = backend_of_shard(job.shard, self._root, self._key, self._encrypt)
        self._store, self._error = Store(self._backend, report=self._event), None
        self._store.run(self.introducing(job), self._lock)
        self._start_threads(0, 1)  # this member's heartbeat must run while it reads a large snapshot
        try:
            entered = self._store.run(self.entering(job.states), self._lock)
        except BaseException:
            self._end_threads()
            raise
        self._start_threads(1, len(self._fragments))
        return entered

    def introducing(self, job: Join) -> Task[None]:
        """Find or create the run, and become one of its members."""
        announced = self._announced and self._announced.of_rank(job.shard.index, job.shard.count)
        limits = self._rounds, self._max_work, self._shares_from
        proposal = Run(secrets.token_hex(8), contract_of(job.contract, *limits), (), self._note, created=True)
        self.run = yield from find_or_create(proposal, self._key, job.states, self._join_only)
        envelope = Envelope(self.run.id, self._key)
        entry = yield from register(envelope, self.name, float(secrets.randbits(48)))
        self.session = session = Session(envelope, entry, Timing(self._options, job.sync_every, self._clock), *limits)
        if announced is not None:
            session.entry = replace(entry, address=session.carrier.listen(announced))
        self._fragments = fragments = list[Fragment]()
        session.phases = lambda: (fragment.machine.phase for fragment in fragments)
        for f, (state, codec, initial) in enumerate(zip(job.states, job.codecs, self.run.snapshots, strict=True)):
            layout = layout_of(codec, len(state.anchor))
            rounds = RoundStore(f, layout, envelope, session.reject, session.source)
            snapshots = Snapshots(rounds, envelope, f, state, initial, session.reject)
            advance = partial(advanced, replace(job, states=()), f)  # which would keep the memory of the start
            self._fragments.append(Fragment(f, rounds, snapshots, session, advance))

    def entering(self, states: Sequence[State]) -> Task[list[State | None]]:
        """Take the state of the run."""
        session = self.session
        assert session is not None
        starts = [part.start(state) for part, state in zip(self._fragments, states, strict=True)]
        entered = yield from together(starts)
        session.entry = replace(session.entry, joining=False)
        yield from session.tick()
        self._entering, self._ends = True, None
        return entered

    def should_send(self, fragment: int, steps: int, scheduled: bool) -> bool:
        with self._lock:
            self._check()
            self._trained.add(fragment)
            self._entering = False
            if fragment == 0 and self.session is not None and self._ends is None:
                self.session.timing.stepped()
            return self._fragments[fragment].should_send(steps, scheduled)

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        with self._lock:
            self._check()
            self._fragments[fragment].send(index, delta)
            self._wake(fragment)

    def poll(self, fragment: int, index: int) -> Outcome | None:
        part = self._fragments[fragment]
        with self._lock:
            outcome = self._poll(part, index)
            while outcome is None and self._entering and not part.machine.caught_up and self._has_time:
                self._lock.wait(1.0)
                outcome = self._poll(part, index)
            while outcome is None and self._ends is not None and part.machine.expects_outcome:
                outcome = self._last_outcome(part, index, self._ends - self._clock())
            if outcome is not None:
                self._wake(fragment)  # there is room for the next one
            return outcome

    @property
    def _has_time(self) -> bool:
        return self._ends is None or self._clock() < self._ends

    def _poll(self, part: Fragment, index: int) -> Outcome | None:
        self._check()
        return part.poll(index)

    def _last_outcome(self, part: Fragment, index: int, left: float) -> Outcome | None:
        """Wait a moment for a round in flight, as no step follows, but not when the time for it is over."""
        if left <= 0:
            part.give_up()
            return Dropped()
        self._lock.wait(min(left, 1.0))
        called = any(fragment.machine.is_awaited for fragment in self._fragments)
        return self._poll(part, index) or (Called() if called else None)

    def drain(self, seconds: float | None = None) -> bool:
        with self._lock:
            self._check()
            self._ends = self._clock() + (self._options.ttl + PATIENCE if seconds is None else seconds)
            if self._run_missing >= MISSING:
                self._warn_lost()
        return False  # the others may continue

    def leave(self) -> None:
        """Tell the others. If the store does not answer, they will notice the missing heartbeat."""
        if self.session is None or not self._threads:
            return
        self._end_threads()
        self._end_with(self.session.leave())

    def lease(self, ranges: Ranges) -> Leases:
        """Take ranges of the corpus, on a thread of their own. Call it after join()."""
        assert self.session is not None
        wake = threading.Event()
        leases = Leases(self.session, ranges, self._lock, wake.set)
        self._wakes.append(wake)
        self._threads += start_threads(
            [partial(self._repeat, self._store, leases.tick, wake, lambda: self._options.heartbeat)], "bucket"
        )
        return leases

    def release(self, leases: Leases) -> None:
        """Tell the others what this member has done of its leases, before or after it leaves."""
        self._end_with(leases.release())

    @property
    def incarnation(self) -> int:
        """How often a member of this name has joined the run before."""
        assert self.session is not None
        return self.session.entry.incarnation

    @property
    def ended(self) -> bool:
        """Whether every trained fragment has reached the last round of the run."""
        with self._lock:
            self._check()
            reached = [self._fragments[f].machine.held for f in self._trained]
            return self._rounds is not None and bool(reached) and min(reached) >= self._rounds

    @property
    def phases(self) -> list[Phase]:
        """What each fragment is doing."""
        with self._lock:
            return [fragment.machine.phase for fragment in self._fragments]

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes sent and received through the store since joining, and the number of requests."""
        return {"sent": self._store.sent, "received": self._store.received, "requests": self._store.requests}

    def publish(self, **values: float) -> None:
        """Publish figures for monitoring: loss, steps, … Non-finite values are omitted, and others clamped to ±1e30,
        because members reject larger ones."""
        if self.session is None:
            return
        with self._lock:
            published = {**self.session.entry.published, **values}
            published = {k: min(max(float(v), -1e30), 1e30) for k, v in published.items() if math.isfinite(v)}
            self.session.entry = replace(self.session.entry, published=published)

    def events(self) -> list[dict[str, Any]]:
        """The events since the last call: members, jumps, snapshots, unusable objects with the reason."""
        return self.session.drain_events() if self.session else []

    def ticks(self) -> list[Callable[[], Task[None]]]:
        """The tasks that the background repeats: one for the members, then one for each fragment."""
        assert self.session is not None
        return [self._heartbeat, *(fragment.tick for fragment in self._fragments)]

    def _heartbeat(self) -> Task[None]:
        """Also check that the run still exists: someone may empty the store, or start another run in it."""
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
        """Start the threads of some ticks; the first tick is the heartbeat."""
        ticks = self.ticks()[first : first + count]
        wakes = [threading.Event() for _ in ticks]
        self._wakes += wakes
        pauses = [lambda: self._options.heartbeat, *(lambda p=p: p.pause for p in self._fragments)]
        loops = zip(ticks, wakes, pauses[first : first + count], strict=True)
        self._threads += start_threads([partial(self._repeat, self._store, *loop) for loop in loops], "bucket")

    def _repeat(
        self, store: Store, tick: Callable[[], Task[None]], wake: threading.Event, pause: Callable[[], float]
    ) -> None:
        try:
            while not store.closing.is_set():
                store.run(tick(), self._lock.behind)
                with self._lock.behind:
                    self._lock.notify_all()
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
        deadline = self._clock() + 5.0  # for all threads together
        for thread in self._threads:
            thread.join(max(deadline - self._clock(), 0.0))
        self._threads, self._wakes = [], []
        if self.session is not None:
            self.session.carrier.close()

    def _end_with(self, task: Task[None]) -> None:
        """Run a last task, for a few seconds if the store does not answer."""
        store = Store(self._backend)

        def run() -> None:
            with contextlib.suppress(Closed, DiLoCoError):
                store.run(task, self._lock.behind)

        last = threading.Thread(target=run, daemon=True)
        last.start()
        last.join(5.0)
        store.close()
