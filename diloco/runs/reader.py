"""Read a run directory: settings, summary and replicas, as far as they were written.

A run may still be going on or may have died: whatever is missing is None. Lines that are cut off are left out, and
steps that were done twice, because the run was resumed before them, count as they were done last.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from diloco.errors import ConfigError
from diloco.runs.replica import Growing, Replica
from diloco.runs.schema import (
    LARGEST,
    Evaluation,
    Figures,
    Record,
    Round,
    Summary,
    bytes_data_parallel,
    figures,
    from_line,
    from_summary,
    parse_object,
)

State = Literal["finished", "stopped", "unfinished"]
_ENDS = ("start", "resume", "stop", "finish")
_WHOLE = {"steps", "seed", "replicas", "sync_every"}
"""Settings that reports compute with."""


@dataclass(frozen=True)
class RecordedRun:
    """A run as its directory tells of it."""

    folder: Path
    config: Mapping[str, Any]
    summary: Summary | None
    figures: Figures
    """The summary's; while there is none, those of the last lines written."""
    replicas: tuple[Replica, ...]
    width: int = 1
    """Steps that an entry of a replica's steps stands for."""

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.folder.resolve().name)

    @property
    def method(self) -> str:
        said = self.summary.method if self.summary else None
        return str(said or self.config.get("method") or "streaming")

    @property
    def seed(self) -> int:
        return self.config.get("seed") or 0

    @property
    def steps_planned(self) -> int | None:
        return self.config.get("steps") or None

    @property
    def samples(self) -> list[str]:
        return [str(text) for text in self.summary.samples] if self.summary else []

    @property
    def state(self) -> State:
        """`unfinished` is going on or has died: the folder alone does not tell which."""
        if self.summary:
            return "stopped" if self.summary.stopped else "finished"
        ends = [replica.events[-1].event for replica in self.replicas if replica.events]
        return "stopped" if "stop" in ends else "unfinished"

    @property
    def error(self) -> str:
        """Why it failed, as its first process to fail said; empty if it did not."""
        said = [parse_object(_bytes(path)) for path in self.folder.glob("replica-*/error-*.json")]
        said = [error for error in said if isinstance(error.get("time"), (int, float))]
        said.sort(key=lambda error: (error.get("type") == "PeerLost", error["time"]))
        return str(said[0].get("message", "")) if said and self.state == "unfinished" else ""

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        return _evaluations(self.replicas)

    @property
    def rounds(self) -> list[Round]:
        return [round for replica in self.replicas for round in replica.rounds]

    @property
    def carried(self) -> tuple[int, int]:
        """Rounds in which the own delta did not count, and all rounds, also those that were thinned out."""
        carried = sum(not round.counted for round in self.rounds) + sum(r.carried_left_out for r in self.replicas)
        return carried, len(self.rounds) + sum(replica.left_out for replica in self.replicas)

    @property
    def factor(self) -> float | None:
        """How many times fewer bytes than data-parallel."""
        sent, data_parallel = self.figures.bytes_sent, self.figures.bytes_data_parallel
        if data_parallel is None or sent is None:
            return None
        return data_parallel / sent if sent else math.inf

    @property
    def waited_most(self) -> tuple[Replica, float] | None:
        """The replica that waited longest, and how long: the summary tells of the first replica only."""
        return max(((r, self._exposed(r)) for r in self.replicas), key=lambda pair: pair[1], default=None)

    @property
    def utilization(self) -> float | None:
        """Training time / (training time + exposed) of the replica where it is lowest."""
        return min((u for u in map(self._utilization, self.replicas) if u is not None), default=None)

    def _exposed(self, replica: Replica) -> float:
        """Seconds that it waited, its last rounds included, which end after its last step."""
        waited = [sum(round.exposed_seconds for round in replica.rounds)]
        waited += [replica.steps[-1].seconds_exposed] if replica.steps else []
        waited += [self.figures.seconds_exposed or 0.0] if replica is self.replicas[0] else []
        return max(waited)

    def _utilization(self, replica: Replica) -> float | None:
        if not replica.steps:
            return None
        # The time of a step includes what the step itself waited.
        trained = sum(step.step_seconds for step in replica.steps) - replica.steps[-1].seconds_exposed
        return trained / (trained + self._exposed(replica)) if trained > 0 else None


