"""How long a member waits, judged by its own step and upload times and by those that the others publish."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import inf
from typing import Literal

from diloco.bucket.members import Member

Pace = Literal["decoupled", "strict"]
LONGEST_GRACE = 30.0
IDLE, LOOKS = 10.0, 8
"""While no own delta is under way, a member looks for calls of others at most this many seconds apart, and about this
often in the time between two of its own."""
LATE = 2.0
"""Seconds after which an averaged share is late, beyond what it should take."""
UPLOAD, POLL = "upload_seconds", "poll_seconds"
"""What a member publishes for the others' grace, besides its step time."""


@dataclass(frozen=True)
class MemberOptions:
    """How this member takes part. Members of one run may differ in it."""

    pace: Pace = "decoupled"
    quorum: int = 1
    grace: float | None = None
    heartbeat: float = 5.0
    poll: float | None = None

    @property
    def strict(self) -> bool:
        return self.pace == "strict"

    @property
    def ttl(self) -> float:
        """Seconds after which a member that was not heard of is dead."""
        return max(10.0, 5 * self.heartbeat)


def default_poll(step_seconds: float) -> float:
    return min(max(step_seconds, 0.2), 5.0)


class Timing:
    def __init__(self, options: MemberOptions, sync_every: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.options, self.sync_every, self.clock = options, sync_every, clock
        self._stepped: float | None = None
        self.steps = 0
        self._steps: deque[float] = deque(maxlen=32)  # seconds
        self._uploads: dict[int, deque[float]] = {}  # fragment: seconds of the last ones
        self._averages: dict[int, deque[float]] = {}  # the same, of averaged rounds

    def stepped(self) -> None:
        """The member has made a step."""
        now = self.clock()
        self.steps += 1
        if self._stepped is not None:
            self._steps.append(now - self._stepped)
        self._stepped = now

    def uploaded(self, fragment: int, seconds: float) -> None:
        """A delta took this long, from its first put until the store had all of it."""
        self._uploads.setdefault(fragment, deque(maxlen=8)).append(seconds)

    def averaged(self, fragment: int, seconds: float) -> None:
        """All shares of a round were there this long after its record."""
        self._averages.setdefault(fragment, deque(maxlen=8)).append(seconds)

    def late(self, fragment: int, load: float) -> float:
        """Seconds after which an averaged share is made by the next member. `load`: how many times the fragment a
        member that averages has to read."""
        lately = self._averages.get(fragment)
        usual = 3 * statistics.median(lately) if lately else 2 * self.upload_seconds * (1 + load)
        return LATE + 2 * self.poll + usual

    @property
    def turn(self) -> float:
        """Seconds after which the next member in turn may close a round, too."""
        return max(1.0, 2 * self.poll)

    @property
    def step_seconds(self) -> float:
        return statistics.median(self._steps) if self._steps else 0.0

    @property
    def poll(self) -> float:
        """Seconds between two looks at an open round."""
        return self.options.poll or default_poll(self.step_seconds)

    @property
    def idle(self) -> float:
        """Seconds between two looks while no own delta is under way, and the round can only be called by others."""
        return max(self.poll, min(self.sync_every * self.step_seconds / LOOKS, IDLE))

    @property
    def upload_seconds(self) -> float:
        """The median of the fragment that takes longest."""
        return max((statistics.median(each) for each in self._uploads.values()), default=0.0)

    @property
    def published(self) -> dict[str, float]:
        """What the others need to know: a delta counts only if they wait long enough for it."""
        return {UPLOAD: self.upload_seconds, POLL: self.idle} if self._uploads else {}

    def grace(self, awaited: Collection[Member], everyone: bool) -> float:
        """Seconds that a round stays open after its first delta: enough for the slowest member it waits for to notice
        the round, end its step and upload its own delta. Unless the round waits for everyone, not longer than the own
        steps between two rounds and the own upload take: one slow link must not set the pace of all."""
        if self.options.strict:
            return inf
        if self.options.grace is not None:
            return self.options.grace
        step = max([self.step_seconds, *(m.step_seconds for m in awaited)])
        poll = max([self.idle, *(m.published.get(POLL, default_poll(m.step_seconds)) for m in awaited)])
        upload = max([self.upload_seconds, *(m.published.get(UPLOAD, 0.0) for m in awaited)])
        grace = min(2 * step + poll + upload, LONGEST_GRACE)
        mine = self.sync_every * self.step_seconds + self.idle + self.upload_seconds
        return grace if everyone or not self._steps else min(grace, mine)
