"""Four members that run `diloco train` over a folder, killed, stopped and restarted at random.
Run: python -m studies.bucket.restarts

Checks, through the store alone, that the run never stops while a member lives, that nothing which was closed changes or
is lost, even when all are killed at once, and that members which held the same round held the same bits. Then the same
run undisturbed with as many tokens, to compare the loss.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.record import Target, write
from diloco.bucket import find_run
from diloco.bucket.members import read_members
from diloco.bucket.rounds import Record, member_of, place_of, read_record, record_name
from diloco.bucket.store import List, Read
from diloco.bucket.store.backend import open_store
from diloco.bucket.store.envelope import HEADER, PREFIX, Envelope
from diloco.bucket.store.store import Store

RESULTS = Path(__file__).parent / "restarts.json"
MODEL = ["--model", "tiny", "--batch", "16", "--context", "64", "--sync-every", "10", "--fragments", "balanced:3",
         "--overlap", "2", "--replicas", "4", "--eval-every", "100000", "--save-every", "20",
         "--lr", "0.004"]  # fmt: skip
PER_ROUND = 4 * 64 * 10
"""Tokens of a member in a round: sequences · context · sync_every."""
STALLED = 60.0
"""Seconds without a closed round, while somebody trains, that count as a stop."""


@dataclass
class Crowd:
    """The processes of a run."""

    place: Path
    steps: int
    words: list[str] = field(default_factory=list)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    stopped: dict[str, float] = field(default_factory=dict)  # name: when it goes on

    def start(self, name: str) -> None:
        words = ["train", "--bucket", str(self.place / "bucket"), "--member", name, "--name", name, "--steps",
                 str(self.steps), "--out", str(self.place / "runs"), *MODEL, *self.words]  # fmt: skip
        with (self.place / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "diloco", *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def living(self) -> list[str]:
        return [name for name, p in self.processes.items() if p.poll() is None]

    def dead(self) -> list[str]:
        return [name for name, p in self.processes.items() if p.poll() is not None]

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()
        self.stopped.pop(name, None)

    def stop(self, name: str, seconds: float) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)
        self.stopped[name] = time.monotonic() + seconds

    def wake(self) -> None:
        for name, until in list(self.stopped.items()):
            if time.monotonic() >= until:
                self.processes[name].send_signal(signal.SIGCONT)
                del self.stopped[name]

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


class Witness:
    """Reads the store and remembers."""

    def __init__(self, url: str) -> None:
        self.url, self.records, self.heads = url, {}, {}
        self.fingerprints: dict[tuple[int, int], set[int]] = {}
        self.changed = 0
        self.tokens: dict[str, float] = {}  # delta: tokens
        self.moved = time.monotonic()
        self._envelope: Envelope | None = None

    def look(self) -> None:
        if self._envelope is None:
            if not Path(self.url, "run.json").exists() or (run := find_run(self.url)) is None:
                return
            self._envelope, self._store, self.fragments = (
                Envelope(run.id),
                Store(open_store(self.url)),
                len(run.snapshots),
            )
        names = self._store.perform(List("rounds/"))
        for fragment in range(self.fragments):
            for name in names:
                place = place_of(name) if member_of(name) else None
                if place and place[0] == fragment and name not in self.tokens:
                    self._delta(fragment, name)
            previous, index = "", 1
            while (name := record_name(fragment, index, 0)) in names:
                previous = self._record(fragment, index, name, previous).digest
                index += 1
            if index <= max((i for f, i in self.records if f == fragment), default=0):
                self.changed += 1  # a record that was there is gone

    def _delta(self, fragment: int, name: str) -> None:
        data = self._store.perform(Read(name, 0, first=PREFIX.size + HEADER))
        if data is not None and self._envelope is not None:
            header = self._envelope.open(name, "delta", data, None, head=True).header
            self.tokens[name] = header["tokens"]
            self.fingerprints.setdefault((fragment, header["index"] - 1), set()).add(header["fingerprint"])

    def _record(self, fragment: int, index: int, name: str, previous: str) -> Record:
        assert self._envelope is not None
        record = read_record(self._envelope.open(name, "record", self._store.perform(Read(name, 1 << 21)), None),
                             fragment, index, previous)  # fmt: skip
        if (fragment, index) not in self.records:
            self.records[fragment, index] = record
            self.moved = time.monotonic()
        self.changed += self.records[fragment, index].digest != record.digest
        return record

    def counted(self) -> float:
        """Tokens that are in closed rounds, of one fragment."""
        wanted = {e.digest for (f, _), record in self.records.items() if f == 0 for e in record.entries}
        return sum(tokens for name, tokens in self.tokens.items() if name.rpartition("-")[2] in wanted)

    def members(self) -> dict[str, Any]:
        assert self._envelope is not None
        return {m.name: m for m in self._store.run(read_members(self._envelope, lambda *_: None), nullcontext())}


def chaos(
    place: Path,
    members: int,
    events: int,
    steps: int,
    every: float,
    seed: int,
    kill_all: bool,
    words: Sequence[str] = (),
    between: int = 0,
) -> dict[str, Any]:
    """Let them run under this many events, then restart all and let the run end.

    Two events are about `every` seconds apart, and at least `between` closed rounds.
    """
    chance, crowd, witness = random.Random(seed), Crowd(place, steps, list(words)), Witness(str(place / "bucket"))
    names = [f"m{k}" for k in range(members)]
    happened: dict[str, int] = {}
    longest = 0.0
    try:
        for name in names:
            crowd.start(name)
        _until(lambda: len(witness.records) > 0, witness, crowd)
        next_at, all_at = time.monotonic() + every, events // 2 if kill_all else -1
        next_round = between
        while sum(happened.values()) < events and not _ended(crowd):
            crowd.wake()
            witness.look()
            if crowd.living() and len(crowd.stopped) < len(crowd.living()):
                longest = max(longest, time.monotonic() - witness.moved)
            else:
                witness.moved = time.monotonic()
            if time.monotonic() >= next_at and len(witness.records) >= next_round:
                next_at = time.monotonic() + chance.uniform(0.5, 1.5) * every
                next_round = len(witness.records) + between
                what = "kill all" if sum(happened.values()) == all_at else _act(crowd, chance)
                if what == "kill all":
                    for name in crowd.living():
                        crowd.kill(name)
                    crowd.start(names[0])
                happened[what] = happened.get(what, 0) + 1
            time.sleep(0.2)
        ended_early = _ended(crowd)
        for name in crowd.stopped.copy():
            crowd.stopped[name] = 0.0
        crowd.wake()
        for name in crowd.dead():
            if crowd.processes[name].returncode != 0:
                crowd.start(name)
        _until(lambda: not crowd.living(), witness, crowd, 600)
        witness.look()
    finally:
        crowd.end()
    codes = {name: process.returncode for name, process in crowd.processes.items()}
    summaries = [json.loads(p.read_text()) for p in (place / "runs").glob("*/summary.json")]
    return {
        "events": happened, "ended before all events": ended_early, "exit codes": codes,
        "longest without a round": longest, "rounds": len(witness.records), "records changed or lost": witness.changed,
        "states with several fingerprints": sum(len(each) > 1 for each in witness.fingerprints.values()),
        "states compared": sum(1 for each in witness.fingerprints.values()),
        "members a round": sum(len(r.entries) for r in witness.records.values()) / max(len(witness.records), 1),
        "tokens": witness.counted(), "losses": sorted(summary["loss"] for summary in summaries),
    }  # fmt: skip


def _act(crowd: Crowd, chance: random.Random) -> str:
    able = [name for name in crowd.living() if name not in crowd.stopped]
    dead = [name for name in crowd.dead() if crowd.processes[name].returncode != 0]
    kind = chance.choice(["kill", "stop", "start", "start"] if dead else ["kill", "stop"])
    if kind == "start" or len(able) < 2:
        if dead:
            crowd.start(chance.choice(dead))
            return "start"
        return "nothing"
    if kind == "kill":
        crowd.kill(chance.choice(able))
        return "kill"
    crowd.stop(chance.choice(able), chance.uniform(1.0, 8.0))
    return "stop"


def _ended(crowd: Crowd) -> bool:
    return any(process.poll() == 0 for process in crowd.processes.values())


def _until(what: Any, witness: Witness, crowd: Crowd, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline or any(p.poll() == 2 for p in crowd.processes.values()):
            raise RuntimeError(f"it does not come; the logs are in {crowd.place}")
        crowd.wake()
        witness.look()
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description="members are killed, stopped, restarted; the run goes on")
    parser.add_argument("--events", type=int, default=50)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two events")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        disturbed = Path(folder, "disturbed")
        disturbed.mkdir()
        found = chaos(disturbed, 4, arguments.events, arguments.steps, arguments.every, arguments.seed, True)
        print(json.dumps(found, indent=1), flush=True)
        rounds = max(round(found["tokens"] / (4 * PER_ROUND)), 1)
        calm = Path(folder, "calm")
        calm.mkdir()
        plain = chaos(calm, 4, 0, rounds * 10, 1.0, 0, False)
    loss, undisturbed = found["losses"][0], plain["losses"][0]
    values = {"disturbed": found, "undisturbed": plain}
    targets = [
        Target("events", sum(found["events"].values()), at_least=50),
        Target("longest time without a closed round, s", found["longest without a round"], at_most=STALLED),
        Target("records that changed or were lost", found["records changed or lost"], at_most=0),
        Target("states of which members held different bits", found["states with several fingerprints"], at_most=0),
        Target("loss ÷ that of the undisturbed run of equal tokens", loss / undisturbed, at_most=1.02),
    ]  # fmt: skip
    write(RESULTS, vars(arguments), values, targets)


if __name__ == "__main__":
    main()
