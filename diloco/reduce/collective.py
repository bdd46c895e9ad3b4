"""Reduce over a torch.distributed group: fixed members, lowest latency.

One communication thread, fed by an ordered queue: all replicas issue the same exchanges in the same order. On it the
delta is encoded, exchanged, decoded and averaged; the training thread waits, if at all, only in `take`.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.codec import Codec, pack, pack_into, weighted
from diloco.errors import ConfigError, DiLoCoError, Diverged, Mismatch, PeerLost
from diloco.reduce import Contract, Delta, Dropped, Round, State, words
from diloco.reduce.contract import SameData, compare, sources
from diloco.reduce.groups import Broken, Groups, Place, Transfer, place_in
from diloco.reduce.header import NBYTES, EarlyEnd, Header, Kind, check_round, settling
from diloco.reduce.link import LinkSpeed, measure
from diloco.reduce.mean import (
    Encoded,
    codec_of_mean,
    decode,
    decode_cuts,
    exact,
    gathers,
    mean_lr,
    parts,
    pieces,
    room_for_cuts,
    shares,
)
from diloco.reduce.thread import CommThread, usual_threads
from diloco.rendezvous import meet_at


def _checked(at: object, group: object, replica: int | None, replicas: int | None) -> tuple[int, int]:
    if group is not None:
        raise ConfigError("give a group of ranks that meet in it, or at=, where others meet: not both")
    if replica is None or replicas is None or not 0 <= replica < replicas:
        raise ConfigError(
            f"at={at!r}, replica={replica}, replicas={replicas}: give the number of this replica, from 0, and how many "
            "there are"
        )
    return replica, replicas


def _meet(at: str | dist.Store, replica: int, replicas: int, timeout: float) -> Place:
    """Among the processes that have the same rank in the other replicas."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    store = meet_at(at, rank, replica, replicas, timeout) if isinstance(at, str) else at
    return Place(replica, replicas, store, f"rank {rank} of each replica")


@dataclass
class _Connection:
    """From `join` to `leave`."""

    thread: CommThread
    groups: Groups | None = None  # opened on the thread
    lost: str | None = None  # why no more exchange is tried

    def drop(self) -> None:
        if self.groups is not None:
            self.thread.unless_exiting(self.groups.drop)


