"""Read a run directory: settings, summary and replicas, complete or while the run is still writing.

Missing values are None and truncated lines are skipped.
"""

import math
import os
import threading
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
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
"""Most steps kept of a thinned replica: as many points as a screen can show."""
CHUNK = 1 << 22
"""Bytes read at once."""
TAIL = 1 << 14
"""Bytes at the end of a file in which `status` looks for the last record."""

Kind = TypeVar("Kind", Step, RoundStats)


@dataclass(frozen=True)
class Replica:
    """The records of one replica."""

    number: int
    steps: tuple[Step, ...]
    """All steps, or every n-th and the last if it is thinned."""
    step_seconds: float
    """Sum over all steps, including their exposed seconds."""
    evaluations: tuple[Evaluation, ...]
    rounds: tuple[RoundStats, ...]
    events: tuple[Event, ...]

    @property
    def seconds_exposed(self) -> float:
        """Seconds in which the training thread waited for rounds, took deltas or applied results."""
        return sum(round.seconds_exposed for round in self.rounds)

    @property
    def utilization(self) -> float | None:
        """Training time / (training time + exposed)."""
        if not self.steps:
            return None
        # The time of a step includes its exposed seconds; rounds after the last step add more.
        trained = self.step_seconds - self.steps[-1].seconds_exposed
        return trained / (trained + self.seconds_exposed) if trained > 0 else None


@dataclass(frozen=True)
class RecordedRun:
    """A run as recorded in its directory."""

    folder: Path
    config: Mapping[str, Any]
    summary: Summary | None
    figures: Figures
    """From the summary; until there is one, from the last lines written."""
    replicas: tuple[Replica, ...]

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
        """That of the replica where it is lowest."""
        shares = (replica.utilization for replica in self.replicas)
        return min((share for share in shares if share is not None), default=None)


class ReplicaReader:
    """Reads the two files of a replica, each time from where the last read ended.

    If `thinned`, it keeps at most `POINTS` steps, so that memory stays flat however long a run is.
    """

    def __init__(self, folder: Path, *, thinned: bool = False) -> None:
        self._folder, self._thinned = folder, thinned
        self._clear()

    def _clear(self) -> None:
        self._stride, self._step_seconds = 1, 0.0
        self._steps: list[Step] = []
        self._evaluations: list[Evaluation] = []
        self._rounds: list[RoundStats] = []
        self._events: list[Event] = []
        # Metrics are read first: then no round of a known step is missing.
        self._offsets = {self._folder / "metrics.jsonl": 0, self._folder / "events.jsonl": 0}
        self._read_once = False

    def poll(self) -> bool:
        """Read the new lines; return whether there were any."""
        changed = False
        if any(path.is_file() and path.stat().st_size < offset for path, offset in self._offsets.items()):
            self._clear()  # the files were rewritten
        for path in self._offsets:
            while records := self._new_records(path):
                if self._read_once and self._resumed(records):
                    self._clear()
                    return self.poll()
                changed = True
                for record in records:
                    self._add(record)
        self._read_once = True
        return changed

    def _new_records(self, path: Path) -> list[Record]:
        """The records in the complete lines added since the last read."""
        if not path.is_file():  # not there yet; or a pipe, which would block
            return []
        with path.open("rb") as file:
            file.seek(self._offsets[path])
            chunk = file.read(CHUNK)
        complete = chunk[: chunk.rfind(b"\n") + 1]
        self._offsets[path] += len(complete)
        return list(filter(None, map(from_line, complete.splitlines())))

    def _resumed(self, records: list[Record]) -> bool:
        """Whether the run was resumed since the last read: the files were cut at its checkpoint and may have grown
        past their old ends since."""
        first = records[0]
        repeated = isinstance(first, Step) and self._steps and first.step <= self._steps[-1].step
        return bool(repeated) or any(isinstance(record, Event) and record.event == "resume" for record in records)

    def _add(self, record: Record) -> None:
        match record:
            case Step():
                self._step_seconds += record.step_seconds
                if self._steps and self._steps[-1].step % self._stride:
                    self._steps.pop()
                self._steps.append(record)
                if self._thinned and len(self._steps) > POINTS:
                    self._stride *= 2
                    self._steps = [step for step in self._steps if step.step % self._stride == 0 or step is record]
            case Evaluation():
                self._evaluations.append(record)
            case RoundStats():
                self._rounds.append(record)
            case Event():
                self._events.append(record)

    def replica(self, number: int) -> Replica:
        steps, evaluations = tuple(self._steps), tuple(self._evaluations)
        return Replica(number, steps, self._step_seconds, evaluations, tuple(self._rounds), tuple(self._events))


