"""The reducer over a torch.distributed group: fixed members, lowest latency.

One communication thread, fed by an ordered queue: all replicas issue the same exchanges in the same order. The thread
encodes the delta, exchanges it, averages, and computes the next state; training waits, if at all, only in `poll`.
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

from diloco.codecs.codec import Codec, pack, pack_into, weighted
from diloco.codecs.formats import gathers
from diloco.errors import ConfigError, DiLoCoError, Diverged, Mismatch, PeerLost
from diloco.exchange.contract import SameData, compare, sources
from diloco.exchange.header import NBYTES, EarlyEnd, Header, Kind, check_round, draining
from diloco.exchange.mean import (
    Encoded,
    Packed,
    codec_of_mean,
    codec_of_round,
    cuts,
    decode,
    decode_cuts,
    exact,
    mean_lr,
    parts,
    pieces,
    room_for_cuts,
    shares,
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
from diloco.exchange.rendezvous import meet_at
from diloco.exchange.thread import CommThread, usual_threads
from diloco.exchange.transport import Broken, Groups, LinkSpeed, Place, Transfer, measure, place_in


def _meet(at: str | dist.Store, replica: int, replicas: int, timeout: float) -> Place:
    """Meet the processes that have the same rank in the other replicas."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    store = meet_at(at, rank, replica, replicas, timeout) if isinstance(at, str) else at
    return Place(replica, replicas, store, f"rank {rank} of each replica")


@dataclass
class _Connection:
    """From `join` to `leave`."""

    thread: CommThread
    groups: Groups | None = None  # opened on the thread
    lost: str | None = None  # why no more exchanges are tried

    def drop(self) -> None:
        if self.groups is not None:
            self.thread.unless_exiting(self.groups.drop)


