"""`diloco recipes`: the recipes and examples that come with the package, to read and to copy."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import ConfigError
from diloco.flags import HOME, flag

FOLDERS = ("recipes", "examples")


@dataclass(frozen=True, kw_only=True)
class RecipesConfig:
    """List the recipes and examples that come with diloco, print one, or copy it."""

    name: str | None = flag(None, "Which one, as in the list.", positional=True, why="list them")
    to: Path | None = flag(None, "Copy it into this folder.", why="print it")


CONFIG = RecipesConfig
EXAMPLES = ("diloco recipes", "diloco recipes demo", "diloco recipes bucket --to .")


def main(config: RecipesConfig) -> int:
    known = found()
    if config.name is None:
        if config.to is not None:
            raise ConfigError(f"to={str(config.to)!r} without a name: give one of {', '.join(known)}")
        width = max(map(len, known), default=0)
        print("\n".join(f"{name:{width}}  {summary(path)}" for name, path in known.items()))
        return 0
    if config.name not in known:
        raise ConfigError(f"there is no recipe or example {config.name!r}: give one of {', '.join(known)}")
    path = known[config.name]
    if config.to is None:
        print(told(path).read_text(encoding="utf-8"), end="")
        return 0
    there = config.to / path.name
    if there.exists():
        raise ConfigError(f"{there} exists already: give another folder, or remove it")
    try:
        config.to.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, there, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(path, there)
    except OSError as error:
        raise ConfigError(f"cannot write to {config.to}: {error.strerror}; give another folder with --to") from None
    print(there)
    return 0


def found() -> dict[str, Path]:
    """Recipes first. A folder is one example."""
    paths = (path for folder in FOLDERS for path in sorted((HOME / folder).glob("*")))
    return {path.stem: path for path in paths if not path.name.startswith(("_", "."))}


def told(path: Path) -> Path:
    """The file that says what it is."""
    return path / "README.md" if path.is_dir() else path


def summary(path: Path) -> str:
    """Its first sentence."""
    text = told(path).read_text(encoding="utf-8").lstrip('#" ')
    return re.split(r"[.:?](?:\s|$)|\n", text, maxsplit=1)[0]
