"""Measure the bucket. Run: python -m studies.bucket (as root for the slow link; about 15 minutes)

Everything is written after every measure; `--only` measures some again and keeps the rest.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.record import Record, Target, read, write
from studies.bucket import folder, kill, link, loss, outage
from studies.bucket.worker import COMMON, STEP

RESULTS = Path(__file__).parent / "results.json"
MEASURES: dict[str, Callable[[str], Record | None]] = {
    "traffic": folder.traffic,
    "utilisation": folder.utilisation,
    "slow": folder.slow,
    "join": folder.join,
    "kill": kill.kill,
    "link": link.link,
    "outage": outage.outage,
    "loss": loss.loss,
    "carrying": loss.carrying,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="studies.bucket", description="what the bucket costs and survives")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES), metavar="MEASURE",
                        help=", ".join(MEASURES))  # fmt: skip
    arguments = parser.parse_args()
    values: Record = (read(RESULTS) or {"values": {}})["values"]
    with tempfile.TemporaryDirectory() as place:
        for name in arguments.only:
            if (found := MEASURES[name](f"{place}/{name}")) is not None:
                values[name] = found
                write(RESULTS, {"step": STEP, **COMMON}, values, targets(values), quiet=True)
            print(time.strftime("%H:%M:%S"), name, json.dumps(found), flush=True)
    print(*targets(values), sep="\n")


def targets(values: Record) -> list[Target]:
    out = []
    if found := values.get("traffic"):
        for each in (found, found["long"]):
            what = f"{each['rounds']} rounds: bytes up and down ÷ the deltas alone"
            out.append(Target(what, each["ratio"], at_most=1.10))
    if found := values.get("utilisation"):
        out.append(Target("folder: steps per second ÷ those without sync", found["ratio"], at_least=0.97))
        out.append(Target("rounds with all members", found["rounds_with_all"], at_least=0.9))
        out.append(Target("steps a round ÷ sync_every", found["steps_a_round"], at_most=1.05))
    if found := values.get("slow"):
        out.append(Target("fast members' steps, with a slow one ÷ without", found["ratio"], at_least=0.9))
        out.append(Target("rounds that count the slow one", found["counted"], at_least=1))
    if found := values.get("join"):
        out.append(Target("others' steps per second while one joins ÷ before", found["ratio"], at_least=0.95))
    if found := values.get("kill"):
        ours = max(each["stall"] for each in found["bucket"])
        out.append(
            Target("a kill: the survivor's longest hook, s", max(e["hook"] for e in found["bucket"]), at_most=0.1)
        )
        if "torchft" in found:
            theirs = min(each["stall"] for each in found["torchft"])
            out.append(Target("a kill: the survivor's stall ÷ torchft's shortest", ours / theirs, at_most=0.1))
    for each in values.get("link", {}).get("rates", []):
        out.append(Target(f"{each['multiple']:g} × the bound: points of utilisation below the collective reducer",
                          100 * (each["collective"] - each["bucket"]), at_most=5))  # fmt: skip
    if found := values.get("outage"):
        out.append(Target("server gone: steps per second ÷ before", found["rate"], at_least=0.95))
    if found := values.get("loss"):
        out.append(Target("loss ÷ that with the collective reducer", found["ratio"], at_most=1.01))
    return out


if __name__ == "__main__":
    main()
