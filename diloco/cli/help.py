"""The help of a command, from its flags."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, fields
from functools import partial

from diloco.runs.flags import meaning, parser, shipped_configs, spelled

COLUMN = 24
"""Where the texts start."""
WIDEST = 100
"""Columns; longer lines are hard to read."""


def render(command: str, kind: type, examples: Sequence[str], width: int | None = None, *, full: bool = True) -> str:
    """`full`: also show flags for experts, and those of the config that this one extends."""
    width = min(width or shutil.get_terminal_size((80, 24)).columns, WIDEST)
    paragraphs = [" ".join(part.split()) for part in (kind.__doc__ or "").split("\n\n")]
    usual = sum(field.name in kind.__annotations__ and not meaning(field).expert for field in fields(kind))
    ends = []
    if not full and usual < len(fields(kind)):
        ends.append(f"diloco {command} --help-all shows {len(fields(kind)) - usual} more flags.")
    if shipped := shipped_configs(kind):
        comments = {name: path.read_text(encoding="utf-8").lstrip("# ") for name, path in shipped.items()}
        sentences = (
            textwrap.fill(
                re.split(r"[.:?](?:\s|$)|\n", comment, maxsplit=1)[0] + ".", width,
                initial_indent=f"  {name}".ljust(COLUMN), subsequent_indent=" " * COLUMN,
            )
            for name, comment in comments.items()
        )  # fmt: skip
        ends.append("\n".join(["configs, by name, or a path that ends in .toml:", *sentences]))
    ends.append("\n".join(["examples:", *(_command(text, width) for text in examples)]))
    return parser(
        kind,
        full=full,
        usage=_usage(command, kind),
        description="\n\n".join(textwrap.fill(text, width) for text in paragraphs),
        epilog="\n\n".join(ends).replace("%", "%%"),
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=COLUMN, width=width),
    ).format_help()


def _usage(command: str, kind: type) -> str:
    places = [field for field in fields(kind) if meaning(field).positional]
    names = [field.name.removesuffix("s").upper() for field in places]
    arguments = [name if field.default is MISSING else f"[{name}]" for name, field in zip(names, places, strict=True)]
    required = [spelled(f.name) for f in fields(kind) if f.default is MISSING and not meaning(f).positional]
    return " ".join(["diloco", command, *(["[CONFIG]"] if shipped_configs(kind) else []), "[flags]", *required,
                     *arguments])  # fmt: skip


def _command(text: str, width: int) -> str:
    """Wrap a long command with backslashes, ready to paste into a shell."""
    lines = textwrap.wrap(text, width - 4, break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(f"{'  ' if i == 0 else '      '}{line}" for i, line in enumerate(lines))
