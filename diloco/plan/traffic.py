"""The traffic of one round on a replica's link: bytes, round trips and seconds."""

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from diloco.codecs.formats import BLOCK, FORMATS, Format, gathers

Array = NDArray[np.float64]
Bytes = Callable[[Any], float]
"""Bytes that n values take on the wire."""
Reduce = Literal["collective", "bucket", "ring"]
"""How the mean is computed: this library's two reducers, and the ring all-reduce of data-parallel training."""
Place = Literal["host", "device"]
"""Where anchors and outer momentum are, if the model is on an accelerator."""

CODECS: dict[str, Bytes] = dict(FORMATS)

TCP = 1.06
"""Bytes on Ethernet per byte of payload: frames of 1,514 bytes carry 1,448, plus acknowledgements."""
FILLED = 0.94
"""Share of the rate that TCP fills if the link is the bottleneck: fitted to the network lab (docs/benchmarks.md)."""
WIRE = TCP / FILLED
"""Link capacity used per byte of payload."""
ROUND_SECONDS = 1e-3
"""Seconds of the training thread per round, whatever its size: measured with 40 rounds in 30 steps of 50 ms. The hook
takes 0.7 ms of it; the rest was not attributed."""
BUCKET_TRIPS, SHARED_TRIPS = 3.0, 6.0
"""Put the delta, read the commit record, get the deltas. If every member averages a share: put the delta, the committer
reads the others' heads, read the record, get the pieces, put the share, get all shares."""
SHARE_LEAST = 16 << 10
"""Bytes: a delta sent through a bucket is cut into pieces if it has at least two of this size (bucket/rounds.py)."""


def round_bytes(n: float, nbytes: Bytes, replicas: int, reduce: Reduce = "collective") -> tuple[float, float]:
    """Bytes that a replica sends and receives in a round of n values.

    >>> [round_bytes(1000, CODECS["bfloat16"], replicas) for replicas in (2, 3, 4)]
    [(2000, 2000), (4000, 4000), (3000, 3000)]
    """
    others = replicas - 1
    if others == 0 or n == 0:
        return 0, 0
    if reduce == "bucket" and (gathers(replicas) or nbytes(n) < 2 * SHARE_LEAST):
        return nbytes(n), others * nbytes(n)
    if reduce == "bucket":
        return nbytes(n) + _mean(nbytes)(n) / replicas, others / replicas * (nbytes(n) + _mean(nbytes)(n))
    if reduce == "ring":
        both = 2 * others / replicas * nbytes(n)
    elif gathers(replicas):
        both = others * nbytes(n)
    else:
        part = math.ceil(n / replicas)
        both = others * (nbytes(part) + _mean(nbytes)(part))
    return both, both


def _mean(nbytes: Bytes) -> Bytes:
    """Bytes of an averaged share, which is encoded again."""
    mean = nbytes.mean if isinstance(nbytes, Format) else None
    return CODECS[mean] if mean else nbytes


ENCODED_ON_DEVICE = ("e3m0", "bfloat16")
"""The formats in which an accelerator encodes a delta for a collective (codecs/device.py)."""


def delta_bytes(codec: str, reduce: Reduce = "collective") -> float:
    """Bytes for each value in which a delta leaves an accelerator."""
    return CODECS[codec](BLOCK) / BLOCK if reduce == "collective" and codec in ENCODED_ON_DEVICE else 4.0


def bus_bytes(codec: str, replicas: int, reduce: Reduce = "collective", state: Place = "host") -> float:
    """Bytes between host and accelerator for each value of a round. With the state on the host: the anchor for the
    delta, the delta, the next anchor. On the device: this replica's payload, and those of the others or their mean.

    >>> bus_bytes("bfloat16", 2), bus_bytes("bfloat16", 2, "bucket")
    (10.0, 12.0)
    >>> [bus_bytes("bfloat16", replicas, state="device") for replicas in (2, 3, 8)]
    [4.0, 6.0, 4.0]
    """
    if state == "device":
        return delta_bytes(codec) * (replicas if gathers(replicas) else 2)
    return 4.0 + delta_bytes(codec, reduce) + 4.0


def round_trips(replicas: int, reduce: Reduce = "collective") -> float:
    """Round trips per round. Each exchange takes one: receives are announced, then every peer is sent its data. Headers
    are exchanged first, then deltas, and with four or more replicas averages.

    >>> round_trips(2), round_trips(8), round_trips(8, "ring")
    (2.0, 3.0, 7.0)
    """
    if replicas == 1:
        return 0.0
    if reduce == "bucket":
        return BUCKET_TRIPS if gathers(replicas) else SHARED_TRIPS
    if reduce == "ring":
        return replicas - 1.0  # half a trip per hop, twice around the ring
    return 2.0 if gathers(replicas) else 3.0


def transfer_seconds(up: float, down: float, rate: Array, reduce: Reduce = "collective") -> Array:
    """Seconds on a link with this rate each way. Both directions run at once; a bucket member puts first, then gets."""
    nbytes = up + down if reduce == "bucket" else max(up, down)
    with np.errstate(divide="ignore"):
        return 8 * nbytes / rate if nbytes else np.zeros_like(rate)
