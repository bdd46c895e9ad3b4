"""What goes in and out of the state machine of a fragment: its events, its effects, and the names of its states."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any

from diloco.bucket.deltas import EncodedDelta
from diloco.bucket.rounds import Attempts, Contribution, Record
from diloco.exchange.reducer import Delta, Outcome, State


class Phase(Enum):
    """What a fragment is doing; the value says what it waits for. Members publish the place of a phase in this list."""

    IDLE = "steps, or another member's delta"
    ENCODING = "the delta to be encoded"
    DELIVERING = "the store to take the delta"
    DELIVERED = "the others' deltas, or the straggler timeout"
    OPEN = "the store to say whether the round is closed"
    COMMITTED = "the deltas that the record names"
    AVERAGING = "the averaged shares"
    READY = "training to apply the round"
    JUDGING = "the others' deltas, to see which bits most of them hold"
    JUMPING = "a snapshot"
    ENDED = "nothing: this was the last round"


# Events of the training thread.


@dataclass(frozen=True)
class Stepped:
    """Training has made a step. `steps`: since the last send; `scheduled`: the schedule says to send."""

    steps: int
    scheduled: bool


@dataclass(frozen=True)
class Sent:
    """Training sends a delta."""

    index: int
    delta: Callable[[], Delta]


@dataclass(frozen=True)
class Polled:
    """Training asks for the outcome of a round."""

    index: int


@dataclass(frozen=True)
class GaveUp:
    """Training no longer waits for the last round."""


# Events of the background.


@dataclass(frozen=True)
class Look:
    """Time to look at the store."""


@dataclass(frozen=True)
class Done:
    """An effect was performed. Each effect below says what its answer is."""

    effect: "Effect"
    answer: Any


# Effects for the training thread.


@dataclass(frozen=True)
class TakeDelta:
    """Send now."""


@dataclass(frozen=True)
class HandOver:
    """Apply this outcome."""

    outcome: Outcome


@dataclass(frozen=True)
class Offer:
    """Training has just taken this state, which may serve as a snapshot. `record`: digest of the record that led to it;
    `first`: this member closed the round."""

    state: State
    record: str
    first: bool


# Effects for the background: this member's delta.


@dataclass(frozen=True)
class Encode:
    """→ EncodedDelta; None if some values are not finite"""

    sent: Sent


@dataclass(frozen=True)
class Deliver:
    """Put the delta. → whether the store has it"""

    index: int
    delta: EncodedDelta


# The open round.


class Listed(Enum):
    """How fresh a listing of the round must be."""

    NOT = "only look for the record"
    IDLE = "recent enough for a member that can only be called"
    SHARED = "one for all fragments, used once by each"
    NOW = "of this round alone"


@dataclass(frozen=True)
class Inspect:
    """Look what is in the round, and whether it is closed. → Inspected"""

    index: int
    previous: str
    listed: Listed


@dataclass(frozen=True)
class Inspected:
    attempts: Attempts
    names: Collection[str] | None  # None: they were not listed


@dataclass(frozen=True)
class Recheck:
    """Read the records of the last rounds again. → the first round that the store has closed differently; None if there
    is none"""

    links: Mapping[int, str]


@dataclass(frozen=True)
class ReadDeltas:
    """→ {name: Contribution, Invalid, or None if it is missing}

    Args:
        values: not only the heads.
        complete: these are all that the round needs to be closed.
    """

    names: Sequence[str]
    values: bool = True
    complete: bool = True


@dataclass(frozen=True)
class Close:
    """Create a record. → the one that the store now has; None: look at the round again. `heads`: deltas whose heads are
    put as one object first, because members will average shares of them."""

    record: Record
    attempt: int
    heads: Sequence[Contribution] = ()


# The closed round.


@dataclass(frozen=True)
class Average:
    """Compute the mean of a record's deltas, and the state after it. → Averaged"""

    record: Record
    deltas: Mapping[str, Contribution]  # by digest
    before: State


@dataclass(frozen=True)
class ReadHeads:
    """→ {digest: Contribution}; Invalid; None if the object is missing"""

    record: Record


@dataclass(frozen=True)
class Collect:
    """Average the shares whose turn it is, and read the others. → Averaged; Missing; None if some are not there yet"""

    record: Record
    heads: Mapping[str, Contribution]  # by digest
    own: Mapping[str, Contribution]  # this member's deltas, by digest
    before: State


@dataclass(frozen=True)
class Averaged:
    state: State  # after the round
    received: int  # bytes
    digests: Mapping[str, int]  # of the deltas, by member; empty if no member has read all of them


class Missing(Exception):
    """An object that a round needs is missing."""


@dataclass(frozen=True)
class SeeWhetherFollowed:
    """→ whether some member has followed a record whose deltas are missing"""

    record: Record


# Leaving and finding the run.


@dataclass(frozen=True)
class CountVotes:
    """→ whether the deltas of the round contradict its record"""

    record: Record


@dataclass(frozen=True)
class Target:
    """A snapshot to take, of at least the index `least`. `until`: when to stop waiting for one and follow the rounds
    again. `before`: the first round that was read wrongly, so that an earlier snapshot is taken."""

    least: int
    until: float = inf
    before: int | None = None


@dataclass(frozen=True)
class Load:
    """→ the newest snapshot's state, and what the next record must refer to; None if there is none"""

    target: Target


@dataclass(frozen=True)
class LookFar:
    """→ index of the newest snapshot; None if the round `closed` is still open: then this member is not far behind"""

    closed: int | None


Event = Stepped | Sent | Polled | GaveUp | Look | Done
Effect = (
    TakeDelta | HandOver | Offer | Encode | Deliver | Inspect | Recheck | ReadDeltas | Close | Average
    | ReadHeads | Collect | SeeWhetherFollowed | CountVotes | Load | LookFar
)  # fmt: skip
Effects = Sequence[Effect]
