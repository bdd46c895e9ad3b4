"""Secrets in files: the one that signs a run's objects, and the one that encrypts them."""

from pathlib import Path

from diloco.errors import ConfigError

SHORTEST = 16
"""Bytes of a secret."""


def read_secret(path: Path | None) -> bytes | None:
    """None without a path. Raises ConfigError."""
    if path is None:
        return None
    try:
        content = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if len(content) < SHORTEST:
        raise ConfigError(f"{path} holds {len(content)} bytes; a secret needs at least {SHORTEST}: make one with "
                          "`openssl rand -hex 32`")  # fmt: skip
    return content
