"""Payloads straight from their owner: how long a round takes, what it saves, and whether anything that harms them
changes a bit or stops a round. Run, as root: python -m studies.bucket.direct, --events N for fewer.

Every member runs in its own network namespace, with an uplink of 100 Mbit/s and a 20 ms round trip to all
others and to the store, which is moto in a namespace too and sends what the members' links can carry. One member is
behind a NAT: it announces its router's address, where nobody reaches it.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.record import Record, Target, write
from diloco import E3M0, DiLoCo
from diloco.bucket import Bucket, carriers
from diloco.bucket import run as session
from diloco.bucket.carriers import Carrier, Payload
from studies.bucket.worker import Worker, open_gate, work
from studies.netlab.relay import behind_nat, far_apart
from tests.support import netns
from tests.support.netns import DEVICE, Network, Rate
from tests.support.s3 import ENVIRONMENT

RESULTS = Path(__file__).parent / "direct.json"
OWNERS, HARMED = "abc", {"parameters": 2_000_000, "fragments": 1, "sync_every": 10, "rest": 1.0, "deadline": 0.5}
"""A member that has failed rests for one second instead of 60, so that the next harm meets members that ask again. A
payload has half a second instead of two, beyond the time of its upload, so that 300 harms take ten minutes."""
PORT = 7000
RULES = {"cut": "ct reply bytes > 30000 counter reject with tcp reset", "silent": "ip length > 100 counter drop",
         "nowhere": "counter drop"}  # fmt: skip
"""What the kernel does with packets to an owner: it cuts a connection in the middle of a piece, or lets one connect and
nothing more, or there is nobody."""
EVERY = 3
"""Every so many times, the store is out of reach instead of one owner harmed."""
OUTAGE = 60.0
"""Seconds of the longest outage of the store. The others last one."""
TIMED = {"parameters": 10_000_000, "fragments": 1, "sync_every": 100, "seconds": 60.0}
LINK, ONE_WAY = Rate(100, burst_kbyte=128), 0.01
WIRE = 8 * E3M0().nbytes(TIMED["parameters"]) / (LINK.mbit * 1e6)
"""Seconds that a delta needs at that rate."""
STOPPED = 180.0
"""Seconds without a round after which a member counts as stopped."""


# The members: processes of this module.


def member(settings: Record) -> Record:
    """Tells how far it is, writes down which rounds it holds with which bits, and lies while there is a file."""
    states, before, lies, harm = dict[int, int](), list[int](), list[str](), Path(settings["harm"])
    payload, progress = Carrier._payload, Path(settings["progress"])

    def offered(carrier: Carrier, digest: str) -> Payload | None:
        data = payload(carrier, digest)
        if data is None or not harm.exists():
            return data
        lies.append(digest)
        return bytes(data[:-1]) + bytes([data[-1] ^ 1])

    def watch(diloco: DiLoCo) -> None:
        state, reducer = diloco._fragments[0].state, diloco.reducer
        if state.index not in states:
            states[state.index] = state.fingerprint()
        if not before:
            assert isinstance(reducer, Bucket)
            before.append(reducer.traffic["received"])
        progress.with_suffix(".new").write_text(json.dumps({"held": state.index, "lies": len(lies)}))
        progress.with_suffix(".new").rename(progress)

    carriers.REST = settings.get("rest", carriers.REST)
    session.LEAST_DEADLINE = settings.get("deadline", session.LEAST_DEADLINE)
    setattr(Carrier, "_payload", offered)  # noqa: B010
    result = work(settings, watch)
    return result | {"states": [*states.items()], "read": result["traffic"]["received"] - before[0]}


class Member(Worker):
    module = "studies.bucket.direct"


# The study.


@dataclass
class Run:
    """Members on their hosts: the announced ones first, then the one behind the router, if there is one."""

    net: Network
    place: Path
    members: list[Worker]

    def progress(self, name: str) -> Record:
        return json.loads((self.place / f"{name}.held").read_text())

    def follow(self, more: int) -> None:
        """Wait until every member has followed so many more rounds."""
        names = [path.stem for path in self.place.glob("*.held")]
        first = {name: self.progress(name)["held"] for name in names}
        deadline = time.monotonic() + STOPPED
        while any(self.progress(name)["held"] < first[name] + more for name in names):
            if time.monotonic() > deadline or any(member.process.poll() is not None for member in self.members):
                raise RuntimeError(f"no round for {STOPPED} s, or a member has ended")
            time.sleep(0.02)


@contextlib.contextmanager
def run(place: Path, owners: str, *, direct: bool = True, hidden: bool = True, **settings: Any) -> Iterator[Run]:
    """`direct`: members announce their addresses. `hidden`: there is one more, z, behind a NAT."""
    place.mkdir()
    router = len(owners) + 1
    with far_apart(ONE_WAY, router + hidden, offload=True) as net, contextlib.ExitStack() as ends:
        net.shape(LINK, range(1, router + hidden))
        net.shape(replace(LINK, mbit=LINK.mbit * (len(owners) + hidden)), [0])
        commands = {name: (net.command(host), net.address(host)) for host, name in enumerate(owners, start=1)}
        for command, _ in commands.values():  # so that a rule can count what a connection has carried
            subprocess.run([*command, "sysctl", "-q", "net.netfilter.nf_conntrack_acct=1"], check=True)
        if hidden:
            commands["z"] = ends.enter_context(behind_nat(net, router)), net.address(router)
        serve = [*net.command(0), sys.executable, "-m", "tests.support.s3", net.address(0), "80"]
        server = subprocess.Popen(serve, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ends.callback(server.communicate)  # its input ends
        assert server.stdout
        server.stdout.readline()
        env = ENVIRONMENT | {"AWS_ENDPOINT_URL": f"http://{net.address(0)}:80"}
        members = list[Worker]()
        for seed, (name, (command, address)) in enumerate(commands.items()):
            files = {"progress": str(place / f"{name}.held"), "harm": str(place / f"{name}.harm")}
            announced = {"announce": f"{address}:{PORT}", "key": "secret"} if direct else {"key": "secret"}
            members.append(Member(command, env, url="s3://bucket/run", name=name, seed=seed, gate=f"{place}/gate",
                                  quorum=len(commands), **files, **announced, **settings))  # fmt: skip
            ends.callback(members[-1].process.kill)
        open_gate(members, f"{place}/gate")
        while len([*place.glob("*.held")]) < len(members):
            time.sleep(0.1)
        yield Run(net, place, members)


@contextlib.contextmanager
def harmed(run: Run, harm: str, name: str, seconds: float) -> Iterator[list[str]]:
    """Harm an owner, or the store for so many seconds. Once that is over, the list has the harm if somebody met it."""
    host, met = 1 + OWNERS.index(name), list[str]()
    if harm == "store":
        for state, pause in (("down", seconds), ("up", 0.0)):
            subprocess.run(f"ip -n {run.net.namespaces[0]} link set {DEVICE} {state}".split(), check=True)
            time.sleep(pause)
        yield met
        met.append(harm)
    elif harm == "lies":
        before, file = run.progress(name)["lies"], run.place / f"{name}.harm"
        file.touch()
        yield met
        file.unlink()
        met += [harm] * (run.progress(name)["lies"] > before)
    else:
        chain = "add table ip harm; add chain ip harm in { type filter hook input priority 0; };"
        _nft(run, host, f"{chain} add rule ip harm in tcp dport {PORT} {RULES[harm]}")
        yield met
        met += [harm] * ("packets 0 " not in _nft(run, host, "list table ip harm"))
        _nft(run, host, "delete table ip harm")


def impossible() -> str | None:
    """Why this cannot run here, or None."""
    return netns.impossible() or (None if shutil.which("nft") else "nft not found: install nftables")


def _nft(run: Run, host: int, rules: str) -> str:
    words = [*run.net.command(host), "nft", rules]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def faults(place: Path, events: int, *, outage: float = OUTAGE, seed: int = 0) -> Record:
    """Harm all three owners, or two and the store, until every member has followed another round; again and again,
    until so many harms were met. The store is out of reach for `outage` seconds first, and for one second later."""
    chance, longest, met, until = random.Random(seed), 0.0, Counter[str](), place / "end"
    with run(place, OWNERS, until=str(until), **HARMED) as members:
        members.follow(2)
        for number in itertools.takewhile(lambda _: met.total() < events, itertools.count()):
            began, kinds = time.monotonic(), chance.sample([*RULES, "lies"], len(OWNERS))
            kinds[-1] = kinds[-1] if number % EVERY else "store"
            with contextlib.ExitStack() as over:
                harms = [
                    over.enter_context(harmed(members, kind, name, 1.0 if number else outage))
                    for kind, name in zip(kinds, chance.sample(OWNERS, len(OWNERS)), strict=True)
                ]
                members.follow(1)
            met.update(harm for found in harms for harm in found)
            longest = max(longest, time.monotonic() - began)
            print(f"{time.monotonic() - began:.1f} s", dict(met), flush=True)
        until.touch()
        results = [member.result() for member in members.members]
    states = dict[int, set[int]]()
    for index, state in (pair for result in results for pair in result["states"]):
        states.setdefault(index, set()).add(state)
    wrong = ("invalid", "lie", "gone", "diverged", "outvoted", "void")
    return {
        "events": met.total(), "met": dict(met), "rounds": len(states),
        "states": sum(len(result["states"]) for result in results),
        "states that differ": sum(len(different) > 1 for different in states.values()),
        "rejected": [e for r in results for e in r["events"] if e["event"] in wrong][:5],
        "longest wait for a round": longest, "read from owners": [r["direct"] for r in results],
    }  # fmt: skip


def timed(place: Path) -> Record:
    """Rounds through the store, and directly: of two members, and with a third behind a NAT."""
    values = dict[str, Any]()
    for name, hidden, direct in (("two, store", False, False), ("two", False, True), ("three, store", True, False),
                                 ("three", True, True)):  # fmt: skip
        with run(place / name, "ab", direct=direct, hidden=hidden, **TIMED) as members:
            results = [member.result() for member in members.members]
        rounds = len(results[0]["rounds"])
        seconds = _seconds(results)
        values[name] = {
            "rounds": rounds, "seconds": statistics.median(seconds), "fastest": min(seconds),
            "÷ wire": statistics.median(seconds) / WIRE, "read from the store": [r["read"] / rounds for r in results],
            "read from owners": [r["direct"] / rounds for r in results],
        }  # fmt: skip
        print(name, json.dumps(values[name]), flush=True)
    return values


def _seconds(results: Sequence[Record]) -> list[float]:
    """For each round, from the last delta until the slowest of the first two members has merged."""
    rounds = []
    for index in range(2, min(max(r["held"]) for r in results)):
        sent = [[r["ends"][step - 1] for _, step, *_ in r["rounds"] if step] for r in results]
        merged = [next(t for t, held in zip(r["ends"], r["held"], strict=True) if held >= index) for r in results[:2]]
        if all(len(times) >= index for times in sent):
            rounds.append(max(merged) - max(times[index - 1] for times in sent))
    return rounds


def targets(values: Record) -> list[Target]:
    out = []
    if found := values.get("faults"):
        wrong = len(found["rejected"]) + found["states that differ"]
        out.append(Target("harmed: objects or states that are not right", wrong, at_most=0))
    if found := values.get("timed"):
        read = [sum(found[name]["read from the store"][:2]) for name in ("two", "two, store")]
        what = "bytes that members with reachable peers read from the store ÷ before"
        out.append(Target(what, read[0] / read[1], at_most=0.05))
        for name in ("two", "three"):
            out.append(Target(f"{name} members: last delta to merged state ÷ the wire's time", found[name]["÷ wire"],
                              at_most=1.3))  # fmt: skip
    return out


def main() -> None:
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        print(json.dumps(member(json.loads(sys.argv[1]))), flush=True)
        os._exit(0)
    parser = argparse.ArgumentParser(prog="studies.bucket.direct", description="payloads straight from their owner")
    parser.add_argument("--events", type=int, default=300)
    parser.add_argument("--only", choices=("faults", "timed"))
    arguments = parser.parse_args()
    if reason := impossible():
        sys.exit(f"skipped: {reason}")
    values: Record = json.loads(RESULTS.read_text())["values"] if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only != "timed":
            values["faults"] = faults(Path(folder, "faults"), arguments.events)
            write(RESULTS, {}, values, targets(values))
        if arguments.only != "faults":
            values["timed"] = timed(Path(folder))
            write(RESULTS, {}, values, targets(values))


if __name__ == "__main__":
    main()
