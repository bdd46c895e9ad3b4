"""Mean and 95 % interval of a few paired differences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from statistics import fmean, stdev

import numpy as np

from diloco.report.comparison import student


@dataclass(frozen=True)
class Noise:
    """Standard deviation of a paired difference, and how many differences it rests on (degrees of freedom)."""

    deviation: float
    freedom: int


@dataclass(frozen=True)
class Spread:
    mean: float
    half_width: float
    n: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def spread(values: Sequence[float], noise: Noise | None = None) -> Spread:
    """
    >>> spread([1.0, 2.0, 3.0])
    Spread(mean=2.0, half_width=2.484338208780883, n=3)

    Args:
        values: differences, one a seed.
        noise: theirs, where more is known about it than three differences say.

    >>> round(spread([1.0, 2.0, 3.0], Noise(1.0, 12)).half_width, 2)
    1.26
    """
    if noise is None and len(values) > 1:
        noise = Noise(stdev(values), len(values) - 1)
    if noise is None or not noise.freedom:
        return Spread(fmean(values), inf, len(values))
    return Spread(fmean(values), student(noise.freedom) * noise.deviation / sqrt(len(values)), len(values))


def residual(values: Mapping[tuple[str, int], float]) -> Noise:
    """Noise of the difference of two rows at one seed, from values by (row, seed): what is left of them when every row
    and every seed has a level of its own. With two rows it is that of their differences.

    >>> residual({("a", 1): 5.0, ("b", 1): 6.0, ("a", 2): 5.0, ("b", 2): 7.0, ("a", 3): 5.0, ("b", 3): 8.0})
    Noise(deviation=1.0, freedom=2)
    """
    if not values:
        return Noise(inf, 0)
    rows, seeds = (sorted({key[i] for key in values}, key=str) for i in (0, 1))
    design = np.array([[*(row == r for r in rows), *(seed == s for s in seeds)] for row, seed in values], float)
    losses = np.array(list(values.values()))
    levels, _, rank, _ = np.linalg.lstsq(design, losses, rcond=None)
    freedom = len(losses) - int(rank)
    squares = float(((losses - design @ levels) ** 2).sum())
    return Noise(round(sqrt(2 * squares / freedom), 12) if freedom else inf, freedom)


@dataclass(frozen=True)
class Bar:
    """A difference in percent and where it should lie."""

    what: str
    found: Spread | None
    low: float = -inf
    high: float = inf

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not run"
        if self.low <= self.found.low and self.found.high <= self.high:
            return "met"
        if self.found.high < self.low or self.high < self.found.low:
            return "**missed**"
        return f"unresolved: {needed} seeds" if (needed := self._seeds_needed(self.found)) else "one seed"

    def _seeds_needed(self, found: Spread) -> int:
        """Seeds after which the interval would lie on one side of the bar, if the mean stays; 0 if nothing is known of
        the noise."""
        distance = min(abs(found.mean - self.low), abs(found.mean - self.high))
        return 0 if found.half_width == inf else ceil(found.n * (found.half_width / distance) ** 2)

    @property
    def limit(self) -> str:
        if self.low == -inf:
            return f"≤ {self.high:+g} %"
        return f"≥ {self.low:+g} %" if self.high == inf else f"within ± {self.high:g} %"

    def cells(self) -> tuple[str, ...]:
        return self.what, percent(self.found), str(self.found.n) if self.found else "", self.limit, self.verdict


def percent(found: Spread | None) -> str:
    return f"{signed(found)} %" if found else "not run"


def signed(found: Spread) -> str:
    return f"{found.mean:+.2f}" if found.half_width == inf else f"{found.mean:+.2f} ± {found.half_width:.2f}"
