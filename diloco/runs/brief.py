"""A run in a few words, without reading all that it wrote."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from diloco.runs import folder as folders
from diloco.runs.reader import read_config, read_summary
from diloco.runs.schema import Round, Step, from_line

R = TypeVar("R", Step, Round)
TAIL = 1 << 14
"""Bytes at the end of a file in which its last step is looked for."""


@dataclass(frozen=True)
class Brief:
    folder: Path
    state: str
    """running, finished, stopped, ended (without a summary), or why it cannot be read."""
    method: str
    model: str
    step: int
    steps: int | None
    rounds: tuple[int, int] | None
    """Of a member of a bucket: rounds that the run has closed, as far as this member knows, and all of them."""
    loss: float | None
    """On held-out text once there is a summary; before, the last one in training."""
    age: float
    """Seconds since it last wrote."""

    @property
    def progress(self) -> str:
        """In steps; in a bucket in rounds, because members make different numbers of steps."""
        if self.rounds:
            return "{}/{} rounds".format(*self.rounds)
        return f"{self.step}/{self.steps}" if self.steps else str(self.step)


def brief(folder: Path) -> Brief:
    try:
        return _brief(folder)
    except Exception as error:  # whatever is wrong with one run must not hide the others
        return Brief(folder, f"cannot be read: {type(error).__name__}: {error}", "–", "–", 0, None, None, None, 0.0)


def _brief(folder: Path) -> Brief:
    config, summary = read_config(folder), read_summary(folder)
    last = _last(Step, folder / "replica-0" / "metrics.jsonl")
    running = folders.in_use(folder)
    ended = "ended" if summary is None else "stopped" if summary.stopped else "finished"
    loss = summary.loss if summary else None
    written = [path for path in (folder / "config.toml", *folder.glob("replica-0/*.jsonl")) if path.exists()]
    return Brief(
        folder=folder,
        state="running" if running else ended,
        method=str(config.get("method", "–")),
        model=str(config.get("model", "–")),
        step=last.step if last else summary.steps if summary else 0,
        steps=config.get("steps"),
        rounds=_rounds(folder, config, finished=summary is not None and not summary.stopped),
        loss=last.loss if loss is None and last else loss,
        age=time.time() - max((path.stat().st_mtime for path in written), default=time.time()),
    )


def _rounds(folder: Path, config: Mapping[str, Any], finished: bool) -> tuple[int, int] | None:
    steps, sync_every = config.get("steps"), config.get("sync_every")
    if not config.get("bucket") or not steps or not sync_every:
        return None
    planned = -(-steps // sync_every)
    last = _last(Round, folder / "replica-0" / "events.jsonl")
    return planned if finished else last.index if last else 0, planned


def _last(kind: type[R], path: Path) -> R | None:
    """The last record of this kind."""
    for line in reversed(_tail(path).splitlines()):
        if isinstance(record := from_line(line), kind):
            return record
    return None


def _tail(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        return file.read()
