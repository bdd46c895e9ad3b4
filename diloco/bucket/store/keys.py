"""Secrets in files: the one that signs a run's objects, and the one that encrypts them."""

import logging
from functools import cache
from pathlib import Path

from diloco.errors import ConfigError

SHORTEST = 32
"""Bytes of a secret. Whoever may read the bucket can try guesses at home, so it has to be random, not typed."""
log = logging.getLogger("diloco")


def read_secret(path: Path | None) -> bytes | None:
    """None without a path. Raises ConfigError."""
    if path is None:
        return None
    try:
        content, mode = path.read_bytes().strip(), path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if len(content) < SHORTEST:
        raise ConfigError(f"{path} holds {len(content)} bytes; a secret needs at least {SHORTEST}, at random: make one "
                          "with `openssl rand -hex 32`")  # fmt: skip
    if mode & 0o077:
        _warn_readable(path)
    return content


@cache
def _warn_readable(path: Path) -> None:
    log.warning("%s can be read by other users of this machine: chmod 600 %s", path, path)
