"""The life cycle of a DiLoCo."""

import enum

from diloco.errors import DiLoCoError


class Life(enum.Enum):
    APART = enum.auto()  # not with the others yet, or not since a state was loaded
    JOINED = enum.auto()
    ANCHORS = enum.auto()  # inside anchors(): the model does not hold the local values
    FINISHING = enum.auto()  # rounds in flight are applied regardless of overlap
    FINISHED = enum.auto()
    LEFT = enum.auto()  # by an error

    def check_open(self) -> None:
        """Raise unless the model holds the local values and more steps may follow."""
        if self is Life.ANCHORS:
            raise DiLoCoError(
                "inside anchors() the model holds the anchors: leave it before optimizer.step(), finish(), "
                "load_state_dict() or another anchors()"
            )
        if self not in (Life.APART, Life.JOINED):
            raise DiLoCoError("this DiLoCo has left the other replicas, by finish() or an error: create a new one")
