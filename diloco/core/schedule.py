"""Which fragment is sent after which step. Integers only; the same on every replica (paper, Algorithm 2)."""

from dataclasses import dataclass
from operator import index
from typing import Any

from diloco.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """Fragment f of P is sent after steps o + H, o + 2H, … with offset o = floor(f · H / P).

    So every fragment is sent once in `sync_every` (H) steps, for the first time after a full `sync_every`, and
    fragments are spread as evenly as integers allow. The result of a send after step t is applied after step
    t + overlap. Replicas may have different overlaps, because only the sends must be at the same steps.

    >>> [step for step in range(1, 251) if Schedule(sync_every=100, fragments=2).sends(step)]
    [100, 150, 200, 250]
    """

    sync_every: int
    fragments: int = 1

    def __post_init__(self) -> None:
        if not _is_whole(self.sync_every) or self.sync_every < 1:
            raise ConfigError(f"sync_every={self.sync_every!r}: pass a whole number of steps, at least 1")
        if self.fragments < 1:
            raise ConfigError(f"fragments={self.fragments}: there must be at least one fragment")

    def offset(self, fragment: int) -> int:
        return fragment * self.sync_every // self.fragments

    def sends_at(self, fragment: int, step: int) -> bool:
        """Whether the fragment is sent after this step."""
        since = step - self.offset(fragment)
        return since > 0 and since % self.sync_every == 0

    def sends(self, step: int) -> list[int]:
        """The fragments that are sent after this step, in order."""
        return [f for f in range(self.fragments) if self.sends_at(f, step)]

    def in_flight(self, overlap: int) -> int:
        """The largest number of fragments in flight at once when each takes `overlap` steps."""
        starts = sorted(self.offset(f) for f in range(self.fragments))
        return max(sum((a - b) % self.sync_every < overlap for b in starts) for a in starts)


def check_overlap(overlap: int, sync_every: int) -> None:
    if not _is_whole(overlap) or not 0 <= overlap < sync_every:
        raise ConfigError(
            f"overlap={overlap!r} with sync_every={sync_every}: pass a whole number of steps from 0 (wait for the "
            f'result) to {sync_every - 1}, because a fragment must be applied before it is sent again; or "auto"'
        )


def _is_whole(value: Any) -> bool:
    try:
        return index(value) == value and not isinstance(value, bool)
    except TypeError:
        return False
