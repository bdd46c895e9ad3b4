"""Read a run directory: settings, summary and replicas, complete or while the run is still writing.

Missing values are None and truncated lines are skipped. Steps repeated after a resume count as they were done last.
"""

import math
import os
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from diloco.core.stats import RoundStats
from diloco.errors import ConfigError
from diloco.runs import folder as folders
from diloco.runs.schema import (
    Evaluation,
    Event,
    Figures,
    Record,
    Step,
    Summary,
    bytes_data_parallel,
    from_line,
    from_summary,
    parse_object,
)

POINTS = 2000
"""Steps kept of a thinned replica: as many points as a screen can show."""
INTERVAL = 0.2
"""Minimum seconds between two reads by a `Follower`; calls in between get the same result."""
CHUNK = 1 << 22
"""Bytes read at once."""
TAIL = 1 << 14
"""Bytes at the end of a file in which `status` looks for the last record."""
_SUMMED = {"step_seconds"}
_AVERAGED = {"loss", "lr", "grad_norm", "tokens_per_second"}
"""How `_merge` combines the fields of two steps. All other fields are totals, of which the last one counts."""

Kind = TypeVar("Kind", Step, RoundStats)
Entry = TypeVar("Entry", Step, Evaluation, RoundStats)


@dataclass(frozen=True)
class Replica:
    """The records of one replica. If it is thinned, each entry of `steps` covers several."""

    number: int
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]
    rounds: tuple[RoundStats, ...]
    events: tuple[Event, ...]

    @property
    def seconds_exposed(self) -> float:
        """Seconds in which the training thread waited for rounds, took deltas or applied results."""
        return sum(round.seconds_exposed for round in self.rounds)


@dataclass(frozen=True)
class RecordedRun:
    """A run as recorded in its directory."""

    folder: Path
    config: Mapping[str, Any]
    summary: Summary | None
    figures: Figures
    """From the summary; until there is one, from the last lines written."""
    replicas: tuple[Replica, ...]
    width: int = 1
    """Steps per entry of a thinned replica."""

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.folder.resolve().name)

    @property
    def method(self) -> str:
        return self.config.get("method", "streaming")

    @property
    def seed(self) -> int:
        return self.config.get("seed") or 0

    @property
    def steps_planned(self) -> int | None:
        return self.config.get("steps") or None

    @property
    def step(self) -> int:
        """The last step that all replicas have completed; replicas on other machines do not write here."""
        return min((replica.steps[-1].step for replica in self.replicas if replica.steps), default=0)

    @property
    def samples(self) -> list[str]:
        return list(self.summary.samples) if self.summary else []

    @property
    def state(self) -> Literal["finished", "stopped", "unfinished"]:
        """`unfinished` runs are still training or have died; the directory alone cannot tell."""
        if self.summary:
            return "stopped" if self.summary.stopped else "finished"
        last_events = [replica.events[-1].event for replica in self.replicas if replica.events]
        return "stopped" if "stop" in last_events else "unfinished"

    @property
    def error(self) -> str:
        """The message of the first process that failed; empty if none did."""
        errors = read_errors(self.folder)
        return errors[0]["message"] if errors and self.state == "unfinished" else ""

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        return _evaluations(self.replicas)

    @property
    def rounds(self) -> list[RoundStats]:
        return [round for replica in self.replicas for round in replica.rounds]

    @property
    def factor(self) -> float | None:
        """How many times fewer bytes were sent than in data-parallel training."""
        sent, data_parallel = self.figures.bytes_sent, self.figures.bytes_data_parallel
        if data_parallel is None or sent is None:
            return None
        return data_parallel / sent if sent else math.inf

    @property
    def most_exposed(self) -> Replica | None:
        """The replica with the most exposed seconds; the summary has those of the first replica only."""
        return max(self.replicas, key=lambda replica: replica.seconds_exposed, default=None)

    @property
    def utilization(self) -> float | None:
        """Training time / (training time + exposed) of the replica where it is lowest."""
        return min((u for u in map(_utilization, self.replicas) if u is not None), default=None)


