"""Render the help of a command from its flags: in groups, each with its default."""

import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from diloco.runs.flags import choices, meaning, shipped_configs, spelled, value_type, words_beside

COLUMN = 24
"""Where the texts start."""
WIDEST = 100
"""Columns; longer lines are hard to read."""
VALUES = {int: "N", float: "X", Path: "PATH", str: "TEXT"}


def render(command: str, kind: type, examples: Sequence[str], width: int | None = None, *, full: bool = True) -> str:
    """`full`: also show flags for experts, and those of the config that this one extends."""
    width = min(width or shutil.get_terminal_size((80, 24)).columns, WIDEST)
    paragraphs = [" ".join(part.split()) for part in (kind.__doc__ or "").split("\n\n")]
    parts = [_usage(command, kind), *(textwrap.fill(part, width) for part in paragraphs)]
    arguments = [field for field in fields(kind) if meaning(field).positional]
    if arguments:
        parts.append("\n".join(_entry(field, width) for field in arguments))
    flags = [field for field in fields(kind) if not meaning(field).positional]
    flags.sort(key=lambda field: field.name not in kind.__annotations__)  # inherited flags come last
    usual = [f for f in flags if full or (f.name in kind.__annotations__ and not meaning(f).expert)]
    for group in dict.fromkeys(meaning(field).group for field in usual):
        entries = (_entry(field, width) for field in usual if meaning(field).group == group)
        parts.append("\n".join([f"{group}:", *entries]))
    if len(usual) < len(flags):
        parts.append(f"diloco {command} --help-all shows {len(flags) - len(usual)} more flags.")
    if summaries := [_summary(path, width) for path in shipped_configs(kind).values()]:
        parts.append("\n".join(["configs, by name, or a path that ends in .toml:", *summaries]))
    return "\n\n".join([*parts, "\n".join(["examples:", *(_command(text, width) for text in examples)])])


def _usage(command: str, kind: type) -> str:
    places = [field for field in fields(kind) if meaning(field).positional]
    arguments = [_name(field) if field.default is MISSING else f"[{_name(field)}]" for field in places]
    required = [_name(f) for f in fields(kind) if f.default is MISSING and not meaning(f).positional]
    words = [*(["[CONFIG]"] if shipped_configs(kind) else arguments), *required, "[flags]"]
    if any(meaning(field).rest for field in places):  # flags after it would belong to it
        words = ["[flags]", *arguments]
    return " ".join(["usage: diloco", command, *words])


def _summary(path: Path, width: int) -> str:
    """The name of a shipped config and the first sentence of its comment."""
    sentence = re.split(r"[.:?](?:\s|$)|\n", path.read_text(encoding="utf-8").lstrip("# "), maxsplit=1)[0]
    return _columns(f"  {path.stem}", f"{sentence}.", width)


def _entry(field: Field[Any], width: int) -> str:
    text = " ".join(filter(None, [meaning(field).text, _default(field)]))
    return _columns(f"  {_name(field)}", text, width)


def _columns(head: str, text: str, width: int) -> str:
    lines = textwrap.wrap(text, width - COLUMN, break_long_words=False, break_on_hyphens=False)
    first = [] if len(head) + 2 > COLUMN else [head.ljust(COLUMN) + lines.pop(0)]
    return "\n".join([*(first or [head]), *(" " * COLUMN + line for line in lines)])


def _name(field: Field[Any]) -> str:
    kind, several = value_type(field)
    more = "…" if several else ""
    if meaning(field).positional:
        return field.name.removesuffix("s").upper() + more
    if kind is bool:
        return spelled(field.name) if field.default is False else spelled(f"[no-]{field.name}")
    value = "|".join(choices(field) or [VALUES[kind], *words_beside(field)])
    return f"{spelled(field.name)} {value}{more}"


def _default(field: Field[Any]) -> str:
    why = meaning(field).why
    if field.default is MISSING:
        return "" if meaning(field).positional else "Required."
    if field.default is None or field.default == ():
        return f"Default: {why}." if why else ""
    if field.default is False:
        return ""
    kind = value_type(field)[0]
    value = f"{field.default:g}" if kind is float else "on" if kind is bool else field.default
    return f"Default: {value} ({why})." if why else f"Default: {value}."


def _command(text: str, width: int) -> str:
    """Wrap a long command with backslashes, ready to paste into a shell."""
    lines = textwrap.wrap(text, width - 4, break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(f"{'  ' if i == 0 else '      '}{line}" for i, line in enumerate(lines))