class Collective:
    """Average over the replicas of a process group.

    Args:
        group: the ranks that hold the same part of the model, one in each replica; by default all ranks. With FSDP2
            inside a replica, the group of the mesh's replica dimension: `mesh.get_group("replica")`.
        shards: with FSDP2 inside a replica, its ranks: an error in a round on one of them ends it on all.
        ddp_ranks: with DDP inside a replica, its ranks: each of them carries a share of the traffic.
        at: instead of a group, for replicas that are separate jobs, each with its own process group or with none.
            "host:port" of the first process of replica 0, or a store. Rank r of one meets rank r of the others.
        replica: with `at`, the number of this replica, from 0.
        replicas: with `at`, how many there are.
        streams: TCP connections to use at once; a single one does not fill a long link.
        threads: to encode and decode with the compiled kernels; by default one where training needs the cores itself,
            and up to four next to an accelerator.
        timeout: seconds that an exchange may take, including the wait for slower replicas, before a peer counts as
            lost.
        mean_codec: the codec of the averaged shares (4 or more replicas); by default that of the deltas, or E3M0
            if the deltas have fewer bits.
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
            raise ConfigError(f"streams={streams}, threads={threads}, timeout={timeout}: pass at least 1 stream and 1 "
                              "thread, and a positive timeout in seconds")  # fmt: skip
        self._at, self._across = at, Place()
        ranks: list[int] = []
        if at is not None:
            if group is not None:
                raise ConfigError("pass either group= or at=, not both")
            if replica is None or replicas is None or not 0 <= replica < replicas:
                raise ConfigError(f"at={at!r}, replica={replica}, replicas={replicas}: with at=, pass the number of "
                                  "this replica, from 0, and how many there are")  # fmt: skip
            self.replica, self.replicas = replica, replicas
        elif replica is not None or replicas is not None:
            raise ConfigError("replica= and replicas= need at=, the address where the replicas meet")
        else:
            if not dist.is_available() or not dist.is_initialized():
                raise ConfigError("there is no process group: call torch.distributed.init_process_group() before "
                                  "DiLoCo and start the script with `torchrun --nproc_per_node 2 script.py`, or pass "
                                  "reducer=")  # fmt: skip
            self._across = place_in(group or dist.group.WORLD)
            self.replica, self.replicas = self._across.index, self._across.size
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            self._made[tuple(ranks)] += 1
        self._number = self._made[tuple(ranks)]
        self._ddp_ranks, self._shard_ranks = place_in(ddp_ranks), place_in(shards)
        inner = () if ddp_ranks is None else dist.get_process_group_ranks(ddp_ranks)
        self.identity = Identity(self.replica, self.replicas, ranks=tuple(ranks), ddp_ranks=tuple(inner),
                                 packs_for=None if inner else self.replicas)  # fmt: skip
        self._streams, self._timeout, self._threads, self._mean_codec = streams, timeout, threads, mean_codec
        self._same_data, self._early_end = SameData(), EarlyEnd()
        self._job: Join | None = None
        self._states: list[State] = []  # the newest of each fragment; used by the communication thread alone
        self._rounds: dict[tuple[int, int], Future[Outcome]] = {}
        self._connection: _Connection | None = None

    def join(self, job: Join) -> list[State | None]:
        self._job = replace(job, states=())  # which would keep the memory of the start
        self._rounds.clear()  # loading a state made them obsolete
        if self._at is not None and self._connection is None:
            self._across = _meet(self._at, self.replica, self.replicas, self._timeout)
        if self._connection is None:
            self._connection = _Connection(CommThread(self._threads))
        return self._submit("join", self._join, job).result()

    def should_send(self, fragment: int, steps: int, scheduled: bool) -> bool:
        return scheduled

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        what, began = f"fragment {fragment}, round {index}", time.perf_counter()
        self._rounds[fragment, index] = self._submit(what, self._round, fragment, index, delta, began)

    def poll(self, fragment: int, index: int) -> Outcome | None:
        future = self._rounds.get((fragment, index))
        if future is None:
            return None
        outcome = future.result()  # may be interrupted, and asked again
        del self._rounds[fragment, index]
        return outcome

    def drain(self, seconds: float | None = None) -> bool:
        self._submit("finish", self._drain).result()
        return True

    def measure(self) -> LinkSpeed:
        """Measure the link between the replicas. All of them call it after the same step, and wait."""
        return self._submit("measuring the link", self._measure).result()

    def gather(self, value: object) -> list[Any]:
        """The JSON values of all ranks of all replicas, in the same order on all. All of them call it."""
        return self._submit("agreeing", self._gather, value).result()

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
        except (Mismatch, Diverged):  # raised on all replicas
            raise
        except BaseException as error:  # the others would wait for this one until their timeout
            connection.drop()
            connection.lost = f"{what}: {type(error).__name__}: {error}. The state can still be saved."
            raise

    def _join(self, groups: Groups, job: Join) -> list[State | None]:
        check_round(groups.exchange(Header(Kind.JOIN)))
        groups.introduce()
        settings = {"mean_codec": repr(self._mean_codec), "streams": self._streams,
                    "ranks of a replica": self._ddp_ranks.size,
                    # If one rank joined two models of equal shapes in another order, each would get the other's values.
                    "place in the order of construction": self._number}  # fmt: skip
        compare(groups.gather_json({**job.contract, **settings}))
        groups.open(self._streams, self._ddp_ranks, self._shard_ranks)
        offers = groups.gather_json([(state.index, state.fingerprint()) for state in job.states])
        self._states = list(job.states)
        replaced: list[State | None] = [None] * len(job.states)
        for i, source in enumerate(sources([[tuple(offer) for offer in replica] for replica in offers])):
            if source is None:
                continue
            old = job.states[i]
            arrived = State(offers[source][i][0], old.anchor.clone(), old.outer.clone())
            for tensor in (arrived.anchor, arrived.outer):
                groups.broadcast(tensor, source)
            if offers[self.replica][i] != offers[source][i]:
                # Into the existing tensors, after everything has arrived: no second copy of the model, no half state.
                old.anchor.copy_(arrived.anchor)
                old.outer.copy_(arrived.outer)
                replaced[i] = self._states[i] = State(arrived.index, old.anchor, old.outer)
        return replaced

    def _round(
        self, groups: Groups, fragment: int, index: int, delta_later: Callable[[], Delta], began: float
    ) -> Outcome:
        delta = delta_later()
        assert self._job is not None
        job, state, bytes_before = self._job, self._states[fragment], (groups.sent, groups.received)
        came = time.perf_counter()
        header = Header(
            Kind.ROUND,
            tokens=delta.tokens,
            fragment=fragment,
            index=index,
            weight=delta.weight,
            lr=delta.lr,
            fingerprint=delta.fingerprint,
            digest=delta.digest(),
        )
        headers = groups.exchange(header)
        met = time.perf_counter()
        if draining(headers):
            self._early_end.warn(m for m, h in enumerate(headers) if h.kind is Kind.DRAIN)
            return Dropped()
        digests, weights = _agree(groups, headers)
        first_rank = self._ddp_ranks.index == self._shard_ranks.index == 0
        self._same_data.compare(digests, len(self._states), warn=first_rank and self.replica == 0)
        members = {str(m): weight for m, weight in enumerate(weights)}
        if not any(weights):  # nothing will change, so send nothing
            if spans := _non_finite(groups, header, delta):
                return NonFinite(index, spans)
            self._states[fragment] = unchanged(state)
            return Round(self._states[fragment], members)
        codec, n = codec_of_round(job.codecs[fragment], last=delta.last), delta.n
        share = parts(n, self._ddp_ranks.size)[self._ddp_ranks.index]
        payloads, encode = self._encoder(codec, delta, share)
        average = self._mean_by_gather if gathers(self.replicas) else self._mean_by_parts
        lr = mean_lr(weights, [h.lr for h in headers])
        # With DDP inside, each rank has the mean of its share, and the state is computed from all of them.
        following = job.advance(fragment, state, lr=lr, last=delta.last) if self._ddp_ranks.size == 1 else None
        mean, all_finite = [], True
        for part, finite in average(groups, codec, share.stop - share.start, payloads, encode, shares(weights)):
            all_finite = all_finite and finite
            if following:
                following.add(part)
            else:
                mean.append(part)
        if not all(groups.gather_json_of_ranks(all_finite)):
            return NonFinite(index, _non_finite(groups, header, delta))
        if following:
            new_state = following.state(index)
        else:
            complete = exact(groups.gather_ddp(decode(mean), n))
            new_state = advanced(job, fragment, state, complete, lr=lr, last=delta.last)
        self._states[fragment] = new_state
        own = self._own(groups, codec, payloads, share, n) if delta.needs_own else None
        headers_nbytes, ended = NBYTES * (self.replicas - 1), time.perf_counter()
        cost = Cost(
            bytes_sent=groups.sent - bytes_before[0] + headers_nbytes,
            bytes_received=groups.received - bytes_before[1] + headers_nbytes,
            seconds=ended - began,
            seconds_apart=met - came,
        )
        return Round(new_state, members, own=own, cost=cost)

    def _encoder(self, codec: Codec, delta: Delta, share: slice) -> tuple[Sequence[Tensor], "Encode"]:
        """Room for the payloads, and what fills it."""
        if isinstance(packed := delta.values, Packed):
            return packed.payloads, lambda cut, span, data: packed.finite
        values = packed[share]
        payloads, places = room_for_cuts(codec, len(values), self.replicas), cuts(len(values), self.replicas)
        return payloads, lambda cut, span, data: pack_into(codec, values[places[cut]][span], payloads[cut][data])

    def _own(
        self, groups: Groups, codec: Codec, payloads: Sequence[Tensor], share: slice, n: int
    ) -> Callable[[], Tensor]:
        decode_own = partial(decode_cuts, codec, payloads, share.stop - share.start, self.replicas)
        if self._ddp_ranks.size == 1:
            return decode_own
        gathered = groups.gather_ddp(decode_own(), n)  # now, as the other ranks of this replica do
        return lambda: gathered

    def _mean_by_gather(
        self, groups: Groups, codec: Codec, n: int, payloads: Sequence[Tensor], encode: "Encode", factors: list[float]
    ) -> Iterator[tuple[Encoded, bool]]:
        """Each replica gets all deltas, its own as the others see it, and averages them. The first pieces travel while
        the next ones are encoded. Yields a piece of the mean, and whether the deltas in it are finite."""
        payload, cut = payloads[0], pieces(codec, n, n, self._streams)
        received = [payload if m == self.replica else torch.empty_like(payload) for m in range(self.replicas)]
        transfer = Transfer(groups, [[theirs[data] for theirs in received] for _, data in cut], phase=0)
        finite = []
        for span, data in cut:
            finite.append(encode(0, span, data))
            transfer.send([payload[data]] * self.replicas, finite[-1])
        for k, (span, data) in enumerate(cut):
            others_finite = transfer.wait()
            part = Encoded(span.start, span.stop - span.start, codec, [theirs[data] for theirs in received], factors)
            yield part, others_finite and finite[k]

    def _mean_by_parts(
        self, groups: Groups, codec: Codec, n: int, payloads: Sequence[Tensor], encode: "Encode", factors: list[float]
    ) -> Iterator[tuple[Encoded, bool]]:
        """Each replica averages one part and sends it to all: unlike in a ring, partial sums are never quantized. The
        replicas that average a piece pass on to all whether it was finite."""
        mean_codec, everyone = codec_of_mean(codec, self._mean_codec), range(self.replicas)
        me, places = self.replica, parts(n, self.replicas)
        counts = [place.stop - place.start for place in places]
        deltas = [pieces(codec, count, counts[0], self._streams) for count in counts]
        averages = [pieces(mean_codec, count, counts[0], self._streams) for count in counts]
        received = [payloads[me] if m == me else torch.empty_like(payloads[me]) for m in everyone]
        averaged = [torch.empty(mean_codec.nbytes(count) if count else 0, dtype=torch.uint8) for count in counts]
        there = Transfer(groups, [[theirs[data] for theirs in received] for _, data in deltas[me]], phase=0)
        turns = range(len(deltas[me]))
        back = Transfer(groups, [[averaged[m][averages[m][k][1]] for m in everyone] for k in turns], phase=1)
        finite = []
        for k in turns:
            cut = [deltas[m][k] for m in everyone]
            finite.append(all([encode(m, span, data) for m, (span, data) in enumerate(cut)]))
            there.send([payloads[m][data] for m, (_, data) in enumerate(cut)], finite[k])
        for k in turns:
            finite[k] = there.wait() and finite[k]
            (span, data), (_, place) = deltas[me][k], averages[me][k]
            mean = weighted(codec, [theirs[data] for theirs in received], factors, span.stop - span.start)
            averaged[me][place] = pack(mean_codec, mean)
            back.send([averaged[me][place]] * self.replicas, finite[k])
        for k in turns:
            others_finite = back.wait()
            for m in everyone:
                span, data = averages[m][k]
                at, count = places[m].start + span.start, span.stop - span.start
                yield Encoded(at, count, mean_codec, [averaged[m][data]], [1.0]), others_finite and finite[k]

    def _measure(self, groups: Groups) -> LinkSpeed:
        check_round(groups.exchange(Header(Kind.MEASURE)))
        return measure(groups)

    def _gather(self, groups: Groups, value: object) -> list[Any]:
        check_round(groups.exchange(Header(Kind.MEASURE)))
        return [theirs for rank in groups.gather_json_of_ranks(groups.gather_json(value)) for theirs in rank]

    def _drain(self, groups: Groups) -> None:
        headers = groups.exchange(Header(Kind.DRAIN))
        while any(h.kind is not Kind.DRAIN for h in headers):
            if not draining(headers):  # otherwise a replica still trains: drop the round that it has just started
                check_round(headers)
            headers = groups.exchange(Header(Kind.DRAIN))


Encode = Callable[[int, slice, slice], bool]
"""Encode these values of a cut into these bytes of its payload. Returns whether they are finite."""


def _agree(groups: Groups, headers: Sequence[Header]) -> tuple[dict[str, int], list[float]]:
    """A digest of each replica's delta, and its weight: all that its ranks have counted. Raises, on all ranks of this
    replica, the error that one of them found."""
    problem = None
    try:
        check_round(headers)
    except DiLoCoError as error:
        problem = [type(error).__name__, str(error)]
    verdicts = groups.gather_json_of_ranks([problem, [h.digest for h in headers], [h.weight for h in headers]])
    for error, _, _ in verdicts:
        if error is not None:
            raise {"Mismatch": Mismatch, "Diverged": Diverged}[error[0]](error[1])
    replicas = range(len(headers))
    digests = {str(m): sum(of_rank[m] for _, of_rank, _ in verdicts) for m in replicas}
    return digests, [sum(of_rank[m] for _, _, of_rank in verdicts) for m in replicas]


def _non_finite(groups: Groups, header: Header, delta: Delta) -> dict[str, int]:
    """The first span with inf or nan on each replica. All ranks of all replicas ask once they have seen one."""
    span = delta.find_non_finite()
    headers = groups.exchange(replace(header, non_finite=-1 if span is None else span))
    spans = groups.gather_json_of_ranks({str(m): h.non_finite for m, h in enumerate(headers) if h.non_finite >= 0})
    return {member: span for of_rank in spans for member, span in of_rank.items()}
