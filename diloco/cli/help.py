"""The help of a command, made from its flags: in groups, each with its default."""

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from diloco.flags import choices, meaning, spelled, value_type, words_beside

COLUMN = 24
"""Where the texts begin."""
WIDEST = 100
"""Columns; longer lines are hard to read."""
SHORT = 18
"""Characters of all choices together up to which they stand beside the flag."""
VALUES = {int: "N", float: "X", Path: "PATH", str: "TEXT"}


def render(command: str, kind: type, examples: Sequence[str], width: int | None = None, *, every: bool = True) -> str:
    """`every`: also flags for experts, and those of the config that this one extends."""
    width = min(width or shutil.get_terminal_size((80, 24)).columns, WIDEST)
    paragraphs = [" ".join(part.split()) for part in (kind.__doc__ or "").split("\n\n")]
    flags = [field for field in fields(kind) if not meaning(field).positional]
    flags.sort(key=lambda field: field.name not in kind.__annotations__)  # its own flags come before inherited ones
    shown = [f for f in flags if every or (f.name in kind.__annotations__ and not meaning(f).expert)]
    parts = [_usage(command, kind), *(textwrap.fill(part, width) for part in paragraphs)]
    if arguments := [field for field in fields(kind) if meaning(field).positional]:
        parts.append("\n".join(_entry(field, width) for field in arguments))
    for group in dict.fromkeys(meaning(field).group for field in shown):
        entries = (_entry(field, width) for field in shown if meaning(field).group == group)
        parts.append("\n".join([f"{group}:", *entries]))
    if len(shown) < len(flags):
        parts.append(f"diloco {command} --help-all shows {len(flags) - len(shown)} more flags.")
    return "\n\n".join([*parts, "\n".join(["examples:", *(_command(text, width) for text in examples)])])


def _usage(command: str, kind: type) -> str:
    places = [field for field in fields(kind) if meaning(field).positional]
    arguments = [_name(field) if field.default is MISSING else f"[{_name(field)}]" for field in places]
    needed = [_name(f) for f in fields(kind) if f.default is MISSING and not meaning(f).positional]
    return " ".join(["usage: diloco", command, *(arguments or ["[RECIPE]"]), *needed, "[flags]"])


def _entry(field: Field[Any], width: int) -> str:
    head = f"  {_name(field)}"
    text = " ".join(filter(None, [meaning(field).text, _allowed(field), _default(field)]))
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
    allowed = "|".join(choices(field))
    value = VALUES.get(kind, "NAME") if not allowed else allowed if len(allowed) <= SHORT else "NAME"
    value = "|".join([value, *words_beside(field)])
    return f"{spelled(field.name)} {value}{more}"


def _allowed(field: Field[Any]) -> str:
    """The choices, where they neither stand beside the flag nor are all explained in its text."""
    names = choices(field)
    if len("|".join(names)) <= SHORT or all(name in meaning(field).text for name in names):
        return ""
    return f"{', '.join(names[:-1])} or {names[-1]}."


def _default(field: Field[Any]) -> str:
    why = meaning(field).default
    if field.default is MISSING:
        return "" if meaning(field).positional else "Required."
    if field.default is None or field.default == ():
        return f"Default: {why}." if why else ""
    kind = value_type(field)[0]
    value = f"{field.default:g}" if kind is float else ("off", "on")[field.default] if kind is bool else field.default
    return f"Default: {value} ({why})." if why else f"Default: {value}."


def _command(text: str, width: int) -> str:
    """Long commands go on in a second line, as a shell takes them."""
    lines = textwrap.wrap(text, width - 4, break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(f"{'  ' if i == 0 else '      '}{line}" for i, line in enumerate(lines))
