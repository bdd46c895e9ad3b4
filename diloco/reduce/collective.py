"""Reduce over a torch.distributed group: fixed members, lowest latency.

One communication thread, fed by an ordered queue: all replicas issue the same collectives in the same order. On it
the delta is encoded, exchanged, decoded and averaged; the training thread only waits, if at all, in `take`.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.codec import Codec, pack, unpack
from diloco.errors import ConfigError
from diloco.reduce import Contract, Delta, Dropped, Round, State
from diloco.reduce.contract import compare, sources
from diloco.reduce.groups import Line
from diloco.reduce.header import NBYTES, Header, Kind, check_round, settling
from diloco.reduce.mean import GATHER, mean, parts


class Collective:
    """The mean over the replicas of a process group.

    Args:
        group: the ranks that hold the same part of the model, one per replica; by default all ranks. With FSDP2 inside
            a replica, the group of the mesh's replica dimension: `mesh.get_group("replica")`.
        shards: with FSDP2 inside a replica, its ranks: what ends a round for one of them ends it for all.
        ddp_ranks: with DDP inside a replica, its ranks: each of them carries its share of the traffic.
        streams: TCP connections to use at once; on a long link one stream does not fill it.
        timeout: seconds that an exchange may take, waiting for slower replicas included; then a peer counts as lost.
        backend: what carries the deltas. They are on the host: gloo also with GPUs, unless NCCL reaches all replicas.
        mean_codec: the codec of the averaged shares (4 or more replicas); by default that of the deltas.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        shards: dist.ProcessGroup | None = None,
        ddp_ranks: dist.ProcessGroup | None = None,
        streams: int = 1,
        timeout: float = 600.0,
        backend: str = "gloo",
        mean_codec: Codec | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "there is no process group: call torch.distributed.init_process_group() before DiLoCo and start the "
                "script with `torchrun --nproc_per_node 2 script.py`, or pass reduce= (see diloco.reduce)"
            )
        if streams < 1 or timeout <= 0 or backend not in ("gloo", "nccl"):
            raise ConfigError(f"streams={streams}, timeout={timeout}, backend={backend!r}: give at least 1 stream, a "
                              "positive timeout in seconds, and 'gloo' or 'nccl'")  # fmt: skip
        self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._ddp_ranks = dist.get_process_group_ranks(ddp_ranks) if ddp_ranks else [dist.get_rank()]
        self._shard_ranks = dist.get_process_group_ranks(shards) if shards else [dist.get_rank()]
        self.replicas, self.replica = len(self._ranks), self._ranks.index(dist.get_rank())
        self._streams, self._timeout, self._backend, self._mean_codec = streams, timeout, backend, mean_codec
        self._codecs: Sequence[Codec] = ()
        self._rounds: dict[tuple[int, int], Future[Round | Dropped]] = {}
        self._line: Line | None = None

    def join(self, contract: Contract, states: Sequence[State], codecs: Sequence[Codec]) -> list[State]:
        self._codecs = codecs
        self._rounds.clear()  # of a time line that was given up by loading a state
        if self._line is None:
            self._line = Line(self._ranks, self._timeout)
        return self._line.submit("join", lambda line: self._join(line, contract, states)).result()

    def due(self, fragment: int, index: int, steps: int, slot: bool) -> bool:
        return slot

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        assert self._line is not None
        began = time.perf_counter()
        what = f"fragment {fragment}, round {index}"
        work = self._line.submit(what, lambda line: self._round(line, fragment, index, delta(), began))
        self._rounds[fragment, index] = work

    def take(self, fragment: int, index: int) -> Round | Dropped | None:
        future = self._rounds.pop((fragment, index), None)
        return future.result() if future else None

    def applied(self, fragment: int, state: State) -> None:
        pass

    def settle(self) -> None:
        assert self._line is not None

        def settle(line: Line) -> None:
            while not all(h.kind is Kind.SETTLE for h in line.exchange(Header(Kind.SETTLE))):
                pass  # a replica still trains: the round that it has just started is dropped

        self._line.submit("finish", settle).result()

    def leave(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _join(self, line: Line, contract: Contract, states: Sequence[State]) -> list[State]:
        check_round(line.exchange(Header(Kind.JOIN)))
        own = {"mean_codec": repr(self._mean_codec), "streams": self._streams, "backend": self._backend,
               "ranks of a replica": len(self._ddp_ranks)}  # fmt: skip
        compare(line.gather_json({**contract, **own}))
        line.open(self._streams, self._backend, self._ddp_ranks, self._shard_ranks)
        held = line.gather_json([(s.index, s.fingerprint()) for s in states])
        out = list(states)
        for i, source in enumerate(sources([[tuple(h) for h in replica] for replica in held])):
            if source is None:
                continue
            arrived = State(held[source][i][0], states[i].anchor.clone(), states[i].outer.clone())
            for tensor in (arrived.anchor, arrived.outer):
                line.broadcast(tensor, source)
            if held[self.replica][i] != held[source][i]:
                # Into the tensors that are there, once all has come: no second copy of the model, and no half state.
                mine = states[i]
                mine.index = arrived.index
                mine.anchor.copy_(arrived.anchor)
                mine.outer.copy_(arrived.outer)
                out[i] = State(mine.index, mine.anchor, mine.outer)
        return out

    def _round(self, line: Line, fragment: int, index: int, delta: Delta, began: float) -> Round | Dropped:
        fault = -1 if delta.fault is None else delta.fault
        mine = Header(Kind.ROUND, delta.tokens, fragment, index, delta.weight, delta.fingerprint, fault)
        headers = line.exchange(mine)
        if settling(headers):
            return Dropped()
        found = {str(m): h.fault for m, h in enumerate(headers) if h.fault >= 0}
        faults = line.agree(lambda: check_round(headers), found)
        weights = [h.weight for h in headers]
        members = {str(m): weight for m, weight in enumerate(weights)}
        if faults or not any(weights):  # nothing will be applied, so nothing need be sent
            return Round(index, delta.values, members, faults=faults)
        before = line.sent
        share = parts(len(delta.values), len(self._ddp_ranks))[self._ddp_ranks.index(dist.get_rank())]
        average = self._mean_by_gather if self.replicas <= GATHER else self._mean_by_parts
        averaged = average(line, self._codecs[fragment], delta.values[share], weights)
        averaged = line.gather_ddp(averaged, len(delta.values))
        sent = line.sent - before + NBYTES * (self.replicas - 1)
        return Round(index, averaged, members, sent=sent, received=sent, seconds=time.perf_counter() - began)

    def _mean_by_gather(self, line: Line, codec: Codec, values: Tensor, weights: list[float]) -> Tensor:
        """Everyone gets all deltas, its own too as the others see it, and averages."""
        payload = pack(codec, values)
        received = line.all_to_all([payload] * self.replicas, [len(payload)] * self.replicas)
        return mean(codec, received, weights, len(values))

    def _mean_by_parts(self, line: Line, codec: Codec, values: Tensor, weights: list[float]) -> Tensor:
        """Everyone averages one part and hands it round; quantised deltas are never summed on their way."""
        mean_codec = self._mean_codec or codec
        cuts = parts(len(values), self.replicas)
        counts = [cut.stop - cut.start for cut in cuts]
        mine = counts[self.replica]
        received = line.all_to_all([pack(codec, values[cut]) for cut in cuts], [codec.nbytes(mine)] * self.replicas)
        averaged = pack(mean_codec, mean(codec, received, weights, mine))
        averages = line.all_to_all([averaged] * self.replicas, [mean_codec.nbytes(n) for n in counts])
        out = torch.empty(len(values), dtype=torch.float32, device="cpu")
        for cut, n, payload in zip(cuts, counts, averages, strict=True):
            out[cut] = unpack(mean_codec, payload, n)
        return out
