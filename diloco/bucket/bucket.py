"""Reduce through a folder or an object store: members come and go, no server of ours runs anywhere.

One thread for each fragment and one for the members do all that touches the store. The training thread asks them under
one lock, which is never held while the store is used or numbers are crunched; it waits only to join, to finish, and in
strict pace.
"""

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from diloco.bucket.members import check_name, register
from diloco.bucket.protocol import FragmentProtocol
from diloco.bucket.run import UNSHARDED, Run, backend_of_shard, contract_of, find_or_create, starting_state
from diloco.bucket.session import MemberOptions, Pace, Session
from diloco.bucket.snapshots import Snapshots
from diloco.bucket.store.envelope import Envelope
from diloco.bucket.store.operations import Task, Write, together
from diloco.bucket.store.store import Backend, Closed, Failure, Store, open_store, probe
from diloco.codec import Codec
from diloco.errors import ConfigError, DiLoCoError
from diloco.reduce import Contract, Delta, Dropped, Jump, Round, State

PATIENCE = 60.0
"""Seconds that finish() waits for a last round to be closed, beyond the time in which a dead member is noticed."""


class Bucket:
    """The mean over whoever meets in a bucket.

    Args:
        url: a folder, or s3://, gs://, az:// (credentials as usual for each, from the environment).
        name: of this member, the same when it returns. Two processes under one name: the older one stops.
        key: if given, all objects are signed with it, and those that are not are ignored.
        join_only: refuse to begin a new run.
        pace: "decoupled" never waits for the others; "strict" waits for all members in every round.
        quorum: the fewest members of a round.
        grace: seconds that a round waits for members that are expected, after its first delta. Default: by step time.
        rounds: index at which every fragment ends; by default never.
        max_work: the most work (tokens, or steps) that counts for one delta.
        note: JSON values that later members find with the run, if this one begins it.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        key: bytes | None = None,
        join_only: bool = False,
        pace: Pace = "decoupled",
        quorum: int = 1,
        grace: float | None = None,
        rounds: int | None = None,
        max_work: float = float("inf"),
        note: Mapping[str, object] = MappingProxyType({}),
        heartbeat: float = 5.0,
        poll: float | None = None,
        backend: Backend | None = None,
    ) -> None:
        if pace not in ("decoupled", "strict") or quorum < 1 or (grace is not None and not 0 <= grace < float("inf")):
            raise ConfigError(f"pace={pace!r}, quorum={quorum}, grace={grace}: give 'decoupled' or 'strict', a quorum "
                              "of at least 1, and a grace of 0 seconds or more")  # fmt: skip
        self.url, self.name = url, check_name(name)
        self._key, self._join_only, self._rounds, self._max_work = key, join_only, rounds, max_work
        self._note = dict(note)
        self._options = MemberOptions(pace, quorum, grace, heartbeat, poll)
        self._root = self._backend = backend if backend is not None else open_store(url, create=not join_only)
        self._lock = threading.Condition()
        self._store = Store(self._backend)
        self._threads: list[threading.Thread] = []
        self._wakes: list[threading.Event] = []
        self._protocols: list[FragmentProtocol] = []
        self._error: BaseException | None = None
        self._entering = self._finishing = self._last_sent = False
        self._trained: set[int] = set()  # fragments with rounds of their own, unlike buffers
        self._stepped: float | None = None
        self._clock = time.monotonic
        self.session: Session | None = None
        self.run: Run | None = None

    def join(self, contract: Contract, states: Sequence[State], codecs: Sequence[Codec]) -> list[State]:
        self._end_threads()
        probe(self._root)  # first: it says at once what operations that are repeated would wait for
        self._backend = backend_of_shard(
            str(contract.get("shard", UNSHARDED)), self._root, self.url, self._options.strict
        )
        self._store, self._error = Store(self._backend), None
        entered = self._store.run(self.joining(contract, states, codecs), self._lock)
        self._start_threads()
        return entered

    def joining(self, contract: Contract, states: Sequence[State], codecs: Sequence[Codec]) -> Task[list[State]]:
        """All of `join` that others may see, as a task."""
        agreed = contract_of(contract, self._rounds, self._max_work)
        proposal = Run(secrets.token_hex(8), agreed, (), self._note, created=True)
        self.run = yield from find_or_create(proposal, self._key, states, self._join_only)
        envelope = Envelope(self.run.id, self._key)
        mine = yield from register(envelope, self.name, float(secrets.randbits(48)))
        sync_every = contract.get("sync_every")
        assert isinstance(sync_every, int)
        session = Session(envelope, mine, self._options, sync_every, self._rounds, self._max_work, self._clock)
        self.session = session
        self._protocols = [
            FragmentProtocol(
                f, len(state.anchor), codec, Snapshots(envelope, f, state, initial, session.reject), session
            )
            for f, (state, codec, initial) in enumerate(zip(states, codecs, self.run.snapshots, strict=True))
        ]
        entered = yield from together([starting_state(c, s) for c, s in zip(self._protocols, states, strict=True)])
        session.mine = replace(session.mine, joining=False)
        yield from session.tick()
        self._entering, self._finishing, self._last_sent = True, False, False
        return entered

    def due(self, fragment: int, index: int, steps: int, slot: bool) -> bool:
        with self._lock:
            self._check()
            self._entering = False
            self._trained.add(fragment)
            if fragment == 0:
                self._time_step()
            return self._protocols[fragment].due(steps, slot)

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        with self._lock:
            self._check()
            self._last_sent |= self._finishing
            self._protocols[fragment].send(index, delta)
            self._wake(fragment)

    def take(self, fragment: int, index: int) -> Round | Jump | Dropped | None:
        protocol, began = self._protocols[fragment], time.monotonic()
        with self._lock:
            while True:
                self._check()
                outcome = protocol.take(index)
                if outcome is not None or not self._must_wait(protocol):
                    self._wake(fragment)  # there is room for the next
                    return outcome
                if self._finishing and time.monotonic() - began > self._options.ttl + PATIENCE:
                    protocol.give_up()
                    return Dropped()
                self._lock.wait(1.0)

    def applied(self, fragment: int, state: State) -> None:
        with self._lock:
            self._protocols[fragment].applied(state)
            self._wake(fragment)

    def settle(self) -> None:
        with self._lock:
            self._check()
            self._finishing = True

    def leave(self) -> None:
        """Tell the others, unless the store does not answer: then they find out by themselves."""
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
            rounds, held = self._rounds, [self._protocols[f].held for f in self._trained]
            return rounds is not None and bool(held) and min(held) >= rounds

    @property
    def traffic(self) -> dict[str, int]:
        """All that went through the store since joining, in bytes, and the number of requests."""
        return {"sent": self._store.sent, "received": self._store.received, "requests": self._store.requests}

    def publish(self, **values: float) -> None:
        """Numbers for those who watch: loss, steps, … What is inf or nan is not told; others refuse more than 1e30."""
        if self.session is None:
            return
        with self._lock:
            published = {**self.session.mine.published, **values}
            published = {k: min(max(float(v), -1e30), 1e30) for k, v in published.items() if math.isfinite(v)}
            self.session.mine = replace(self.session.mine, published=published)

    def events(self) -> list[dict[str, Any]]:
        """What happened since the last call: members, jumps, snapshots, objects that were not used and why."""
        return self.session.drain() if self.session else []

    def ticks(self) -> list[Callable[[], Task[None]]]:
        """What the background does again and again: first for the members, then for each fragment."""
        assert self.session is not None
        return [self.session.tick, *(protocol.tick for protocol in self._protocols)]

    def _must_wait(self, protocol: FragmentProtocol) -> bool:
        if self._entering and not protocol.caught_up:
            return True
        if not protocol.outbox.under_way or protocol.given_up:
            return False
        if not self._options.strict:
            return self._finishing
        return self._last_sent or not self._waited_for_crosswise(protocol)

    def _waited_for_crosswise(self, protocol: FragmentProtocol) -> bool:
        """Whether others wait for another fragment of ours, while we wait for this one of theirs: it is to be sent at
        the next step. Members that came off phase would else wait for ever; those in phase never call before the round
        that is waited for is closed, so a look since the call finds it closed."""
        others = [self._protocols[f] for f in self._trained if self._protocols[f] is not protocol]
        called = [other for other in others if other.called_since < protocol.open_at]
        for other in called:
            other.answer_call = True
        return bool(called)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _time_step(self) -> None:
        assert self.session is not None
        now = self._clock()
        if self._stepped is not None:
            self.session.steps.append(now - self._stepped)
        self._stepped = now

    def _wake(self, fragment: int) -> None:
        if self._wakes:
            self._wakes[fragment + 1].set()

    def _start_threads(self) -> None:
        session, ticks = self.session, self.ticks()
        assert session is not None
        self._wakes = [threading.Event() for _ in ticks]
        pauses = [lambda: self._options.heartbeat, *[lambda: session.poll] * (len(ticks) - 1)]
        # torch keeps the number of threads per thread, but new threads inherit what was set last.
        threads, ready = torch.get_num_threads(), threading.Barrier(len(ticks) + 1)
        self._threads = [
            threading.Thread(target=self._attend, args=(ready, self._store, *each), name="bucket", daemon=True)
            for each in zip(ticks, self._wakes, pauses, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        ready.wait()
        torch.set_num_threads(threads)

    def _attend(
        self,
        ready: threading.Barrier,
        store: Store,
        tick: Callable[[], Task[None]],
        wake: threading.Event,
        pause: Callable[[], float],
    ) -> None:
        torch.set_num_threads(1)  # the cores belong to training
        torch.get_num_threads()  # holds it: what is set elsewhere before a thread first asks would be its number
        ready.wait()
        try:
            while not store.closing.is_set():
                store.run(tick(), self._lock)
                with self._lock:
                    self._lock.notify_all()
                    if self.session is not None and self.session.members.stranger:
                        self._wakes[0].set()
                wake.wait(pause())
                wake.clear()
        except Closed:
            pass
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
                self._lock.notify_all()

    def _end_threads(self) -> None:
        self._store.close()
        for wake in self._wakes:
            wake.set()
        for thread in self._threads:
            thread.join(5.0)
        self._threads, self._wakes = [], []

    def _try(self, operation: Write) -> None:
        with contextlib.suppress(Failure, DiLoCoError):
            self._backend.attempt(operation)
