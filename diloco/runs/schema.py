"""What a run directory holds, and under which keys it is written and read. No torch.

A replica writes steps and evaluations to metrics.jsonl, rounds and events to events.jsonl, one JSON object a line.
The run writes its summary to summary.json. A field has its own name as its key, unless its type is annotated with
another.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeAlias, get_args, get_type_hints


@dataclass(frozen=True, slots=True)
class Step:
    """One training step. Bytes and seconds of communication are sums since the start of the run."""

    step: int
    seconds: float
    tokens: int
    loss: Annotated[float, "train/loss"]
    lr: Annotated[float, "train/lr"]
    grad_norm: Annotated[float, "train/grad_norm"]
    step_seconds: Annotated[float, "train/step_seconds"]
    tokens_per_second: Annotated[float, "train/tokens_per_second"]
    bytes_sent: Annotated[int, "sync/bytes_sent"]
    bytes_received: Annotated[int, "sync/bytes_received"]
    seconds_hidden: Annotated[float, "sync/seconds_hidden"]
    seconds_exposed: Annotated[float, "sync/seconds_exposed"]
    in_flight: Annotated[int, "sync/in_flight"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss on held-out text: of the anchors, and of the replica's own weights."""

    step: int
    seconds: float
    tokens: int
    loss: Annotated[float, "eval/loss"]
    bits_per_byte: Annotated[float, "eval/bits_per_byte"]
    replica_loss: Annotated[float, "eval/replica_loss"]


@dataclass(frozen=True, slots=True)
class Round:
    """One applied round of one fragment. `step` and `seconds` are those of applying it."""

    seconds: float
    step: int
    fragment: int
    index: int
    sent_step: int | None
    """None: this replica did not send in this round."""
    sent_seconds: float
    flight_seconds: float
    exposed_seconds: float
    bytes_sent: int
    bytes_received: int
    members: int
    counted: bool
    """Whether this replica's delta is in the mean. If not, the replica carries its work on into its next delta."""
    overlap: int | None = None
    """The overlap of this replica when it was applied. None: written before this key existed."""


@dataclass(frozen=True, slots=True)
class Event:
    """What happened besides rounds: start, resume, save, finish, stop, what the autopilot chose, and what a
    bucket reports."""

    event: str
    seconds: float
    step: int
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further values, written beside the others."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of a run. Bytes and seconds of communication are those of one replica."""

    steps: int = 0
    tokens: int = 0
    """All replicas together."""
    seconds: float | None = None
    parameters: int | None = None
    loss: Annotated[float | None, "eval/loss"] = None
    """The loss of the anchors on held-out text, in nats per token."""
    bits_per_byte: Annotated[float | None, "eval/bits_per_byte"] = None
    replica_loss: Annotated[float | None, "eval/replica_loss"] = None
    """The same for the first replica's own weights."""
    unigram_loss: float | None = None
    bytes_sent: int | None = None
    bytes_data_parallel: int | None = None
    """What data-parallel in bfloat16 would have sent in the same steps."""
    largest_burst: int | None = None
    seconds_hidden: float | None = None
    seconds_exposed: float | None = None


@dataclass(frozen=True, slots=True)
class Summary(Figures):
    """What summary.json holds, once a run is finished or was stopped."""

    method: str | None = None
    replicas: int | None = None
    stopped: bool = False
    corpus: Mapping[str, Any] | None = None
    """Its name, its sha256 and its bytes."""
    samples: Sequence[str] = ()
    """Texts that the model wrote."""
    predicted_utilization: float | None = None
    """What the planner says of the run as it was. None: it cannot say."""


Record: TypeAlias = Step | Evaluation | Round | Event


def to_line(record: Record) -> dict[str, Any]:
    """The JSON object that is written for a record."""
    line = {key: getattr(record, name) for name, key, _ in _FIELDS[type(record)]}
    if isinstance(record, Event):
        return line | dict(record.details)
    return {"event": "round", **line} if isinstance(record, Round) else line


