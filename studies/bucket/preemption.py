"""Members that are preempted with notice, and return elsewhere under the same name with nothing but the store.
Run: python -m studies.bucket.preemption

Each notice is a SIGTERM to a `diloco train` that nobody else expects to leave. What is lost comes from the member
itself and, for all of its lives together, from the deltas that the records in the store name.
"""

import argparse
import json
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import Target, write
from diloco.bucket.rounds import place_of
from studies.bucket.trainer import Trainer
from studies.bucket.witness import Witness

RESULTS = Path(__file__).parent / "preemption.json"
MEMBERS, FRAGMENTS, SYNC_EVERY, BATCH, CONTEXT = 3, 3, 20, 4, 32
STEP = 0.05
"""Seconds."""
NOTICE = 30.0
"""Seconds that the machine has left. The member uses at most 20 of them for its last rounds."""
MODEL = ["--model", "nano", "--batch", str(MEMBERS * BATCH), "--context", str(CONTEXT), "--sync-every",
         str(SYNC_EVERY), "--fragments", f"balanced:{FRAGMENTS}", "--overlap", "2", "--replicas", str(MEMBERS),
         "--eval-every", "1000000", "--save-every", "1000000",
         "--steps", "10000000"]  # fmt: skip


def preempt(member: Trainer) -> dict[str, Any]:
    """Give the notice, and switch the machine off when the member has saved."""
    began = time.monotonic()
    member.signal(signal.SIGTERM)
    while not (stops := [event for event in member.events() if event["event"] == "stop"]):
        if not member.process.is_alive() or time.monotonic() > began + 120:
            raise RuntimeError(f"it does not stop: {member.log.read_text()[-2000:]}")
        time.sleep(0.05)
    member.kill()
    return {"member": member.name, "steps": stops[0]["step"], "lost": stops[0]["steps_lost"],
            "seconds": time.monotonic() - began}  # fmt: skip


def campaign(place: Path, times: int) -> list[dict[str, Any]]:
    """Preempt the members in turn; each comes back on a machine that has nothing of its earlier lives."""
    chance, names, preempted = random.Random(0), [f"m{k}" for k in range(MEMBERS)], []
    members = {name: Trainer(place, name, 0, MODEL, step=STEP) for name in names}
    try:
        for number in range(times):
            name = names[number % MEMBERS]
            members[name].trains(FRAGMENTS)
            time.sleep(chance.uniform(0, SYNC_EVERY * STEP))
            preempted.append(preempt(members[name]))
            members[name] = Trainer(place, name, number + 1, MODEL, step=STEP)
            print(number, preempted[-1], flush=True)
        for member in members.values():  # so that all work is either counted or known to be lost
            member.trains(FRAGMENTS)
            preempted.append(preempt(member))
    finally:
        for member in members.values():
            member.kill()
    return preempted


def steps_in_records(place: Path) -> float:
    """Steps that the records count, of the fragment that has fewest."""
    witness = Witness(str(place / "bucket"))
    witness.look()
    counted = {(f, entry.digest) for (f, _), record in witness.records.items() for entry in record.entries}
    tokens = [0.0] * witness.fragments
    for name, amount in witness.tokens.items():
        fragment, _ = place_of(name) or (0, 0)
        if (fragment, name.rpartition("-")[2]) in counted:
            tokens[fragment] += amount
    return min(tokens) / (BATCH * CONTEXT)


def main() -> None:
    parser = argparse.ArgumentParser(description="what a preemption with notice loses")
    parser.add_argument("--times", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        preempted = campaign(place, arguments.times)
        lost, seconds = [p["lost"] for p in preempted], [p["seconds"] for p in preempted]
        values = {
            "preemptions": len(preempted), "steps lost": sorted(lost), "median": statistics.median(lost),
            "mean": statistics.mean(lost), "largest": max(lost), "longest seconds": max(seconds),
            "steps done": sum(p["steps"] for p in preempted), "steps in the records": steps_in_records(place),
        }  # fmt: skip
    print(json.dumps(values), flush=True)
    targets = [
        Target("preemptions", values["preemptions"], at_least=50),
        Target("steps lost, median", values["median"], at_most=2),
        Target(
            "steps that no record counts, beyond those reported",
            values["steps done"] - values["steps in the records"] - sum(values["steps lost"]),
            at_most=0,
        ),
        Target("longest time from the notice to the checkpoint, s", values["longest seconds"], at_most=NOTICE),
    ]
    write(RESULTS, {"sync_every": SYNC_EVERY, "members": MEMBERS, "notice": NOTICE, **vars(arguments)}, values, targets)


if __name__ == "__main__":
    main()
