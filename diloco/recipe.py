"""Flags into a config. A recipe is a TOML file of stored flags, so a typo in it gets the same answer as on the line."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError


def parse(kind: type, words: Sequence[str], program: str) -> Any:
    """A first word that ends in .toml is a recipe, whose flags those on the line override."""
    import tyro

    if words and words[0].endswith(".toml"):
        words = [*flags(Path(words[0])), *words[1:]]
    return tyro.cli(kind, args=words, prog=program)


def flags(path: Path) -> list[str]:
    """The flat keys of a TOML file as flags."""
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe {path}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    words = []
    for key, value in values.items():
        flag = key.replace("_", "-")
        if isinstance(value, dict):
            raise ConfigError(f"{path}: [{key}] is a table; a recipe has keys only, as in sync_every = 100")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)] if value else []
        else:
            words += [f"--{flag}", str(value)]
    return words
