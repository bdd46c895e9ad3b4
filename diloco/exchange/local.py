"""M replicas in one process, for studies and tests: the same loop and the same bits as the collective.

M threads run the unmodified loop, one at a time: a replica that would wait passes the turn to the next that can run.
So the order of execution, and with it every random number, is the same each time.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from diloco.codecs.codec import Codec
from diloco.errors import ConfigError, DiLoCoError, Mismatch, PeerLost
from diloco.exchange.contract import SameData, compare, sources
from diloco.exchange.header import EarlyEnd, Header, Kind, check_round
from diloco.exchange.mean import (
    Encoded,
    Packed,
    codec_of_mean,
    codec_of_round,
    decode_cuts,
    encode_cuts,
    gathers,
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


class _Board:
    """State that the replicas share, and whose turn it is."""

    def __init__(self, replicas: int, mean_codec: Codec | None) -> None:
        self.replicas, self.mean_codec = replicas, mean_codec
        self.holder = 0
        self.condition = threading.Condition()
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.joins: list[_Join] = []
        self.deltas: dict[tuple[int, int], dict[int, Delta]] = {}
        self.outcomes: dict[tuple[int, int], _Outcome] = {}
        self.places: dict[tuple[int, int], dict[int, int]] = {}
        self.dropped: set[tuple[int, tuple[int, int]]] = set()
        self.drained: set[int] = set()
        self.gone: set[int] = set()
        self.same_data, self.early_end = SameData(), EarlyEnd()

    def clear(self) -> None:
        for left in (self.deltas, self.outcomes, self.places, self.dropped, self.drained):
            left.clear()

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

    def some_will_not_send(self, deltas: Collection[int]) -> bool:
        """Whether a replica that has finished its steps is missing while others still train."""
        return len(self.drained) < self.replicas and any(m not in deltas for m in self.drained)

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


@dataclass
class _Join:
    offers: dict[int, Join] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Mean:
    """What the collective would compute on all replicas."""

    parts: Sequence[Encoded]  # empty: nobody had trained
    members: dict[str, float]
    lr: float
    nbytes: int
    encoded: list[list[Tensor]]  # the payloads of each replica


@dataclass
class _Outcome:
    result: _Mean | NonFinite | DiLoCoError
    polled: set[int] = field(default_factory=set)  # by these replicas


class Local:
    """One replica's view of the board. Created by `run`."""

    def __init__(self, board: _Board, replica: int) -> None:
        self._board, self.replica, self.replicas = board, replica, board.replicas
        self.identity = Identity(replica, board.replicas, packs_for=board.replicas)
        self._job: Join | None = None
        self._states: list[State] = []  # the newest of each fragment
        self._began: dict[tuple[int, int], float] = {}
        self._sends = 0  # since all replicas joined or drained together
        self._joins = 0

    def join(self, job: Join) -> list[State | None]:
        self._job, self._states = job, list(job.states)
        if len(self._board.joins) == self._joins:
            self._board.joins.append(_Join())
        meeting = self._board.joins[self._joins]
        self._joins += 1
        meeting.offers[self.replica] = job
        self._wait("join", lambda: len(meeting.offers) == self.replicas)
        self._began.clear()
        self._sends = 0
        self._board.clear()  # all are here: the rest belongs to a run that has ended
        offers = [meeting.offers[m] for m in range(self.replicas)]
        compare([offer.contract for offer in offers])
        indices = [[(state.index, state.fingerprint()) for state in offer.states] for offer in offers]
        replaced: list[State | None] = [None] * len(job.states)
        for i, source in enumerate(sources(indices)):
            if source is not None and indices[source][i] != indices[self.replica][i]:
                theirs = offers[source].states[i]
                replaced[i] = self._states[i] = State(theirs.index, theirs.anchor.clone(), theirs.outer.clone())
        meeting.done.add(self.replica)  # a source must not train before all have copied
        self._wait("join", lambda: len(meeting.done) == self.replicas)
        return replaced

    def should_send(self, fragment: int, steps: int, scheduled: bool) -> bool:
        return scheduled

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        self._began[fragment, index] = time.perf_counter()
        self._board.deltas.setdefault((fragment, index), {})[self.replica] = delta()
        self._sends += 1
        self._board.places.setdefault((fragment, index), {})[self.replica] = self._sends

    def poll(self, fragment: int, index: int) -> Outcome | None:
        key = fragment, index
        began = self._began.pop(key, None)
        if began is None:
            return None
        board, job = self._board, self._job
        assert job is not None
        if (self.replica, key) in board.dropped:
            board.dropped.remove((self.replica, key))
            return Dropped()
        deltas = board.deltas[key]
        round_name = f"fragment {fragment}, round {index}"
        self._wait(round_name, lambda: len(deltas) == self.replicas or board.some_will_not_send(deltas))
        if len(deltas) < self.replicas:
            board.early_end.warn(board.drained - deltas.keys())
            del deltas[self.replica]
            return Dropped()
        delta = deltas[self.replica]
        codec = codec_of_round(job.codecs[fragment], last=delta.last)
        if key not in board.outcomes:
            ordered = [deltas[m] for m in range(self.replicas)]
            _check_places(round_name, board.places.pop(key))
            board.same_data.compare({str(m): d.digest() for m, d in enumerate(ordered)}, len(job.codecs))
            board.outcomes[key] = _Outcome(_mean(index, ordered, fragment, board.mean_codec, codec))
        outcome = board.outcomes[key]
        outcome.polled.add(self.replica)
        if len(outcome.polled) == self.replicas:
            del board.outcomes[key], board.deltas[key]
        mean = outcome.result
        if isinstance(mean, DiLoCoError):
            raise mean
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
        return Round(state, mean.members, own=own, cost=Cost(mean.nbytes, mean.nbytes, seconds=seconds))

    def drain(self, seconds: float | None = None) -> bool:
        board = self._board
        board.drained.add(self.replica)
        if len(board.drained) == self.replicas:
            for key in [key for key, deltas in board.deltas.items() if len(deltas) < self.replicas]:
                board.dropped.update((m, key) for m in board.deltas.pop(key))
        self._wait("finish", lambda: len(board.drained) == self.replicas)
        self._sends = 0
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


