"""A run directory as the trainer would leave it, to read and to spoil."""

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diloco.core.schedule import Schedule

STEPS, SYNC_EVERY, FRAGMENTS, OVERLAP = 300, 50, 5, 2
PARAMETERS, ROUND_BYTES, STEP_SECONDS, TOKENS = 1_200_000, 121_000, 0.2, 2048
DATA_PARALLEL = 2 * PARAMETERS * STEPS


def make_run(
    folder: Path, *, method: str = "streaming", seed: int = 0, steps: int = STEPS, final: float = 1.45, **config: Any
) -> Path:
    """A run directory as the trainer would leave it; every number follows from the arguments."""
    chosen: dict[str, Any] = {
        "model": "tiny", "method": method, "replicas": 2, "steps": steps, "batch": 16, "sync_every": SYNC_EVERY,
        "fragments": "strided:3", "overlap": OVERLAP, "codec": "e3m0", "outer_lr": 0.4, "seed": seed, **config,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in chosen.items()))
    ends = [_replica(folder / f"replica-{number}", number, method, seed, steps, final) for number in range(2)]
    summary = ends[0] | {
        "method": method, "replicas": 2, "parameters": PARAMETERS, "steps": steps, "tokens": 2 * TOKENS * steps,
        "loss": final, "bits_per_byte": final / math.log(2), "replica_loss": final + 0.04,
        "unigram_loss": 3.31, "bytes_data_parallel": 2 * PARAMETERS * steps,
        "corpus": {"name": "Python standard library", "sha256": "ab" * 32, "bytes": 11_800_000},
        "samples": ["def read(self, n=-1):\n    if n < 0 & True:\n        return '</script><b>'", "class A: pass"],
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _replica(folder: Path, number: int, method: str, seed: int, steps: int, final: float) -> dict[str, Any]:
    folder.mkdir()
    schedule = Schedule(SYNC_EVERY, FRAGMENTS)
    now = hidden = exposed = 0.0
    sent = largest = 0
    flying: list[dict[str, Any]] = []
    metrics, events = [], [{"event": "start", "seconds": 0.0, "step": 0}]
    for step in range(1, steps + 1):
        waited = 0.0
        length = STEP_SECONDS * (1 + 0.1 * math.sin(step * 1.7 + number))
        now += length
        for round in [round for round in flying if round["sent_step"] + OVERLAP == step]:
            flying.remove(round)
            waited += max(0.0, round["sent_at"] + round["seconds"] - now - waited)
            events.append(round | {"applied_step": step, "seconds_exposed": waited, "seconds_waited": waited})
            sent += round["bytes_sent"]
            hidden += round["seconds"] - waited
        if method == "dp":
            sent += 2 * PARAMETERS
            largest = 2 * PARAMETERS
        now += waited
        exposed += waited
        for fragment in schedule.sends(step) if method == "streaming" else []:
            slow = 0.25 if step in (160, 210) else 0.0
            size = ROUND_BYTES + 1000 * fragment
            largest = max(largest, size)
            flying.append({
                "event": "round", "fragment": fragment, "index": step // SYNC_EVERY - 1, "sent_step": step,
                "sent_at": now, "seconds": 0.24 + 0.02 * fragment + slow, "members": 2, "counted": True,
                "bytes_sent": size, "bytes_received": size, "overlap": OVERLAP,
            })  # fmt: skip
        at = final + 1.9 * (math.exp(-5 * step / steps) - math.exp(-5))
        value = at + 0.06 * math.sin(step * 12.9 + 7 * number + 3 * seed) * math.cos(step * 3.3 + number)
        metrics.append({
            "event": "step", "step": step, "tokens": TOKENS * step, "seconds": now, "loss": value, "lr": 0.003,
            "grad_norm": 0.8, "step_seconds": length + waited,
            "tokens_per_second": TOKENS / (length + waited), "bytes_sent": sent, "bytes_received": sent,
            "seconds_hidden": hidden, "seconds_exposed": exposed, "in_flight": len(flying),
        })  # fmt: skip
        if step % max(1, steps // 12) == 0 and number == 0:
            metrics.append({"event": "evaluation", "step": step, "tokens": TOKENS * step, "seconds": now, "loss": at,
                            "bits_per_byte": at / math.log(2), "replica_loss": at + 0.04})  # fmt: skip
            now += 0.3
        if step % 100 == 0:
            events.append({"event": "save", "seconds": now, "step": step})
    events.append({"event": "finish", "seconds": now, "step": steps})
    for name, lines in (("metrics", metrics), ("events", events)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "seconds": now,
        "bytes_sent": sent,
        "largest_burst": largest,
        "seconds_hidden": hidden,
        "seconds_exposed": exposed,
    }


def replace_line(path: Path, number: int, text: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    lines[number] = text + "\n"
    path.write_text("".join(lines))


def carry(replica: Path, unsent: Iterable[int] = (), uncounted: Iterable[int] = ()) -> None:
    """Rewrite these rounds, by their order, as a member of a bucket writes those that its delta is not in."""
    path = replica / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rounds = [line for line in lines if line["event"] == "round"]
    for k in unsent:
        arrival = rounds[k]["sent_at"] + rounds[k]["seconds"]
        rounds[k] |= {"sent_step": None, "sent_at": arrival, "seconds": 0.0, "seconds_exposed": 0.0, "bytes_sent": 0,
                      "counted": False}  # fmt: skip
    for k in uncounted:
        rounds[k] |= {"counted": False}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def steer(replica: Path) -> None:
    """Let the autopilot have chosen settings."""
    chosen = {"event": "autopilot", "seconds": 2.0, "step": 10, "sync_every": 50, "fragments": "strided:3",
              "overlap": 2, "codec": "e3m0", "expected_utilization": 0.99, "rate": 94e6}  # fmt: skip
    with (replica / "events.jsonl").open("a") as file:
        file.write(json.dumps(chosen) + "\n")


def wait_at_end(replica: Path, seconds: float) -> None:
    """The last round, during which there is nothing left to train, takes this long."""
    end = {
        "event": "round", "applied_step": STEPS, "fragment": 0, "index": 5, "sent_step": STEPS, "members": 2,
        "sent_at": 51.0, "seconds": seconds, "seconds_exposed": seconds, "seconds_waited": seconds, "bytes_sent": 0,
        "bytes_received": 0, "counted": True,
    }  # fmt: skip
    with (replica / "events.jsonl").open("a") as file:
        file.write(json.dumps(end) + "\n")


def copy_until(step: int, source: Path, target: Path, rest: str = "") -> None:
    """The run as it was when all replicas had done this step."""
    shutil.copy(source / "config.toml", target)
    for path in source.glob("replica-*/*.jsonl"):
        lines = [line for line in path.read_text().splitlines(keepends=True) if _step(json.loads(line)) <= step]
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text("".join(lines) + rest)


def _step(record: dict[str, Any]) -> int:
    return record["applied_step"] if record.get("event") == "round" else record["step"]
