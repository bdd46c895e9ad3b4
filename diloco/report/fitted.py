"""Tables that fit the terminal: where there is no room, whole columns are left out. No number is ever cut."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

GAP = 2
"""Spaces between two columns."""


@dataclass(frozen=True)
class Column:
    name: str
    cells: Sequence[str]
    left: bool = False
    """Words begin at the left, numbers end at the right."""
    spare: int = 0
    """The column with the largest is the first to be left out; 0 stays."""
    style: str = ""

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.name, *self.cells)))


@dataclass(frozen=True)
class Fitted:
    columns: Sequence[Column]

    def kept(self, width: int) -> list[Column]:
        kept = list(self.columns)
        while sum(column.width + GAP for column in kept) - GAP > width:
            spare = max(kept, key=lambda column: column.spare)
            if not spare.spare:
                break
            kept.remove(spare)
        return kept

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, GAP - 1, 0, 0))
        kept = self.kept(options.max_width)
        for column in kept:  # what still does not fit are words, which may go on in a second line
            table.add_column(column.name, justify="left" if column.left else "right", no_wrap=not column.left,
                             overflow="fold", style=column.style)  # fmt: skip
        for cells in zip(*(column.cells for column in kept), strict=True):
            table.add_row(*map(Text, cells))
        yield table
