"""Three members of speeds 1 : 2 : 4 that are told nothing but `--batch auto`, and three equal ones with as many tokens.
Run: python -m studies.bucket.speeds

A step pauses for each of its sequences, as long as a machine of that speed would train it. So what is measured does not
depend on how processes share the cores.
"""

import argparse
import json
import statistics
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.record import Target, write
from studies.bucket.trainer import Trainer
from studies.bucket.witness import Witness

RESULTS = Path(__file__).parent / "speeds.json"
SPEEDS = {"slow": 1, "middle": 2, "fast": 4}
SEQUENCE = 0.16
"""Seconds of a sequence on the slow one."""
MODEL = ["--model", "nano", "--context", "64", "--sync-every", "20", "--fragments", "balanced:3", "--overlap", "2",
         "--replicas", "3", "--eval-every", "1000000", "--save-every", "1000000"]  # fmt: skip


class Arm:
    """Three members. Nobody makes a step before all have joined, so that all take part in every round."""

    def __init__(self, place: Path, words: list[str], sequences: dict[str, float]) -> None:
        place.mkdir()
        self.place, self.sequences, gate = place, sequences, place / "gate"
        self.members = dict[str, Trainer]()
        try:
            for name, sequence in sequences.items():
                member = Trainer(place, name, 0, [*MODEL, *words], sequence=sequence, gate=gate)
                self.members[name] = member
                _until(lambda member=member: any(e["event"] == "start" for e in member.events()), member)
            time.sleep(10.0)  # two heartbeats, so that all know each other
            gate.touch()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        for member in self.members.values():
            member.kill()

    def ended(self) -> dict[str, Any]:
        for member in self.members.values():
            _until(lambda member=member: not member.process.is_alive(), member)
            if member.process.exitcode:
                raise RuntimeError(member.log.read_text()[-2000:])
        witness, tokens = Witness(str(self.place / "bucket")), Counter[str]()
        witness.look()
        for record in witness.records.values():
            tokens.update({entry.member: round(entry.tokens) for entry in record.entries})
        weights = [record.members for record in witness.records.values()]
        return {
            "batches": {name: self.batch(name) for name in self.members},
            "utilization": {name: self.utilization(name) for name in self.members},
            "tokens": {name: tokens[name] // witness.fragments for name in self.members},
            "weights": {name: statistics.mean(w.get(name, 0.0) for w in weights) for name in self.members},
            "rounds": len(witness.records),
            "rounds with all": sum(len(w) == len(self.members) for w in weights),
            "loss": json.loads((self.members["slow"].run / "summary.json").read_text())["loss"],
        }

    def batch(self, name: str) -> int:
        config = tomllib.loads((self.members[name].run / "config.toml").read_text())
        return config.get("share", config["batch"] // len(self.members))

    def utilization(self, name: str) -> float:
        """Time that the machine needs for the steps ÷ time that passed, from the first step to the last."""
        steps = [line for line in self.members[name].events("metrics") if line["event"] == "step"]
        passed = steps[-1]["seconds"] - steps[0]["seconds"]
        return (len(steps) - 1) * self.batch(name) * self.sequences[name] / passed


def _until(done: Any, member: Trainer) -> None:
    deadline = time.monotonic() + 900
    while not done():
        if time.monotonic() > deadline or (member.process.exitcode or 0) != 0:
            raise RuntimeError(member.log.read_text()[-2000:])
        time.sleep(0.1)


def pair(place: Path, steps: int, seed: int) -> dict[str, dict[str, Any]]:
    """Both arms at the same time. The equal members have the same step time, and as many tokens in a step."""
    place.mkdir()
    words = ["--steps", str(steps), "--seed", str(seed)]
    unequal = Arm(place / "auto", [*words, "--batch", "auto"], {n: SEQUENCE / speed for n, speed in SPEEDS.items()})
    try:
        shares = {name: unequal.batch(name) for name in SPEEDS}
        share = round(sum(shares.values()) / len(shares))
        equal = Arm(place / "equal", [*words, "--batch", str(share * len(shares))],
                    dict.fromkeys(SPEEDS, shares["slow"] * SEQUENCE / share))  # fmt: skip
        try:
            return {"auto": unequal.ended(), "equal": equal.ended()}
        finally:
            equal.kill()
    finally:
        unequal.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description="what members of unequal speed contribute with --batch auto")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    pairs = list[dict[str, dict[str, Any]]]()
    settings = {"speeds": SPEEDS, "sequence": SEQUENCE, "words": MODEL, **vars(arguments)}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            pairs.append(pair(Path(folder, str(seed)), arguments.steps, seed))
            print(json.dumps(pairs[-1]), flush=True)
            write(RESULTS, settings, *summary(pairs))


def summary(pairs: list[dict[str, dict[str, Any]]]) -> tuple[dict[str, Any], list[Target]]:
    ratios = [p["auto"]["loss"] / p["equal"]["loss"] for p in pairs]
    ratio = statistics.mean(ratios)
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
    off = max(
        abs(p["auto"]["tokens"][name] / p["auto"]["tokens"]["slow"] / speed - 1)
        for p in pairs for name, speed in SPEEDS.items()
    )  # fmt: skip
    values = {"pairs": pairs, "loss ÷ equal": ratio, "standard error": error}
    targets = [
        Target("lowest utilization", min(u for p in pairs for u in p["auto"]["utilization"].values()), at_least=0.95),
        Target("counted tokens: largest deviation from the ratio of speeds", off, at_most=0.1),
    ]
    if error is not None:
        targets.append(Target("loss ÷ that of equal members, within two standard errors", ratio, at_most=1 + 2 * error))
    return values, targets


if __name__ == "__main__":
    main()
