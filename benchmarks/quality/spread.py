"""Mean and 95 % interval of a few paired differences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean

T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
"""97.5 % point of Student's distribution with 1, 2, … degrees of freedom."""


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


def spread(values: Sequence[float], alike: Iterable[Sequence[float]] = ()) -> Spread:
    """
    >>> spread([1.0, 2.0, 3.0])
    Spread(mean=2.0, half_width=2.484338208780883, n=3)

    Args:
        values: differences, one a seed.
        alike: others with the same noise: three differences alone say little about it.

    >>> round(spread([1.0, 2.0, 3.0], [[5.0, 6.0, 7.0]] * 5).half_width, 2)
    1.26
    """
    groups = [values, *alike]
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return Spread(fmean(values), inf, len(values))
    squares = sum((value - fmean(group)) ** 2 for group in groups for value in group)
    return Spread(fmean(values), student(freedom) * sqrt(squares / freedom / len(values)), len(values))


def student(freedom: int) -> float:
    """97.5 % point; beyond the table within 0.01."""
    return T[freedom - 1] if freedom <= len(T) else 1.96 + 2.5 / freedom
