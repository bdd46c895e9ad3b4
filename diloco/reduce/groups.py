"""The communication thread of a process, its queue and its process groups."""

import atexit
import json
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.errors import DiLoCoError, Diverged, Mismatch, PeerLost
from diloco.reduce.header import NBYTES, Header


class Line:
    """The communication thread and its process groups. The collectives below run on that thread only."""

    _opened: ClassVar[Counter[str]] = Counter()

    def __init__(self, ranks: list[int], timeout: float) -> None:
        # Groups of our own: the user's collectives come from another thread, in an order we do not know. They are not
        # registered with torch.distributed, whose names and keys would be used again after a group was destroyed.
        self._ranks, self._timeout = ranks, timeout
        self._replicas, self._replica = len(ranks), ranks.index(dist.get_rank())
        self._device = torch.device("cpu")
        # The current device is that of a thread, and the first one for a new thread.
        self._cuda = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self._stream: Any = None
        self._control: Any = self._group("control", ranks, "gloo")
        self._payload: list[Any] = []
        self._ddp: Any = None
        self._shards: Any = None
        self._ddp_size = self._shard_count = 1
        self._lost: str | None = None
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[Line], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._closing, self._exiting = threading.Lock(), False
        self.sent = 0
        # torch keeps the number of threads per thread, but new threads inherit what was set last.
        threads, ready = torch.get_num_threads(), threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), name="diloco", daemon=True)
        self._thread.start()
        atexit.register(self._stay)
        ready.wait()
        torch.set_num_threads(threads)

    def _group(self, name: str, ranks: list[int], backend: str) -> Any:
        name = f"diloco/{name}/{','.join(map(str, ranks))}"
        self._opened[name] += 1  # every member opens its lines in the same order
        store = dist.PrefixStore(f"{name}/{self._opened[name]}", dist.distributed_c10d._get_default_store())
        rank, timeout = ranks.index(dist.get_rank()), timedelta(seconds=self._timeout)
        try:
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                return dist.ProcessGroupNCCL(store, rank, len(ranks), options)
            return dist.ProcessGroupGloo(store, rank, len(ranks), timeout)
        except RuntimeError as error:
            raise PeerLost(f"join: {_explain(str(error), self._timeout)}") from None

    def open(self, streams: int, backend: str, ddp_ranks: list[int], shards: list[int]) -> None:
        """The other groups, once all are known to want the same."""
        if self._payload:
            return
        if backend == "nccl":
            assert self._cuda is not None
            self._device = self._cuda
            torch.cuda.set_device(self._cuda)
            self._stream = torch.cuda.Stream(self._cuda)  # behind that of training payloads would wait for its kernels
        self._payload = [self._group(f"payload {i}", self._ranks, backend) for i in range(streams)]
        self._ddp_size, self._shard_count = len(ddp_ranks), len(shards)
        self._ddp = self._group("inner", ddp_ranks, "gloo") if len(ddp_ranks) > 1 else None
        self._shards = self._group("shards", shards, "gloo") if len(shards) > 1 else None

    def submit(self, what: str, work: Callable[["Line"], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((what, work, future))
        return future

    def close(self) -> None:
        """Stop after the job under way. Closing the sockets is what tells the others.

        Wait for it, unless the job waits for others.
        """
        self._jobs.put(None)
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            atexit.unregister(self._stay)

    def _stay(self) -> None:
        """At exit: leave the groups to the system, for closing one while the interpreter ends aborts the process."""
        with self._closing:
            self._exiting = True

    def _serve(self, ready: threading.Event) -> None:
        torch.set_num_threads(1)  # one core's worth of work; the others belong to training
        torch.get_num_threads()  # holds it: what is set elsewhere before a thread first asks would be its number
        ready.set()
        while (job := self._jobs.get()) is not None:
            what, work, future = job
            began = time.perf_counter()
            try:
                if self._lost is not None:
                    raise PeerLost(self._lost)
                future.set_result(work(self))
            except _Broken as error:
                self._lost = f"{what}, {time.perf_counter() - began:.1f} s: {error}. The state can still be saved."
                self._drop()  # at once, so that survivors who wait for us learn of it too
                future.set_exception(PeerLost(self._lost))
            except BaseException as error:
                future.set_exception(error)
            del job, work, future  # they hold a delta and a mean, and the next job may be long in coming
        self._drop()

    def _drop(self) -> None:
        with self._closing:
            if not self._exiting:
                self._control, self._payload, self._ddp, self._shards = None, [], None, None
                return
        threading.Event().wait()  # for the end of the process

    def _wait(self, works: Sequence[Any], poll: bool = True) -> None:
        """Sleep until all are done, checking after ever longer pauses: at most 10 % more time, 50 checks in 100 ms.

        A check takes 25 µs from the core that trains.
        Not in `work.wait()`: a thread that is in there when the interpreter ends aborts the process.
        """
        began = time.perf_counter()
        while poll and not all(work.is_completed() for work in works):
            time.sleep(min(max((time.perf_counter() - began) / 10, 2e-4), 0.02))
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise _Broken(_explain(str(error), self._timeout)) from None

    def exchange(self, header: Header) -> list[Header]:
        out = torch.empty(NBYTES * self._replicas, dtype=torch.uint8)
        mine = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
        self._wait([self._control._allgather_base(out, mine)])
        return [Header.unpack(bytes(row.tolist())) for row in out.view(self._replicas, -1)]

    def gather_json(self, value: object) -> list[Any]:
        """What each replica says."""
        return self._gather_json(self._control, self._replicas, value)

    def agree(self, check: Callable[[], None], faults: dict[str, int]) -> dict[str, int]:
        """The faults that any rank of this replica knows of. An error of the check on one of them is raised on all."""
        try:
            check()
            verdict = None
        except DiLoCoError as error:
            verdict = [type(error).__name__, str(error)]
        said: list[Any] = [[verdict, faults]]
        if self._shards is not None:
            said = self._gather_json(self._shards, self._shard_count, said[0])
        for verdict, _ in said:
            if verdict is not None:
                raise {"Mismatch": Mismatch, "Diverged": Diverged}[verdict[0]](verdict[1])
        return {member: fault for _, each in said for member, fault in each.items()}

    def _gather_json(self, group: Any, size: int, value: object) -> list[Any]:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = torch.empty(size, dtype=torch.int64)
        self._wait([group._allgather_base(lengths, torch.tensor([len(data)]))])
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: len(data)] = data
        out = torch.empty(size * len(padded), dtype=torch.uint8)
        self._wait([group._allgather_base(out, padded)])
        rows = zip(out.view(size, -1), lengths.tolist(), strict=True)
        return [json.loads(row[:n].numpy().tobytes()) for row, n in rows]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        if len(tensor):
            self._wait([self._control.broadcast(tensor, source)])

    def all_to_all(self, payloads: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Give each replica the payload for it; take from each what it has for this one, sizes[m] bytes."""
        streams, out = len(self._payload), [torch.empty(size, dtype=torch.uint8) for size in sizes]
        out[self._replica] = payloads[self._replica]
        swap = self._swap_gloo if self._device.type == "cpu" else self._swap_nccl
        ours, theirs = ([t.tensor_split(streams) for t in tensors] for tensors in (payloads, out))
        try:
            started = [
                swap(group, [t[i] for t in ours], [t[i] for t in theirs]) for i, group in enumerate(self._payload)
            ]
        except RuntimeError as error:  # a connection that is known to be closed
            raise _Broken(_explain(str(error), self._timeout)) from None
        self._wait([last for *_, last in started])
        self._wait([work for works in started for work in works], poll=False)
        self.sent += sum(map(len, payloads)) - len(payloads[self._replica])
        return out

    def _swap_gloo(self, group: Any, ours: list[Tensor], theirs: list[Tensor]) -> list[Any]:
        """Straight to each peer, every receive posted before any send.

        gloo announces a receive on the connection that carries the data: behind megabytes of our own the peer sees it
        only when ours are through, and the link works one way at a time. gloo's own all_gather and all_to_all often do
        that (50 to 75 % of a 100 Mbit/s link in two rounds of three; in this order 99 % in all).
        Sends and receives cannot be asked whether they are done. A byte to each peer at the end can, and it travels
        behind them on the same connections.
        """
        peers = [(self._replica + i) % self._replicas for i in range(1, self._replicas)]
        receives = [group.recv([theirs[m]], m, 0) for m in peers if len(theirs[m])]
        sends = [group.send([ours[m]], m, 0) for m in peers if len(ours[m])]
        end = [torch.zeros(self._replicas, dtype=torch.uint8) for _ in range(2)]
        return [*receives, *sends, group.alltoall_base(*end, [], [])]

    def _swap_nccl(self, group: Any, ours: list[Tensor], theirs: list[Tensor]) -> list[Any]:
        with torch.cuda.stream(self._stream):
            received = torch.empty(sum(map(len, theirs)), dtype=torch.uint8, device=self._device)
            data = torch.cat(ours).to(self._device)
            work = group.alltoall_base(received, data, [len(t) for t in theirs], [len(o) for o in ours])
            self._wait([work])
            for target, values in zip(theirs, received.split([len(t) for t in theirs]), strict=True):
                target.copy_(values)
        return [work]

    def gather_ddp(self, share: Tensor, n: int) -> Tensor:
        """The whole of n values from the share that each rank of this replica has."""
        if self._ddp is None:
            return share
        padded = torch.zeros(-(-n // self._ddp_size), dtype=torch.float32)
        padded[: len(share)] = share
        out = torch.empty(len(padded) * self._ddp_size, dtype=torch.float32)
        self._wait([self._ddp._allgather_base(out, padded)])
        return out[:n]


class _Broken(Exception):
    """The backend gave up a collective."""


def _explain(message: str, timeout: float) -> str:
    if "Timed out" in message:
        return f"another replica did not answer within {timeout:g} s"
    peer = re.search(r"\[[^\]]*\]:\d+(?!\])", message)
    if "closed by peer" in message or "reset by peer" in message:
        return f"another replica{f' ({peer[0]})' if peer else ''} is gone: its connection was closed"
    return f"the exchange failed: {message.splitlines()[0][:200]}"
