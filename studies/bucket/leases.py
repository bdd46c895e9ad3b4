"""Eight members lease one epoch of a corpus, while they are killed, come back and leave at random.
Run: python -m studies.bucket.leases

Every member writes down which windows it trains on, and which steps are in each delta. With the records, that says how
often each window was trained and counted; the audit of the leases must name all that was not exactly once.
"""

import argparse
import json
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.record import Target, write
from diloco.bucket import Bucket
from diloco.bucket.fragment import Fragment
from diloco.bucket.leases import Leases, Ranges, audit, read_names, read_ranges
from diloco.bucket.run import find_run
from diloco.bucket.store import List
from diloco.bucket.store.backend import open_store
from diloco.bucket.store.envelope import Envelope
from diloco.bucket.store.store import Store
from studies.bucket.trainer import Trainer
from studies.bucket.witness import Witness

RESULTS = Path(__file__).parent / "leases.json"
MEMBERS, SYNC_EVERY, BATCH, CONTEXT, STEP = 8, 10, 4, 32, 0.2
TOKENS = BATCH * CONTEXT
"""Of a step of one member."""
LEAST, EVENTS = 5, 3
"""Members that always live, and events for each kill."""
MODEL = ["--model", "nano", "--batch", str(MEMBERS * BATCH), "--context", str(CONTEXT), "--sync-every",
         str(SYNC_EVERY), "--fragments", "balanced:3", "--overlap", "2", "--replicas", str(MEMBERS), "--inner", "adamw",
         "--eval-every", "1000000", "--save-every", "1000000",
         "--steps", "10000000"]  # fmt: skip


def note_work(path: Path) -> None:
    """In a member's process: write down which windows each step trains, and the work of which steps each delta has."""
    file, current, sent = path.open("a", buffering=1), [0], dict[int, tuple[Any, int]]()
    take, send, sealed = Leases.take, Bucket.send, Fragment._sealed

    def note(**values: Any) -> None:
        file.write(json.dumps(values) + "\n")

    def taken(self: Leases, count: int, step: int) -> list[tuple[int, int, int]]:
        current[0], spans = step, take(self, count, step)
        note(step=step, spans=spans)
        return spans

    def sending(self: Bucket, fragment: int, index: int, delta: Callable[[], Any]) -> None:
        step = current[0]

        def made() -> Any:
            found = delta()
            sent[id(found)] = found, step
            return found

        send(self, fragment, index, made)

    def encoded(self: Fragment, index: int, delta: Any) -> Any:
        found, (_, step) = sealed(self, index, delta), sent.pop(id(delta))
        if found is not None:
            note(
                delta=[self.number, found.contribution.digest], first=step - round(delta.weight / TOKENS) + 1, last=step
            )
        return found

    Leases.take, Bucket.send, Fragment._sealed = taken, sending, encoded


def windows_of(place: Path) -> tuple[Counter[int], list[Counter[int]]]:
    """How often each window of the first epoch was trained, and how often the rounds of each fragment counted it: from
    what the members wrote down and from the records."""
    witness, trained = Witness(str(place / "bucket")), Counter[int]()
    witness.look()
    named = {(f, entry.digest) for (f, _), record in witness.records.items() for entry in record.entries}
    counted = [Counter[int]() for _ in range(witness.fragments)]
    for path in place.glob("*.work"):
        windows = dict[int, list[int]]()
        for line in path.read_text().splitlines(keepends=True):
            values = json.loads(line) if line.endswith("\n") else {}  # it was killed while it wrote
            if "spans" in values:
                windows[values["step"]] = [w for e, first, end in values["spans"] if e == 0 for w in range(first, end)]
                trained.update(windows[values["step"]])
            elif values and tuple(values["delta"]) in named:
                for step in range(values["first"], values["last"] + 1):
                    counted[values["delta"][0]].update(windows[step])
    return trained, counted


