"""Where numbers go besides the run directory: tensorboard, wandb and trackio, each if it is asked for."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from diloco.errors import ConfigError, install_command

MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""What each of them imports."""


class Sink(Protocol):
    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


def open_sinks(names: Sequence[str], run: str, config: Mapping[str, Any], folder: Path) -> list[Sink]:
    return [_OPEN[name](run, config, folder) for name in names]


class _Tensorboard:
    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise missing("tensorboard") from None
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """wandb, and trackio, which has the same calls."""

    def __init__(self, module: str, run: str, config: Mapping[str, Any]) -> None:
        try:
            self._module = __import__(module)
        except ImportError:
            raise missing(module) from None
        self._module.init(project="diloco", name=run, config=dict(config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        self._module.finish()


_OPEN = {
    "tensorboard": lambda run, config, folder: _Tensorboard(folder),
    "wandb": lambda run, config, folder: _Wandb("wandb", run, config),
    "trackio": lambda run, config, folder: _Wandb("trackio", run, config),
}


def missing(name: str) -> ConfigError:
    return ConfigError(f"track={name} is not installed: {install_command(name)}")
