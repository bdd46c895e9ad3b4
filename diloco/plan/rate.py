"""What the link gives at the moment, from the rounds of a run. Pure.

Many links carry the first part of a message faster than they can go on (a token bucket, the buffers of a router). So a
short round on an idle link looks faster than the link is, by a factor that stays the same as long as rounds have the
same size: it is taken from the first rounds after the link was measured. On a link that is never idle there is no such
factor.
"""

import statistics
from collections import deque

from diloco.plan.auto import Facts
from diloco.plan.traffic import CODECS, round_bytes

ROUNDS, SHARE = 3, 0.25
"""Rounds whose median is what the link gives at the moment: at least this many, and this share of a sync period. Small
rounds differ by a factor of two."""
SHORT = 0.1
"""Share of a step: in a round shorter than this, threads and polls take a large part."""
QUEUED = 0.25
"""Share of a round's time on the link: a round that was queued for longer came to a link that is never idle."""


class LinkRate:
    """
    Args:
        facts: as they were measured, with the link.
        codec: of the rounds.
        first: rounds from which the factor is taken: those of a sync period.
    """

    def __init__(self, facts: Facts, codec: str, replicas: int, first: int) -> None:
        self._facts, self._codec, self._first, self._count = facts, codec, list[float](), max(first, ROUNDS)
        self._value_bytes = round_bytes(1 << 20, CODECS[codec], replicas)[0] / (1 << 20)
        self._rates: deque[float] = deque(maxlen=max(ROUNDS, int(SHARE * first) | 1))  # odd: the median is one of them

    def add(self, nbytes: int, seconds: float, queued: float) -> None:
        """A round sent these bytes. `seconds`: from the moment when all were there; `queued`: before its turn came."""
        facts = self._facts
        on_link = max(seconds - facts.round_trip, 1e-6)
        seen = 8 * nbytes / on_link
        if len(self._first) < self._count:
            self._first.append(seen)
            return
        factor = max(statistics.median(self._first) / facts.rate, 0.8)  # less: the link became slower meanwhile
        rate = seen if queued > QUEUED * on_link else seen / factor
        codec_seconds = 1e-9 * facts.codec_ns[self._codec] * nbytes / self._value_bytes
        if on_link < max(2 * codec_seconds, SHORT * facts.step_seconds):
            rate = max(rate, facts.rate)  # it says only that the link is no slower than that
        self._rates.append(rate)

    @property
    def now(self) -> float:
        """Bits a second; as measured, until enough rounds have said something else."""
        return statistics.median(self._rates) if len(self._rates) == self._rates.maxlen else self._facts.rate
