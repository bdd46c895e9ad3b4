"""The round after the frontier, as one member sees it: which deltas are there, and when it may be closed.

Few members each read all deltas as they come, and whoever sees the last one closes the round. In a crowd that would be
requests without number. There one member after the other has its turn to list the round and to read the heads; the
others only ask whether it is closed.
"""

import logging
from collections.abc import Iterable, Sequence
from math import inf

from diloco.bucket.averaging import Averaging
from diloco.bucket.outbox import Outbox
from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import (
    Contribution,
    Link,
    Record,
    count_votes,
    entries_of,
    folder,
    may_close,
    member_of,
    one_per_member,
    place_of,
)
from diloco.bucket.session import Session
from diloco.bucket.shares import turns
from diloco.bucket.store.envelope import Invalid
from diloco.bucket.store.operations import List, Task

log = logging.getLogger("diloco")


class OpenRound:
    def __init__(self, fragment: int, index: int, session: Session, store: RoundStore, before: Sequence[str]) -> None:
        """`before`: the members of the last round, in order; none if it is not known."""
        self._fragment, self._index, self._session, self._store, self._before = fragment, index, session, store, before
        self.deltas: dict[str, Contribution] = {}  # by name
        self._unusable: set[str] = set()
        self.checked = False  # that the rounds before were not closed otherwise
        self.lacking_since: float | None = None  # when something that its record names was first missed
        self.first_seen: float | None = None  # when the first delta was
        self.open_at = -inf  # when it was last seen to be open
        self.averaging: Averaging | None = None  # once it is closed, if its shares are averaged one by one

    def saw(self, name: str, delta: Contribution) -> None:
        self.deltas[name] = delta
        self._noticed(delta.member)

    def _noticed(self, member: str) -> None:
        self.first_seen = self._session.clock() if self.first_seen is None else self.first_seen
        self._session.members.delivered(member)

    def lacks(self) -> None:
        """It is closed, and something that its record names is not there: say so, once."""
        if self.lacking_since is None:
            self.lacking_since = self._session.clock()
            self._session.event("gone", fragment=self._fragment, index=self._index)
            log.warning("fragment %d: an object of round %d is gone from the store; waiting for it, or for a snapshot "
                        "of a member that has followed the round", self._fragment, self._index)  # fmt: skip

    def called(self, fingerprint: int) -> bool:
        """Whether another member has sent a delta against this state."""
        return any(d.fingerprint == fingerprint and d.member != self._session.me for d in self.deltas.values())

    @property
    def crowded(self) -> bool:
        return self._store.layout.cut and self._session.crowded

    def names(self, outbox: Outbox) -> Task[dict[str, int] | None]:
        """What there is in the round, or None if this member has no reason to list it. If this round and the next one
        are closed, what lies in both and in those that follow is read at once."""
        if self.lacking_since is not None:  # another record may stand in for it by now
            return (yield List(folder(self._fragment, self._index)))
        names = yield from self._list(outbox)
        yield from self._store.read_ahead(self._session.listing.closed(self._fragment, self._index))
        return names

    def _list(self, outbox: Outbox) -> Task[dict[str, int] | None]:
        listing, timing = self._session.listing, self._session.timing
        if not self.crowded:
            return (yield from listing.names(self._fragment, self._index))
        if not outbox.under_way:  # somebody may call
            return (yield from listing.names(self._fragment, self._index, timing.idle))
        if not self._may_have_turn(outbox):
            return None
        return (yield List(folder(self._fragment, self._index)))

    def _may_have_turn(self, outbox: Outbox) -> bool:
        """Whether it is this member's turn to look who is there, and to close the round if all are. If those before it
        are away, its turn comes a little later."""
        if outbox.acknowledged is None:
            return False
        session, start, now = self._session, self._fragment + self._index, self._session.clock()
        order = self._before or sorted([session.me, *session.members.alive(now)])
        position = turns(order, session.me, session.members.away(order, now))(start)
        return now - outbox.acknowledged_at >= position * session.timing.turn

    def gather(self, names: Iterable[str], fingerprint: int) -> Task[bool]:
        """Read what is new. Returns whether all that is there is known."""
        new = []
        for name in sorted(names):
            if place_of(name) is None:
                self._session.reject(name, Invalid("no object of a round has such a name"))
            elif member_of(name) and name not in self.deltas and name not in self._unusable:
                new.append(name)
        if not self.crowded:
            yield from self._read(new, heads=False)
            return True
        present = {member_of(name) for name in (*new, *self.deltas)}
        for member in present:
            self._noticed(str(member))
        if self._closable({str(member) for member in present}):
            yield from self._read(new, heads=True)
            return True
        if not self.called(fingerprint):
            yield from self._read(new[:1], heads=True)
        return False

    def _read(self, names: list[str], heads: bool) -> Task[None]:
        reading = self._store.heads(names) if heads else self._store.deltas(names)
        for name, delta in zip(names, (yield from reading), strict=True):
            if isinstance(delta, Contribution):
                self.saw(name, delta)
            elif delta is not None:
                self._unusable.add(name)

    def reread(self) -> Task[None]:
        """Know only the deltas that are there as a whole."""
        self.deltas.clear()
        names = yield List(folder(self._fragment, self._index))
        yield from self._read(sorted(filter(member_of, names)), heads=False)

    def votes(self, fingerprint: int) -> tuple[int, int]:
        """How many members have sent a delta against this state, and how many, at most, against the same other one."""
        return count_votes(self.deltas.values(), fingerprint)

    def _closable(self, present: set[str]) -> bool:
        session, index = self._session, self._index
        if len(present) < session.options.quorum:  # a member that waits for a call asks this all the time
            return False
        waited = session.clock() - (self.first_seen or session.clock())
        return may_close(present, session.awaited(index), waited, session.grace(index), session.options.quorum)

    def propose(self, previous: Link, fingerprint: int, own: Contribution) -> Task[Record | None]:
        """The record that may close the round now, or None if the round must stay open."""
        session = self._session
        deltas = one_per_member(self.deltas.values(), fingerprint, own.digest)
        if own.digest not in {delta.digest for delta in deltas}:
            return None
        if not self._closable({delta.member for delta in deltas}):
            return None
        heads = ""
        if self._store.layout.cut and len(deltas) >= session.shares_from:
            named = {entry.digest for entry in entries_of(deltas, session.max_work, own.digest)}
            deltas = [delta for delta in deltas if delta.digest in named]
            heads = yield from self._store.put_heads(self._index, deltas)
        elif unread := {name for name, delta in self.deltas.items() if delta.payloads is None}:
            self.deltas = {name: delta for name, delta in self.deltas.items() if name not in unread}
            yield from self._read(sorted(unread), heads=False)
            return None
        entries = entries_of(deltas, session.max_work, own.digest)
        return Record(self._fragment, self._index, previous, fingerprint, session.me, entries, heads=heads)
