"""Reduce: the mean of the deltas over the replicas. One protocol, three implementations.

`reduce.local` runs M replicas in one process, `reduce.collective` uses a torch.distributed group with fixed members,
and `diloco.bucket` lets members come and go, with a folder or an object store between them. A reducer sees
fragments as numbers and flat values, and never a model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from diloco.codec import Codec
from diloco.reduce.mean import Encoded, decode

Contract = Mapping[str, object]
"""What all replicas must agree on before the first round, as JSON values."""


@dataclass(frozen=True, eq=False)
class State:
    """What a replica holds of a fragment: the anchor after round `index` and the outer rule's state."""

    index: int
    anchor: Tensor
    outer: Tensor
    known: int | None = None  # its fingerprint, if it was computed together with the values

    def fingerprint(self) -> int:
        """A sum over all bits, modulo a prime: equal states give the same, one flipped bit gives another."""
        return fingerprint(words(self.anchor), words(self.outer)) if self.known is None else self.known


class Next(Protocol):
    """The state after a round, made beside the one that is held, part by part as the mean arrives."""

    def add(self, part: Encoded) -> None: ...

    def state(self, index: int) -> State:
        """Called once, when all parts were added."""
        ...


@dataclass(frozen=True)
class Delta:
    """What a replica brings to a round."""

    values: Tensor  # anchor − local, flat fp32 on the host; its memory is reused once its round was applied
    weight: float  # work since the last round that counted: tokens, or steps
    tokens: bool  # whether the weight counts tokens
    fingerprint: int  # of the state that the delta is against
    find_fault: Callable[[], int | None] = lambda: None
    lr: float = 0.0  # the mean inner learning rate of the steps in it
    feedback: bool = False  # the round must have `own`
    next: Callable[[float], Next] | None = (
        None  # for a reducer that prepares the next state on a thread of its own; takes the round's lr
    )

    @property
    def fault(self) -> int | None:
        """The first span that holds inf or nan: a pass over all values."""
        return self.find_fault()


@dataclass(frozen=True)
class Round:
    """A finished round. `counted`: this replica's delta is in the mean."""

    index: int
    encoded: Sequence[Encoded]  # the mean, in parts
    members: Mapping[str, float]  # name → its part in the mean: work done (collective) or share (bucket)
    lr: float = 0.0  # mean over the members, by their part
    counted: bool = True
    sent: int = 0  # bytes
    received: int = 0
    seconds: float = 0.0  # from send to result
    apart: float = 0.0  # the part of them until all replicas had come to the round, as far as it is known
    transfer: float = 0.0  # the part of them from that moment on
    faults: Mapping[str, int] = field(default_factory=dict)  # member → span; then nothing is applied
    own: Callable[[], Tensor] | None = (
        None  # this replica's delta as the others decoded it; None: not asked or not known
    )
    state: State | None = None  # what Delta.next made of the mean; None: the core makes it when it applies the round

    @property
    def mean(self) -> Tensor:
        return decode(self.encoded)


@dataclass(frozen=True)
class Jump:
    """Instead of rounds, their outcome: take this state."""

    state: State


@dataclass(frozen=True)
class Dropped:
    """The round that was sent will not take place. The work stays in the next delta. With `reset` it is lost: local
    goes back to the anchor. `spoiled`: because the delta held inf or nan, and the others continue without it."""

    reset: bool = False
    spoiled: bool = False


class Reduce(Protocol):
    """All calls come from the training thread. Only `join`, `take` of a round that was sent, and `settle` may wait."""

    def join(self, contract: Contract, states: Sequence[State], codecs: Sequence[Codec]) -> list[State | None]:
        """Compare the contract; agree on every fragment's state. Returns the states to take; None: keep the own."""
        ...

    def due(self, fragment: int, steps: int, slot: bool) -> bool:
        """Whether to send now. `steps`: own steps since the last send; `slot`: the schedule says so."""
        ...

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        """Start round `index`; returns at once. `delta` is called once, on the thread that does the work."""
        ...

    def take(self, fragment: int, index: int) -> Round | Jump | Dropped | None:
        """The outcome of round `index`, or None if there is none yet. Called when it may be applied."""
        ...

    def applied(self, fragment: int, state: State) -> None:
        """The core has applied a round. `state` must not be changed or kept."""
        ...

    def settle(self) -> bool:
        """This replica is done with its steps. Returns whether all are: then the next round of each fragment is the
        last one. Rounds that some replicas have not started end as Dropped."""
        ...

    def leave(self) -> None:
        """Leave the other replicas. May be called twice."""
        ...


def fingerprint(anchor: int, outer: int) -> int:
    """The fingerprint of a state, from the sums over its words."""
    return (anchor + 0x9E3779B97F4A7C15 * outer) % ((1 << 63) - 25)


def words(x: Tensor) -> int:
    """The sum of all pairs of values, and of the value behind the last pair, as words of 64 bits."""
    even = len(x) // 2 * 2
    behind = int(x[even:].numpy().view(np.uint32)[0]) if even < len(x) else 0
    return (int(np.add.reduce(x.numpy()[:even].view(np.uint64))) + behind) % (1 << 64)