def from_line(text: bytes) -> Record | None:
    """The record of one line; None if the line is cut off, is not a record, or holds a value of another type.

    Unknown keys are ignored. A number that is missing is 0; one that is null is nan.
    """
    line = parse_object(text)
    if line.get("event") == "round":
        if not {"fragment", "index", "sent_step", "sent_seconds"} <= line.keys():
            return None
        # Lines written before the keys `counted` and `overlap` existed.
        return _made(Round, {"counted": line["sent_step"] is not None, "overlap": None, **line})
    if "event" in line:
        known = {key for _, key, _ in _FIELDS[Event]}
        return _made(Event, line, details={key: value for key, value in line.items() if key not in known})
    if "step" not in line:
        return None
    return _made(Step, line) if "train/loss" in line else _made(Evaluation, line) if "eval/loss" in line else None


def parse_object(text: bytes) -> dict[str, Any]:
    """A JSON object; empty if the text is cut off or not an object."""
    try:
        value = json.loads(text.decode())
        if b"\\u" in text:  # half of a surrogate pair cannot be printed
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def to_summary(summary: Summary) -> dict[str, Any]:
    """The JSON object that summary.json holds. What is not known has no key."""
    found = {key: getattr(summary, name) for name, key in keys(Summary)}
    return {key: value for key, value in found.items() if value is not None}


def from_summary(text: bytes) -> Summary | None:
    """The summary that a file holds; None if it is cut off, or not there. A value of another type counts as missing."""
    line = parse_object(text)
    given: dict[str, Any] = {name: line.get(key) for name, key in keys(Summary)}
    known = {name: value for name, value in given.items() if _is_a(value, _SUMMARY[name])}
    return Summary(**known) if line else None


def figures(summary: Summary | None, so_far: Mapping[str, Any]) -> Figures:
    """The figures of a summary; where it has none, those in `so_far`, by the names of the fields."""
    said = {each.name: getattr(summary, each.name) for each in fields(Figures) if summary is not None}
    empty = Figures()
    return Figures(**{**so_far, **{name: value for name, value in said.items() if value != getattr(empty, name)}})


def bytes_data_parallel(parameters: int, replicas: int, steps: int, width: int = 2) -> int:
    """What one replica would have sent with data-parallel training, if a ring sums the gradients. `width`: bytes of a
    value; 2 is bfloat16."""
    return round(2 * (replicas - 1) / replicas * width * parameters * steps)


def _made(kind: Callable[..., Record], line: Mapping[str, Any], **more: Any) -> Record | None:
    try:
        return kind(*[read(line.get(key, 0)) for _, key, read in _FIELDS[kind]], **more)
    except (TypeError, ValueError, OverflowError):
        return None


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)


def _int(value: Any) -> int:
    if abs(number := int(value)) > LARGEST:
        raise OverflowError
    return number


def _optional_int(value: Any) -> int | None:
    return None if value is None else _int(value)


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value of a summary is of this type, and is no number beyond `LARGEST`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return kind in (int, float) and abs(value) <= LARGEST
    return isinstance(value, kind)


LARGEST = 1 << 63
"""The largest whole number that is believed. Beyond it, arithmetic with floats may raise."""
_READERS: dict[Any, Any] = {float: _float, int: _int, int | None: _optional_int}


def _field_table(kind: type) -> list[tuple[str, str, Callable[[Any], Any]]]:
    """(name, key on disk, conversion) of every field that has a key."""
    types = get_type_hints(kind)
    return [(name, key, _READERS.get(types[name], types[name])) for name, key in keys(kind) if name != "details"]


def keys(kind: type) -> list[tuple[str, str]]:
    """(name, key on disk) of every field."""
    types = get_type_hints(kind, include_extras=True)
    return [(f.name, getattr(types[f.name], "__metadata__", (f.name,))[0]) for f in fields(kind)]


_SUMMARY: dict[str, Any] = {name: get_args(kind)[0] if get_args(kind) else kind
                            for name, kind in get_type_hints(Summary).items()}  # fmt: skip
_SUMMARY |= {"corpus": dict, "samples": list}
"""The type of each value of a summary, if it is there."""
_FIELDS: dict[Any, list[tuple[str, str, Callable[[Any], Any]]]] = {
    kind: _field_table(kind) for kind in (Step, Evaluation, Round, Event)
}
