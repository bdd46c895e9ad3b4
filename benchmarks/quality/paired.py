"""Rows against rows, seed by seed, on seeds that tuning has not seen."""

from dataclasses import replace
from math import sqrt
from statistics import fmean
from typing import Any

from benchmarks.quality.rows import NAMED, ROWS, STREAMING, UNLIKE, Row
from benchmarks.quality.spread import Spread, spread
from benchmarks.quality.tuning import Results, tuned

FEW, MANY = 3, 6
"""Seeds of a row: at least, and at most."""


def compared(row: Row, against: Row, results: Results, what: str = "final") -> Spread | None:
    """Difference in percent of the loss, paired by seed.

    Up to FEW pairs borrow the noise of the other rows of their width: its spread from three values is a guess.
    """
    found = differences(row, against, results, what)
    alike: list[list[float]] = []
    if len(found) <= FEW and row is not against:
        alike = _others(row, against, results)
        if not alike and row.cell.width == NAMED[STREAMING].cell.width:
            alike = _others(row, NAMED[STREAMING], results)
    return spread(found, alike) if found else None


def _others(row: Row, against: Row, results: Results) -> list[list[float]]:
    """Differences of the other rows of this width, where several seeds show their noise."""
    others = [other for other in ROWS if other.cell.width == row.cell.width and other.name not in UNLIKE]
    groups = [differences(other, against, results) for other in others if other not in (row, against)]
    return [group for group in groups if len(group) > 1]


def differences(row: Row, against: Row, results: Results, what: str = "final") -> list[float]:
    ours, theirs = tuned(row, results)[0], tuned(against, results)[0]
    if ours is None or theirs is None:
        return []
    pairs = [(replace(ours, seed=seed).key, replace(theirs, seed=seed).key) for seed in range(1, MANY + 1)]
    return [100 * (results[a][what] / results[b]["final"] - 1) for a, b in pairs if a in results and b in results]


def noise(results: Results) -> float:
    """Standard deviation of a paired difference, percent: rows of the usual width against streaming."""
    groups = _others(NAMED[STREAMING], NAMED[STREAMING], results)
    freedom = sum(len(group) - 1 for group in groups)
    return sqrt(sum((value - fmean(group)) ** 2 for group in groups for value in group) / freedom) if freedom else 0.0


def judged(row: Row, results: Results) -> list[dict[str, Any]]:
    """The results of all seeds that judge the row."""
    chosen, _ = tuned(row, results)
    cells = [] if chosen is None else [replace(chosen, seed=seed) for seed in range(1, MANY + 1)]
    return [results[cell.key] for cell in cells if cell.key in results]
