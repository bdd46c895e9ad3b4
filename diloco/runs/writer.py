"""Where numbers go: metrics.jsonl and events.jsonl always; tensorboard, wandb and trackio if asked for."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from diloco.errors import ConfigError
from diloco.stats import RoundStats


class Sink(Protocol):
    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """One replica's numbers. `seconds` count from the start of the run and go on after a resume."""

    def __init__(self, folder: Path, sinks: Sequence[Sink] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {kind: (folder / f"{kind}.jsonl").open("a") for kind in ("metrics", "events")}
        self._sinks = sinks
        self._began = time.time()

    def seconds(self, at: float | None = None) -> float:
        return (time.time() if at is None else at) - self._began

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._write("metrics", {"step": step, "seconds": self.seconds(), **values})
        for sink in self._sinks:
            sink.log(values, step)

    def event(self, event: str, step: int, **values: Any) -> None:
        self._write("events", {"event": event, "seconds": self.seconds(), "step": step, **values})

    def round(self, r: RoundStats) -> None:
        self.event(
            "round",
            r.applied_step,
            fragment=r.fragment,
            index=r.index,
            sent_step=r.sent_step,
            sent_seconds=self.seconds(r.sent_at),
            flight_seconds=r.seconds,
            exposed_seconds=r.seconds_exposed,
            bytes_sent=r.bytes_sent,
            bytes_received=r.bytes_received,
            members=r.members,
        )

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        file = self._files[kind]
        file.write(json.dumps(values) + "\n")
        file.flush()  # a killed run keeps its numbers, and the live view reads them

    def state_dict(self) -> dict[str, Any]:
        """How much of each file belongs to this moment: on resume, what came later is cut off."""
        return {"seconds": self.seconds(), **{kind: file.tell() for kind, file in self._files.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._began = time.time() - state["seconds"]
        for kind, file in self._files.items():
            file.truncate(state[kind])
            file.seek(0, 2)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        for sink in self._sinks:
            sink.close()


def open_sinks(names: Sequence[str], run: str, config: Mapping[str, Any], folder: Path) -> list[Sink]:
    return [_OPEN[name](run, config, folder) for name in names]


class _Board:
    def __init__(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise _missing("tensorboard") from None
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Run:
    """wandb, and trackio, which has the same calls."""

    def __init__(self, module: str, run: str, config: Mapping[str, Any]) -> None:
        try:
            self._module = __import__(module)
        except ImportError:
            raise _missing(module) from None
        self._module.init(project="diloco", name=run, config=dict(config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        self._module.finish()


_OPEN = {
    "tensorboard": _Board,
    "wandb": lambda run, config, folder: _Run("wandb", run, config),
    "trackio": lambda run, config, folder: _Run("trackio", run, config),
}


def _missing(name: str) -> ConfigError:
    return ConfigError(f"track={name}: it is not installed; pip install 'diloco[{name}]'")
