"""Reduce: who computes the mean of the deltas over the replicas. Three answers to one question, one seam.

`reduce.local` runs M replicas in one process, `reduce.collective` uses a torch.distributed group with fixed members,
and `diloco.bucket` lets members come and go, with a folder or an object store between them. A reducer knows fragments
only as numbers and flat values, and nothing of models.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from diloco.codec import Codec

Contract = Mapping[str, object]
"""What all replicas must agree on before the first round, as JSON values."""


@dataclass
class State:
    """What a replica holds of a fragment: the anchor after round `index` and the outer rule's state."""

    index: int
    anchor: Tensor
    outer: Tensor

    def fingerprint(self) -> int:
        """A sum over all bits, modulo a prime: equal states have equal ones, and one flipped bit changes it."""
        anchor, outer = _words(self.anchor), _words(self.outer)
        return (anchor + 0x9E3779B97F4A7C15 * outer) % ((1 << 63) - 25)


@dataclass(frozen=True)
class Delta:
    """What a replica brings to a round."""

    values: Tensor  # anchor − local, flat fp32 on the host
    weight: float  # work since the last round that counted: tokens, or steps
    tokens: bool  # which of the two
    fingerprint: int  # of the state that the delta is against
    fault: int | None = None  # the span that holds inf or nan
    feedback: bool = False  # the round must tell `own`


@dataclass(frozen=True)
class Round:
    """A finished round. `counted`: this replica's delta is in the mean."""

    index: int
    mean: Tensor
    members: Mapping[str, float]  # name → weight
    counted: bool = True
    sent: int = 0  # bytes
    received: int = 0
    seconds: float = 0.0  # from send to result
    faults: Mapping[str, int] = field(default_factory=dict)  # member → span; then nothing is applied
    own: Callable[[], Tensor] | None = None  # this replica's delta as the others decoded it; None: not asked, not known


@dataclass(frozen=True)
class Jump:
    """Not a round but its outcome: take this state as it is."""

    state: State


@dataclass(frozen=True)
class Dropped:
    """The round that was sent will not take place. What was trained stays in the next delta, unless it is to be given
    up: `reset` puts local back to the anchor (a delta with inf or nan, where others go on without it)."""

    reset: bool = False


class Reduce(Protocol):
    """All calls come from the training thread. Only `join`, `take` of a round that was sent, and `settle` may wait."""

    def join(self, contract: Contract, states: Sequence[State], codecs: Sequence[Codec]) -> list[State | None]:
        """Compare the contract; agree on every fragment's state. Returns the states to take; None: the own one."""
        ...

    def due(self, fragment: int, steps: int, slot: bool) -> bool:
        """Whether to send now. `steps`: own steps since the last send; `slot`: the schedule says so."""
        ...

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        """Start round `index`; returns at once. `delta` is called once, on whatever thread does the work."""
        ...

    def take(self, fragment: int, index: int) -> Round | Jump | Dropped | None:
        """The outcome of round `index`, or None if there is none yet. Called when it may be applied."""
        ...

    def applied(self, fragment: int, state: State) -> None:
        """The core has applied a round. `state` must not be changed or kept."""
        ...

    def settle(self) -> None:
        """All replicas are done with their steps. Rounds that not all have started end as Dropped."""
        ...

    def leave(self) -> None:
        """Take no further part. May be called twice."""
        ...


def _words(x: Tensor) -> int:
    flat = x.numpy()
    even = len(flat) // 2 * 2
    return int(np.add.reduce(flat[:even].view(np.uint64))) + int(np.add.reduce(flat[even:].view(np.uint32)))