def read(folder: Path) -> RecordedRun:
    """All that is in a run directory so far."""
    replicas = []
    for number, home in replica_folders(folder).items():
        growing = Growing()
        for name in ("metrics.jsonl", "events.jsonl"):
            for record in _records(home / name):
                growing.add(record)
        replicas.append(growing.replica(number))
    return recorded(folder, tuple(replicas))


def recorded(folder: Path, replicas: tuple[Replica, ...], width: int = 1) -> RecordedRun:
    """The run of which these replicas were read."""
    ends = [event.event for event in replicas[0].events if event.event in _ENDS] if replicas else []
    # While a run that was stopped goes on, its summary is that of the stop.
    old = bool(ends) and ends[-1] in ("start", "resume")
    config, summary = read_config(folder), None if old else read_summary(folder)
    return RecordedRun(folder, config, summary, figures(summary, _so_far(config, replicas)), replicas, width)


def replica_folders(folder: Path) -> dict[int, Path]:
    """The folders of the replicas, in the order of their numbers. Raises ConfigError if this is not a run."""
    numbered = {int(tail): path for path in folder.glob("replica-*") if (tail := path.name[8:]).isdecimal()}
    if not numbered and not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} has no config.toml and no replica-0: give a folder that `diloco train` wrote")
    return {number: numbered[number] for number in sorted(numbered)}


def read_config(folder: Path) -> dict[str, Any]:
    """The settings of a run; empty while they are not written, or only half. A number of another type is left out."""
    try:
        config = tomllib.loads(_bytes(folder / "config.toml").decode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return {name: value for name, value in config.items()
            if name not in _WHOLE or (type(value) is int and 0 <= value <= LARGEST)}  # fmt: skip


def read_summary(folder: Path) -> Summary | None:
    """The summary of a run; None while it is not written, or only half."""
    return from_summary(_bytes(folder / "summary.json"))


def _so_far(config: Mapping[str, Any], replicas: tuple[Replica, ...]) -> dict[str, Any]:
    """Figures by the last lines written."""
    last = [replica.steps[-1] for replica in replicas if replica.steps]
    found: dict[str, Any] = {
        "steps": max((step.step for step in last), default=0),
        "tokens": sum(step.tokens for step in last),
        "largest_burst": max((round.bytes_sent for r in replicas for round in r.rounds), default=None),
    }
    if replicas and replicas[0].steps:
        names = ("seconds", "bytes_sent", "seconds_hidden", "seconds_exposed")
        found |= {name: getattr(replicas[0].steps[-1], name) for name in names}
    begun = [event.details for event in replicas[0].events if "parameters" in event.details] if replicas else []
    if begun and isinstance(begun[-1]["parameters"], int) and begun[-1]["parameters"] <= LARGEST:
        count, many = begun[-1]["parameters"], config.get("replicas") or len(replicas)
        found["parameters"] = count
        found["bytes_data_parallel"] = bytes_data_parallel(count, many, found["steps"])
    if evaluations := _evaluations(replicas):
        found |= {name: getattr(evaluations[-1], name) for name in ("loss", "bits_per_byte", "replica_loss")}
    return found


def _evaluations(replicas: tuple[Replica, ...]) -> tuple[Evaluation, ...]:
    return next((replica.evaluations for replica in replicas if replica.evaluations), ())


def _records(path: Path) -> Iterator[Record]:
    if path.is_file():
        with path.open("rb") as file:
            yield from filter(None, map(from_line, file))


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
