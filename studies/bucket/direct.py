"""Payloads straight from their owner: what they save, and whether anything that harms them changes a bit or stops a
round. Run: python -m studies.bucket.direct (as root for the links), --events N for fewer.
"""

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import diloco.bucket.rounds as rounds_
from benchmarks.record import Record, Target, write
from diloco.bucket import carriers, run
from diloco.bucket.carriers import Address, Announced, Carrier, Payload
from diloco.bucket.store.backend import Failure, open_store
from studies.bucket.worker import Worker, open_gate
from tests.support.members import Member, agree
from tests.support.netns import Rate, impossible, network
from tests.support.s3 import ENVIRONMENT

RESULTS = Path(__file__).parent / "direct.json"
LOCAL = "127.0.0.1"
HARMS = ("cut", "silent", "slow", "lies", "nowhere", "store")
PARAMETERS, MBIT, E3M0_BITS = 10_000_000, 100, 4.125
PORT = 7000
STOPPED = 120.0
"""Seconds without a round after which a member counts as stopped."""


class Hurdle:
    """In front of one member's server: passes bytes on, cuts a connection after some of them, or keeps them."""

    def __init__(self, carrier: Carrier, target: int) -> None:
        self.harm, self.harmed = "", 0
        self._payload, self._target = carrier._payload, target
        self._socket = socket.create_server((LOCAL, 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def payload(self, digest: str) -> Payload | None:
        data = self._payload(digest)
        if self.harm == "lies" and data is not None:
            self.harmed += 1
            return bytes(data[:-1]) + bytes([data[-1] ^ 1])
        return data

    def _accept(self) -> None:
        while True:
            reader, _ = self._socket.accept()
            if self.harm == "nowhere":
                self.harmed += 1
                reader.close()
                continue
            try:
                owner = socket.create_connection((LOCAL, self._target))
            except OSError:
                reader.close()
                continue
            for source, target in ((reader, owner), (owner, reader)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(512):
                if self.harm in ("cut", "nowhere"):
                    self.harmed += 1
                    target.sendall(data[: len(data) // 2])
                    break
                if self.harm in ("silent", "slow"):
                    self.harmed += 1
                    time.sleep(0.02 if self.harm == "slow" else 1.0)
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()


class Outage:
    """A store that fails while it is down."""

    def __init__(self, folder: str) -> None:
        self._store, self.down = open_store(folder), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def attempt(self, operation: Any) -> Any:
        if self.down.is_set():
            raise Failure("it is down")
        return self._store.attempt(operation)


@contextmanager
def hurdles() -> Iterator[list[Hurdle]]:
    """One in front of every member that starts to listen."""
    listen, made = Carrier.listen, list[Hurdle]()

    def behind(carrier: Carrier, announced: Announced) -> str:
        address = Address.read(listen(carrier, announced))
        hurdle = Hurdle(carrier, address.port)
        assert carrier._server is not None
        carrier._server._payload = hurdle.payload
        made.append(hurdle)
        return str(Address(address.host, hurdle.port, address.fingerprint, address.token))

    setattr(Carrier, "listen", behind)  # noqa: B010
    try:
        yield made
    finally:
        setattr(Carrier, "listen", listen)  # noqa: B010


def faults(folder: str, events: int, *, names: str = "abcd", outage: float = 60.0, seed: int = 0) -> Record:
    """Harm one owner, or the store, until every member has followed another round; again and again. The store is down
    for `outage` seconds once."""
    rounds_.LEAST, rounds_.UNIT = 64, 256
    carriers.REST, run.LEAST_DEADLINE = 0.1, 0.2  # so that the next event meets members that ask again
    choice, longest = random.Random(seed), 0.0
    met: Counter[str] = Counter()
    store = Outage(folder)
    with hurdles() as made:
        gate = threading.Barrier(len(names))
        members = [Member(folder, name, backend=store, gate=gate, announce=f"{LOCAL}:0") for name in names]
        _followed(members, 2)
        for event in range(events):
            harm, owner = HARMS[event % len(HARMS)], choice.choice(made)
            began, before = time.monotonic(), owner.harmed
            if harm == "store":
                store.down.set()
                time.sleep(outage if event == len(HARMS) - 1 else 0.2)
                store.down.clear()
            else:
                owner.harm = harm
            _followed(members, 1)
            owner.harm = ""
            met[harm] += harm == "store" or owner.harmed > before
            longest = max(longest, time.monotonic() - began)
        for member in members:
            member.stop()
        for member in members:
            member.end()
    rejected = [e for m in members for e in m.reduce.events() if e["event"] in ("invalid", "lie", "gone", "diverged")]
    return {"events": events, "met": dict(met), "states compared": len(agree(*members)), "rounds": min(members[0].held),
            "rejected": rejected[:5], "longest wait for a round": longest,
            "direct bytes": sum(m.reduce.session.carrier.received for m in members if m.reduce.session)}  # fmt: skip


def _followed(members: Sequence[Member], more: int) -> None:
    """Wait until every member has followed so many more rounds; raises what one of them raised."""
    first = [min(member.held) if member.joined.is_set() else 0 for member in members]
    deadline = time.monotonic() + STOPPED
    while any(not m.joined.is_set() or min(m.held) < k + more for m, k in zip(members, first, strict=True)):
        for member in members:
            if member.error:
                raise member.error
        if time.monotonic() > deadline:
            raise RuntimeError(f"no round for {STOPPED} s")
        time.sleep(0.005)


def link(folder: str) -> Record | None:
    """Rounds of two members over slow links, beside a third that nobody can connect to: all through the store, then
    with the two announced."""
    if reason := impossible():
        print("skipped:", reason)
        return None
    out: Record = {"parameters": PARAMETERS, "mbit": MBIT}
    for name, announced in (("store", False), ("direct", True)):
        with network(4, offload=True) as hosts, ExitStack() as ends:
            hosts.shape(Rate(MBIT), range(1, 4))  # the members' uplinks; the store's is not slow
            serve = [sys.executable, "-m", "tests.support.s3", hosts.address(0), "80"]
            command = [*hosts.command(0), *serve]
            server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            ends.callback(server.kill)
            assert server.stdout is not None
            server.stdout.readline()
            env = ENVIRONMENT | {"AWS_ENDPOINT_URL": f"http://{hosts.address(0)}:80"}
            gate, workers = f"{folder}-{name}", []
            for host, member in enumerate("abc", start=1):
                announce = f"{hosts.address(host)}:{PORT}" if announced and member != "c" else None
                workers.append(
                    Worker(hosts.command(host), env, url=f"s3://bucket/{name}", name=member, seed=host, gate=gate,
                           parameters=PARAMETERS, fragments=1, sync_every=100, seconds=90.0, announce=announce,
                           quorum=3)
                )  # fmt: skip
            for worker in workers:
                ends.callback(worker.process.kill)
            open_gate(workers, gate)
            results = [worker.result() for worker in workers]
        rounds = len(results[0]["rounds"])
        out[name] = {
            "rounds": rounds, "seconds": _seconds(results),
            "read from the store": [r["traffic"]["received"] / rounds for r in results],
            "read from owners": [r["direct"] / rounds for r in results],
        }  # fmt: skip
    return out


def _seconds(results: Sequence[Record]) -> float:
    """The median, over rounds, from the last delta until the slowest of the first two members has merged."""
    rounds = []
    for index in range(2, min(max(r["held"]) for r in results)):
        sent = [[r["ends"][step - 1] for _, step, *_ in r["rounds"] if step] for r in results]
        merged = [next(t for t, held in zip(r["ends"], r["held"], strict=True) if held >= index) for r in results[:2]]
        if all(len(times) >= index for times in sent):
            rounds.append(max(merged) - max(times[index - 1] for times in sent))
    return statistics.median(rounds)


def targets(values: Record) -> list[Target]:
    out = []
    if found := values.get("faults"):
        out.append(Target("harmed: objects or states that are not right", len(found["rejected"]), at_most=0))
    if found := values.get("link"):
        store, direct = found["store"], found["direct"]
        read = [column["read from the store"][2] for column in (direct, store)]
        what = "bytes a member with reachable peers reads from the store ÷ before"
        out.append(Target(what, read[0] / read[1], at_most=0.05))
        wire = PARAMETERS * E3M0_BITS / (MBIT * 1e6)
        out.append(Target("last delta to merged state ÷ the wire's time", direct["seconds"] / wire, at_most=1.3))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="studies.bucket.direct", description="payloads straight from their owner")
    parser.add_argument("--events", type=int, default=300)
    parser.add_argument("--only", choices=("faults", "link"))
    arguments = parser.parse_args()
    values: Record = json.loads(RESULTS.read_text())["values"] if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as place:
        if arguments.only != "link":
            values["faults"] = faults(f"{place}/faults", arguments.events)
            write(RESULTS, {}, values, targets(values))
        if arguments.only != "faults" and (measured := link(f"{place}/link")) is not None:
            values["link"] = measured
            write(RESULTS, {}, values, targets(values))


if __name__ == "__main__":
    main()
