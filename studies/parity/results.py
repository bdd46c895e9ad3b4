"""The results of runs: lines of a file that several processes read and add to.

A line is written at once when its run has ended, so an interruption loses only the runs that were under way. A run that
is claimed is left alone by other processes; the claim ends with the process that made it.
"""

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CLAIMS = Path(tempfile.gettempdir()) / f"parity-claims-{os.getuid()}"


Results = Mapping[str, dict[str, Any]]
"""What each run found, by its key."""


def load(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {result["key"]: result for result in map(json.loads, lines)}


def append(path: Path, result: dict[str, Any]) -> None:
    """One write at the end of the file, whoever else writes to it: lines are never mixed."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, (json.dumps(result) + "\n").encode())
    finally:
        os.close(file)


@contextmanager
def claim(key: str, folder: Path = CLAIMS) -> Iterator[bool]:
    """Whether this process alone may do the run."""
    folder.mkdir(exist_ok=True)
    with (folder / key).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def once(path: Path, key: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Run it and add its result to the file, or None where another process does or has done so."""
    with claim(key) as mine:
        if not mine or key in load(path):
            return None
        result = run()
        append(path, result)
        return result
