"""The overlap: steps from sending a fragment to applying its result, fixed or chosen from measurements. Pure.

The smallest overlap without waiting is the number of steps in which the slowest round of a sync period arrives.
Replicas may differ in it: only the sends must be at the same steps (paper, Algorithm 2).
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from diloco.core.schedule import check_overlap

SAFE_OVERLAP = 5
"""The streaming paper's advice; up to 10 it saw less than 0.2 % of loss."""
RISE, FALL = 1.05, 1.2
"""A round must fit into the overlap with this margin. A smaller overlap needs a larger one, so that the choice does not
oscillate."""
WAITED = 0.01
"""Share of a step. A shorter wait is only the cost of the call."""
STEPS = 15
"""The median over this many steps is the step time: evaluations and checkpoints between two steps do not count."""


class Overlap:
    """The current overlap in `steps`. With "auto" it is chosen again after each round.

    A single slow round, as after a lost packet, changes nothing: of the rounds of the last two sync periods, in which
    each fragment has two, the second slowest decides. So the overlap rises as soon as training waited for two rounds,
    and falls after two periods in which less would have been enough.

    Args:
        overlap: fixed, or "auto".
        fragments: rounds in a sync period.
        sync_every: the overlap stays below it.
        first: where "auto" starts.
    """

    def __init__(self, overlap: int | Literal["auto"], fragments: int, sync_every: int, *, first: int = 1) -> None:
        self.auto = overlap == "auto"
        self.most = max(min(SAFE_OVERLAP, sync_every - 1), 0)
        if overlap == "auto":
            self.steps = min(max(first, 1), self.most)  # with 0 it would wait for every round
        else:
            check_overlap(overlap, sync_every)
            self.steps = overlap
        self._step_ended: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=STEPS)
        self._least_apart: deque[float] = deque(maxlen=4 * fragments)
        self._rounds: deque[tuple[float, bool]] = deque(maxlen=2 * fragments)  # (steps that it took, waited for)

    def restarted(self, steps: int, fragments: int, sync_every: int) -> "Overlap":
        """One for other settings that starts from `steps`, and knows how long a step takes."""
        fresh = Overlap("auto" if self.auto else steps, fragments, sync_every, first=steps)
        fresh._step_seconds, fresh._step_ended = self._step_seconds, self._step_ended
        return fresh

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Everything inside is not part of a training step."""
        now = time.perf_counter()
        if self._step_ended is not None:
            self._step_seconds.append(now - self._step_ended)
        yield
        self._step_ended = time.perf_counter()

    @property
    def step_seconds(self) -> float:
        """The usual time of a training step; 0 if unknown."""
        return statistics.median(self._step_seconds) if self._step_seconds else 0.0

    def observe(self, *, seconds: float, apart: float, waited: float) -> None:
        """A round was applied: seconds from send to result, the part until all replicas had reached the round, and the
        seconds for which training waited."""
        step_seconds = self.step_seconds
        if not self.auto or step_seconds <= 0:
            return
        # A replica that comes first waits for the others whatever its overlap is, and that must not raise it. The least
        # of these waits is what the link itself takes.
        self._least_apart.append(apart)
        on_link = seconds - (apart - min(self._least_apart))
        self._rounds.append((on_link / step_seconds, waited > WAITED * step_seconds))
        late = [steps for steps, was_waited_for in self._rounds if was_waited_for]
        rise = self._enough(sorted(late)[-2], RISE) if len(late) > 1 else self.steps
        if rise > self.steps:
            self._set(rise)
        elif len(self._rounds) == self._rounds.maxlen:
            second_slowest = sorted(steps for steps, _ in self._rounds)[-2]
            if (fall := self._enough(second_slowest, FALL)) < self.steps:
                self._set(fall)

    def _enough(self, steps: float, margin: float) -> int:
        """At least 1: with 0 every round is waited for."""
        return min(max(math.ceil(steps * margin), 1), self.most)

    def _set(self, steps: int) -> None:
        self.steps = steps
        self._rounds.clear()
