"""`--batch auto`: the batch with which a step of this member takes as long as a step of the run. No torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diloco.errors import ConfigError

Pace = Mapping[int, float]
"""Seconds of a step, by the number of its sequences."""


@dataclass(frozen=True)
class Batch:
    """A step of one replica."""

    sequences: int
    accumulate: int
    why: str = ""
    """The reason, if it was chosen."""


def measure(seconds: Callable[[int], float | None], *, first: int = 1, until: float, most: int) -> Pace:
    """Time steps of twice as many sequences each, from `first` on, until one takes this long or has the most sequences.
    `seconds` returns None if memory does not suffice."""
    pace: dict[int, float] = {}
    sequences = first
    while (taken := seconds(sequences)) is not None:
        pace[sequences] = taken
        if taken >= until or sequences >= most:
            return pace
        sequences = min(2 * sequences, most)
    if not pace:
        raise ConfigError(f"a step of {first} sequences does not fit into this machine's memory: use a smaller model")
    return pace


def seconds_of(pace: Pace, sequences: int) -> float:
    """Seconds of a step with this many sequences; in several passes if fewer were tried."""
    largest = max(pace)
    return pace[sequences] if sequences in pace else pace[largest] * sequences / largest


def batch_for(pace: Pace, step_seconds: float, *, accumulate: int = 1) -> Batch:
    """The batch whose step takes this long. No micro-batch is larger than what was tried: it may not fit into memory.

    >>> batch_for({1: 0.3, 2: 0.5, 4: 0.9}, 0.7)
    Batch(sequences=3, accumulate=1, why='')
    >>> batch_for({1: 0.3, 2: 0.5}, 2.2)
    Batch(sequences=10, accumulate=5, why='')
    """
    largest = max(pace)
    below = max((n for n in pace if pace[n] <= step_seconds), default=None)
    if below is None:
        wanted = min(pace)
    elif below == largest:
        wanted = largest * step_seconds / pace[largest]
    else:
        above = min(n for n in pace if n > below)
        wanted = below + (above - below) * (step_seconds - pace[below]) / (pace[above] - pace[below])
    parts = accumulate * math.ceil(round(wanted / largest, 3))
    return Batch(max(round(wanted / parts), 1) * parts, parts)
