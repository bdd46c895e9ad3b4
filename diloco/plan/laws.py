"""Published scaling laws: estimates of the loss, and default learning rate, batch size and number of steps."""

import math
from dataclasses import dataclass

from diloco.core.overlap import SAFE_OVERLAP

SCALING_LAWS = "arXiv 2503.09799"
STREAMING = "arXiv 2501.18512"

FITS = {1: (18.363, -0.0961), 2: (18.768, -0.0969), 4: (19.762, -0.0992), 8: (21.051, -0.1018)}
"""Loss A·N^a of DiLoCo by replicas: C4, 20 tokens per parameter, sync_every 30 (scaling laws)."""
DATA_PARALLEL = (18.129, -0.0953)
MORE_REPLICAS = 0.0116
"""Exponent of the replicas in the joint fit, used above 8."""
FITTED = (35e6, 2.4e9)
"""Range of model sizes that were fitted."""
LOSS_30_100 = {
    2: ((3.53, 3.56), (3.21, 3.22), (2.98, 3.00), (2.81, 2.83), (2.67, 2.69), (2.48, 2.50)),
    4: ((3.60, 3.64), (3.25, 3.29), (3.02, 3.05), (2.84, 2.87), (2.70, 2.73), (2.50, 2.53)),
}
"""Loss with sync_every 30 and 100 at 35M, 100M, 200M, 300M, 500M and 1B, by replicas (streaming paper, Tables 5, 6)."""
LARGEST_SYNC_EVERY = 300
"""The largest value in the scaling-law experiments."""
TOKENS_PER_PARAMETER = 20


@dataclass(frozen=True)
class Estimate:
    """A relative difference in loss from data-parallel training."""

    gap: float
    caution: str
    """Why it is uncertain; empty inside the published range."""


def loss_gap(parameters: float, replicas: int, sync_every: int, overlap: int) -> Estimate:
    """Estimate the loss gap to data-parallel training with the same tokens and batch size.

    >>> estimate = loss_gap(35e6, 2, 100, 1)
    >>> round(100 * estimate.gap, 1)  # published: 3.56 and 3.51, +1.4 %
    1.4
    """
    gap = _loss(parameters, replicas) / _fit(DATA_PARALLEL, parameters) - 1 + _rise(replicas, sync_every)
    cautions = []
    if not FITTED[0] <= parameters <= FITTED[1]:
        cautions.append("model size outside the fits")
    if replicas > max(FITS):
        cautions.append("more replicas than were fitted")
    if not 30 <= sync_every <= 100:
        cautions.append("sync_every outside 30 to 100")
    if overlap > SAFE_OVERLAP:
        cautions.append("up to 0.2 % more for overlap" if overlap <= 10 else "overlap above 10 costs more")
    return Estimate(gap, ", ".join(cautions))


def inner_lr(parameters: float, replicas: int) -> float:
    """Peak learning rate of AdamW by the joint fit of the scaling laws."""
    return 22256 * parameters**-0.8827 * replicas**0.2929


def batch_of(parameters: float, replicas: int, context: int, multiple: int) -> int:
    """Sequences per step of all replicas, by the joint fit, which is for sequences of 2048 tokens."""
    sequences = 0.00709 * parameters**0.4695 * replicas**0.3399 * 2048 / context
    return max(round(sequences / multiple), 1) * multiple


def steps(parameters: float, replicas: int, context: int, batch: int | None = None, tokens: int | None = None) -> int:
    """Steps of a run. Defaults: batch by the scaling laws, 20 tokens per parameter."""
    batch = batch or batch_of(parameters, replicas, context, replicas)
    return max(round((tokens or TOKENS_PER_PARAMETER * round(parameters)) / (batch * context)), 1)


def _loss(parameters: float, replicas: int) -> float:
    """By the fits; between them linear in log M, above them by the joint fit."""
    if replicas > max(FITS):
        return _fit(FITS[max(FITS)], parameters) * (replicas / max(FITS)) ** MORE_REPLICAS
    below = max(m for m in FITS if m <= replicas)
    above = min(m for m in FITS if m >= replicas)
    low, high = _fit(FITS[below], parameters), _fit(FITS[above], parameters)
    return low if above == below else low + (high - low) * math.log(replicas / below) / math.log(above / below)


def _fit(law: tuple[float, float], parameters: float) -> float:
    return law[0] * parameters ** law[1]


def _rise(replicas: int, sync_every: int) -> float:
    """Rise of the loss above sync_every 30: linear in log H through the published means at 30 and 100; 0 below 30."""
    means = {m: sum(b / a - 1 for a, b in pairs) / len(pairs) for m, pairs in LOSS_30_100.items()}
    share = min(max(math.log2(max(replicas, 1)) - 1, 0.0), 1.0)
    rise = means[2] + (means[4] - means[2]) * share
    return rise * max(math.log(sync_every / 30), 0.0) / math.log(100 / 30)
