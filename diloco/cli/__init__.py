"""`diloco VERB`: each verb is a module of this package, imported when it is used.

A verb is a row of `VERBS` and a file of that name with `CONFIG` (its flags, a dataclass), `EXAMPLES` (for its help) and
`main(config)`, which returns the exit code; and, if it needs it, `complete(words)`, which may add words.

Results go to stdout, progress to stderr. Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted.
"""

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from diloco import __version__
from diloco.errors import ConfigError, DiLoCoError, Mismatch

VERBS = {
    "train": "train a language model on several replicas",
    "compare": "run several methods or settings at equal tokens, side by side",
    "report": "show a run: table here, curves and timeline as one HTML file",
    "dashboard": "serve runs as a page that lives, while they train",
    "ls": "list the runs, each with its state",
    "watch": "show a run that meets in a bucket, live, from anywhere",
    "keys": "make a key, list who may take part in a run in a bucket",
    "sample": "let the model of a run write: one answer, or a conversation",
    "export": "write the agreed weights as a Hugging Face folder",
    "plan": "know before the run whether the link suffices",
    "fleet": "know what failures cost many chips",
    "recipes": "list, print or copy the recipes and examples that come with it",
    "doctor": "check this machine, and the link between replicas",
    "completion": "print what makes a shell complete verbs and flags",
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) > 1 and words[0] == "help":
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"diloco {__version__}")
        return 0
    if words[0] not in VERBS:
        close = difflib.get_close_matches(words[0], VERBS, 1)
        hint = f"; did you mean {close[0]}?" if close else "."
        print(f"diloco: there is no verb {words[0]!r}{hint} There are {', '.join(VERBS)}.", file=sys.stderr)
        return 2
    try:
        code = _perform(words[0], words[1:])
        sys.stdout.flush()
        return code
    except (ConfigError, Mismatch) as error:
        print(f"diloco: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at exit
        return 1
    except (DiLoCoError, OSError) as error:
        print(f"diloco: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _perform(verb: str, words: list[str]) -> int:
    from diloco.flags import parse

    module = import_module(f"diloco.cli.{verb}")
    if "-h" in words or "--help" in words:
        from diloco.cli.help import render

        print(render(verb, module.CONFIG, module.EXAMPLES))
        return 0
    words = module.complete(words) if hasattr(module, "complete") else words
    return module.main(parse(module.CONFIG, words))


def _usage() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:{width}}  {text}" for verb, text in VERBS.items())
    return (
        "usage: diloco VERB [RECIPE.toml] [flags]\n\n"
        "Train one model on machines that are far apart, over slow links, without\nwaiting for them.\n\n"
        f"{verbs}\n\n"
        "diloco VERB --help lists the flags of a verb; diloco --version gives the version."
    )


if __name__ == "__main__":
    sys.exit(main())
