"""What one round moves through a replica's link: bytes, round trips and seconds."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from diloco.formats import FORMATS, GATHER, Format, Sparse

Array = NDArray[np.float64]
Bytes = Callable[[Any], float]
"""Bytes that n values take on the wire."""
Reduce = Literal["collective", "bucket", "ring"]
"""Who computes the mean: this library's two, and the ring all-reduce of data-parallel."""

CODECS: dict[str, Bytes] = dict(FORMATS)

TCP = 1.06
"""Bytes on an Ethernet for each byte of payload: frames of 1,514 bytes carry 1,448, plus acknowledgements."""
FILLED = 0.94
"""Share of a link's rate that TCP fills where the link is the limit: fitted to the network lab (docs/benchmarks.md)."""
WIRE = TCP / FILLED
"""What a link carries, or could have carried, for each byte of payload."""
ROUND_SECONDS = 1e-3
"""Seconds of the training thread in a round, whatever its size: about what 40 rounds in 30 steps of 50 ms cost. 0.7 ms
of it were in the hook; where the rest goes was not measured."""
BUCKET_TRIPS, SHARED_TRIPS = 3.0, 6.0
"""Put the delta, read the closing record, get the deltas; or, if each member averages a share: put the delta, the
closer reads what others have put, read the record, get the pieces, put the share, get all shares."""
SHARE_LEAST = 16 << 10
"""Bytes: a delta through a bucket is cut into pieces if it has at least two of this size (bucket/deltas.py)."""


@dataclass(frozen=True)
class Link:
    """Bits a second of the slowest replica, each way; arrays are many links at once."""

    up: float | Array
    down: float | Array

    @classmethod
    def same(cls, rate: float | Array) -> "Link":
        return cls(rate, rate)

    @property
    def rate(self) -> float:
        """The slower direction of one link."""
        return float(np.minimum(self.up, self.down).min())

    def scaled(self, rates: Array) -> "Link":
        """Links of these rates in the slower direction, with this link's ratio of up to down."""
        return Link(rates * (self.up / self.rate), rates * (self.down / self.rate))


def gathers(nbytes: Bytes, replicas: int) -> bool:
    return replicas <= GATHER or isinstance(nbytes, Sparse)


def break_even(codec: str, other: str = "e3m0") -> int:
    """The most replicas with which a round takes fewer bytes than with the other codec.

    >>> break_even("topk"), break_even("topk", "twobit")
    (35, 26)
    """
    n, replicas = 1 << 24, 2
    while round_bytes(n, CODECS[codec], replicas + 1) < round_bytes(n, CODECS[other], replicas + 1) and replicas < 999:
        replicas += 1
    return replicas


def round_bytes(n: float, nbytes: Bytes, replicas: int, reduce: Reduce = "collective") -> tuple[float, float]:
    """Bytes that a replica sends and receives in a round of n values.

    >>> [round_bytes(1000, CODECS["bfloat16"], replicas) for replicas in (2, 3, 4)]
    [(2000, 2000), (4000, 4000), (3000, 3000)]
    """
    others = replicas - 1
    if others == 0 or n == 0:
        return 0, 0
    if reduce == "bucket" and (gathers(nbytes, replicas) or nbytes(n) < 2 * SHARE_LEAST):
        return nbytes(n), others * nbytes(n)
    if reduce == "bucket":
        return nbytes(n) + _mean(nbytes)(n) / replicas, others / replicas * (nbytes(n) + _mean(nbytes)(n))
    if reduce == "ring":
        both = 2 * others / replicas * nbytes(n)
    elif gathers(nbytes, replicas):
        both = others * nbytes(n)
    else:
        part = math.ceil(n / replicas)
        both = others * (nbytes(part) + _mean(nbytes)(part))
    return both, both


def _mean(nbytes: Bytes) -> Bytes:
    """Bytes of an averaged share, which is encoded again."""
    mean = nbytes.mean if isinstance(nbytes, Format) else None
    return CODECS[mean] if mean else nbytes


def round_trips(replicas: int, reduce: Reduce = "collective", nbytes: Bytes = FORMATS["e3m0"]) -> float:
    """Round trips of a round. An exchange takes one: receives are announced, then data are sent, straight to every
    peer. Headers are exchanged, then deltas; from four replicas on, then averages.

    >>> round_trips(2), round_trips(8), round_trips(8, "ring")
    (2.0, 3.0, 7.0)
    """
    if replicas == 1:
        return 0.0
    if reduce == "bucket":
        return BUCKET_TRIPS if gathers(nbytes, replicas) else SHARED_TRIPS
    if reduce == "ring":
        return replicas - 1.0  # half a trip a hop, twice around
    return 2.0 if gathers(nbytes, replicas) else 3.0


def transfer_seconds(up: float, down: float, link: Link, reduce: Reduce = "collective") -> Array:
    """Seconds on the link. Both directions run at once; through a bucket, a replica first puts and then gets."""
    sending, receiving = _seconds(up, link.up), _seconds(down, link.down)
    return sending + receiving if reduce == "bucket" else np.maximum(sending, receiving)


def _seconds(nbytes: float, rate: float | Array) -> Array:
    rates = np.atleast_1d(np.asarray(rate, dtype=np.float64))
    if nbytes == 0:
        return np.zeros_like(rates)
    with np.errstate(divide="ignore"):
        return 8 * nbytes / rates
