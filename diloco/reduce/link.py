"""Measure the link between replicas, with the exchanges that rounds are made of."""

import time
from dataclasses import dataclass

import torch

from diloco.reduce.groups import Groups, Transfer

SMALL, LARGE = 1 << 16, 1 << 25
"""Bytes of the first message to each peer, and of the largest."""
LONG = 0.5
"""Seconds after which a message is long enough: what a link carries at once at first does not count any more."""
TRIPS = 5


@dataclass(frozen=True)
class LinkSpeed:
    round_trip: float  # seconds
    rate: float  # bits of payload a second, each way, while all replicas send


def measure(groups: Groups) -> LinkSpeed:
    """All replicas at once. The messages grow until one takes long enough."""
    if not groups.peers:
        return LinkSpeed(0.0, float("inf"))
    trip = min(_slowest(groups, 1) for _ in range(TRIPS))
    size, seconds = SMALL, _slowest(groups, SMALL)
    while seconds < LONG and size < LARGE:
        size *= 4
        seconds = _slowest(groups, size)
    return LinkSpeed(trip, 8 * size * len(groups.peers) / max(seconds - trip, 1e-6))


def _slowest(groups: Groups, size: int) -> float:
    """Seconds of an exchange on the replica where it took longest: all must agree on whether it was long enough."""
    groups.gather_json(None)  # all begin at the same time
    mine, count = torch.zeros(size, dtype=torch.uint8), len(groups.peers) + 1
    began = time.perf_counter()
    transfer = Transfer(groups, [[torch.empty(size, dtype=torch.uint8) for _ in range(count)]], phase=0)
    transfer.send([mine] * count, good=True)
    transfer.wait()
    return max(groups.gather_json(time.perf_counter() - began))
