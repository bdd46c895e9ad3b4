"""The seam between the algorithm and the network.

A reducer averages the deltas of all replicas and computes the next state of a fragment from the mean. It sees fragments
as numbers and flat fp32 values, never a model. `local` runs M replicas in one process, `collective` uses a
torch.distributed group with fixed members, `diloco.bucket` lets members come and go through a store, and `first_rank`
lets the ranks of one DDP job share any of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from diloco.codecs.codec import Codec
from diloco.exchange.mean import Encoded, Packed

Contract = Mapping[str, object]
"""Settings that all replicas must agree on before the first round, as JSON values."""


@dataclass(frozen=True, eq=False)
class State:
    """The agreed state of a fragment: the anchor after round `index`, and the outer optimizer's state."""

    index: int
    anchor: Tensor
    outer: Tensor
    cached_fingerprint: int | None = None  # computed along with the values

    def fingerprint(self) -> int:
        """A sum over all bits modulo a prime: equal for equal states, different after a single flipped bit."""
        if self.cached_fingerprint is not None:
            return self.cached_fingerprint
        return fingerprint(words(self.anchor), words(self.outer))


class Next(Protocol):
    """The state after a round, computed part by part as the mean arrives, while training reads the old one."""

    def add(self, part: Encoded) -> None: ...

    def state(self, index: int) -> State:
        """Call this once, after the last part."""
        ...


class Advance(Protocol):
    """Begin the outer step of a fragment. `lr`: mean inner learning rate of the round. `last`: the final round of all
    replicas, whose result is their plain mean."""

    def __call__(self, fragment: int, state: State, *, lr: float, last: bool) -> Next: ...


@dataclass(frozen=True)
class Shard:
    """The shard of the model that a process holds."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        """A key in checkpoints and contracts."""
        return f"shard {self.index} of {self.count}"


@dataclass(frozen=True)
class Identity:
    """Who this process is among the replicas."""

    name: int | str  # the number of the replica, or the name of the member
    replicas: int | None = None  # None: members come and go
    ranks: tuple[int, ...] = ()  # torch ranks that are replicas of each other
    ddp_ranks: tuple[int, ...] = ()  # torch ranks that train this replica together, with DDP
    packs_for: int | None = None  # replicas, if a delta may be `Packed` for them


@dataclass(frozen=True)
class Join:
    """What the core hands to a reducer when it joins the others."""

    contract: Contract
    states: Sequence[State]  # one for each fragment
    codecs: Sequence[Codec]
    advance: Advance
    sync_every: int = 1
    shard: Shard = Shard()


@dataclass(frozen=True)
class Delta:
    """A replica's contribution to a round."""

    values: Tensor | Packed  # anchor − local, flat fp32 on the host; the memory is reused after the round
    weight: float  # work since the last round that counted: tokens or steps
    tokens: bool  # whether the weight counts tokens
    fingerprint: int  # of the state that the delta is against
    lr: float = 0.0  # mean inner learning rate of the steps in it
    last: bool = False  # see `Advance`
    needs_own: bool = False  # the codec is coarse, so the round must have `own`
    find_non_finite: Callable[[], int | None] = lambda: None  # the first span with inf or nan: a pass over all values

    @property
    def n(self) -> int:
        return self.values.n if isinstance(self.values, Packed) else len(self.values)

    def digest(self) -> int:
        """The sum over the bits of the values: 0.13 ns a value, where encoding takes 0.6."""
        return self.values.words if isinstance(self.values, Packed) else words(self.values)

    def unpacked(self) -> Tensor:
        """For reducers that let nobody else encode."""
        assert not isinstance(self.values, Packed), "identity.packs_for is None"
        return self.values


@dataclass(frozen=True)
class Cost:
    """What a round cost. `seconds` runs from send to result."""

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    seconds_apart: float = 0.0  # until all replicas had reached the round, as far as known


@dataclass(frozen=True)
class Round:
    """A finished round."""

    state: State  # after the round
    members: Mapping[str, float]  # name → part in the mean: work done (collective) or share (bucket)
    counted: bool = True  # this replica's delta is in the mean
    earlier: bool = False  # instead of it, the mean has one that was sent by an earlier life of this replica
    own: Callable[[], Tensor] | None = None  # this replica's delta as the others decoded it; None: not asked or unknown
    cost: Cost = Cost()
    newer: int = 0  # deltas that this replica has sent after the one that counted


@dataclass(frozen=True)
class NonFinite:
    """Deltas contained inf or nan: nothing was applied on any replica."""

    index: int
    spans: Mapping[str, int] = field(default_factory=dict)  # member → first span


@dataclass(frozen=True)
class Jump:
    """Take this state; it replaces all rounds up to it."""

    state: State


@dataclass(frozen=True)
class Dropped:
    """The round that was sent will not happen, and its work stays in the next delta. With `reset` the work is lost:
    local goes back to the anchor. `non_finite`: because the delta had inf or nan, and the others continue without it.
    """

    reset: bool = False
    non_finite: bool = False


@dataclass(frozen=True)
class Called:
    """Instead of an outcome, after `drain`: the others wait for another fragment of this replica. Call `should_send`
    for each, then poll again."""


Outcome = Round | NonFinite | Jump | Dropped | Called


class Reducer(Protocol):
    """All calls come from the training thread. Only `join`, `poll` of a round that was sent, and `drain` may wait."""

    @property
    def identity(self) -> Identity: ...

    def join(self, job: Join) -> list[State | None]:
        """Compare contracts and agree on the state of every fragment. Returns the states to take; None: keep yours."""
        ...

    def should_send(self, fragment: int, steps: int, scheduled: bool) -> bool:
        """Whether to send now. `steps`: since the last send; `scheduled`: the schedule says so."""
        ...

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        """Start round `index` and return at once. `delta` is called once, on the thread that does the work."""
        ...

    def poll(self, fragment: int, index: int) -> Outcome | None:
        """The outcome of round `index`, or None if there is none yet. Called when it may be applied. After `drain` it
        waits for a round that was sent."""
        ...

    def drain(self, seconds: float | None = None) -> bool:
        """This replica has done its steps. Returns whether all have: then the next round of each fragment is the last
        one. Rounds that some replicas have not started end as Dropped. `seconds`: the most time that a member nobody
        waits for may spend on its last rounds."""
        ...

    def leave(self) -> None:
        """Leave the other replicas. May be called twice."""
        ...


def fingerprint(anchor: int, outer: int) -> int:
    """The fingerprint of a state, from the sums over its words."""
    return (anchor + 0x9E3779B97F4A7C15 * outer) % ((1 << 63) - 25)


def words(x: Tensor) -> int:
    """The sum of all values as 64-bit words, two values each; an odd value at the end is added alone."""
    even = len(x) // 2 * 2
    odd = int(x[even:].numpy().view(np.uint32)[0]) if even < len(x) else 0
    return (int(np.add.reduce(x.numpy()[:even].view(np.uint64))) + odd) % (1 << 64)


def advanced(job: Join, fragment: int, state: State, mean: Sequence[Encoded], *, lr: float, last: bool) -> State:
    """The state after a round whose complete mean is known."""
    following = job.advance(fragment, state, lr=lr, last=last)
    for part in mean:
        following.add(part)
    return following.state(state.index + 1)


def unchanged(state: State) -> State:
    """The state after a round in which nobody had trained: momentum alone must not move anything."""
    return State(state.index + 1, state.anchor, state.outer, state.cached_fingerprint)
