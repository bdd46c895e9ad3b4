"""`diloco VERB`: verbs are modules, imported when used; flags are dataclasses; a recipe is stored flags.

Results go to stdout, progress to stderr. Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted.
"""

import difflib
import sys
import tomllib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from diloco import __version__
from diloco.errors import ConfigError, DiLoCoError, Mismatch

VERBS = {
    "train": ("diloco.train.command", "train a language model on several replicas"),
    "compare": ("diloco.train.compare", "run several methods or settings at equal tokens, side by side"),
    "report": ("diloco.report.command", "show a run: table here, curves and timeline as one HTML file"),
    "export": ("diloco.train.export_command", "write the agreed weights as a Hugging Face folder"),
    "plan": ("diloco.plan.command", "know before the run whether the link suffices"),
    "doctor": ("diloco.doctor", "check this machine, and the link between replicas"),
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"diloco {__version__}")
        return 0
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        print(f"diloco: there is no verb {verb!r}{hint} There are {', '.join(VERBS)}.", file=sys.stderr)
        return 2
    try:
        module = import_module(VERBS[verb][0])
        return module.main(parse(module.CONFIG, rest, f"diloco {verb}"))
    except (ConfigError, Mismatch) as error:
        print(f"diloco: {error}", file=sys.stderr)
        return 2
    except (DiLoCoError, OSError) as error:
        print(f"diloco: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parse(kind: type, words: Sequence[str], program: str) -> Any:
    """Flags into a config. A first word that ends in .toml is a recipe: flags that those on the line override."""
    import tyro

    if words and words[0].endswith(".toml"):
        words = [*recipe(Path(words[0])), *words[1:]]
    return tyro.cli(kind, args=words, prog=program)


def recipe(path: Path) -> list[str]:
    """A TOML file of flat keys as flags, so that a typo in it gets the same answer as one on the line."""
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


def _usage() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:{width}}  {text}" for verb, (_, text) in VERBS.items())
    return (
        "diloco: train one model on machines that are far apart, over slow links, without waiting for them\n\n"
        f"usage: diloco VERB [RECIPE.toml] [flags]\n\n{verbs}\n\n"
        "diloco VERB --help lists the flags of a verb; diloco --version gives the version."
    )


if __name__ == "__main__":
    sys.exit(main())
