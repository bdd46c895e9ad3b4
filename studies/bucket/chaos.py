"""Members of a bucket, and what they meet in, disturbed in every way. Run: python -m studies.bucket.chaos [--events N]

Real processes that train a small regression with the bucket's own defaults: half of the events over a folder, half over
an S3 server in this process, signed and encrypted. A witness reads the store past all faults and follows the chain of
records; members write down which states they held. As root the folder is a file system of its own, in a mount
namespace of this process, which can be full or read-only. In the end the S3 server is rolled back by some seconds.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.record import Record, Target, write
from diloco.bucket.round_store import RoundStore
from diloco.bucket.run import read_run
from diloco.bucket.store.envelope import Envelope
from diloco.bucket.store.store import Store
from studies.bucket.faults import AWAY, Crowd, FolderMedium, Medium, ServerMedium, prepare
from studies.bucket.life import FRAGMENTS
from studies.bucket.s3_server import LISTS, Server

RESULTS = Path(__file__).parent / "chaos.json"
EVERY = 1.1
"""Seconds between two events, on average."""
RESTART = 20.0
"""Seconds in which all that were killed together are waited for, before anything else happens."""
END = 150.0
"""Seconds in which everybody must have joined and closed rounds in the end, and then have left."""
BACK = 10.0
"""Seconds by which the server is rolled back."""
SPENT = ("seconds", "cpu", "waited", "others ran", "others waited", "rounds", "step")
"""What is kept of the longest hooks."""
KINDS = {"kill": 5, "stop": 5, "start": 9, "all killed at once": 1, "same name twice": 2, "leave": 3,
         "leave and join": 3, "bit flip": 1, "clock jumps an hour": 2, "medium": 6}  # fmt: skip
"""Events and how often they come, where they can."""


class Witness:
    """Follows the records, past all faults."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
        self.digests: dict[tuple[int, int], str] = {}
        self.members: list[int] = []  # of each round
        self.moved = time.monotonic()
        self.lost = 0
        self._store: Store | None = None

    def look(self) -> None:
        if self._store is None:
            store = Store(self._medium.watched())
            run = store.run(read_run(self._medium.secret), nullcontext())
            if run is None:
                return
            self._store = store
            envelope = Envelope(run.id, self._medium.secret)
            self._rounds = [RoundStore.reader(f, envelope) for f in range(FRAGMENTS)]
        for fragment in range(FRAGMENTS):
            self._follow(fragment)

    def _follow(self, fragment: int) -> None:
        assert self._store is not None
        index = sum(1 for f, _ in self.digests if f == fragment) + 1
        while True:
            previous = self.digests.get((fragment, index - 1), "")
            record = self._store.run(self._rounds[fragment].record(index, previous), nullcontext())[0]
            if record is None:
                return
            self.digests[fragment, index] = record.digest
            self.members.append(len(record.entries))
            self.moved = time.monotonic()
            index += 1

    def check(self) -> None:
        """Read everything again: what was closed must be there, with the same bytes."""
        assert self._store is not None
        for fragment in range(FRAGMENTS):
            link = ""
            for index in range(1, sum(1 for f, _ in self.digests if f == fragment) + 1):
                record = self._store.run(self._rounds[fragment].record(index, link), nullcontext())[0]
                self.lost += record is None or record.digest != self.digests[fragment, index]
                if record is None:
                    break
                link = record.digest


