"""The learning rates of a row: the best on seed 0."""

from collections.abc import Callable
from dataclasses import replace

from studies.parity.cell import Cell
from studies.parity.results import Results
from studies.parity.rows import LR, NAMED, OUTER, START, Row

FACTOR = 2**0.5
"""Between neighbours of a grid. At half of it from the optimum the loss changes by less than seeds do."""
NOISE = 0.2
"""Percent: a neighbour that is better by less is not a reason to move. Chance is larger: a walk ends near the optimum,
at one of several values that are as good."""

Point = tuple[int, ...]


def tuned(row: Row, results: Results) -> tuple[Cell | None, list[Cell]]:
    """The row's run with the best values on seed 0, or None and the runs that are needed to know them."""
    if not row.tune and row.like is None:
        return row.cell, []
    start = START
    if row.like is not None:
        source, _ = tuned(NAMED[row.like], results)
        if source is None:
            return None, []
        start = {LR: row.cell.lr or source.lr, OUTER: row.cell.outer_lr or source.outer_lr}
    base = replace(row.cell, lr=start[LR], outer_lr=start[OUTER] if row.cell.replicas else 0.0)
    if not row.tune:
        return base, []

    def at(point: Point) -> Cell:
        powers = dict(zip(row.tune, point, strict=True))
        if len(powers) > 1:  # a step is as long with a larger inner and a smaller outer lr: the valley lies along that
            powers[OUTER] -= powers[LR]
        return replace(base, **{name: _moved(start[name], k) for name, k in powers.items()})

    best, missing = climb(len(row.tune), lambda point: results.get(at(point).key, {}).get("final"))
    return (None if best is None else at(best)), [at(point) for point in missing]


def _moved(value: float, k: int) -> float:
    """k steps along the grid, in two digits, so that walks from different points meet."""
    return float(f"{value * FACTOR**k:.2g}") if k else value


def climb(dimensions: int, loss: Callable[[Point], float | None]) -> tuple[Point | None, list[Point]]:
    """Walk a grid to a point that no neighbour beats by more than NOISE. Returns it, or the points to try next."""
    centre: Point = (0,) * dimensions
    while True:
        star = [centre]
        for i in range(dimensions):
            star += [(*centre[:i], centre[i] + k, *centre[i + 1 :]) for k in (-1, 1)]
        found = {point: value for point in star if (value := loss(point)) is not None}
        missing = [point for point in star if point not in found]
        if missing:
            return None, missing
        best = min(star, key=lambda point: _order(found[point]))
        if not _order(found[best]) < _order(found[centre]) * (1 - NOISE / 100):
            return centre, []
        centre = best


def _order(loss: float) -> float:
    return loss if loss == loss else float("inf")  # nan: it diverged
