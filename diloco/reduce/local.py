"""Reduce between M replicas in one process, for studies and tests: the same loop, the same bits as the collective.

M threads run the unmodified loop, one at a time: a replica that would wait passes the turn to the next that can run.
So the order of execution, and with it every random number, is the same each time.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from diloco.codec import Codec
from diloco.errors import ConfigError, DiLoCoError, Mismatch, PeerLost
from diloco.reduce import Contract, Delta, Dropped, Round, State, words
from diloco.reduce.contract import SameData, compare, sources
from diloco.reduce.header import EarlyEnd, Header, Kind, check_round
from diloco.reduce.mean import codec_of_mean, decode_cuts, encode_cuts, gathers, mean_lr, mean_of_encoded

T = TypeVar("T")


def run(replicas: int, loop: Callable[["Local"], T], *, mean_codec: Codec | None = None) -> list[T]:
    """Run `loop(reduce)` once for each replica and return their results, in order.

    Give each replica `DiLoCo(…, reduce=reduce)`; `reduce.replica` is its number. The first error is raised.
    """
    if not isinstance(replicas, int) or replicas < 1:
        raise ConfigError(f"replicas={replicas}: give a whole number of at least 1, then the loop")
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
    """What the replicas share, and which of them has the turn."""

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
        self.settled: set[int] = set()
        self.gone: set[int] = set()
        self.same_data, self.early_end = SameData(), EarlyEnd()

    def clear(self) -> None:
        for left in (self.deltas, self.outcomes, self.places, self.dropped, self.settled):
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
        return len(self.settled) < self.replicas and any(m not in deltas for m in self.settled)

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
    offers: dict[int, tuple[Contract, Sequence[State]]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


@dataclass
class _Outcome:
    """What the collective would give to all replicas, the replicas that took it, and the encoded deltas."""

    round: Round | DiLoCoError
    encoded: list[list[Tensor]]
    taken: set[int] = field(default_factory=set)


class Local:
    """One replica's view of the board. Made by `run`."""

    def __init__(self, board: _Board, replica: int) -> None:
        self._board, self.replica, self.replicas = board, replica, board.replicas
        self._codecs: Sequence[Codec] = ()
        self._began: dict[tuple[int, int], float] = {}
        self._sends = 0  # since all replicas joined or settled together
        self._joins = 0

    def join(self, contract: Contract, states: Sequence[State], codecs: Sequence[Codec]) -> list[State | None]:
        self._codecs = codecs
        if len(self._board.joins) == self._joins:
            self._board.joins.append(_Join())
        meeting = self._board.joins[self._joins]
        self._joins += 1
        meeting.offers[self.replica] = (contract, states)
        self._wait("join", lambda: len(meeting.offers) == self.replicas)
        self._began.clear()
        self._sends = 0
        self._board.clear()  # all are here: the rest belongs to a run that has ended
        offers = [meeting.offers[m] for m in range(self.replicas)]
        compare([theirs for theirs, _ in offers])
        held = [[(s.index, s.fingerprint()) for s in theirs] for _, theirs in offers]
        out: list[State | None] = [None] * len(states)
        for i, source in enumerate(sources(held)):
            if source is not None and held[source][i] != held[self.replica][i]:
                theirs = offers[source][1][i]
                out[i] = State(theirs.index, theirs.anchor.clone(), theirs.outer.clone())
        meeting.done.add(self.replica)  # a source must not train before all have copied
        self._wait("join", lambda: len(meeting.done) == self.replicas)
        return out

    def due(self, fragment: int, steps: int, slot: bool) -> bool:
        return slot

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        self._began[fragment, index] = time.perf_counter()
        self._board.deltas.setdefault((fragment, index), {})[self.replica] = delta()
        self._sends += 1
        self._board.places.setdefault((fragment, index), {})[self.replica] = self._sends

    def take(self, fragment: int, index: int) -> Round | Dropped | None:
        key = fragment, index
        began = self._began.pop(key, None)
        if began is None:
            return None
        board = self._board
        if (self.replica, key) in board.dropped:
            board.dropped.remove((self.replica, key))
            return Dropped()
        deltas = board.deltas[key]
        what = f"fragment {fragment}, round {index}"
        self._wait(what, lambda: len(deltas) == self.replicas or board.some_will_not_send(deltas))
        if len(deltas) < self.replicas:
            board.early_end.warn(board.settled - deltas.keys())
            del deltas[self.replica]
            return Dropped()
        codec = self._codecs[fragment]
        if key not in board.outcomes:
            ordered = [deltas[m] for m in range(self.replicas)]
            _check_places(what, board.places.pop(key))
            board.same_data.compare({str(m): words(d.values) for m, d in enumerate(ordered)}, len(self._codecs))
            board.outcomes[key] = _Outcome(*_outcome(index, ordered, fragment, board.mean_codec, codec))
        outcome, asked = board.outcomes[key], deltas[self.replica].feedback
        outcome.taken.add(self.replica)
        if len(outcome.taken) == self.replicas:
            del board.outcomes[key], board.deltas[key]
        if isinstance(outcome.round, DiLoCoError):
            raise outcome.round
        own = None
        if asked and outcome.encoded:
            n = len(deltas[self.replica].values)
            own = partial(decode_cuts, codec, outcome.encoded[self.replica], n, self.replicas)
        return replace(outcome.round, seconds=time.perf_counter() - began, own=own)

    def applied(self, fragment: int, state: State) -> None:
        pass

    def settle(self) -> bool:
        board = self._board
        board.settled.add(self.replica)
        if len(board.settled) == self.replicas:
            for key in [key for key, deltas in board.deltas.items() if len(deltas) < self.replicas]:
                board.dropped.update((m, key) for m in board.deltas.pop(key))
        self._wait("finish", lambda: len(board.settled) == self.replicas)
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


def _check_places(what: str, places: dict[int, int]) -> None:
    """The collective pairs deltas by their order, not by their round: what it would refuse is refused here too."""
    if len(set(places.values())) > 1:
        told = ", ".join(f"{place} of replica {m}" for m, place in sorted(places.items()))
        raise Mismatch(f"{what} is send {told}: they resumed from different steps; resume all from the same one")


def _outcome(
    index: int, deltas: list[Delta], fragment: int, mean_codec: Codec | None, codec: Codec
) -> tuple[Round | DiLoCoError, list[list[Tensor]]]:
    faults = [-1 if (fault := d.fault) is None else fault for d in deltas]
    headers = [
        Header(Kind.ROUND, d.tokens, fragment, index, d.weight, d.lr, d.fingerprint, fault)
        for d, fault in zip(deltas, faults, strict=True)
    ]
    try:
        check_round(headers)
    except DiLoCoError as error:
        return error, []
    members = {str(m): d.weight for m, d in enumerate(deltas)}
    named = {str(m): fault for m, fault in enumerate(faults) if fault >= 0}
    if named or not any(d.weight for d in deltas):
        return Round(index, (), members, faults=named), []
    replicas, n = len(deltas), len(deltas[0].values)
    encoded = [encode_cuts(codec, d.values, replicas) for d in deltas]
    mean_codec = codec_of_mean(codec, mean_codec)
    mean = mean_of_encoded(codec, mean_codec, encoded, [d.weight for d in deltas], n)
    to_each = codec.nbytes(n) if gathers(codec, replicas) else (codec.nbytes(n) + mean_codec.nbytes(n)) / replicas
    nbytes = round((replicas - 1) * to_each)
    lr = mean_lr([d.weight for d in deltas], [d.lr for d in deltas])
    return Round(index, mean, members, lr, sent=nbytes, received=nbytes), encoded
