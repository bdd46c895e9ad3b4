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

from diloco.errors import PeerLost
from diloco.reduce.header import NBYTES, Header


class Line:
    """The communication thread and its process groups. The collectives below run on that thread only."""

    _opened: ClassVar[Counter[str]] = Counter()

    def __init__(self, ranks: list[int], inner: list[int], streams: int, timeout: float, backend: str) -> None:
        # Groups of our own: the user's collectives come from another thread, in an order we do not know. They are not
        # registered with torch.distributed, whose names and keys would be used again after a group was destroyed.
        self._timeout = timeout
        self._replicas, self._inner_size = len(ranks), len(inner)
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._control: Any = self._group("control", ranks, "gloo")
        self._payload = [self._group(f"payload {i}", ranks, backend) for i in range(streams)]
        self._inner: Any = self._group("inner", inner, "gloo") if len(inner) > 1 else None
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
        self._drop()

    def _drop(self) -> None:
        with self._closing:
            if not self._exiting:
                self._control, self._payload, self._inner = None, [], None
                return
        threading.Event().wait()  # for the end of the process

    def _wait(self, works: Sequence[Any]) -> None:
        """Sleep until all are done, checking after ever longer pauses: at most 5 % more time, and little work.

        Not in `work.wait()`: a thread that is in there when the interpreter ends aborts the process.
        """
        began = time.perf_counter()
        while not all(work.is_completed() for work in works):
            time.sleep(min(max((time.perf_counter() - began) / 20, 1e-4), 0.02))
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
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = torch.empty(self._replicas, dtype=torch.int64)
        length = torch.tensor([len(data)])
        self._wait([self._control._allgather_base(lengths, length)])
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: len(data)] = data
        out = torch.empty(self._replicas * len(padded), dtype=torch.uint8)
        self._wait([self._control._allgather_base(out, padded)])
        rows = zip(out.view(self._replicas, -1), lengths.tolist(), strict=True)
        return [json.loads(row[:n].numpy().tobytes()) for row, n in rows]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        if len(tensor):
            self._wait([self._control.broadcast(tensor, source)])

    def all_gather(self, payload: Tensor) -> list[Tensor]:
        """Each replica's payload, all of one size."""
        outs, works = [], []
        for group, part in zip(self._payload, payload.tensor_split(len(self._payload)), strict=True):
            outs.append(torch.empty(self._replicas * len(part), dtype=torch.uint8, device=self._device))
            if len(part):
                works.append(group._allgather_base(outs[-1], part.to(self._device)))
        self._wait(works)
        self.sent += len(payload) * (self._replicas - 1)
        rows = [out.cpu().view(self._replicas, -1) for out in outs]
        return [rows[0][m] if len(rows) == 1 else torch.cat([r[m] for r in rows]) for m in range(self._replicas)]

    def all_to_all(self, payloads: list[Tensor], expected: int) -> list[Tensor]:
        """The payload that each replica has for this one, `expected` bytes each."""
        streams = len(self._payload)
        outs, works = [], []
        for i, group in enumerate(self._payload):
            ours = [payload.tensor_split(streams)[i] for payload in payloads]
            size = len(torch.empty(expected, dtype=torch.uint8).tensor_split(streams)[i])
            data = torch.cat(ours).to(self._device)
            outs.append(torch.empty(size * self._replicas, dtype=torch.uint8, device=self._device))
            sizes = [size] * self._replicas, [len(part) for part in ours]
            works.append(group.alltoall_base(outs[-1], data, *sizes))
        self._wait(works)
        self.sent += sum(map(len, payloads)) - expected
        rows = [out.cpu().view(self._replicas, -1) for out in outs]
        return [torch.cat([r[m] for r in rows]) for m in range(self._replicas)]

    def gather_inner(self, share: Tensor, n: int) -> Tensor:
        """The whole of n values from the share that each rank of this replica has."""
        if self._inner is None:
            return share
        padded = torch.zeros(-(-n // self._inner_size))
        padded[: len(share)] = share
        out = torch.empty(len(padded) * self._inner_size)
        self._wait([self._inner._allgather_base(out, padded)])
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
