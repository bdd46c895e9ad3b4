"""What a run does at the moment, in a word or two, where the live view finds it."""

import contextlib
import os
import time
from pathlib import Path

EVERY = 0.2
"""Seconds between two lines of progress: more often nobody can read them."""


class Phase:
    """Written by the first process of a run. Without a path it says nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._said = path, -EVERY

    def say(self, text: str) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # a full disk is reported where it matters
            part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            part.write_text(text, encoding="utf-8")
            part.replace(self._path)
        self._said = time.monotonic()

    def progress(self, text: str, done: float, total: float) -> None:
        """Say how far it is, a few times a second."""
        if total and time.monotonic() - self._said >= EVERY:
            self.say(f"{text}, {min(done / total, 1):.0%}")


def read_phase(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
