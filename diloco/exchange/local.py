"""M replicas in one process, for studies and tests: the same loop and the same bits as the collective.

M threads run the unmodified loop, one at a time: a replica that would wait passes the turn to the next that can run.
So the order of execution, and with it every random number, is the same each time.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from diloco.codecs.codec import Codec
from diloco.codecs.formats import gathers
from diloco.errors import ConfigError, PeerLost
from diloco.exchange.contract import SameData, compare, sources
from diloco.exchange.header import EarlyEnd, Header, Kind, check_round
from diloco.exchange.mean import (
    Encoded,
    Packed,
    codec_of_mean,
    codec_of_round,
    decode_cuts,
    encode_cuts,
    mean_lr,
    mean_of_encoded,
)
from diloco.exchange.reducer import (
    Cost,
    Delta,
    Dropped,
    Identity,
    Join,
    NonFinite,
    Outcome,
    Round,
    State,
    advanced,
    unchanged,
)

T = TypeVar("T")


def run(replicas: int, loop: Callable[["Local"], T], *, mean_codec: Codec | None = None) -> list[T]:
    """Run `loop(reducer)` once for each replica and return the results, in order.

    Create `DiLoCo(…, reducer=reducer)` in the loop; `reducer.replica` is the number of the replica. The first error is
    raised.
    """
    if not isinstance(replicas, int) or replicas < 1:
        raise ConfigError(f"replicas={replicas}: pass a whole number of at least 1, then the loop")
    board = _Board(replicas, mean_codec)
    results: list[Any] = [None] * replicas
    errors: list[BaseException] = []

    def play(m: int) -> None:
        try:
            board.begin(m)
            results[m] = loop(Local(board, m))
        except BaseException as error:
            errors.append(error)
        finally:
            board.gone.add(m)
            board.pass_on(m)

    threads = [threading.Thread(target=play, args=(m,), name=f"replica {m}", daemon=True) for m in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@dataclass
class _Round:
    """The deltas at the same place in each replica's order of sends: the collective pairs them in this way too."""

    deltas: dict[int, Delta] = field(default_factory=dict)  # by replica
    headers: dict[int, Header] = field(default_factory=dict)
    outcome: "_Mean | NonFinite | None" = None
    polls: int = 0


@dataclass(frozen=True)
class _Mean:
    """What the collective would compute on all replicas."""

    parts: Sequence[Encoded]  # empty: nobody had trained
    members: dict[str, float]
    lr: float
    nbytes: int
    encoded: list[list[Tensor]]  # the payloads of each replica


class _Board:
    """State that the replicas share, and whose turn it is."""

    def __init__(self, replicas: int, mean_codec: Codec | None) -> None:
        self.replicas, self.mean_codec = replicas, mean_codec
        self.holder = 0
        self.condition = threading.Condition()
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.meetings: dict[tuple[str, int], dict[int, Any]] = {}  # (purpose, join) → what each replica brought
        self.gone: set[int] = set()
        self.same_data, self.early_end = SameData(), EarlyEnd()
        self.clear()

    def clear(self) -> None:
        self.sends = [0] * self.replicas
        self.rounds: dict[int, _Round] = {}
        self.drained: set[int] = set()

    def begin(self, m: int) -> None:
        with self.condition:
            self.condition.wait_for(lambda: self.holder == m)

    def wait(self, m: int, until: Callable[[], bool]) -> None:
        """Pass the turn on; return when `until` holds and the turn is back."""
        with self.condition:
            self.waiting[m] = until
            if self.holder == m:
                self._next(m)
            self.condition.wait_for(lambda: self.holder == m)
            del self.waiting[m]

    def pass_on(self, m: int) -> None:
        with self.condition:
            self._next(m)

    def _next(self, m: int) -> None:
        """Give the turn to the next replica that can run. If none can, the one after m gets it, to raise the reason."""
        order = [(m + i) % self.replicas for i in range(1, self.replicas + 1)]
        alive = [r for r in order if r not in self.gone]
        able = [r for r in alive if r not in self.waiting or self.waiting[r]()]
        self.holder = next(iter(able or alive), -1)
        self.condition.notify_all()

    def decided(self, round: _Round) -> bool:
        """Whether all have sent, or some never will: they have finished their steps while others still train."""
        some_drained = len(self.drained) < self.replicas and self.drained - round.deltas.keys()
        return len(round.deltas) == self.replicas or bool(some_drained)

    def drain(self, m: int) -> None:
        self.drained.add(m)
        if len(self.drained) == self.replicas:
            self.rounds = {place: r for place, r in self.rounds.items() if len(r.deltas) == self.replicas}
            self.sends = [max(self.sends)] * self.replicas


