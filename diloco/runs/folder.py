"""The folder of a run: which one, and that nobody else is using it. No torch."""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from diloco.errors import ConfigError
from diloco.recipe import flags
from diloco.runs.config import TrainConfig


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
    if "--resume" not in words:
        return list(words)
    apart = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    given = {flag: value for flag, value in pairwise(apart) if flag.startswith("--")}
    if words[0].endswith(".toml"):
        if "--name" not in given and "--name" not in flags(Path(words[0])):
            raise ConfigError(f"--resume with {words[0]}: which run? Add --name, or leave the recipe out to go on with "
                              "the newest run and its own settings")  # fmt: skip
        return list(words)
    try:
        config = TrainConfig(name=given.get("--name"), out=Path(given.get("--out", "runs")), resume=True)
        stored = flags(_existing(config) / "config.toml")
    except ConfigError:
        return list(words)  # said again, and better, when the run starts
    if "--tokens" in given and "--steps" in stored:
        at = stored.index("--steps")  # they followed from the tokens before, or are replaced by them
        del stored[at : at + 2]
    return [*stored, *words]


@contextmanager
def locked(folder: Path, taken: str = "") -> Iterator[int]:
    """Hold the folder while the run goes on. The lock ends with the processes that have its file, however they end.

    `taken`: what to say if another process holds it. Yields the file's number, for processes that are started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = f"{folder} is in use by another process: wait for it, or give another --name"
            raise ConfigError(taken or busy) from None
        yield file.fileno()
