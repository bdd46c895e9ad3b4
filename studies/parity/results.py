"""The results of runs: lines of a file that several processes read and add to.

A line is written at once when its run has ended, so an interruption loses only the runs that were under way.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
