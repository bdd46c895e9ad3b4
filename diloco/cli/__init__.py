"""`diloco VERB`: verbs are modules, imported when used; flags are dataclasses; a recipe is stored flags.

Results go to stdout, progress to stderr. Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted.
"""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

from diloco import __version__
from diloco.errors import ConfigError, DiLoCoError, Mismatch
from diloco.recipe import parse

VERBS = {
    "train": ("diloco.cli.train", "train a language model on several replicas"),
    "compare": ("diloco.cli.compare", "run several methods or settings at equal tokens, side by side"),
    "report": ("diloco.cli.report", "show a run: table here, curves and timeline as one HTML file"),
    "watch": ("diloco.cli.watch", "show a run that meets in a bucket, live, from anywhere"),
    "export": ("diloco.cli.export", "write the agreed weights as a Hugging Face folder"),
    "plan": ("diloco.cli.plan", "know before the run whether the link suffices"),
    "doctor": ("diloco.cli.doctor", "check this machine, and the link between replicas"),
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
        hint = f"; did you mean {close[0]}?" if close else "."
        print(f"diloco: there is no verb {verb!r}{hint} There are {', '.join(VERBS)}.", file=sys.stderr)
        return 2
    try:
        module = import_module(VERBS[verb][0])
        rest = module.complete(rest) if hasattr(module, "complete") else rest
        return module.main(parse(module.CONFIG, rest, f"diloco {verb}"))
    except (ConfigError, Mismatch) as error:
        print(f"diloco: {error}", file=sys.stderr)
        return 2
    except (DiLoCoError, OSError) as error:
        print(f"diloco: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


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
