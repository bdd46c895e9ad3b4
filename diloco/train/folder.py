"""The folder of a run: which one, and that nobody else is using it. No torch."""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from diloco.errors import ConfigError
from diloco.train.config import TrainConfig


def choose(config: TrainConfig) -> Path:
    """The run to go on with, or a new one. An existing run is never overwritten."""
    if config.resume:
        return _existing(config)
    if config.name is not None:
        folder = config.out / config.name
        if (folder / "config.toml").exists():
            raise ConfigError(f"{folder} holds a run already: add --resume to go on with it, or give another --name")
        return folder
    stem = f"{config.model.replace('/', '-').replace(':', '-')}-{config.method}"
    numbers = (n for n in range(1, 1_000_000) if not (config.out / f"{stem}-{n}").exists())
    return config.out / f"{stem}-{next(numbers)}"


def _existing(config: TrainConfig) -> Path:
    if config.name is not None:
        folder = config.out / config.name
        if not (folder / "config.toml").exists():
            raise ConfigError(f"there is nothing to resume in {folder}: leave --resume out to start there")
        return folder
    runs = sorted(config.out.glob("*/config.toml"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise ConfigError(f"there is nothing to resume in {config.out}: leave --resume out to start a run")
    return runs[-1].parent


def resumed(words: Sequence[str]) -> list[str]:
    """The flags of the run that `--resume` goes on with, then those given: what is not changed stays as it was."""
    if "--resume" not in words or words[0].endswith(".toml"):
        return list(words)
    given = {flag: value for flag, value in pairwise(words) if flag in ("--name", "--out")}
    try:
        config = TrainConfig(name=given.get("--name"), out=Path(given.get("--out", "runs")), resume=True)
        return [str(_existing(config) / "config.toml"), *words]
    except ConfigError:
        return list(words)  # said again, and better, when the run starts


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder while the run goes on. The lock ends with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder} is in use by another process: wait for it, or give another --name") from None
        yield
