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
from diloco.runs.schema import Evaluation, Event, Record, Round, Step, from_line, parse_object

State = Literal["finished", "stopped", "unfinished"]


@dataclass(frozen=True)
class Replica:
    number: int
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]
    rounds: tuple[Round, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Run:
    """A run directory. Figures are the summary's; while there is none, those of the last lines written."""

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    replicas: tuple[Replica, ...]
    samples: tuple[str, ...] = ()

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
    def state(self) -> State:
        """`unfinished` is going on or has died: the folder alone does not tell which."""
        if self.summary:
            return "stopped" if self.summary.get("stopped") else "finished"
        ends = [replica.events[-1].event for replica in self.replicas if replica.events]
        return "stopped" if "stop" in ends else "unfinished"

    @property
    def steps(self) -> int:
        """Steps done by the replica that is furthest."""
        return int(self._given("steps") or max((r.steps[-1].step for r in self.replicas if r.steps), default=0))

    @property
    def steps_planned(self) -> int | None:
        return int(self.config["steps"]) if self.config.get("steps") else None

    @property
    def tokens(self) -> int:
        return int(self._given("tokens") or sum(r.steps[-1].tokens for r in self.replicas if r.steps))

    @property
    def seconds(self) -> float | None:
        return self._first("seconds", self._last("seconds"))

    @property
    def parameters(self) -> float | None:
        return self._given("parameters")

    @property
    def loss(self) -> float | None:
        """Of the anchors, on held-out text, in nats per token."""
        return self._first("eval/loss", self._evaluated("loss"))

    @property
    def replica_loss(self) -> float | None:
        return self._first("eval/replica_loss", self._evaluated("replica_loss"))

    @property
    def bits_per_byte(self) -> float | None:
        return self._first("eval/bits_per_byte", self._evaluated("bits_per_byte"))

    @property
    def unigram_loss(self) -> float | None:
        return self._given("unigram_loss")

    @property
    def bytes_sent(self) -> float | None:
        """Per replica."""
        return self._first("bytes_sent", self._last("bytes_sent"))

    @property
    def bytes_data_parallel(self) -> float | None:
        """What data-parallel in bfloat16 would have sent per replica in as many steps."""
        return self._given("bytes_data_parallel")

    @property
    def factor(self) -> float | None:
        """How many times fewer bytes than data-parallel."""
        if self.bytes_data_parallel is None or self.bytes_sent is None:
            return None
        return self.bytes_data_parallel / self.bytes_sent if self.bytes_sent else math.inf

    @property
    def largest_burst(self) -> float | None:
        bursts = [round.bytes_sent for replica in self.replicas for round in replica.rounds]
        return self._first("largest_burst", max(bursts, default=None))

    @property
    def seconds_hidden(self) -> float | None:
        return self._first("seconds_hidden", self._last("seconds_hidden"))

    @property
    def seconds_exposed(self) -> float | None:
        return self._first("seconds_exposed", self._last("seconds_exposed"))

    @property
    def utilization(self) -> float | None:
        """Training time / (training time + exposed), of the replica where it is lowest."""
        return min((u for u in map(self._utilization, self.replicas) if u is not None), default=None)

    @property
    def waited_most(self) -> tuple[Replica, float] | None:
        """The replica that waited longest, and how long: the summary tells of the first replica only."""
        return max(((r, self._exposed(r)) for r in self.replicas), key=lambda pair: pair[1], default=None)

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        return next((replica.evaluations for replica in self.replicas if replica.evaluations), ())

    def _exposed(self, replica: Replica) -> float:
        """With what it waited in its last rounds, after the last step."""
        waited = [sum(round.exposed_seconds for round in replica.rounds)]
        waited += [replica.steps[-1].seconds_exposed] if replica.steps else []
        waited += [self.seconds_exposed or 0.0] if replica is self.replicas[0] else []
        return max(waited)

    def _utilization(self, replica: Replica) -> float | None:
        """The time of a step holds what the step itself waited."""
        if not replica.steps:
            return None
        trained = sum(step.step_seconds for step in replica.steps) - replica.steps[-1].seconds_exposed
        return trained / (trained + self._exposed(replica)) if trained > 0 else None

    def _given(self, key: str) -> float | None:
        value = self.summary.get(key)
        return float(value) if isinstance(value, int | float) else None

    def _first(self, key: str, otherwise: float | None) -> float | None:
        value = self._given(key)
        return otherwise if value is None else value

    def _last(self, name: str) -> float | None:
        steps = self.replicas[0].steps if self.replicas else ()
        return float(getattr(steps[-1], name)) if steps else None

    def _evaluated(self, name: str) -> float | None:
        return float(getattr(self.evaluations[-1], name)) if self.evaluations else None


def read(folder: Path) -> Run:
    """All that is in a run directory so far."""
    numbered = {int(tail): path for path in folder.glob("replica-*") if (tail := path.name[8:]).isdecimal()}
    if not numbered and not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder}: no config.toml and no replica-0 in it; give a folder that `diloco train` wrote")
    summary = _object(folder / "summary.json")
    samples = summary.get("samples")
    return Run(
        folder=folder,
        config=_toml(folder / "config.toml"),
        summary=summary,
        replicas=tuple(_replica(number, numbered[number]) for number in sorted(numbered)),
        samples=tuple(str(text) for text in samples) if isinstance(samples, list) else (),
    )


def _replica(number: int, folder: Path) -> Replica:
    """What one replica wrote so far."""
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


def _object(path: Path) -> dict[str, Any]:
    return parse_object(path.read_bytes()) if path.is_file() else {}


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (FileNotFoundError, tomllib.TOMLDecodeError):
        return {}
