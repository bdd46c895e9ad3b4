"""`diloco COMMAND`: each command is a module of this package, imported on use.

A command is a row of `COMMANDS` and a file of that name with `CONFIG` (its flags, a dataclass), `EXAMPLES` (for its
help), `main(config)`, which returns the exit code, and optionally `complete(words)`, which edits the command line.

Results go to stdout, progress to stderr. Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted.
"""

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from diloco import __version__
from diloco.errors import ConfigError, DiLoCoError, Mismatch

COMMANDS = {
    "train": "train a language model on several replicas",
    "run": "run a transformers or Lightning script as a replica, unchanged",
    "compare": "train several methods on the same number of tokens, side by side",
    "report": "list runs; show or compare them, here and in an HTML file",
    "dashboard": "serve a live page of all runs",
    "watch": "watch a run in a bucket, live, from anywhere",
    "sample": "continue a text with the model of a run",
    "export": "write the agreed weights as a Hugging Face folder",
    "plan": "predict whether the link is fast enough",
    "fleet": "estimate goodput under failures",
    "doctor": "check this machine, and the link between replicas",
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
    if words[0] not in COMMANDS:
        close = difflib.get_close_matches(words[0], COMMANDS, 1)
        hint = f"; did you mean {close[0]}?" if close else "."
        print(f"diloco: unknown command {words[0]!r}{hint} Commands: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    try:
        code = _perform(words[0], words[1:])
        sys.stdout.flush()
        return code
    except (ConfigError, Mismatch) as error:
        print(f"diloco: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit raises again
        return 1
    except DiLoCoError as error:
        print(f"diloco: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename and error.strerror else ""
        print(f"diloco: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _perform(command: str, words: list[str]) -> int:
    from diloco.runs.flags import parse

    module = import_module(f"diloco.cli.{command}")
    if {"-h", "--help", "--help-all"} & set(words[:1] if command == "run" else words):  # a script has its own --help
        from diloco.cli.help import render

        print(render(command, module.CONFIG, module.EXAMPLES, full="--help-all" in words))
        return 0
    words = module.complete(words) if hasattr(module, "complete") else words
    return module.main(parse(module.CONFIG, words))


def _usage() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: diloco COMMAND [flags]\n\n"
        "Train one model on machines that are far apart, without waiting for the slow\nlinks between them.\n\n"
        f"{commands}\n\n"
        "diloco COMMAND --help lists the common flags, --help-all lists all of them.\n"
        "diloco --version prints the version."
    )


if __name__ == "__main__":
    sys.exit(main())
