"""The last records that one member has followed, and whether they are those of the run."""

from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import Link, folder
from diloco.bucket.store.operations import List, Task

KEPT = 16
"""Rounds."""


class Chain:
    def __init__(self, rounds: RoundStore) -> None:
        self._rounds = rounds
        self.links: dict[int, Link] = {}  # by index

    def begin(self) -> None:
        """Begin again, with what is added next."""
        self.links.clear()

    def add(self, index: int, link: Link) -> None:
        self.links = {each: known for each, known in self.links.items() if each > index - KEPT}
        self.links[index] = link

    def differs_at(self) -> Task[int | None]:
        """The first of these rounds that is closed differently from what is known here."""
        self._rounds.forget()
        for index, link in sorted(self.links.items()):
            previous = self.links.get(index - 1)
            if previous is None:
                continue
            names = yield List(folder(self._rounds.fragment, index))
            record, _, _ = yield from self._rounds.record(index, previous, names)
            if record is not None and record.link != link:
                return index
        return None
