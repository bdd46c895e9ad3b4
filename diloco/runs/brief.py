"""A run in a few words, without reading all that it wrote."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from diloco.runs import folder as folders
from diloco.runs.reader import read_config
from diloco.runs.schema import Step, from_line, parse_object

TAIL = 1 << 14
"""Bytes at the end of a file in which its last step is looked for."""


@dataclass(frozen=True)
class Brief:
    folder: Path
    state: str
    """running, finished, stopped or ended: it ended without a summary."""
    method: str
    model: str
    step: int
    steps: int | None
    loss: float | None
    """On held-out text once there is a summary; before, the last one in training."""
    age: float
    """Seconds since it last wrote."""


def brief(folder: Path) -> Brief:
    config = read_config(folder)
    summary = parse_object(_tail(folder / "summary.json", whole=True))
    last = _last_step(folder / "replica-0" / "metrics.jsonl")
    running = folders.in_use(folder)
    ended = "ended" if not summary else "stopped" if summary.get("stopped") else "finished"
    written = [path for path in (folder / "config.toml", *folder.glob("replica-0/*.jsonl")) if path.exists()]
    return Brief(
        folder=folder,
        state="running" if running else ended,
        method=str(config.get("method", "–")),
        model=str(config.get("model", "–")),
        step=last.step if last else int(summary.get("steps", 0)),
        steps=config.get("steps"),
        loss=summary.get("eval/loss", last.loss if last else None),
        age=time.time() - max((path.stat().st_mtime for path in written), default=time.time()),
    )


def _last_step(path: Path) -> Step | None:
    for line in reversed(_tail(path).splitlines()):
        if isinstance(record := from_line(line), Step):
            return record
    return None


def _tail(path: Path, whole: bool = False) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0 if whole else max(0, size - TAIL))
        return file.read()
