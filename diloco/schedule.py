"""Which fragment is sent after which step. Integers only; the same on every replica (paper, Algorithm 2)."""

from dataclasses import dataclass

from diloco.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """Fragment f of P is sent after steps o + H, o + 2H, … with offset o = floor(f · H / P).

    So every fragment is sent once in `sync_every` (H) steps, for the first time after a full `sync_every`,
    and fragments are spread as evenly as integers allow. The result of a send after step t is applied after
    step t + overlap. Replicas may have different overlaps, because only the sends must be at the same steps.

    >>> [step for step in range(1, 251) if Schedule(sync_every=100, fragments=2).sends(step)]
    [100, 150, 200, 250]
    """

    sync_every: int
    fragments: int

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise ConfigError(f"sync_every={self.sync_every}: give the number of steps between two syncs, at least 1")
        if self.fragments < 1:
            raise ConfigError(f"fragments={self.fragments}: there must be at least one fragment")

    def offset(self, fragment: int) -> int:
        return fragment * self.sync_every // self.fragments

    def sends_at(self, fragment: int, step: int) -> bool:
        """Whether the fragment is sent after this step."""
        since = step - self.offset(fragment)
        return since > 0 and since % self.sync_every == 0

    def sends(self, step: int) -> list[int]:
        """The fragments that are sent after this step, in the order in which they are sent."""
        return [f for f in range(self.fragments) if self.sends_at(f, step)]

    def in_flight(self, overlap: int) -> int:
        """The largest number of fragments in flight at once when each takes `overlap` steps."""
        starts = sorted(self.offset(f) for f in range(self.fragments))
        return max(sum((a - b) % self.sync_every < overlap for b in starts) for a in starts)


def check_overlap(overlap: int, sync_every: int) -> None:
    if not 0 <= overlap < sync_every:
        raise ConfigError(
            f"overlap={overlap} with sync_every={sync_every}: a result must be applied before the fragment is sent "
            f"again; give 0 (blocking) to {sync_every - 1}"
        )
