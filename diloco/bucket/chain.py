"""The last records that one member has followed, and whether they are those of the run.

Each record names the one before it, so a member that knows one of them can find those that led to it. Records are never
deleted: one that names another that is not there was not made by following the run.
"""

from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import Link
from diloco.bucket.store.operations import Task

KEPT = 16
"""Rounds."""
SLOTS = 1 << 20
"""All that anybody may have filled with garbage: a record is not gone because it lies behind it."""


class Chain:
    def __init__(self, rounds: RoundStore) -> None:
        self._rounds = rounds
        self.links: dict[int, Link] = {}  # by index
        self.began = 0  # with the record of this round, which a snapshot or a checkpoint has named

    def begin(self) -> None:
        """Begin again, with what is added next."""
        self.links.clear()

    def add(self, index: int, link: Link) -> None:
        self.began = self.began if self.links else index
        self.links = {each: known for each, known in self.links.items() if each > index - KEPT}
        self.links[index] = link

    def differs_at(self) -> Task[int | None]:
        """The first of these rounds that is closed differently from what is known here."""
        if not (yield from self._look_back()):
            return self.began
        for index, link in sorted(self.links.items()):
            previous = self.links.get(index - 1)
            if previous is None:
                continue
            record, _, _ = yield from self._rounds.record(index, previous)
            if record is not None and record.link != link:
                return index
        return None

    def _look_back(self) -> Task[bool]:
        """Find the records before the first one that is known, as far as they are kept: a snapshot names only one, and
        both may be forged. Returns whether they lead to it."""
        index, lowest = min(self.links), max(max(self.links) - KEPT + 1, 0)
        if index <= lowest:
            return True
        yield from self._rounds.records_ahead(range(max(lowest, 1), index + 1))
        record = yield from self._rounds.find(index, self.links[index].digest, SLOTS)
        while record is not None and index > lowest:
            index, previous = index - 1, record.previous
            record = (yield from self._rounds.find(index, previous.digest, SLOTS)) if index else record
            link = Link() if not index else None if record is None else record.link
            if link is None or (link.digest, link.usual) != (previous.digest, previous.usual):
                return False  # another list of members may count by then
            self.links[index] = link
        return record is not None
