"""The user's cache folder."""

import os
import sys
from pathlib import Path


def default_cache() -> Path:
    """`diloco` in the user's cache folder on this platform."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or ("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return Path(base).expanduser() / "diloco"
