"""Follows the records of a run from the store alone, while its members are disturbed."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from diloco.bucket import find_run
from diloco.bucket.members import read_members
from diloco.bucket.rounds import Record, member_of, place_of, read_record, record_name
from diloco.bucket.store import List, Read
from diloco.bucket.store.backend import open_store
from diloco.bucket.store.envelope import HEADER, PREFIX, Envelope
from diloco.bucket.store.store import Store


class Witness:
    """Reads the store and remembers."""

    def __init__(self, url: str) -> None:
        self.url, self.records, self.heads = url, {}, {}
        self.fingerprints: dict[tuple[int, int], set[int]] = {}
        self.changed = 0
        self.tokens: dict[str, float] = {}  # delta: tokens
        self.moved = time.monotonic()
        self._envelope: Envelope | None = None

    def look(self) -> None:
        if self._envelope is None:
            if not Path(self.url, "run.json").exists() or (run := find_run(self.url)) is None:
                return
            self._envelope, self._store, self.fragments = (
                Envelope(run.id),
                Store(open_store(self.url)),
                len(run.snapshots),
            )
        names = self._store.perform(List("rounds/"))
        for fragment in range(self.fragments):
            for name in names:
                place = place_of(name) if member_of(name) else None
                if place and place[0] == fragment and name not in self.tokens:
                    self._delta(fragment, name)
            previous, index = "", 1
            while (name := record_name(fragment, index, 0)) in names:
                previous = self._record(fragment, index, name, previous).digest
                index += 1
            if index <= max((i for f, i in self.records if f == fragment), default=0):
                self.changed += 1  # a record that was there is gone

    def _delta(self, fragment: int, name: str) -> None:
        data = self._store.perform(Read(name, 0, first=PREFIX.size + HEADER))
        if data is not None and self._envelope is not None:
            header = self._envelope.open(name, "delta", data, None, head=True).header
            self.tokens[name] = header["tokens"]
            self.fingerprints.setdefault((fragment, header["index"] - 1), set()).add(header["fingerprint"])

    def _record(self, fragment: int, index: int, name: str, previous: str) -> Record:
        assert self._envelope is not None
        record = read_record(self._envelope.open(name, "record", self._store.perform(Read(name, 1 << 21)), None),
                             fragment, index, previous)  # fmt: skip
        if (fragment, index) not in self.records:
            self.records[fragment, index] = record
            self.moved = time.monotonic()
        self.changed += self.records[fragment, index].digest != record.digest
        return record

    def counted(self) -> float:
        """Tokens that are in closed rounds, of one fragment."""
        wanted = {e.digest for (f, _), record in self.records.items() if f == 0 for e in record.entries}
        return sum(tokens for name, tokens in self.tokens.items() if name.rpartition("-")[2] in wanted)

    def members(self) -> dict[str, Any]:
        assert self._envelope is not None
        return {m.name: m for m in self._store.run(read_members(self._envelope, lambda *_: None), nullcontext())}
