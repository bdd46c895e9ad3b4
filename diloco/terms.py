"""What all replicas must have alike and may change together in mid-run: sync_every and codec. Pure; no torch.

Each replica puts what it would like into the header of the rounds of fragment 0. Every replica applies the same rule
to the same headers, so all come to the same decision without another message.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.formats import FORMATS


@dataclass(frozen=True)
class Terms:
    sync_every: int
    codec: str  # by its name in FORMATS; a codec without a row there is named "" and stays

    def bits(self) -> float:
        """Bits that a value costs in each step: what the link has to carry."""
        return 8 * FORMATS[self.codec].nbytes(1 << 20) / (1 << 20) / self.sync_every if self.codec else -self.sync_every


def agree(wishes: Sequence[Terms | None], held: Terms) -> Terms | None:
    """The terms that all take next, or None: all keep those they hold.

    There is a change only if every replica wishes one in the same direction, to send more or to send less. Then the
    largest sync_every is taken, with the finest codec that sends no more than any replica wishes: all wait for the
    slowest link.

    >>> agree([Terms(100, "e3m0"), Terms(75, "e3m0")], held=Terms(30, "e3m0"))
    Terms(sync_every=100, codec='e3m0')
    >>> agree([Terms(300, "e3m0"), Terms(150, "twobit")], held=Terms(200, "twobit"))
    Terms(sync_every=300, codec='e3m0')
    >>> agree([Terms(100, "e3m0"), None], held=Terms(30, "e3m0"))
    """
    wished = [wish for wish in wishes if wish is not None and (wish.codec == "") == (held.codec == "")]
    if not wished or len(wished) < len(wishes):
        return None
    more, less = (all(sign * (wish.bits() - held.bits()) > 0 for wish in wished) for sign in (1, -1))
    if not (more or less):
        return None
    sync_every, most = max(wish.sync_every for wish in wished), min(wish.bits() for wish in wished)
    fits = [terms for wish in wished if (terms := Terms(sync_every, wish.codec)).bits() <= most]
    agreed = max(fits, key=Terms.bits)
    return agreed if (agreed.bits() > held.bits()) == more else None


@dataclass(frozen=True)
class Change:
    """Terms that hold from a step on: that of the next send of fragment 0."""

    step: int
    terms: Terms


NAMES = tuple(FORMATS)
"""A codec travels as its place in this list."""


def to_numbers(wish: Terms | None) -> tuple[int, int]:
    """(sync_every, codec) for a header; sync_every 0 is not a wish, codec -1 has no name."""
    return (0, -1) if wish is None else (wish.sync_every, NAMES.index(wish.codec) if wish.codec else -1)


def from_numbers(sync_every: int, codec: int) -> Terms | None:
    return Terms(sync_every, NAMES[codec] if 0 <= codec < len(NAMES) else "") if sync_every > 0 else None
