"""Write a replica's records to its run directory and its tracker (tensorboard, wandb, trackio), and the run's phase."""

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from diloco.core.stats import RoundStats
from diloco.errors import ConfigError, install_command
from diloco.runs.schema import Evaluation, Record, Step, to_line

PHASE_INTERVAL = 0.2
"""Seconds between progress updates of a phase."""
TRACKER_MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""The module that each tracker imports."""


class Sink(Protocol):
    """A tracker that receives the values in metrics.jsonl, as train/loss and eval/loss."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class Writer:
    """The records of one replica. Times are seconds since the start of the run; a resume continues the clock."""

    def __init__(self, folder: Path, sinks: Sequence[Sink] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {kind: (folder / f"{kind}.jsonl").open("a") for kind in ("metrics", "events")}
        self._sinks = sinks
        self._start = time.time()

    def seconds(self, at: float | None = None) -> float:
        """Seconds of the run until now, or until `at` (seconds since the epoch)."""
        return (time.time() if at is None else at) - self._start

    def write(self, record: Record) -> None:
        line = to_line(record)
        metric = {Step: "train", Evaluation: "eval"}.get(type(record))
        file = self._files["metrics" if metric else "events"]
        file.write(json.dumps(line) + "\n")
        file.flush()  # a killed run keeps its records, and the live view reads them
        if metric:
            values = {f"{metric}/{name}": line[name] for name in line if name not in ("event", "step", "seconds")}
            for sink in self._sinks:
                sink.log(values, line["step"])

    def round(self, stats: RoundStats, ranks: int = 1) -> None:
        """Write an applied round: `sent_at` on the clock of the run, bytes of all `ranks` of this replica."""
        self.write(
            replace(
                stats,
                sent_at=self.seconds(stats.sent_at),
                bytes_sent=ranks * stats.bytes_sent,
                bytes_received=ranks * stats.bytes_received,
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """The clock and the size of each file. On resume, everything written later is cut off."""
        return {"seconds": self.seconds(), **{kind: file.tell() for kind, file in self._files.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start = time.time() - state["seconds"]
        for kind, file in self._files.items():
            file.truncate(state[kind])
            file.seek(0, 2)

    def clear(self) -> None:
        """Begin without the records of a start that has saved no checkpoint."""
        self.load_state_dict({"seconds": 0.0, **dict.fromkeys(self._files, 0)})

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        for sink in self._sinks:
            sink.close()


class Phase:
    """What the run is doing now, in a word or two, for the live view. Without a path, does nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._written = path, -PHASE_INTERVAL

    def say(self, text: str) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # a full disk is reported elsewhere
            part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            part.write_text(text, encoding="utf-8")
            part.replace(self._path)
        self._written = time.monotonic()

    def progress(self, text: str, done: float, total: float) -> None:
        """Write the phase with its progress, at most a few times per second."""
        if total and time.monotonic() - self._written >= PHASE_INTERVAL:
            self.say(f"{text}, {min(done / total, 1):.0%}")


def open_sinks(names: Sequence[str], run: str, config: Mapping[str, Any], folder: Path) -> list[Sink]:
    return [_Tensorboard(folder) if name == "tensorboard" else _Wandb(name, run, config) for name in names]


class _Tensorboard:
    def __init__(self, folder: Path) -> None:
        self._writer = _imported("tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """wandb, or trackio, which has the same API."""

    def __init__(self, name: str, run: str, config: Mapping[str, Any]) -> None:
        self._module = _imported(name)
        project = os.environ.get("WANDB_PROJECT", "diloco")
        self._module.init(project=project, name=run, config=dict(config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        self._module.finish()


def _imported(name: str) -> Any:
    try:
        return __import__(TRACKER_MODULES[name])
    except ImportError:
        raise missing_tracker(name) from None


def missing_tracker(name: str) -> ConfigError:
    return ConfigError(f"track={name} is not installed: {install_command(name)}")
