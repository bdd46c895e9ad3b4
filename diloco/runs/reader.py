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
from diloco.runs.schema import Evaluation, Event, Figures, Record, Round, Step, figures, from_line, parse_object

State = Literal["finished", "stopped", "unfinished"]


@dataclass(frozen=True)
class Replica:
    number: int
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]
    rounds: tuple[Round, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True)
class RecordedRun:
    """A run as its directory tells of it."""

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    figures: Figures
    """The summary's; while there is none, those of the last lines written."""
    replicas: tuple[Replica, ...]

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.folder.resolve().name)

    @property
    def method(self) -> str:
        return str(self.summary.get("method") or self.config.get("method") or "streaming")

    @property
    def seed(self) -> int:
        return int(self.config.get("seed") or 0)

    @property
    def steps_planned(self) -> int | None:
        return int(self.config["steps"]) if self.config.get("steps") else None

    @property
    def samples(self) -> list[str]:
        samples = self.summary.get("samples")
        return [str(text) for text in samples] if isinstance(samples, list) else []

    @property
    def state(self) -> State:
        """`unfinished` is going on or has died: the folder alone does not tell which."""
        if self.summary:
            return "stopped" if self.summary.get("stopped") else "finished"
        ends = [replica.events[-1].event for replica in self.replicas if replica.events]
        return "stopped" if "stop" in ends else "unfinished"

    @property
    def error(self) -> str:
        """Why it failed, as its first process to fail said; empty if it did not."""
        said = [parse_object(_bytes(path)) for path in self.folder.glob("replica-*/error-*.json")]
        said.sort(key=lambda error: (error.get("type") == "PeerLost", error.get("time", 0)))
        return str(said[0].get("message", "")) if said and self.state == "unfinished" else ""

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        return _evaluations(self.replicas)

    @property
    def rounds(self) -> list[Round]:
        return [round for replica in self.replicas for round in replica.rounds]

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
    numbered = {int(tail): path for path in folder.glob("replica-*") if (tail := path.name[8:]).isdecimal()}
    if not numbered and not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} has no config.toml and no replica-0: give a folder that `diloco train` wrote")
    summary = parse_object(_bytes(folder / "summary.json"))
    replicas = tuple(_replica(number, numbered[number]) for number in sorted(numbered))
    return RecordedRun(folder, read_config(folder), summary, figures(summary, _so_far(replicas)), replicas)


def read_config(folder: Path) -> dict[str, Any]:
    """The settings of a run; empty while they are not written, or only half."""
    try:
        return tomllib.loads(_bytes(folder / "config.toml").decode(errors="replace"))
    except tomllib.TOMLDecodeError:
        return {}


def _so_far(replicas: tuple[Replica, ...]) -> dict[str, Any]:
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
    if evaluations := _evaluations(replicas):
        found |= {name: getattr(evaluations[-1], name) for name in ("loss", "bits_per_byte", "replica_loss")}
    return found


def _evaluations(replicas: tuple[Replica, ...]) -> tuple[Evaluation, ...]:
    return next((replica.evaluations for replica in replicas if replica.evaluations), ())


def _replica(number: int, folder: Path) -> Replica:
    steps: list[Step] = []
    evaluations: list[Evaluation] = []
    rounds: list[Round] = []
    events: list[Event] = []
    for record in _records(folder / "metrics.jsonl"):
        if isinstance(record, Step):
            _rewind(steps, record.step)
            _rewind(evaluations, record.step)
            steps.append(record)
        elif isinstance(record, Evaluation):
            _rewind(evaluations, record.step)
            evaluations.append(record)
    for record in _records(folder / "events.jsonl"):
        if isinstance(record, Round):
            rounds.append(record)
        elif isinstance(record, Event):
            if record.event == "resume":
                _rewind(rounds, record.step + 1)
            events.append(record)
    return Replica(number, tuple(steps), tuple(evaluations), tuple(rounds), tuple(events))


def _rewind(entries: "list[Step] | list[Evaluation] | list[Round]", step: int) -> None:
    """Forget what was done at this step and later: the run was resumed before it and did it again."""
    while entries and entries[-1].step >= step:
        entries.pop()


def _records(path: Path) -> Iterator[Record]:
    if path.is_file():
        with path.open("rb") as file:
            yield from filter(None, map(from_line, file))


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
