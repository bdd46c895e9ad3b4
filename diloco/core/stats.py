"""What communication cost: bytes, and seconds hidden behind training or exposed to it, per round and in total."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RoundStats:
    """One applied round."""

    fragment: int
    index: int
    sent_step: int | None  # None: this replica sent nothing in this round
    applied_step: int
    sent_at: float  # seconds since the epoch
    bytes_sent: int
    bytes_received: int
    seconds: float  # from send to result
    seconds_exposed: float  # of training: waiting, taking the delta, applying the result, and the device's for these
    seconds_waited: float  # the part of them in which it waited for the result
    members: int
    counted: bool
    seconds_apart: float = 0.0  # of `seconds`: until all replicas had reached the round
    seconds_device: float = 0.0  # of seconds_exposed, on the accelerator's training stream
    overlap: int = 0  # of this replica when the round was applied
    share: float = 0.0  # of this replica's delta in the mean

    @property
    def seconds_hidden(self) -> float:
        return max(self.seconds - self.seconds_exposed, 0.0)


@dataclass
class Stats:
    """Totals over all rounds, and the last 10,000 rounds."""

    rounds: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    largest_round: int = 0  # bytes sent
    seconds_hidden: float = 0.0
    seconds_exposed: float = 0.0
    seconds_waited: float = 0.0
    last: deque[RoundStats] = field(default_factory=lambda: deque(maxlen=10_000))

    def add(self, round: RoundStats) -> None:
        self.rounds += 1
        self.bytes_sent += round.bytes_sent
        self.bytes_received += round.bytes_received
        self.largest_round = max(self.largest_round, round.bytes_sent)
        self.seconds_hidden += round.seconds_hidden
        self.seconds_exposed += round.seconds_exposed
        self.seconds_waited += round.seconds_waited
        self.last.append(round)

    def since(self, rounds: int) -> list[RoundStats]:
        """Rounds after the first `rounds`."""
        return list(self.last)[len(self.last) - (self.rounds - rounds) :] if self.rounds > rounds else []

    def totals(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "last"}
