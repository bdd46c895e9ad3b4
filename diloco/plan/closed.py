"""Closed forms of the simulator, exact where they apply (derived from its rules; the tests compare them)."""

import math
from collections.abc import Sequence


def step_with_sync(step_seconds: float, layers: int, sync_seconds: float) -> float:
    """Seconds of a step whose gradients are all sent, layer by layer in equal messages, before the next forward pass.

    With a = 2T/3L (backward of a layer) and s (its message): T/3 + a + s + (L − 1)·max(a, s).
    """
    backward, message = 2 * step_seconds / (3 * layers), sync_seconds / layers
    return step_seconds / 3 + backward + message + (layers - 1) * max(backward, message)


def data_parallel(step_seconds: float, layers: int, sync_seconds: float) -> float:
    """Utilisation; `sync_seconds` is what the whole model takes on the link."""
    return step_seconds / step_with_sync(step_seconds, layers, sync_seconds)


def diloco(step_seconds: float, layers: int, sync_seconds: float, sync_every: int) -> float:
    """Utilisation: one step in `sync_every` is as in data-parallel."""
    longest = step_with_sync(step_seconds, layers, sync_seconds)
    return sync_every * step_seconds / ((sync_every - 1) * step_seconds + longest)


def streaming(step_seconds: float, rounds: Sequence[float], sync_every: int, overlap: int) -> float:
    """Utilisation with rounds of these seconds made in turn, if no two are under way at once.

    Each has `overlap` steps; what it takes longer is waited for. Applies when overlap ≤ sync_every // fragments.
    """
    waited = math.fsum(max(0.0, seconds - overlap * step_seconds) for seconds in rounds)
    return sync_every * step_seconds / (sync_every * step_seconds + waited)


def least_rate(bits: float, sync_every: float, step_seconds: float) -> float:
    """Bits a second without which no overlap reaches full utilisation: what is sent must pass in the time there is."""
    return bits / (sync_every * step_seconds)
