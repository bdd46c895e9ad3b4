"""Eight members lease one epoch of a corpus, while they are killed, come back and leave at random.
Run: python -m studies.bucket.leases

Every member writes down the windows that it trains on. What the audit says is then compared with what happened.
"""

import argparse
import json
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.record import Target, write
from diloco.bucket.leases import Ranges, read_names
from diloco.bucket.store import List
from diloco.bucket.store.backend import open_store
from diloco.bucket.store.store import Store
from diloco.report.bucket import Watch
from studies.bucket.trainer import Trainer

RESULTS = Path(__file__).parent / "leases.json"
MEMBERS, SYNC_EVERY, BATCH, CONTEXT, STEP = 8, 10, 4, 32, 0.2
MODEL = ["--model", "nano", "--batch", str(MEMBERS * BATCH), "--context", str(CONTEXT), "--sync-every",
         str(SYNC_EVERY), "--fragments", "balanced:3", "--overlap", "2", "--replicas", str(MEMBERS), "--inner", "adamw",
         "--eval-every", "1000000", "--eval-tokens", "512", "--save-every", "1000000",
         "--steps", "10000000"]  # fmt: skip


def epoch(place: Path, events: int, corpus: Path, seed: int) -> dict[str, Any]:
    """Until the first epoch is complete: it has `events` kills, departures and joins, as long as it lasts."""
    chance, members = random.Random(seed), dict[str, Trainer]()
    lives, happened, killed = Counter[str](), Counter[str](), set[str]()

    def start(name: str) -> None:
        members[name] = Trainer(place, name, lives[name], [*MODEL, "--data", str(corpus)], step=STEP)
        lives[name] += 1

    try:
        for k in range(MEMBERS):
            start(f"m{k}")
        members["m0"].trains(1)
        store = Store(open_store(str(place / "bucket")))
        ranges = _ranges(place)
        next_at = time.monotonic()
        while not _is_complete(store, ranges):
            time.sleep(0.5)
            living = [name for name, member in members.items() if member.process.is_alive()]
            if sum(happened.values()) >= events:
                for name in members.keys() - living:
                    start(name)
                continue
            if time.monotonic() < next_at:
                continue
            next_at = time.monotonic() + chance.uniform(1.0, 3.0)
            dead = sorted(members.keys() - living)
            what = "join" if dead and (len(living) < 5 or chance.random() < 0.5) else chance.choice(["kill", "leave"])
            name = chance.choice(dead if what == "join" else sorted(living))
            if what == "join":
                start(name)
            elif what == "kill":
                killed.add(f"{name}/{_incarnations(place, name) - 1}")
                members[name].kill()
            else:
                members[name].signal(signal.SIGTERM)
                members[name].process.join(60)
                killed |= {f"{name}/{_incarnations(place, name) - 1}"} if members[name].process.is_alive() else set()
                members[name].kill()
            happened[what] += 1
            print(what, name, dict(happened), flush=True)
        lines = list(Watch(str(place / "bucket"), None).audit())
    finally:
        for member in members.values():
            member.kill()
    print(*lines, sep="\n", flush=True)
    again = [line for line in lines[: _end_of_epoch(lines)] if " was taken by " in line]
    holders = [set(line.partition(" was taken by ")[2].partition(":")[0].split(", then by ")) for line in again]
    return {"events": dict(happened), "ranges": ranges.count, "summary": lines[0], "taken again": again,
            "taken again without a kill": sum(not names & killed for names in holders)}  # fmt: skip


def _end_of_epoch(lines: list[str]) -> int:
    return next((k for k, line in enumerate(lines) if line.startswith("epoch 1")), len(lines))


def _incarnations(place: Path, name: str) -> int:
    return len(list((place / "bucket/members" / name).glob("??????"))) and 1 + max(
        int(path.name) for path in (place / "bucket/members" / name).glob("??????")
    )


def _ranges(place: Path) -> Ranges:
    shared: Any = Watch(str(place / "bucket"), None).run.note["ranges"]
    return Ranges(shared["windows"], shared["size"])


def _is_complete(store: Store, ranges: Ranges) -> bool:
    known = read_names(store.perform(List("leases/000000/")))
    done = [number for (_, number), attempts in known.items() if attempts.is_done(*ranges.bounds(number))]
    return len(done) == ranges.count


def main() -> None:
    parser = argparse.ArgumentParser(description="one epoch, leased by members that come and go")
    parser.add_argument("--events", type=int, default=50)
    parser.add_argument("--ranges", type=int, default=700)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        text = random.Random(0)
        size = arguments.ranges * SYNC_EVERY * BATCH * CONTEXT
        words = ["".join(text.choices("abcdefghijklmnopqrstuvwxyz", k=text.randint(2, 9))) for _ in range(2000)]
        (place / "corpus.txt").write_text(" ".join(text.choices(words, k=size // 6)))
        values = epoch(place, arguments.events, place / "corpus.txt", arguments.seed)
    print(json.dumps(values, indent=1))
    summary = values["summary"]
    once = int(summary.split(" counted once")[0].rpartition(" ")[2])
    targets = [
        Target("kills, departures and joins", sum(values["events"].values()), at_least=arguments.events),
        Target("ranges that are neither counted once nor named", values["ranges"] - once - len(values["taken again"]),
               at_most=0),
        Target("ranges taken again of which no holder was killed", values["taken again without a kill"], at_most=0),
    ]  # fmt: skip
    write(RESULTS, {"members": MEMBERS, "sync_every": SYNC_EVERY, "step": STEP, **vars(arguments)}, values, targets)


if __name__ == "__main__":
    main()
