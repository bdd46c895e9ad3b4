"""The process groups of a Collective, and the exchanges on them. Gloo on the host carries everything.

The groups are separate from the user's, which other threads use in an unknown order. They are not registered with
torch.distributed, which would reuse names and keys after a group was destroyed.
"""

import json
import os
import re
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.exchange.header import Header

PATIENCE = 2.0
"""Seconds for the others to report that their exchange broke too. They learn of it at once."""
UNREACHABLE = 60
"""Seconds without an answer from another machine's kernel after which its replica is lost: power, cable, router. The
kernel of a replica that is only slow still answers; for those there is the timeout."""
UNLIMITED = timedelta(days=365)


_GOOD, _BAD = 1, 2
"""The byte behind a piece."""


class Broken(Exception):
    """An exchange failed: a peer is gone or did not answer in time. The groups cannot be used any more."""


@dataclass(frozen=True)
class Place:
    """This process among those that find each other at a store."""

    index: int = 0
    size: int = 1
    store: dist.Store | None = None
    name: str = ""  # the same on all of these processes, and different from others at the same store


def own_name() -> str:
    """For messages of other replicas: "process 4711 on gpu07"."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def place_in(group: dist.ProcessGroup | None) -> Place:
    """This process's place in a group of the default world; alone without one."""
    if group is None:
        return Place()
    ranks = dist.get_process_group_ranks(group)
    store = dist.distributed_c10d._get_default_store()
    return Place(ranks.index(dist.get_rank()), len(ranks), store, ",".join(map(str, ranks)))


HEAD = 512
"""Bytes of a message; longer ones take a second."""


