"""A run in a few words, without reading all that it wrote."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from diloco.runs import folder as folders
from diloco.runs.reader import read_config, read_summary
from diloco.runs.schema import Step, from_line

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
    loss: float | None
    """On held-out text once there is a summary; before, the last one in training."""
    age: float
    """Seconds since it last wrote."""


def brief(folder: Path) -> Brief:
    try:
        return _brief(folder)
    except Exception as error:  # whatever is wrong with one run must not hide the others
        return Brief(folder, f"cannot be read: {type(error).__name__}: {error}", "–", "–", 0, None, None, 0.0)


def _brief(folder: Path) -> Brief:
    config, summary = read_config(folder), read_summary(folder)
    last = _last_step(folder / "replica-0" / "metrics.jsonl")
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
        loss=last.loss if loss is None and last else loss,
        age=time.time() - max((path.stat().st_mtime for path in written), default=time.time()),
    )


def _last_step(path: Path) -> Step | None:
    for line in reversed(_tail(path).splitlines()):
        if isinstance(record := from_line(line), Step):
            return record
    return None


def _tail(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        return file.read()