class ReplicaReader:
    """Reads the two files of a replica, each time from where the last read ended.

    If `thinned`, an entry of `steps` covers `width` steps (a power of 2), so that there are never more than `POINTS`.
    """

    def __init__(self, folder: Path, *, thinned: bool = False) -> None:
        self._folder, self._thinned = folder, thinned
        self._clear()

    def _clear(self) -> None:
        self.width = 1
        self._steps: list[Step] = []
        self._evaluations: list[Evaluation] = []
        self._rounds: list[RoundStats] = []
        self._events: list[Event] = []
        # Metrics are read first: then no round of a known step is missing.
        self._tails = Tail(self._folder / "metrics.jsonl"), Tail(self._folder / "events.jsonl")
        self._read_once = False

    def poll(self) -> bool:
        """Read the new lines; return whether there were any."""
        changed = False
        for tail in self._tails:
            while records := tail.records():
                if self._read_once and self._resumed(records):
                    self._clear()
                    return self.poll()
                changed = True
                for record in records:
                    self.add(record)
        self._read_once = True
        return changed

    def _resumed(self, records: list[Record]) -> bool:
        """Whether the run was resumed since the last read: the files were cut at its checkpoint and may have grown
        past their old ends since."""
        first = records[0]
        repeated = isinstance(first, Step) and self._steps and first.step <= self._steps[-1].step
        return bool(repeated) or any(isinstance(record, Event) and record.event == "resume" for record in records)

    def add(self, record: Record) -> None:
        if isinstance(record, Step):
            _rewind(self._steps, record.step, _step)
            _rewind(self._evaluations, record.step, _step)
            self._steps = _append(self._steps, record, self.width)
            if self._thinned and len(self._steps) > POINTS:
                self.widen(2 * self.width)
        elif isinstance(record, Evaluation):
            _rewind(self._evaluations, record.step, _step)
            self._evaluations.append(record)
        elif isinstance(record, RoundStats):
            self._rounds.append(record)
        else:
            if record.event == "resume":
                _rewind(self._rounds, record.step + 1, lambda round: round.applied_step)
            self._events.append(record)

    def widen(self, width: int) -> None:
        """Let each entry of `steps` cover this many of them."""
        while self.width < width:
            self.width *= 2
            steps, self._steps = self._steps, []
            for step in steps:
                self._steps = _append(self._steps, step, self.width)

    def replica(self, number: int) -> Replica:
        steps, evaluations = tuple(self._steps), tuple(self._evaluations)
        return Replica(number, steps, evaluations, tuple(self._rounds), tuple(self._events))


