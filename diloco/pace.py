"""How long a round may take: the overlap, fixed or chosen by this replica from what its rounds took. Pure.

The smallest overlap without waiting is the number of steps in which the slowest round of a sync period arrives.
Replicas may differ in it: only the sends must be at the same steps (paper, Algorithm 2).
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass

from diloco.laws import SAFE_OVERLAP
from diloco.schedule import check_overlap

RISE, FALL = 1.05, 1.2
"""A round must fit in the overlap's steps with this much to spare; a smaller overlap is taken with more to spare, so
that it does not go to and fro."""
WAITED = 0.01
"""Share of a step. A shorter wait is only the time of the call."""
STEPS = 15
"""Steps whose median is the time of a step: evaluations and checkpoints between two steps do not count."""


@dataclass(frozen=True)
class RoundTimes:
    """What is known of a round that was applied, in seconds."""

    seconds: float  # from send to result
    apart: float  # the part of them until all replicas had come to the round
    waited: float  # that the training thread waited for the result


class Pace:
    """The overlap; with `auto` it is chosen again after each round.

    A round that is slow once, as after a lost packet, changes nothing: of the rounds of the last two sync periods, in
    which each fragment has two, the second slowest counts. So the overlap rises as soon as two rounds were waited for,
    and falls after two periods in which less would have been enough.

    Args:
        overlap: the first one, and the only one without `auto`.
        fragments: rounds in a sync period.
        sync_every: the overlap stays below it.
    """

    def __init__(self, overlap: int, fragments: int, sync_every: int, auto: bool = True) -> None:
        if not auto:
            check_overlap(overlap, sync_every)
        self.auto, self.clock = auto, StepClock()
        self.most = max(min(SAFE_OVERLAP, sync_every - 1), 0)
        self.overlap = min(max(overlap, 1), self.most) if auto else overlap  # with 0 it would wait for every round
        self._least_apart: deque[float] = deque(maxlen=4 * fragments)
        self._rounds: deque[tuple[float, bool]] = deque(maxlen=2 * fragments)  # (steps that it took, waited for)

    def after(self, times: RoundTimes, step_seconds: float) -> int:
        """A round was applied. Returns the overlap from now on."""
        if not self.auto or step_seconds <= 0:
            return self.overlap
        # A replica that comes first waits for the others whatever its overlap is, and that must not raise it. The least
        # of these waits is what the link itself takes.
        self._least_apart.append(times.apart)
        own = times.seconds - (times.apart - min(self._least_apart))
        self._rounds.append((own / step_seconds, times.waited > WAITED * step_seconds))
        late = [steps for steps, waited in self._rounds if waited]
        rise = self._enough(sorted(late)[-2], RISE) if len(late) > 1 else self.overlap
        if rise > self.overlap:
            self._take(rise)
        elif len(self._rounds) == self._rounds.maxlen:
            second = sorted(steps for steps, _ in self._rounds)[-2]
            if (fall := self._enough(second, FALL)) < self.overlap:
                self._take(fall)
        return self.overlap

    def _enough(self, steps: float, spare: float) -> int:
        """At least 1: with 0 every round is waited for."""
        return min(max(math.ceil(steps * spare), 1), self.most)

    def _take(self, overlap: int) -> None:
        self.overlap = overlap
        self._rounds.clear()


class StepClock:
    """Times the steps of a loop, without what happens between `begin` and `end`."""

    def __init__(self) -> None:
        self._ended: float | None = None
        self._seconds: deque[float] = deque(maxlen=STEPS)

    def begin(self, now: float) -> None:
        """A step of the loop is done."""
        if self._ended is not None:
            self._seconds.append(now - self._ended)

    def end(self, now: float) -> None:
        """The next step of the loop begins."""
        self._ended = now

    @property
    def seconds(self) -> float:
        """The usual time of a step; 0 if none is known."""
        return statistics.median(self._seconds) if self._seconds else 0.0
