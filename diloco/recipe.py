"""Flags into a config. A recipe is a TOML file of stored flags."""

import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError


def parse(kind: type, words: Sequence[str], program: str) -> Any:
    """A first word that ends in .toml is a recipe, whose flags those on the line override."""
    import tyro

    if words and words[0].endswith(".toml"):
        words = [*_known(kind, Path(words[0])), *words[1:]]
    return tyro.cli(kind, args=words, prog=program)


def _known(kind: type, path: Path) -> list[str]:
    """The flags of a recipe, which must all be of this config."""
    words, names = flags(path), [field.name for field in fields(kind)]
    for key in (word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")):
        if key.removeprefix("no_") not in names and key not in names:
            close = difflib.get_close_matches(key, names, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{path}: there is no setting {key}{hint}")
    return words


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