class Tail:
    """The complete lines added to a file since the last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def records(self) -> list[Record]:
        if not self.path.is_file():  # not there yet; or a pipe, which would block
            return []
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self.offset:
                self.offset = 0  # the file was rewritten
            file.seek(self.offset)
            chunk = file.read(CHUNK)
        complete = chunk[: chunk.rfind(b"\n") + 1]
        self.offset += len(complete)
        return list(filter(None, map(from_line, complete.splitlines())))


class Follower:
    """Follows a run while its replicas write. Thread-safe."""

    def __init__(self, folder: Path, *, thinned: bool = True) -> None:
        self.folder = folder
        self._thinned = thinned
        self._replicas: dict[int, ReplicaReader] = {}
        self._lock = threading.Lock()
        self._last_read = -INTERVAL
        self._stamp: object = None
        self._run: RecordedRun | None = None

    def read(self) -> RecordedRun:
        """The run as it is now; the same object if nothing has changed."""
        with self._lock:
            if time.monotonic() - self._last_read >= INTERVAL or self._run is None:
                self._run = self._read()
                self._last_read = time.monotonic()
            return self._run

    def _read(self) -> RecordedRun:
        paths = replica_folders(self.folder)
        self._replicas = {
            number: self._replicas.get(number) or ReplicaReader(path, thinned=self._thinned)
            for number, path in paths.items()
        }
        changes = [reader.poll() for reader in self._replicas.values()]
        stamp = [_stamp(self.folder / name) for name in ("config.toml", "summary.json")]
        if self._run and not any(changes) and stamp == self._stamp and len(changes) == len(self._run.replicas):
            return self._run
        self._stamp = stamp
        width = max((reader.width for reader in self._replicas.values()), default=1)
        for reader in self._replicas.values():
            reader.widen(width)
        replicas = tuple(reader.replica(number) for number, reader in self._replicas.items())
        return _recorded(self.folder, replicas, width)


def read(folder: Path) -> RecordedRun:
    """Everything in a run directory so far."""
    return Follower(folder, thinned=False).read()


@dataclass(frozen=True)
class Status:
    """A run in a few words, for lists."""

    folder: Path
    state: str
    """running, finished, stopped, ended (without a summary), or why it cannot be read."""
    method: str = "–"
    model: str = "–"
    step: int = 0
    steps: int | None = None
    rounds: tuple[int, int] | None = None
    """For a bucket member: the rounds that the run has closed, as far as this member knows, and the total."""
    loss: float | None = None
    """Held-out loss from the summary; until there is one, the last training loss."""
    age: float = 0.0
    """Seconds since the run last wrote."""

    @property
    def progress(self) -> str:
        """In steps; in a bucket in rounds, because members take different numbers of steps."""
        if self.rounds:
            return "{}/{} rounds".format(*self.rounds)
        return f"{self.step}/{self.steps}" if self.steps else str(self.step)


def status(folder: Path) -> Status:
    """The state of a run, without reading all of it."""
    try:
        return _status(folder)
    except Exception as error:  # one bad run must not hide the others
        return Status(folder, f"cannot be read: {type(error).__name__}: {error}")


def _status(folder: Path) -> Status:
    config, summary = read_config(folder), read_summary(folder)
    last = _last(Step, folder / "replica-0" / "metrics.jsonl")
    ended = "ended" if summary is None else "stopped" if summary.stopped else "finished"
    loss = summary.loss if summary else None
    written = [path for path in (folder / "config.toml", *folder.glob("replica-0/*.jsonl")) if path.exists()]
    return Status(
        folder=folder,
        state="running" if folders.in_use(folder) else ended,
        method=str(config.get("method", "–")),
        model=str(config.get("model", "–")),
        step=last.step if last else summary.steps if summary else 0,
        steps=config.get("steps"),
        rounds=_rounds(folder, config, finished=ended == "finished"),
        loss=last.loss if loss is None and last else loss,
        age=time.time() - max((path.stat().st_mtime for path in written), default=time.time()),
    )


def _rounds(folder: Path, config: Mapping[str, Any], finished: bool) -> tuple[int, int] | None:
    steps, sync_every = config.get("steps"), config.get("sync_every")
    if not config.get("bucket") or not steps or not sync_every:
        return None
    planned = -(-steps // sync_every)
    last = _last(RoundStats, folder / "replica-0" / "events.jsonl")
    return planned if finished else last.index if last else 0, planned


def _last(kind: type[Kind], path: Path) -> Kind | None:
    """The last record of this kind, if it is near the end of the file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        lines = file.read().splitlines()
    records = (from_line(line) for line in reversed(lines))
    return next((record for record in records if isinstance(record, kind)), None)


def replica_folders(folder: Path) -> dict[int, Path]:
    """The replicas' folders, ordered by number. Raises ConfigError if this is not a run."""
    numbered = {int(tail): path for path in folder.glob("replica-*") if (tail := path.name[8:]).isdecimal()}
    if not numbered and not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} has no config.toml and no replica-0: pass a folder written by `diloco train`")
    return {number: numbered[number] for number in sorted(numbered)}


def read_config(folder: Path) -> dict[str, Any]:
    """The settings of a run; empty until they are completely written."""
    try:
        return tomllib.loads(_bytes(folder / "config.toml").decode())
    except ValueError:
        return {}


def read_summary(folder: Path) -> Summary | None:
    """The summary of a run; None until it is completely written."""
    return from_summary(_bytes(folder / "summary.json"))


