"""The lines that a replica writes, metrics.jsonl and events.jsonl, as far as they can be read.

Lines that are cut off are left out, unknown keys are ignored, and steps that were done twice, because the run was
resumed before them, count as done last.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Step:
    """One training line of metrics.jsonl. Bytes and seconds of sync are sums since the start."""

    step: int
    tokens: int
    seconds: float
    loss: float
    step_seconds: float
    tokens_per_second: float
    bytes_sent: int
    seconds_hidden: float
    seconds_exposed: float
    in_flight: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation line: loss on held-out text of the anchors, and of the replica's own weights."""

    step: int
    tokens: int
    seconds: float
    loss: float
    bits_per_byte: float
    replica_loss: float


@dataclass(frozen=True, slots=True)
class Round:
    """One applied exchange of one fragment."""

    fragment: int
    index: int
    sent_step: int
    step: int
    sent_seconds: float
    flight_seconds: float
    seconds: float
    exposed_seconds: float
    bytes_sent: int
    members: int


@dataclass(frozen=True, slots=True)
class Event:
    """start, resume, save, finish or stop."""

    event: str
    step: int
    seconds: float


@dataclass(frozen=True)
class Replica:
    number: int
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]
    rounds: tuple[Round, ...]
    events: tuple[Event, ...]


def parsed(line: bytes) -> dict[str, Any]:
    """One line of a .jsonl file; empty if it is cut off or no object."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def training(line: Mapping[str, Any]) -> Step | None:
    """A training line, if it is one."""
    return _made(Step, line, {"step", "train/loss"}, _TRAINING)


_TRAINING = {
    "loss": "train/loss",
    "step_seconds": "train/step_seconds",
    "tokens_per_second": "train/tokens_per_second",
    "bytes_sent": "sync/bytes_sent",
    "seconds_hidden": "sync/seconds_hidden",
    "seconds_exposed": "sync/seconds_exposed",
    "in_flight": "sync/in_flight",
}
_EVALUATION = {"loss": "eval/loss", "bits_per_byte": "eval/bits_per_byte", "replica_loss": "eval/replica_loss"}


def replica(number: int, folder: Path) -> Replica:
    """What one replica wrote so far."""
    steps: list[Step] = []
    evaluations: list[Evaluation] = []
    for line in _lines(folder / "metrics.jsonl"):
        if step := training(line):
            _rewind(steps, step.step)
            _rewind(evaluations, step.step)
            steps.append(step)
        elif evaluation := _made(Evaluation, line, {"step", "eval/loss"}, _EVALUATION):
            _rewind(evaluations, evaluation.step)
            evaluations.append(evaluation)
    rounds: list[Round] = []
    events: list[Event] = []
    for line in _lines(folder / "events.jsonl"):
        if line.get("event") == "round":
            if round := _made(Round, line, {"fragment", "index", "sent_step", "sent_seconds"}, {}):
                rounds.append(round)
        elif event := _made(Event, line, {"event"}, {}):
            if event.event == "resume":
                _rewind(rounds, event.step + 1)
            events.append(event)
    return Replica(number, tuple(steps), tuple(evaluations), tuple(rounds), tuple(events))


def _rewind(entries: "list[Step] | list[Evaluation] | list[Round]", step: int) -> None:
    """Forget what was done at this step and later: the run was resumed before it and did it again."""
    while entries and entries[-1].step >= step:
        entries.pop()


def _made(kind: type[T], line: Mapping[str, Any], marks: set[str], keys: Mapping[str, str]) -> T | None:
    """A line as a dataclass, by the types of its fields; a number that is missing is 0, one that is null is nan."""
    if not marks <= line.keys():
        return None
    try:
        return kind(
            **{name: _value(line.get(keys.get(name, name), 0), of) for name, of in kind.__annotations__.items()}
        )
    except (TypeError, ValueError, OverflowError):
        return None


def _value(value: Any, of: type) -> Any:
    return math.nan if value is None and of is float else of(value)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        with path.open("rb") as file:
            yield from filter(None, map(parsed, file))
