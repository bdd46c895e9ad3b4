"""`--batch auto`: choose the batch whose step takes this machine as long as a step of the run. No torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diloco.errors import ConfigError

Pace = Mapping[int, float]
"""Seconds per step, by number of sequences."""


@dataclass(frozen=True)
class Batch:
    """One step of a replica."""

    sequences: int
    accumulate: int
    why: str = ""
    """The reason, if it was chosen."""


def measure(seconds: Callable[[int], float | None], *, first: int = 1, until: float, most: int) -> Pace:
    """Time steps of `first` sequences, then twice as many each time, until a step takes `until` seconds or holds `most`
    sequences. `seconds` returns None when memory runs out."""
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
    """Seconds of a step of this size. Beyond the largest that was timed, the time grows with the size."""
    largest = max(pace)
    return pace[sequences] if sequences in pace else pace[largest] * sequences / largest


def batch_for(pace: Pace, step_seconds: float, *, accumulate: int = 1) -> Batch:
    """The batch whose step takes this long. Micro-batches never exceed the largest size timed: more may not fit.

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