class Campaign:
    def __init__(self, medium: Medium, folder: Path, names: Sequence[str], seed: int, clocks: bool) -> None:
        self.medium, self.chance = medium, random.Random(seed)
        self.crowd = Crowd(medium, folder, random.Random(seed + 1), clocks, tuple(names))
        self.witness = Witness(medium)
        self.folder = folder
        self.happened: dict[str, int] = {}
        self.longest = 0.0
        self.restarts: list[float] = []
        self.broken: list[tuple[float, float]] = []  # from, to: something is wrong with the medium
        self._failing: tuple[str, float] | None = None  # fault, until
        self._joining: list[tuple[str, float]] = []  # leave and join: name, when
        self._joined: set[int] = set()  # lives
        self._life: dict[str, int] = {}  # the newest of each member that has said something
        self._read: dict[str, int] = {}  # bytes of each log
        self.lines: list[Record] = []

    def run(self, events: int) -> None:
        for name in self.crowd.names:
            self.crowd.start(name)
        if not self.until(lambda: len(self.witness.digests) > 2 * FRAGMENTS, END) or self.crowd.dead():
            raise RuntimeError(f"the run does not start; the last lines: {self.lines[-3:]}")
        next_at = time.monotonic()
        while sum(self.happened.values()) < events:
            self.tick()
            if time.monotonic() >= next_at:
                next_at = time.monotonic() + self.chance.uniform(0.3, 1.7) * EVERY
                kind = self.act()
                if kind is not None:
                    self.happened[kind] = self.happened.get(kind, 0) + 1
        self.heal()
        self.crowd.wake(everybody=True)

    def end(self) -> Record:
        """Everybody returns, closes rounds and leaves."""
        began = time.monotonic()
        self._joining.clear()  # all return now, and nobody after all have left
        out = self.go_on(lambda: len(self.witness.digests))
        for name in self.crowd.living():
            self.crowd.leave(name)
        self.until(lambda: not self.crowd.living(), END)
        out["finish() that did not return"] = len(self.crowd.living())
        self.witness.look()
        self.witness.check()
        return {"seconds to the end": time.monotonic() - began, **out}

    def go_on(self, closed: Callable[[], int]) -> Record:
        """Everybody returns and closes rounds, also those that were asked to leave just before."""
        for name in self.crowd.dead():
            self.crowd.start(name)
        before = closed()

        def all_returned() -> bool:
            for name in self.crowd.leaving.intersection(self.crowd.dead()):
                self.crowd.start(name)
            return not self.crowd.leaving and not self.waiting()

        self.until(lambda: all_returned() and closed() > before + 3 * FRAGMENTS, END)
        return {"members that could not join in the end": len(self.waiting()) + len(self.crowd.dead()),
                "rounds closed in the end": closed() - before}  # fmt: skip

    def roll_back(self, server: Server) -> Record:
        """The server forgets some seconds, under members that live and know more; then all are killed and return, some
        with a checkpoint that the store knows nothing about. What was closed is lost by intent here."""
        self.go_on(server.closed)
        self.read()
        before, seen = self.crowd.lives, len(self.lines)
        server.roll_back(BACK)
        self.until(lambda: False, BACK)
        self.kill_all()
        ended = self.go_on(server.closed)
        self.read()
        later = self.lines[seen:]
        self.lines = self.lines[:seen]
        return {
            "said by members that lived on": _count(
                line["event" if line["what"] == "event" else "error"] for line in later
                if line["life"] <= before and line["what"] in ("event", "ended")
            ),
            "said by members that returned": _count(
                line["event" if line["what"] == "event" else "text"][:80] for line in later
                if line["life"] > before and line["what"] in ("event", "ended")
            ),
            "states with several fingerprints": self._forked(line for line in later if line["life"] > before)[1],
            **ended,
        }  # fmt: skip

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """False, if it did not happen in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.tick()
            if time.monotonic() > deadline:
                return False
        return True

    def tick(self) -> None:
        """See what there is, and measure how long there was no round while somebody could have made one."""
        time.sleep(0.05)
        now = time.monotonic()
        self.crowd.wake()
        self.read()
        if self._failing and now >= self._failing[1]:
            self.heal()
        if not (self._failing and self._failing[0] == AWAY):
            self.witness.look()
        for name, at in [each for each in self._joining if now >= each[1]]:
            self._joining.remove((name, at))
            if name in self.crowd.dead():
                self.crowd.start(name)
        stands = self._failing is not None and self._failing[0] in self.medium.stops
        if stands or not self.trains():
            self.witness.moved = now
        self.longest = max(self.longest, now - self.witness.moved)

    def trains(self) -> bool:
        """Somebody has joined, lives, and is not stopped."""
        return any(self.life_of(name) in self._joined for name in self.crowd.able())

    def waiting(self) -> list[str]:
        """Who lives and has not joined."""
        return [name for name in self.crowd.able() if self.life_of(name) not in self._joined]

    def life_of(self, name: str) -> int:
        return self._life.get(name, -1)

    def read(self) -> None:
        for name in self.crowd.names:
            path = self.folder / f"{name}.jsonl"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read.get(name, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[name] = self._read.get(name, 0) + len(whole)
            for line in whole.splitlines():
                said = json.loads(line)
                self.lines.append(said | {"name": name})
                self._life[name] = max(self._life.get(name, -1), said["life"])
                if said["what"] == "joined":
                    self._joined.add(said["life"])

    def act(self) -> str | None:
        crowd, able, dead = self.crowd, self.crowd.able(), self.crowd.dead()
        joined = [name for name in able if self.life_of(name) in self._joined]
        possible = {
            "kill": len(able) > 1, "stop": len(able) > 1, "start": bool(dead), "all killed at once": len(able) > 1,
            "same name twice": bool(able), "leave": len(able) > 1, "leave and join": len(able) > 1,
            "bit flip": len(joined) > 2, "clock jumps an hour": bool(joined),
            "medium": bool(self.medium.faults) and self._failing is None,
        }  # fmt: skip
        kinds = [kind for kind, possible in possible.items() if possible]
        if not kinds:
            return None
        kind = self.chance.choices(kinds, [KINDS[kind] for kind in kinds])[0]
        among = {"start": dead, "bit flip": joined, "clock jumps an hour": joined}
        who = self.chance.choice(among.get(kind, able) or crowd.names)
        match kind:
            case "kill":
                crowd.kill(who)
            case "stop":
                crowd.stop(who, self.chance.choice((1.0, 2.0, 5.0, 10.0, 30.0)))
            case "start":
                crowd.start(who)
            case "all killed at once":
                self.kill_all()
            case "same name twice":
                crowd.twice(who)
            case "leave" | "leave and join":
                crowd.leave(who)
                if kind == "leave and join":
                    self._joining.append((who, time.monotonic() + self.chance.uniform(0.2, 3.0)))
            case "bit flip":
                crowd.flip(who)
            case "clock jumps an hour":
                crowd.jump(who)
            case "medium":
                return self.fail()
        return kind

    def kill_all(self) -> None:
        """All die and all return, at once. Measures until the first has joined."""
        for name in self.crowd.living():
            self.crowd.kill(name)
        self._joining.clear()
        self.heal()
        before = self.crowd.lives
        began = time.monotonic()
        for name in self.crowd.names:
            self.crowd.start(name)
        while time.monotonic() - began < RESTART and not any(life > before for life in self._joined):
            self.tick()
        self.restarts.append(time.monotonic() - began)

    def fail(self) -> str:
        fault = self.chance.choice(self.medium.faults)
        seconds = 10.0 if fault in LISTS else self.chance.uniform(1.0, 5.0)
        self._failing = (fault, time.monotonic() + seconds)
        self.broken.append((time.monotonic(), float("inf")))
        self.medium.fail(fault)
        return fault

    def heal(self) -> None:
        if self._failing is not None:
            self.medium.heal()
            self._failing = None
            self.broken[-1] = (self.broken[-1][0], time.monotonic())

    def _forked(self, lines: Iterable[Record]) -> tuple[int, int, int]:
        """States that were compared, those that members held with different bits, and lives that were left with a
        flipped bit: whose last state, two rounds after it, is none that another life held. A life that returns with the
        checkpoint of a flipped one has the bit, too."""
        holders: dict[tuple[int, int], dict[int, set[int]]] = {}  # state: fingerprint: lives
        flipped: dict[tuple[int, int], list[Record]] = {}  # life and fragment: what it held since
        sound: set[tuple[int, int]] = set()  # fragment and fingerprint, as other lives held them
        damaged: set[tuple[int, int]] = set()  # as flipped lives held them
        for line in sorted(lines, key=lambda line: line["at"]):
            match line["what"]:
                case "flipped":
                    flipped[line["life"], line["fragment"]] = []
                    damaged.add((line["fragment"], line["fingerprint"]))
                case "begins":
                    returned = damaged.difference(sound).intersection(enumerate(line["held"]))
                    flipped |= {(line["life"], fragment): [] for fragment, _ in returned}
                case "holds" if (line["life"], line["fragment"]) in flipped:
                    flipped[line["life"], line["fragment"]].append(line)
                    damaged.add((line["fragment"], line["fingerprint"]))
                case "holds":
                    sound.add((line["fragment"], line["fingerprint"]))
                    state = holders.setdefault((line["fragment"], line["index"]), {})
                    state.setdefault(line["fingerprint"], set()).add(line["life"])
        wrong = [held[-1] for held in flipped.values() if len(held) > 2]
        wrong = [
            line
            for line in wrong
            if line["fingerprint"] not in holders.get((line["fragment"], line["index"]), [line["fingerprint"]])
        ]
        return len(holders), sum(len(state) > 1 for state in holders.values()), len(wrong)

    def report(self, seconds: float, ending: Record) -> Record:
        said: dict[str, list[Record]] = {}
        for line in self.lines:
            said.setdefault(line["what"], []).append(line)
        compared, forked, wrong = self._forked(self.lines)
        calm = [line for line in said.get("joined", []) if not self._disturbed(line, line["seconds"])]
        slow = [line for line in said.get("hook", []) if not self._stopped(line, line["seconds"])]
        hooks = [line["seconds"] for line in slow]
        losses = [line["loss"] for line in said.get("trains", [])]
        events = [line["event"] for line in said.get("event", [])]
        return {
            "events": dict(sorted(self.happened.items())), "seconds": seconds, **ending,
            "starts": self.crowd.lives, "of these": self.crowd.started,
            "records": len(self.witness.digests), "members a record": statistics.mean(self.witness.members),
            "records changed or lost": self.witness.lost + self.medium.spoiled(),
            "states compared": compared, "states with several fingerprints": forked,
            "lives left with a flipped bit": wrong,
            "longest without a round": self.longest,
            "joins": _spread([line["seconds"] for line in said.get("joined", [])]),
            "joins while nothing else was wrong": _spread([line["seconds"] for line in calm]),
            "restarts of all": _spread(self.restarts),
            "leaves": _spread([line["seconds"] for line in said.get("left", [])]),
            "longest hook": max(hooks, default=0.0), "hooks above 50 ms": sum(hook > 0.05 for hook in hooks),
            "longest hook with a core": max((line["seconds"] - line["waited"] for line in slow), default=0.0),
            "longest hooks": [{what: line[what] for what in SPENT}
                              for line in sorted(slow, key=lambda line: -line["seconds"])[:10]],
            "most CPU of a hook": max((line["cpu"] for line in slow), default=0.0),
            "longest first hook": max((line["seconds"] for line in said.get("first hook", [])), default=0.0),
            "loss at first": statistics.mean(losses[:5]), "loss at last": statistics.median(losses[-20:]),
            "ends of members": _count(f"{line['error']}: {line['text'][:60]}" for line in said.get("ended", [])),
            "ends that nobody asked for": _count(
                line["error"] for line in said.get("ended", [])
                if line["life"] in self._joined and line["error"] != "Superseded"
            ),
            "events of members": _count(events),
        }  # fmt: skip

    def _disturbed(self, line: Record, seconds: float) -> bool:
        began, ended = line["at"] - seconds, line["at"]
        return self._stopped(line, seconds) or any(low < ended and began < high for low, high in self.broken)

    def _stopped(self, line: Record, seconds: float) -> bool:
        began, ended = line["at"] - seconds - 0.5, line["at"] + 0.5
        return any(name == line["name"] and low < ended and began < high for name, low, high in self.crowd.stops)


def _spread(values: Sequence[float]) -> Record:
    ordered = sorted(values)
    if not ordered:
        return {"count": 0, "median": 0.0, "90 %": 0.0, "most": 0.0}
    return {"count": len(ordered), "median": statistics.median(ordered), "90 %": ordered[int(0.9 * (len(ordered) - 1))],
            "most": ordered[-1]}  # fmt: skip


def _count(words: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:12])


def campaign(kind: str, events: int, seed: int, *, clocks: bool, roll_back: bool) -> Record:
    """`roll_back`: the S3 server, in the end. A record whose delta it has forgotten stops its fragment until the record
    may be replaced (`rules.VOID`), so this may take minutes."""
    with tempfile.TemporaryDirectory() as place:
        medium: Medium = FolderMedium(Path(place)) if kind == "folder" else ServerMedium()
        lives = Path(place, "lives")
        lives.mkdir()
        names = [f"m{k}" for k in range(5 if kind == "folder" else 4)]
        disturbed = Campaign(medium, lives, names, seed, clocks)
        began = time.monotonic()
        try:
            disturbed.run(events)
            found = disturbed.report(time.monotonic() - began, disturbed.end())
            if roll_back and isinstance(medium, ServerMedium):
                found["rolled back"] = disturbed.roll_back(medium.server)
            return found
        finally:
            disturbed.crowd.end()
            medium.end()


def targets(values: Record) -> list[Target]:
    each = list(values.values())
    joins = [found["joins while nothing else was wrong"] for found in each]
    restarts = [found["restarts of all"]["median"] for found in each if found["restarts of all"]["count"]]
    out = [
        Target("events", sum(sum(found["events"].values()) for found in each), at_least=1000),
        Target("records that changed or were lost", sum(found["records changed or lost"] for found in each), at_most=0),
        Target("states of which members held different bits",
               sum(found["states with several fingerprints"] for found in each), at_most=0),
        Target("members that had joined and ended, and whose name nobody has taken",
               sum(sum(found["ends that nobody asked for"].values()) for found in each), at_most=0),
        Target("members that could not join in the end, or whose finish() did not return",
               sum(found["members that could not join in the end"] + found["finish() that did not return"]
                   for found in each), at_most=0),
        Target("rounds after the server was rolled back",
               min((found["rolled back"]["rounds closed in the end"] for found in each if "rolled back" in found),
                   default=FRAGMENTS), at_least=FRAGMENTS),
        Target("lives that were left with a flipped bit", sum(found["lives left with a flipped bit"] for found in each),
               at_most=0),
        Target("longest time without a closed round while somebody trains, s",
               max(found["longest without a round"] for found in each), at_most=15),
        Target("joins, median, s", max(join["median"] for join in joins), at_most=2),
        Target("joins, 90 %, s", max(join["90 %"] for join in joins), at_most=5),
        Target("longest hook after the first step of a life, s", max(found["longest hook"] for found in each),
               at_most=0.05),
    ]  # fmt: skip
    if restarts:
        out.append(Target("restart of all until the first has joined, median, s", max(restarts), at_most=2))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="members of a bucket, disturbed in every way")
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("folder", "s3"), nargs="+", default=["folder", "s3"])
    parser.add_argument("--to", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if os.geteuid() == 0 and shutil.which("unshare") and "CHAOS_OWN_MOUNTS" not in os.environ:
        os.environ["CHAOS_OWN_MOUNTS"] = "1"
        os.execvp("unshare", ["unshare", "-m", sys.executable, "-m", "studies.bucket.chaos", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as place:
        clocks = prepare(Path(place))
        values: Record = {}
        for kind in arguments.only:
            values[kind] = campaign(
                kind, arguments.events // len(arguments.only), arguments.seed, clocks=clocks, roll_back=True
            )
            print(kind, json.dumps(values[kind], indent=1), flush=True)
            settings = {"events": arguments.events, "seed": arguments.seed, "every": EVERY}
            write(arguments.to, settings, values, targets(values), quiet=kind != arguments.only[-1])


if __name__ == "__main__":
    main()