def read_errors(folder: Path) -> list[dict[str, Any]]:
    """What failed processes wrote, in the order of their failures; errors that only report the loss of a peer last."""
    errors = filter(None, (parse_object(_bytes(path)) for path in folder.glob("replica-*/error-*.json")))
    return sorted(errors, key=lambda error: (error["type"] == "PeerLost", error["time"]))


def read_phase(folder: Path) -> str:
    """What the run is doing now; empty if it has not said."""
    return _bytes(folder / "phase").decode(errors="replace").strip()


def block(step: int, width: int) -> int:
    """The last of the `width` steps that this one is drawn with: the same on all replicas.

    >>> [block(step, 4) for step in (1, 4, 5)]
    [4, 4, 8]
    """
    return -(-step // width) * width


def _recorded(folder: Path, replicas: tuple[Replica, ...], width: int) -> RecordedRun:
    events = [event.event for event in replicas[0].events] if replicas else []
    marks = [event for event in events if event in ("start", "resume", "stop", "finish")]
    # The summary of a run that was stopped and then resumed is that of the stop.
    outdated = bool(marks) and marks[-1] in ("start", "resume")
    config, summary = read_config(folder), None if outdated else read_summary(folder)
    return RecordedRun(folder, config, summary, summary or _so_far(config, replicas), replicas, width)


def _so_far(config: Mapping[str, Any], replicas: tuple[Replica, ...]) -> Figures:
    """Figures from the last lines written."""
    last_steps = [replica.steps[-1] for replica in replicas if replica.steps]
    values: dict[str, Any] = {
        "steps": max((step.step for step in last_steps), default=0),
        "tokens": sum(step.tokens for step in last_steps),
        "largest_burst": max((round.bytes_sent for r in replicas for round in r.rounds), default=None),
    }
    if replicas and replicas[0].steps:
        names = ("seconds", "bytes_sent", "seconds_hidden", "seconds_exposed")
        values |= {name: getattr(replicas[0].steps[-1], name) for name in names}
    starts = [event.details for event in replicas[0].events if "parameters" in event.details] if replicas else []
    if starts:
        parameters, count = starts[-1]["parameters"], config.get("replicas") or len(replicas)
        values["parameters"] = parameters
        values["bytes_data_parallel"] = bytes_data_parallel(parameters, count, values["steps"])
    if evaluations := _evaluations(replicas):
        values |= {name: getattr(evaluations[-1], name) for name in ("loss", "bits_per_byte", "replica_loss")}
    return Figures(**values)


def _evaluations(replicas: tuple[Replica, ...]) -> tuple[Evaluation, ...]:
    return next((replica.evaluations for replica in replicas if replica.evaluations), ())


def _utilization(replica: Replica) -> float | None:
    if not replica.steps:
        return None
    # The time of a step includes its exposed seconds; rounds after the last step add more.
    trained = sum(step.step_seconds for step in replica.steps) - replica.steps[-1].seconds_exposed
    return trained / (trained + replica.seconds_exposed) if trained > 0 else None


def _append(steps: list[Step], step: Step, width: int) -> list[Step]:
    """Add a step to the last entry if both are in the same block, otherwise as a new entry."""
    if steps and block(steps[-1].step, width) == block(step.step, width):
        steps[-1] = _merge(steps[-1], step, width)
    else:
        steps.append(step)
    return steps


def _merge(first: Step, second: Step, width: int) -> Step:
    """Combine two successive entries of a block."""
    before, after = first.step - (block(first.step, width) - width), second.step - first.step
    share = after / (before + after)
    values = {}
    for name in (field.name for field in fields(Step)):
        one, two = getattr(first, name), getattr(second, name)
        values[name] = one + share * (two - one) if name in _AVERAGED else one + two if name in _SUMMED else two
    return Step(**values)


def _step(entry: Step | Evaluation) -> int:
    return entry.step


def _rewind(entries: list[Entry], step: int, step_of: Callable[[Entry], int]) -> None:
    """Drop what was done at this step and later: the run was resumed before it."""
    while entries and step_of(entries[-1]) >= step:
        entries.pop()


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
