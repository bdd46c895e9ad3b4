"""Which runs the study consists of, in the order in which they matter.

`wanted` is a pure function of the results so far: tuning decides what comes next, and an interrupted study goes on.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from studies.parity import today
from studies.parity.cell import EVALUATED, Cell
from studies.parity.paired import FEW, MANY, compared
from studies.parity.results import Results
from studies.parity.rows import DILOCO, DP, NAMED, ROWS, STREAMING, WIDTH, Row
from studies.parity.tuning import tuned

RESOLVED = 0.2
"""Percent: a headline row gets seeds until the half-width of its 95 % interval is below this, or MANY are run."""
QUICK: dict[str, tuple[str, ...]] = {
    DP: (),
    DILOCO: (DP,),
    STREAMING: (DP,),
    "random zeroing": (DP,),
    today.MUON: (DP,),
    today.DEFAULTS: (DP, today.MUON),
}
"""Rows, and those that they are compared with."""
QUICK_STEPS, QUICK_SEEDS = 900, 2


def quick(results: Results) -> tuple[Row, ...]:
    """A few rows with the values that the complete study has found, in a third of the steps."""
    cells = {name: tuned(NAMED[name], results)[0] for name in QUICK if name in NAMED}
    cells |= {name: replace(today.ROWS[name], width=WIDTH, evaluated=EVALUATED) for name in QUICK if name not in NAMED}
    return tuple(Row(name, replace(cell, steps=QUICK_STEPS), against=QUICK[name])
                 for name, cell in cells.items() if cell is not None)  # fmt: skip


def wanted(results: Results, rows: tuple[Row, ...] = ROWS, few: int = FEW) -> Iterator[tuple[str, Cell]]:
    """(row, run) still to be done, the most important first. More may follow from their results."""
    headlines = [row for row in rows if row.headline]
    for row in headlines:
        yield from _of_row(row, results, few)
    for seeds in range(1, few + 1):
        for row in rows:
            yield from _of_row(row, results, seeds)
    for row in headlines:
        yield from _of_row(row, results, _seeds(row, results, rows))


def least(results: Results, rows: tuple[Row, ...], few: int) -> int:
    """How many runs there are to do, if every tuning ends where it begins and the first seeds resolve all."""
    rows, supposed = tuple(replace(row, headline=False) for row in rows), dict(results)
    while todo := {cell.key for _, cell in wanted(supposed, rows, few)} - supposed.keys():
        supposed |= {key: {"final": inf} for key in todo}
    return len(supposed) - len(results)


def _of_row(row: Row, results: Results, seeds: int) -> Iterator[tuple[str, Cell]]:
    chosen, missing = tuned(row, results)
    yield from ((row.name, cell) for cell in missing)
    if chosen is not None:
        for seed in range(1, seeds + 1):
            cell = replace(chosen, seed=seed)
            if cell.key not in results:
                yield row.name, cell


def _seeds(row: Row, results: Results, rows: tuple[Row, ...]) -> int:
    """One more than there are, for both sides of a comparison that is not resolved."""
    most = FEW
    for other in rows:
        if other.headline and (other is row or row.name in other.against):
            for against in other.against:
                found = compared(other, NAMED[against], results)
                if found is not None and found.half_width > RESOLVED:
                    most = max(most, min(found.n + 1, MANY))
    return most