def _check_places(round_name: str, places: dict[int, int]) -> None:
    """The collective pairs deltas by their order, not by their round: refuse here what it would refuse."""
    if len(set(places.values())) > 1:
        orders = ", ".join(f"send {place} of replica {m}" for m, place in sorted(places.items()))
        raise Mismatch(f"replicas sent {round_name} in a different order ({orders}): they resumed from different "
                       "steps; resume all from the same one")  # fmt: skip


def _mean(
    index: int, deltas: list[Delta], fragment: int, mean_codec: Codec | None, codec: Codec
) -> _Mean | NonFinite | DiLoCoError:
    spans = [delta.find_non_finite() for delta in deltas]
    headers = [
        Header(Kind.ROUND, d.tokens, fragment, index, d.weight, d.lr, d.fingerprint, -1 if span is None else span)
        for d, span in zip(deltas, spans, strict=True)
    ]
    try:
        check_round(headers)
    except DiLoCoError as error:
        return error
    if any(span is not None for span in spans):
        return NonFinite(index, {str(m): span for m, span in enumerate(spans) if span is not None})
    weights = [delta.weight for delta in deltas]
    members = {str(m): weight for m, weight in enumerate(weights)}
    if not any(weights):
        return _Mean((), members, 0.0, 0, [])
    replicas, n = len(deltas), deltas[0].n
    # Copies: the first replica to apply the round uses its memory again before the last one has computed its state.
    encoded = [
        [payload.clone() for payload in delta.values.payloads]
        if isinstance(delta.values, Packed)
        else encode_cuts(codec, delta.values, replicas)
        for delta in deltas
    ]
    mean_codec = codec_of_mean(codec, mean_codec)
    parts = mean_of_encoded(codec, mean_codec, encoded, weights, n)
    to_each = codec.nbytes(n) if gathers(codec, replicas) else (codec.nbytes(n) + mean_codec.nbytes(n)) / replicas
    lr = mean_lr(weights, [delta.lr for delta in deltas])
    return _Mean(parts, members, lr, round((replicas - 1) * to_each), encoded)