class Follower:
    """Follows a run while its replicas write. Thread-safe."""

    def __init__(self, folder: Path, *, thinned: bool = True) -> None:
        self.folder = folder
        self._thinned = thinned
        self._replicas: dict[int, ReplicaReader] = {}
        self._lock = threading.Lock()
        self._last_read: object = None
        self._run: RecordedRun | None = None

    def read(self) -> RecordedRun:
        """The run as it is now; the same object if nothing has changed."""
        with self._lock:
            self._replicas = {
                number: self._replicas.get(number) or ReplicaReader(path, thinned=self._thinned)
                for number, path in replica_folders(self.folder).items()
            }
            changes = [reader.poll() for reader in self._replicas.values()]
            config, summary = read_config(self.folder), read_summary(self.folder)
            if self._run is None or any(changes) or self._last_read != (config, summary, len(changes)):
                self._last_read = config, summary, len(changes)
                replicas = tuple(reader.replica(number) for number, reader in self._replicas.items())
                self._run = RecordedRun(self.folder, config, summary, summary or _so_far(config, replicas), replicas)
            return self._run


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
    progress: str = ""
    """In steps; in a bucket in rounds, because members take different numbers of steps."""
    loss: float | None = None
    """Held-out loss from the summary; until there is one, the last training loss."""
    age: float = 0.0
    """Seconds since the run last wrote."""


def status(folder: Path) -> Status:
    """The state of a run, without reading all of it."""
    try:
        return _status(folder)
    except Exception as error:  # one bad run must not hide the others
        return Status(folder, f"cannot be read: {type(error).__name__}: {error}")


def _status(folder: Path) -> Status:
    config, summary = read_config(folder), read_summary(folder)
    first = next(iter(replica_folders(folder).values()), folder / "replica-0")  # another machine has replica 0
    last = _last(Step, first / "metrics.jsonl")
    step, steps = last.step if last else summary.steps if summary else 0, config.get("steps")
    ended = "ended" if summary is None else "stopped" if summary.stopped else "finished"
    loss = summary.loss if summary else None
    written = [path for path in (folder / "config.toml", *first.glob("*.jsonl")) if path.exists()]
    progress = f"{step}/{steps}" if steps else str(step)
    if planned := rounds_planned(config) if config.get("bucket") else 0:
        round = _last(RoundStats, first / "events.jsonl")
        progress = f"{planned if ended == 'finished' else round.index if round else 0}/{planned} rounds"
    return Status(
        folder=folder,
        state="running" if folders.in_use(folder) else ended,
        method=str(config.get("method", "–")),
        model=str(config.get("model", "–")),
        step=step,
        steps=steps,
        progress=progress,
        loss=last.loss if loss is None and last else loss,
        age=time.time() - max((path.stat().st_mtime for path in written), default=time.time()),
    )


def rounds_planned(config: Mapping[str, Any]) -> int:
    """Rounds of each fragment in the whole run; 0 if unknown."""
    steps, sync_every = config.get("steps"), config.get("sync_every")
    return math.ceil(steps / sync_every) if steps and sync_every else 0


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


def read_fragments(folder: Path) -> list[list[str]]:
    """What the fragments of a member of a bucket were doing last: a state, the fragments in it, what they wait for."""
    lines = _bytes(folder / "fragments").decode(errors="replace").splitlines()
    return [words for line in lines if len(words := line.split("\t")) == 3]


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


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
