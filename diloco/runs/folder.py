"""The folder of a run: a new one, an existing one, and the lock that keeps a second process out of it. No torch."""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco.errors import ConfigError

RUNS = Path("runs")
"""The default folder of all runs."""
PAUSES = (0.01, 0.05, 0.1, 0.0)
"""Seconds between tries to lock: `in_use` holds a lock for a moment to see whether it can."""


def new(out: Path, name: str | None, stem: str) -> Path:
    """A folder in `out` for a run that starts: `name`, or the first free number after `stem`.

    An existing run is never overwritten.
    """
    if name is not None:
        folder = out / name
        if (folder / "config.toml").exists():
            raise ConfigError(f"{folder} already holds a run: add --resume to continue it, or give another --name")
        return folder
    stem = stem.replace("/", "-").replace(":", "-")
    numbers = (n for n in range(1, 1_000_000) if not (out / f"{stem}-{n}").exists())
    return out / f"{stem}-{next(numbers)}"


def existing(out: Path, name: str | None) -> Path:
    """The folder in `out` of the run to resume: the one called `name`, or the newest."""
    if name is not None:
        folder = out / name
        if not (folder / "config.toml").exists():
            raise ConfigError(f"there is nothing to resume in {folder}: leave --resume out to start a run there")
        return folder
    runs = [folder for folder in by_age(out) if folder.parent == out]
    if not runs:
        raise ConfigError(f"there is nothing to resume in {out}: leave --resume out to start a run")
    return runs[-1]


def make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; give another folder with --out") from error


def store(folder: Path, settings: str, rank: int) -> None:
    """Write config.toml as a whole: where machines share the folder, a process on each of them does."""
    new = folder / f"config.toml.{rank}"
    new.write_text(settings, encoding="utf-8")
    new.replace(folder / "config.toml")


def checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints of a replica by step."""
    names = {path: re.fullmatch(r"step-([0-9]{8,15})", path.name) for path in folder.glob("step-*")}
    return {int(name[1]): path for path, name in names.items() if name and (path / ".metadata").exists()}


def by_age(out: Path) -> list[Path]:
    """The folders of the runs in `out`, and in folders of a comparison there; the one that began last comes last."""
    settings = [*out.glob("*/config.toml"), *out.glob("*/*/config.toml")]
    return [path.parent for path in sorted(settings, key=lambda path: path.lstat().st_mtime)]


def in_use(folder: Path) -> bool:
    """Whether a process holds the lock of the run, or that of one of its replicas."""
    for path in filter(Path.is_file, (folder / "lock", *folder.glob("replica-*/lock"))):
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


@contextmanager
def locked(folder: Path, busy: str = "") -> Iterator[int]:
    """Lock the folder of a run. The lock is released when the last process that has the file open ends.

    `busy`: the error if another process holds it. Yields the file descriptor, for child processes to inherit.
    """
    make(folder)
    with (folder / "lock").open("a+") as file:
        for pause in PAUSES:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not pause:
                    file.seek(0)
                    used = f"{folder} is in use by process {file.read()}: wait until it ends, stop it with kill"
                    raise ConfigError(busy or f"{used} (which saves a checkpoint), or use another --name") from None
                time.sleep(pause)
        file.truncate(0)
        print(os.getpid(), end="", file=file, flush=True)
        yield file.fileno()