def gather_json(group: Any, value: object, wait: Callable[[Any], object] = lambda work: work.wait()) -> list[Any]:
    """The value of each process of a group. Not torch's all_gather_object: unpickling runs code of whoever has joined
    the group."""

    def gathered(message: bytes) -> list[bytes]:
        ours = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        out = torch.empty(group.size() * len(message), dtype=torch.uint8, device="cpu")
        wait(group._allgather_base(out, ours))
        return [row.numpy().tobytes() for row in out.view(group.size(), -1)]

    data = json.dumps(value).encode()
    rows = gathered((len(data).to_bytes(8, "little") + data)[:HEAD].ljust(HEAD, b"\0"))
    lengths = [int.from_bytes(row[:8], "little") for row in rows]
    rows = gathered(data.ljust(most, b"\0")) if (most := max(lengths)) > HEAD - 8 else [row[8:] for row in rows]
    return [json.loads(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def wait_patiently(work: Any) -> None:
    """On the training thread, in a group without a time limit: in short steps, to notice an interrupt."""
    while not work.is_completed():
        with suppress(RuntimeError):  # not done yet; a real error is raised below
            work.wait(timedelta(seconds=0.2))
    with explained(UNLIMITED.total_seconds()):
        work.wait()


@contextmanager
def explained(timeout: float) -> Iterator[None]:
    """Raise Broken, in our words, for an error of torch's."""
    try:
        yield
    except RuntimeError as error:
        raise Broken(_explain(str(error), timeout)) from None


_opened: Counter[str] = Counter()


def own_store(name: str, place: Place) -> dist.Store:
    """A part of the store for one purpose, fresh at each call: every member calls this in the same order."""
    name = f"diloco/{name}/{place.name}"
    _opened[name] += 1
    assert place.store is not None
    return dist.PrefixStore(f"{name}/{_opened[name]}", place.store)


def open_group(name: str, place: Place, timeout: float, *, patient: bool = False) -> Any:
    """Connect to the other processes. `timeout`: in seconds, also of each exchange, unless `patient`."""
    store, before = own_store(name, place), _open_files()
    with explained(timeout):
        group = dist.ProcessGroupGloo(store, place.index, place.size, timedelta(seconds=timeout))
    _keep_alive(_open_files() - before)
    if patient:
        group._set_default_timeout(UNLIMITED)
    return group


class RollCall:
    """Find which replica is missing after an exchange broke.

    The address of a broken connection often has an unknown port, or is that of a survivor that gave up first. So each
    replica whose exchange breaks reports to the store at which all met; those that do not are gone. This starts at
    once, on its own thread, because the store may never answer.
    """

    def __init__(self, store: dist.Store, replica: int, names: Sequence[str]) -> None:
        self._store, self._replica, self._names = store, replica, names
        self._missing = set(range(len(names))) - {replica}
        self._asked = False
        self._thread = threading.Thread(target=self._ask, name="roll call", daemon=True)
        if len(names) > 2:
            self._thread.start()

    def result(self) -> str:
        """A sentence that names the missing replicas."""
        if len(self._names) == 2:
            return f"The other is {self._named(self._missing)}."
        self._thread.join(PATIENCE + 1)
        if not self._asked:
            return "Could not tell which one: the rendezvous store does not answer."
        if not self._missing:
            return "All replicas answer: only a connection between two of them broke."
        return f"No answer from {self._named(self._missing)}."

    def _named(self, replicas: set[int]) -> str:
        return ", ".join(f"replica {m} ({self._names[m]})" for m in sorted(replicas))

    def _ask(self) -> None:
        deadline = time.monotonic() + PATIENCE
        with suppress(RuntimeError):  # the store is gone
            self._store.set(f"broken/{self._replica}", "")
            while True:
                self._missing -= {m for m in self._missing if self._store.check([f"broken/{m}"])}
                self._asked = True
                if not self._missing or time.monotonic() > deadline:
                    return
                time.sleep(0.02)


class Groups:
    """This process among the ranks that hold the same part of the model, one for each replica."""

    def __init__(self, across: Place, timeout: float) -> None:
        self._across, self._timeout = across, timeout
        self._replicas, self._replica = across.size, across.index
        self._store = own_store("roll call", across)
        self._control: Any = self._group("control", across)
        self._names: list[str] = []
        self._payload: list[Any] = []
        self._ddp: Any = None
        self._shards: Any = None
        self.sent = self.received = 0  # bytes of payloads

    def _group(self, name: str, place: Place) -> Any:
        return open_group(name, place, self._timeout)

    def open(self, streams: int, ddp_ranks: Place, shards: Place) -> None:
        """Open the other groups, after all replicas have agreed on the settings."""
        if self._payload:
            return
        self._payload = [self._group(f"payload {i}", self._across) for i in range(streams)]
        self._ddp = self._group("ddp", ddp_ranks) if ddp_ranks.size > 1 else None
        self._shards = self._group("shards", shards) if shards.size > 1 else None

    def introduce(self) -> None:
        """Learn who the others are, while all are there."""
        self._names = self.gather_json(own_name())

    def roll_call(self) -> RollCall | None:
        """Call this after an exchange broke, to find who is still there."""
        return RollCall(self._store, self._replica, self._names) if self._names else None

    def drop(self) -> None:
        """Close the connections, which tells the others that this replica is gone."""
        self._control, self._payload, self._ddp, self._shards = None, [], None, None

    def exchange(self, header: Header) -> list[Header]:
        """Straight to every peer, in one round trip. Gloo's all-gather goes round a ring: a trip for each peer."""
        packed = torch.frombuffer(bytearray(header.pack() * self._replicas), dtype=torch.uint8)
        out = torch.empty_like(packed)
        self.wait([self._control.alltoall_base(out, packed, [], [])])
        return [Header.unpack(bytes(row.tolist()), m) for m, row in enumerate(out.view(self._replicas, -1))]

    def gather_json(self, value: object) -> list[Any]:
        """The value of each replica."""
        return self._gather_json(self._control, value)

    def gather_json_of_ranks(self, value: object) -> list[Any]:
        """The value of each rank of this replica, in the same order on all of them."""
        values = [value] if self._ddp is None else self._gather_json(self._ddp, value)
        if self._shards is None:
            return values
        return [of_rank for of_shard in self._gather_json(self._shards, values) for of_rank in of_shard]

    def _gather_json(self, group: Any, value: object) -> list[Any]:
        return gather_json(group, value, lambda work: self.wait([work]))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        if len(tensor):
            self.wait([self._control.broadcast(tensor, source)])

    @property
    def peers(self) -> list[int]:
        return [(self._replica + i) % self._replicas for i in range(1, self._replicas)]

    def post(self, kind: Literal["send", "recv"], piece: int, tensor: Tensor, peer: int, tag: int) -> Any:
        """Start to send or to receive a piece. The streams take turns."""
        return self._started(lambda: getattr(self._payload[piece % len(self._payload)], kind)([tensor], peer, tag))

    def post_ends(self) -> list[Any]:
        """A byte to and from each peer on every stream, behind all that was posted."""
        end = [torch.zeros(self._replicas, dtype=torch.uint8) for _ in range(2)]
        return [self._started(lambda g=group: g.alltoall_base(*end, [], [])) for group in self._payload]

    def _started(self, start: Callable[[], Any]) -> Any:
        with explained(self._timeout):  # a connection may be known to be closed
            return start()

    def gather_ddp(self, share: Tensor, n: int) -> Tensor:
        """All n values, from the shares of the ranks of this replica."""
        if self._ddp is None:
            return share
        size = self._ddp.size()
        padded = torch.zeros(-(-n // size), dtype=torch.float32)
        padded[: len(share)] = share
        out = torch.empty(len(padded) * size, dtype=torch.float32)
        self.wait([self._ddp._allgather_base(out, padded)])
        return out[:n]

    def wait(self, works: Sequence[Any], poll: bool = True) -> None:
        """Wait until all are done. Not in `work.wait()`: a thread inside it when the interpreter ends aborts the
        process."""
        if poll:
            _sleep_until(lambda: all(work.is_completed() for work in works))
        with explained(self._timeout):
            for work in works:
                work.wait()


class Transfer:
    """Payloads to and from all peers, in pieces that are under way at the same time and can be used one by one.

    Straight to each peer, every receive posted before any send: gloo announces a receive on the connection that carries
    the data. Behind megabytes that we send, the peer sees it late, and the link works in one direction at a time.
    gloo's own all_gather and all_to_all often do that (50 to 75 % of a 100 Mbit/s link in two rounds of three; in this
    order 99 % in all rounds).

    Gloo cannot tell whether a send or receive has completed. So a byte follows every piece on the same connection: when
    it has changed in memory, the piece is there. It also says whether the piece is good. A last exchange, which can be
    asked, ends with the transfer, or when a peer is lost.

    Args:
        theirs: the memory for what comes, as theirs[piece][replica].
        phase: a number for each transfer that is under way at the same time.
    """

    def __init__(self, groups: Groups, theirs: Sequence[Sequence[Tensor]], phase: int) -> None:
        self._groups, self._phase = groups, phase
        self._sends: list[Any] = []
        self._ends: list[Any] = []
        self._sent = self._received = 0
        self._marks = torch.zeros(len(theirs), len(groups.peers), dtype=torch.uint8)
        self._seen = self._marks.numpy()
        self._receives = [self._post("recv", k, pieces, self._marks[k]) for k, pieces in enumerate(theirs)]
        self._expected = [sum(len(pieces[m]) for m in groups.peers) for pieces in theirs]  # bytes

    def _post(self, kind: Literal["send", "recv"], k: int, pieces: Sequence[Tensor], marks: Tensor) -> list[Any]:
        """One piece from or to each peer, and the byte behind it."""
        tag, out = 4 * k + 2 * self._phase, []
        for i, m in enumerate(self._groups.peers):
            out += [self._groups.post(kind, k, pieces[m], m, tag)] if len(pieces[m]) else []
            out.append(self._groups.post(kind, k, marks[i : i + 1], m, tag + 1))
        return out

    def send(self, ours: Sequence[Tensor], good: bool) -> None:
        """The next piece, one for each replica. `good`: what it was encoded from is finite."""
        k = self._sent
        self._sent += 1
        self._sends += self._post("send", k, ours, torch.full_like(self._marks[k], _GOOD if good else _BAD))
        self._groups.sent += sum(len(ours[m]) for m in self._groups.peers)
        if self._sent == len(self._receives):
            self._ends = self._groups.post_ends()

    def wait(self) -> bool:
        """Until the next piece from every peer is here; with the last one, until all was sent too. Returns whether all
        of them are good."""
        k = self._received
        self._received += 1
        _sleep_until(lambda: self._seen[k].all() or any(end.is_completed() for end in self._ends))
        last = self._received == len(self._receives)
        self._groups.wait([*self._receives[k], *(self._sends if last else [])], poll=False)
        self._groups.received += self._expected[k]
        if last:
            self._groups.wait(self._ends)
        return bool((self._seen[k] == _GOOD).all())


def _sleep_until(done: Callable[[], bool]) -> None:
    """Check after ever longer pauses: at most 10 % more time, 50 checks in 100 ms, of 25 µs on a core that trains."""
    began = time.perf_counter()
    while not done():
        time.sleep(min(max((time.perf_counter() - began) / 10, 2e-4), 0.02))


def _open_files() -> set[int]:
    return {int(name) for name in os.listdir("/dev/fd")} if os.path.isdir("/dev/fd") else set()


def _keep_alive(files: set[int]) -> None:
    """Let the kernel notice unreachable peers. This also keeps idle connections open in routers, which forget them
    after minutes. Gloo has no option for it, so this takes the sockets it has opened; one that another thread opened
    meanwhile does no harm."""
    options = {"TCP_KEEPIDLE": UNREACHABLE // 4, "TCP_KEEPALIVE": UNREACHABLE // 4, "TCP_KEEPINTVL": UNREACHABLE // 4,
               "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 1000 * UNREACHABLE}  # fmt: skip
    for file in files:
        with suppress(OSError):  # closed again
            if stat.S_ISSOCK(os.fstat(file).st_mode):
                connection = socket.socket(fileno=file)
                try:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for name, value in options.items():
                        if hasattr(socket, name):  # which of them exist depends on the system
                            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
                finally:
                    connection.detach()


def _explain(message: str, timeout: float) -> str:
    if "Timed out" in message:
        return f"another replica did not answer within {timeout:g} s"
    peer = re.search(r"\[[^\]]*\]:\d+(?!\])", message)
    if "Connection timed out" in message or "No route to host" in message:
        return f"another replica{f' ({peer[0]})' if peer else ''} has been unreachable for {UNREACHABLE} s"
    if "closed by peer" in message or "reset by peer" in message:
        return f"another replica{f' ({peer[0]})' if peer else ''} is gone: its connection was closed"
    return f"the exchange failed: {message.splitlines()[0][:200]}"


SMALL, LARGE = 1 << 16, 1 << 25
"""Bytes of the first and of the largest message to each peer."""
LONG = 0.5
"""Seconds after which a message is long enough: by then a link's first burst does not count."""
TRIPS = 5


@dataclass(frozen=True)
class LinkSpeed:
    round_trip: float  # seconds
    rate: float  # bits of payload a second, each way, while all replicas send


def measure(groups: Groups) -> LinkSpeed:
    """All replicas at once. The messages grow until one takes long enough."""
    if not groups.peers:
        return LinkSpeed(0.0, float("inf"))
    trip = min(_slowest(groups, 1) for _ in range(TRIPS))
    size, seconds = SMALL, _slowest(groups, SMALL)
    while seconds < LONG and size < LARGE:
        size *= 4
        seconds = _slowest(groups, size)
    return LinkSpeed(trip, 8 * size * len(groups.peers) / max(seconds - trip, 1e-6))


def _slowest(groups: Groups, size: int) -> float:
    """Seconds of an exchange on the replica where it took longest: all must agree on whether it was long enough."""
    groups.gather_json(None)  # all begin at the same time
    message, count = torch.zeros(size, dtype=torch.uint8), len(groups.peers) + 1
    began = time.perf_counter()
    transfer = Transfer(groups, [[torch.empty(size, dtype=torch.uint8) for _ in range(count)]], phase=0)
    transfer.send([message] * count, good=True)
    transfer.wait()
    return max(groups.gather_json(time.perf_counter() - began))