class Collective:
    """The mean over the replicas of a process group.

    Args:
        group: the ranks that hold the same part of the model, one in each replica; by default all ranks. With FSDP2
            inside a replica, the group of the mesh's replica dimension: `mesh.get_group("replica")`.
        shards: with FSDP2 inside a replica, its ranks: an error in a round on one of them ends it on all.
        ddp_ranks: with DDP inside a replica, its ranks: each of them carries its share of the traffic.
        at: instead of a group, for replicas that are separate jobs, each with its own process group or with none.
            "host:port" of the first process of replica 0, or a store. Rank r of one meets rank r of the others.
        replica: with `at`, the number of this replica, from 0.
        replicas: with `at`, how many there are.
        streams: TCP connections to use at once; a single one does not fill a long link.
        threads: that encode and decode a round, on as many cores, with the compiled kernels; by default one where
            training needs the cores itself, and up to four beside an accelerator.
        timeout: seconds that an exchange may take, including the wait for slower replicas; then a peer counts as lost.
        mean_codec: the codec of the averaged shares (4 or more replicas); by default that of the deltas, or E3M0
            if the deltas have fewer bits. Sparse deltas are not averaged in shares.
    """

    _made: ClassVar[Counter[tuple[int, ...]]] = Counter()

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        shards: dist.ProcessGroup | None = None,
        ddp_ranks: dist.ProcessGroup | None = None,
        at: str | dist.Store | None = None,
        replica: int | None = None,
        replicas: int | None = None,
        streams: int = 1,
        threads: int | None = None,
        timeout: float = 600.0,
        mean_codec: Codec | None = None,
    ) -> None:
        threads = usual_threads() if threads is None else threads
        if streams < 1 or threads < 1 or timeout <= 0:
            raise ConfigError(
                f"streams={streams}, threads={threads}, timeout={timeout}: give at least 1 stream and 1 thread, and a "
                "positive timeout in seconds"
            )
        self._at, self._across = at, Place()
        if at is not None:
            self.replica, self.replicas = _checked(at, group, replica, replicas)
            self.ranks: list[int] = []
        elif replica is not None or replicas is not None:
            raise ConfigError("replica= and replicas= need at=, the place where the replicas meet")
        else:
            if not dist.is_available() or not dist.is_initialized():
                raise ConfigError(
                    "there is no process group: call torch.distributed.init_process_group() before DiLoCo and start "
                    "the script with `torchrun --nproc_per_node 2 script.py`, or pass reduce= (see diloco.reduce)"
                )
            self._across = place_in(group or dist.group.WORLD)
            self.replica, self.replicas = self._across.index, self._across.size
            self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            self._made[tuple(self.ranks)] += 1
        self._number = self._made[tuple(self.ranks)]
        self._ddp_ranks, self._shard_ranks = place_in(ddp_ranks), place_in(shards)
        self.ddp_size = self._ddp_ranks.size
        self._streams, self._timeout, self._mean_codec = streams, timeout, mean_codec
        self._threads = threads
        self._same_data, self._early_end = SameData(), EarlyEnd()
        self._codecs: Sequence[Codec] = ()
        self._rounds: dict[tuple[int, int], Future[Round | Dropped]] = {}
        self._connection: _Connection | None = None

    def join(self, contract: Contract, states: Sequence[State], codecs: Sequence[Codec]) -> list[State | None]:
        self._codecs = codecs
        self._rounds.clear()  # loading a state has made them obsolete
        if self._at is not None and self._connection is None:
            self._across = _meet(self._at, self.replica, self.replicas, self._timeout)
        if self._connection is None:
            self._connection = _Connection(CommThread(self._threads))
        return self._submit("join", self._join, contract, states).result()

    def due(self, fragment: int, steps: int, slot: bool) -> bool:
        return slot

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        what, began = f"fragment {fragment}, round {index}", time.perf_counter()
        self._rounds[fragment, index] = self._submit(what, self._round, fragment, index, delta, began)

    def take(self, fragment: int, index: int) -> Round | Dropped | None:
        future = self._rounds.pop((fragment, index), None)
        return future.result() if future else None

    def applied(self, fragment: int, state: State) -> None:
        pass

    def settle(self) -> bool:
        self._submit("finish", self._settle).result()
        return True

    def measure(self) -> LinkSpeed:
        """The link between the replicas, after `join`. All of them call it after the same step, and wait."""
        return self._submit("measuring the link", self._measure).result()

    def tell(self, value: object) -> list[Any]:
        """What all ranks of all replicas say, in the same order on all: JSON values. Called by all, after `join`."""
        return self._submit("agreeing", self._tell, value).result()

    def leave(self) -> None:
        if self._connection is not None:
            self._connection.thread.close(self._connection.drop)
            self._connection = None

    def _submit(self, what: str, work: Callable[..., Any], *args: Any) -> Future[Any]:
        assert self._connection is not None, "join() comes first"
        return self._connection.thread.submit(self._perform, self._connection, what, work, *args)

    # On the communication thread.

    def _perform(self, connection: _Connection, what: str, work: Callable[..., Any], *args: Any) -> Any:
        if connection.lost is not None:
            raise PeerLost(connection.lost)
        began = time.perf_counter()
        try:
            if connection.groups is None:
                connection.groups = Groups(self._across, self._timeout)
            return work(connection.groups, *args)
        except Broken as error:
            seconds, roll_call = time.perf_counter() - began, connection.groups and connection.groups.roll_call()
            connection.drop()  # at once, so that replicas that wait for this one also learn of it
            who = f" {roll_call.result()}" if roll_call else ""
            connection.lost = f"{what}, {seconds:.1f} s: {error}.{who} The state can still be saved."
            raise PeerLost(connection.lost) from None

    def _join(self, groups: Groups, contract: Contract, states: Sequence[State]) -> list[State | None]:
        check_round(groups.exchange(Header(Kind.JOIN)))
        groups.introduce()
        own = {"mean_codec": repr(self._mean_codec), "streams": self._streams,
               "ranks of a replica": self._ddp_ranks.size,
               # If one rank joined two models of equal shapes in another order, each would get the other's values.
               "place in the order of construction": self._number}  # fmt: skip
        compare(groups.gather_json({**contract, **own}))
        groups.open(self._streams, self._ddp_ranks, self._shard_ranks)
        held = groups.gather_json([(s.index, s.fingerprint()) for s in states])
        out: list[State | None] = [None] * len(states)
        for i, source in enumerate(sources([[tuple(h) for h in replica] for replica in held])):
            if source is None:
                continue
            arrived = State(held[source][i][0], states[i].anchor.clone(), states[i].outer.clone())
            for tensor in (arrived.anchor, arrived.outer):
                groups.broadcast(tensor, source)
            if held[self.replica][i] != held[source][i]:
                # Into the existing tensors, after everything has arrived: no second copy of the model, no half state.
                mine = out[i] = State(arrived.index, states[i].anchor, states[i].outer)
                mine.anchor.copy_(arrived.anchor)
                mine.outer.copy_(arrived.outer)
        return out

    def _round(
        self, groups: Groups, fragment: int, index: int, delta_later: Callable[[], Delta], began: float
    ) -> Round | Dropped:
        delta = delta_later()
        n, codec, before = len(delta.values), self._codecs[fragment], (groups.sent, groups.received)
        came = time.perf_counter()
        digest = words(delta.values)  # 0.13 ns a value; encoding takes 0.6
        header = Header(
            Kind.ROUND, delta.tokens, fragment, index, delta.weight, delta.lr, delta.fingerprint, digest=digest
        )
        headers = groups.exchange(header)
        met = time.perf_counter()
        if settling(headers):
            self._early_end.warn(m for m, h in enumerate(headers) if h.kind is Kind.SETTLE)
            return Dropped()
        digests = _agree(groups, headers)
        first_rank = self._ddp_ranks.index == self._shard_ranks.index == 0
        self._same_data.compare(digests, len(self._codecs), warn=first_rank and self.replica == 0)
        weights = [h.weight for h in headers]
        members = {str(m): weight for m, weight in enumerate(weights)}
        if not any(weights):  # nothing will be applied, so do not send
            return Round(index, (), members, faults=_faults(groups, header, delta))
        share = parts(n, self._ddp_ranks.size)[self._ddp_ranks.index]
        values = delta.values[share]
        payloads = room_for_cuts(codec, len(values), self.replicas)
        average = self._mean_by_gather if gathers(codec, self.replicas) else self._mean_by_parts
        lr = mean_lr(weights, [h.lr for h in headers])
        prepared = delta.next(lr) if delta.next and self._ddp_ranks.size == 1 else None
        mean, all_good = [], True
        for part, good in average(groups, codec, values, payloads, shares(weights)):
            mean.append(part)
            all_good = all_good and good
            if prepared is not None:
                prepared.add(part)
        if not all(groups.gather_json_of_ranks(all_good)):
            return Round(index, (), members, faults=_faults(groups, header, delta))
        if self._ddp_ranks.size > 1:
            mean = exact(groups.gather_ddp(decode(mean), n))
        state = prepared.state(index) if prepared else None
        headers_nbytes = NBYTES * (self.replicas - 1)
        sent, received = groups.sent - before[0] + headers_nbytes, groups.received - before[1] + headers_nbytes
        own = self._own(groups, codec, payloads, share, n) if delta.feedback else None
        ended = time.perf_counter()
        return Round(
            index, mean, members, lr, sent=sent, received=received, seconds=ended - began, apart=met - came,
            transfer=ended - met, own=own, state=state,
        )  # fmt: skip

    def _own(self, groups: Groups, codec: Codec, payloads: list[Tensor], share: slice, n: int) -> Callable[[], Tensor]:
        decode_own = partial(decode_cuts, codec, payloads, share.stop - share.start, self.replicas)
        if self._ddp_ranks.size == 1:
            return decode_own
        gathered = groups.gather_ddp(decode_own(), n)  # now, as the other ranks of this replica do
        return lambda: gathered

    def _mean_by_gather(
        self, groups: Groups, codec: Codec, values: Tensor, payloads: list[Tensor], factors: list[float]
    ) -> Iterator[tuple[Encoded, bool]]:
        """Each replica gets all deltas, its own as the others see it, and averages them. The first pieces travel while
        the next ones are encoded. Yields a piece of the mean, and whether the deltas in it are finite."""
        mine, cut = payloads[0], pieces(codec, len(values), len(values), self._streams)
        all_ = [mine if m == self.replica else torch.empty_like(mine) for m in range(self.replicas)]
        transfer = Transfer(groups, [[payload[data] for payload in all_] for _, data in cut], phase=0)
        good = []
        for here, data in cut:
            good.append(pack_into(codec, values[here], mine[data]))
            transfer.send([mine[data]] * self.replicas, good[-1])
        for k, (here, data) in enumerate(cut):
            theirs = transfer.wait()
            part = Encoded(here.start, here.stop - here.start, codec, [payload[data] for payload in all_], factors)
            yield part, theirs and good[k]

    def _mean_by_parts(
        self, groups: Groups, codec: Codec, values: Tensor, payloads: list[Tensor], factors: list[float]
    ) -> Iterator[tuple[Encoded, bool]]:
        """Each replica averages one part and sends it to all: unlike in a ring, partial sums are never quantised. What
        one replica says of a piece, those that average say to all."""
        mean_codec, everyone = codec_of_mean(codec, self._mean_codec), range(self.replicas)
        own, places = self.replica, parts(len(values), self.replicas)
        counts = [place.stop - place.start for place in places]
        deltas = [pieces(codec, count, counts[0], self._streams) for count in counts]
        averages = [pieces(mean_codec, count, counts[0], self._streams) for count in counts]
        received = [payloads[own] if m == own else torch.empty_like(payloads[own]) for m in everyone]
        averaged = [torch.empty(mean_codec.nbytes(count) if count else 0, dtype=torch.uint8) for count in counts]
        there = Transfer(groups, [[each[data] for each in received] for _, data in deltas[own]], phase=0)
        steps = range(len(deltas[own]))
        back = Transfer(groups, [[averaged[m][averages[m][k][1]] for m in everyone] for k in steps], phase=1)
        good = []
        for k in steps:
            here = [deltas[m][k] for m in everyone]
            fine = [pack_into(codec, values[places[m]][v], payloads[m][data]) for m, (v, data) in enumerate(here)]
            good.append(all(fine))
            there.send([payloads[m][data] for m, (_, data) in enumerate(here)], good[k])
        for k in steps:
            good[k] = there.wait() and good[k]
            (here, data), (_, place) = deltas[own][k], averages[own][k]
            mean = weighted(codec, [each[data] for each in received], factors, here.stop - here.start)
            averaged[own][place] = pack(mean_codec, mean)
            back.send([averaged[own][place]] * self.replicas, good[k])
        for k in steps:
            theirs = back.wait()
            for m in everyone:
                here, data = averages[m][k]
                at, count = places[m].start + here.start, here.stop - here.start
                yield Encoded(at, count, mean_codec, [averaged[m][data]], [1.0]), theirs and good[k]

    def _measure(self, groups: Groups) -> LinkSpeed:
        check_round(groups.exchange(Header(Kind.MEASURE)))
        return measure(groups)

    def _tell(self, groups: Groups, value: object) -> list[Any]:
        check_round(groups.exchange(Header(Kind.MEASURE)))
        return [said for rank in groups.gather_json_of_ranks(groups.gather_json(value)) for said in rank]

    def _settle(self, groups: Groups) -> None:
        headers = groups.exchange(Header(Kind.SETTLE))
        while any(h.kind is not Kind.SETTLE for h in headers):
            if not settling(headers):  # otherwise a replica still trains: drop the round that it has just started
                check_round(headers)
            headers = groups.exchange(Header(Kind.SETTLE))


def _agree(groups: Groups, headers: Sequence[Header]) -> dict[str, int]:
    """A digest of each replica's delta. Raises, on all ranks of this replica, the error that one has found."""
    wrong = None
    try:
        check_round(headers)
    except DiLoCoError as error:
        wrong = [type(error).__name__, str(error)]
    verdicts = groups.gather_json_of_ranks([wrong, [header.digest for header in headers]])
    for error, _ in verdicts:
        if error is not None:
            raise {"Mismatch": Mismatch, "Diverged": Diverged}[error[0]](error[1])
    return {str(m): sum(of_ranks) for m, of_ranks in enumerate(zip(*(digests for _, digests in verdicts), strict=True))}


def _faults(groups: Groups, header: Header, delta: Delta) -> dict[str, int]:
    """Where inf or nan is, on all ranks of all replicas. Asked when a piece has told of it, which all have seen."""
    fault = delta.fault
    headers = groups.exchange(replace(header, fault=-1 if fault is None else fault))
    said = groups.gather_json_of_ranks({str(m): h.fault for m, h in enumerate(headers) if h.fault >= 0})
    return {member: fault for each in said for member, fault in each.items()}