class Local:
    """One replica's view of the board. Created by `run`."""

    def __init__(self, board: _Board, replica: int) -> None:
        self._board, self.replica, self.replicas = board, replica, board.replicas
        self.identity = Identity(replica, board.replicas, packs_for=board.replicas)
        self._job: Join | None = None
        self._states: list[State] = []  # the newest of each fragment
        self._sent: dict[tuple[int, int], tuple[int, float]] = {}  # (fragment, index) → place in the order, time
        self._joins = 0

    def join(self, job: Join) -> list[State | None]:
        board = self._board
        self._job, self._states = replace(job, states=()), list(job.states)  # which would keep the memory of the start
        self._joins += 1
        jobs = self._meet("join", job)
        self._sent.clear()
        board.clear()  # all are here: the rest belongs to a run that has ended
        compare([job.contract for job in jobs])
        versions = [[(state.index, state.fingerprint()) for state in job.states] for job in jobs]
        replaced: list[State | None] = [None] * len(job.states)
        for i, source in enumerate(sources(versions)):
            if source is not None and versions[source][i] != versions[self.replica][i]:
                theirs = jobs[source].states[i]
                replaced[i] = self._states[i] = State(theirs.index, theirs.anchor.clone(), theirs.outer.clone())
        self._meet("copied", None)  # a source must not train before
        board.meetings.pop(("join", self._joins), None)
        return replaced

    def _meet(self, purpose: str, value: T) -> list[T]:
        """Wait for all replicas, and return what each of them brought."""
        brought = self._board.meetings.setdefault((purpose, self._joins), {})
        brought[self.replica] = value
        self._wait("join", lambda: len(brought) == self.replicas)
        return [brought[m] for m in range(self.replicas)]

    def should_send(self, fragment: int, steps: int, scheduled: bool) -> bool:
        return scheduled

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        place, ours, began = self._board.sends[self.replica], delta(), time.perf_counter()
        self._board.sends[self.replica] += 1
        self._sent[fragment, index] = place, began
        span = ours.find_non_finite()
        round = self._board.rounds.setdefault(place, _Round())
        round.deltas[self.replica] = ours
        round.headers[self.replica] = Header(
            Kind.ROUND,
            tokens=ours.tokens,
            fragment=fragment,
            index=index,
            weight=ours.weight,
            lr=ours.lr,
            fingerprint=ours.fingerprint,
            non_finite=-1 if span is None else span,
            digest=ours.digest(),
        )

    def poll(self, fragment: int, index: int) -> Outcome | None:
        if (fragment, index) not in self._sent:
            return None
        place, began = self._sent.pop((fragment, index))
        board, job = self._board, self._job
        assert job is not None
        round = board.rounds.get(place)
        if round is None:
            return Dropped()
        self._wait(f"fragment {fragment}, round {index}", lambda: board.decided(round))
        if len(round.deltas) < self.replicas:
            board.early_end.warn(board.drained - round.deltas.keys())
            del round.deltas[self.replica]
            return Dropped()
        delta = round.deltas[self.replica]
        codec = codec_of_round(job.codecs[fragment], last=delta.last)
        if round.outcome is None:
            headers = [round.headers[m] for m in range(self.replicas)]
            check_round(headers)
            board.same_data.compare({str(m): header.digest for m, header in enumerate(headers)}, len(job.codecs))
            deltas = [round.deltas[m] for m in range(self.replicas)]
            round.outcome = _outcome(headers, deltas, codec, codec_of_mean(codec, board.mean_codec))
        round.polls += 1
        if round.polls == self.replicas:
            del board.rounds[place]
        mean = round.outcome
        if isinstance(mean, NonFinite):
            return mean
        state, own = self._states[fragment], None
        if not mean.parts:
            state = unchanged(state)
        else:
            state = advanced(job, fragment, state, mean.parts, lr=mean.lr, last=delta.last)
            if delta.needs_own:
                own = partial(decode_cuts, codec, mean.encoded[self.replica], delta.n, self.replicas)
        self._states[fragment] = state
        seconds = time.perf_counter() - began
        cost = Cost(bytes_sent=mean.nbytes, bytes_received=mean.nbytes, seconds=seconds)
        return Round(state, mean.members, own=own, cost=cost)

    def drain(self, seconds: float | None = None) -> bool:
        self._board.drain(self.replica)
        self._wait("finish", lambda: len(self._board.drained) == self.replicas)
        return True

    def leave(self) -> None:
        pass

    def _wait(self, what: str, until: Callable[[], bool]) -> None:
        if not until():
            self._board.wait(self.replica, until)
        if not until():
            gone = ", ".join(str(m) for m in sorted(self._board.gone))
            reason = f"replica {gone} is gone without finish()" if gone else "replicas wait for different rounds"
            raise PeerLost(f"{what}: {reason}, so this one would wait forever")


def _outcome(headers: list[Header], deltas: list[Delta], codec: Codec, mean_codec: Codec) -> _Mean | NonFinite:
    spans = {str(m): header.non_finite for m, header in enumerate(headers) if header.non_finite >= 0}
    if spans:
        return NonFinite(headers[0].index, spans)
    weights = [delta.weight for delta in deltas]
    members = {str(m): weight for m, weight in enumerate(weights)}
    if not any(weights):
        return _Mean(parts=(), members=members, lr=0.0, nbytes=0, encoded=[])
    replicas, n = len(deltas), deltas[0].n
    # Copies: the first replica to apply the round uses its memory again before the last one has computed its state.
    encoded = [
        [payload.clone() for payload in delta.values.payloads]
        if isinstance(delta.values, Packed)
        else encode_cuts(codec, delta.values, replicas)
        for delta in deltas
    ]
    parts = mean_of_encoded(codec, mean_codec, encoded, weights, n)
    to_each = codec.nbytes(n) if gathers(replicas) else (codec.nbytes(n) + mean_codec.nbytes(n)) / replicas
    lr = mean_lr(weights, [delta.lr for delta in deltas])
    return _Mean(parts=parts, members=members, lr=lr, nbytes=round((replicas - 1) * to_each), encoded=encoded)