def epoch(place: Path, kills: int, corpus: Path, seed: int) -> dict[str, Any]:
    """Until the first epoch is complete. Kills, departures and joins are spread over it: the next one comes when its
    share of the ranges is done, so that they do not depend on the machine's speed."""
    chance, members = random.Random(seed), dict[str, Trainer]()
    lives, happened, killed = Counter[str](), Counter[str](), set[str]()

    def start(name: str) -> None:
        words = [*MODEL, "--data", str(corpus)]
        note = partial(note_work, place / f"{name}-{lives[name]}.work")
        members[name] = Trainer(place, name, lives[name], words, step=STEP, prepare=note)
        lives[name] += 1

    try:
        for k in range(MEMBERS):
            start(f"m{k}")
        members["m0"].trains(1)
        store, run = Store(open_store(str(place / "bucket"))), find_run(str(place / "bucket"))
        assert run is not None
        envelope, ranges = Envelope(run.id), read_ranges(run.note["ranges"])
        assert ranges is not None
        while (done := _done(store, ranges)) < ranges.count:
            time.sleep(0.5)
            living = sorted(name for name, member in members.items() if member.process.is_alive())
            dead = sorted(members.keys() - living)
            if happened["kill"] >= kills:
                for name in dead:
                    start(name)
                continue
            if done < ranges.count * sum(happened.values()) / (EVENTS * kills):
                continue
            what = chance.choice(["kill", "kill", "kill", "leave", "join"] if dead else ["kill"])
            what = "join" if len(living) < LEAST else what
            name = chance.choice(dead if what == "join" else living)
            if what == "join":
                start(name)
            elif what == "kill":
                killed.add(_incarnation(place, name))
                members[name].kill()
            else:
                members[name].signal(signal.SIGTERM)
                members[name].process.join(60)
                killed |= {_incarnation(place, name)} if members[name].process.is_alive() else set()
                members[name].kill()
            happened[what] += 1
            print(f"{done}/{ranges.count}", what, name, dict(happened), flush=True)
        (audited, *_) = store.run(audit(envelope, ranges, lambda *_: None), nullcontext())
    finally:
        for member in members.values():
            member.kill()
    trained, counted = windows_of(place)
    twice = {window // ranges.size for of in counted for window in of if of[window] > 1}
    retrained = {window // ranges.size for window in trained if trained[window] > 1}
    return {
        "events": dict(happened), "ranges": ranges.count, "windows": ranges.windows, "counted once": audited.once,
        "taken again": audited.again,
        "taken again without a kill": sum(not killed.intersection(holders) for holders in audited.again.values()),
        "windows that a fragment did not count": sum(min(of[w] for of in counted) < 1 for w in range(ranges.windows)),
        "ranges counted twice": len(twice), "ranges trained twice": len(retrained),
        "not named": sorted((twice | retrained) - set(audited.again)),
    }  # fmt: skip


def _incarnation(place: Path, name: str) -> str:
    """The newest one, as the audit writes it."""
    numbers = [int(path.name) for path in (place / "bucket/members" / name).glob("??????")]
    return f"{name}/{max(numbers, default=-1)}"


def _done(store: Store, ranges: Ranges) -> int:
    known = read_names(store.perform(List("leases/000000/")))
    return sum(attempts.is_done(*ranges.bounds(number)) for (_, number), attempts in known.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="one epoch, leased by members that come and go")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranges", type=int, default=700)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        text = random.Random(0)
        size = arguments.ranges * SYNC_EVERY * BATCH * CONTEXT
        words = ["".join(text.choices("abcdefghijklmnopqrstuvwxyz", k=text.randint(2, 9))) for _ in range(2000)]
        (place / "corpus.txt").write_text(" ".join(text.choices(words, k=size // 6)))
        values = epoch(place, arguments.kills, place / "corpus.txt", arguments.seed)
    print(json.dumps(values, indent=1))
    targets = [
        Target("kills", values["events"]["kill"], at_least=arguments.kills),
        Target("ranges that are neither counted once nor named",
               values["ranges"] - values["counted once"] - len(values["taken again"]), at_most=0),
        Target("ranges taken again of which no holder was killed", values["taken again without a kill"], at_most=0),
        Target("windows that a fragment did not count", values["windows that a fragment did not count"], at_most=0),
        Target("ranges trained or counted twice that the audit does not name", len(values["not named"]), at_most=0),
    ]  # fmt: skip
    write(RESULTS, {"members": MEMBERS, "sync_every": SYNC_EVERY, "step": STEP, **vars(arguments)}, values, targets)


if __name__ == "__main__":
    main()
