"""Rows against rows, seed by seed, on seeds that tuning has not seen."""

from dataclasses import replace
from math import log
from statistics import fmean
from typing import Any

from studies.parity.results import Results
from studies.parity.rows import ROWS, UNLIKE, Row
from studies.parity.spread import Noise, Spread, residual, spread
from studies.parity.tuning import tuned

FEW, MANY = 3, 6
"""Seeds of a row: at least, and at most."""


def compared(row: Row, against: Row, results: Results, what: str = "final", of: str = "final") -> Spread | None:
    """Difference in percent of the loss, paired by seed.

    Rows that are alike share their noise, however many seeds they have: three differences alone say little about it.
    """
    found = differences(row, against, results, what, of)
    if not found:
        return None
    shared = row is not against and _alike(row, against.cell.width) and _alike(against, row.cell.width)
    return spread(found, noise(row.cell.width, results) if shared else None)


def noise(width: int, results: Results) -> Noise:
    """Noise of a paired difference in percent, shared by the rows of this width that are alike."""
    cells = {row.name: tuned(row, results)[0] for row in ROWS if _alike(row, width)}
    keys = {(name, seed): replace(cell, seed=seed).key
            for name, cell in cells.items() if cell is not None for seed in range(1, MANY + 1)}  # fmt: skip
    return residual({key: 100 * log(results[of]["final"]) for key, of in keys.items() if of in results})


def _alike(row: Row, width: int) -> bool:
    return row.cell.width == width and row in ROWS and row.name not in UNLIKE


def differences(row: Row, against: Row, results: Results, what: str = "final", of: str = "final") -> list[float]:
    ours, theirs = tuned(row, results)[0], tuned(against, results)[0]
    if ours is None or theirs is None:
        return []
    pairs = [(replace(ours, seed=seed).key, replace(theirs, seed=seed).key) for seed in range(1, MANY + 1)]
    return [100 * (results[a][what] / results[b][of] - 1) for a, b in pairs if a in results and b in results]


def curve(row: Row, against: Row, results: Results) -> list[float]:
    """Difference of the anchors in percent over the run, mean of the seeds that both have."""
    ours, theirs = ({r["cell"]["seed"]: r["curve"] for r in judged(one, results)} for one in (row, against))
    both = [zip(ours[seed], theirs[seed], strict=True) for seed in ours.keys() & theirs.keys()]
    return [fmean(100 * (a / b - 1) for a, b in points) for points in zip(*both, strict=True)]


def judged(row: Row, results: Results) -> list[dict[str, Any]]:
    """The results of all seeds that judge the row."""
    chosen, _ = tuned(row, results)
    cells = [] if chosen is None else [replace(chosen, seed=seed) for seed in range(1, MANY + 1)]
    return [results[cell.key] for cell in cells if cell.key in results]
