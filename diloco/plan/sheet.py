"""A table of the planner: text that fits the terminal, or cells for a page."""

import io
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

WIDEST = 110


@dataclass(frozen=True)
class Sheet:
    title: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    left: int = 1
    """How many columns, from the first one on, are words."""
    spare: tuple[int, ...] = ()
    """When each column may be left out, see `Column`. Empty: none is."""

    def __str__(self) -> str:
        from rich.console import Console

        from diloco.report.fitted import Column, Fitted

        when = self.spare or (0,) * len(self.head)
        cells = zip(self.head, zip(*self.lines, strict=True), strict=True)
        columns = [Column(name, each, i < self.left, when[i]) for i, (name, each) in enumerate(cells)]
        text = io.StringIO()
        console = Console(file=text, width=width(), color_system=None)
        console.print(Fitted(columns))
        missing = len(columns) - len(Fitted(columns).kept(console.width))
        hint = f" ({missing} more columns in a wider terminal)" if missing else ""
        title = textwrap.fill(self.title + hint, console.width)
        return "\n".join([title, *(line.rstrip() for line in text.getvalue().splitlines())]) + "\n\n"


def width() -> int:
    return min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)
