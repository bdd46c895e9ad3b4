"""Snapshots: a fragment's anchor and outer state after a round, and deletion of objects that newer ones replace."""

from collections.abc import Collection
from typing import Any

import torch

from diloco.bucket import rules
from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import FINGERPRINTS, PIECES, ROUNDS, round_prefix, snapshot_folder, snapshot_index
from diloco.bucket.store import All, Delete, List, Read, Task, Work, together
from diloco.bucket.store.envelope import (
    DIGEST,
    PART,
    PREFIX,
    Envelope,
    Invalid,
    Opened,
    Reject,
    Sealed,
    flag,
    get,
    put,
    refuses,
    usable,
)
from diloco.exchange.reducer import State

EVERY, STRIDE = 100, 16
"""Rounds of two members between two snapshots. With more members it is fewer rounds, because each moves deltas, but at
least STRIDE: so snapshots are about 4 % of the traffic. They follow rounds whose index is a multiple of STRIDE, so that
several members that put one put the same. If a member waits for one, put it at once, but only once in STRIDE rounds: a
member that keeps asking must not make the others upload without end."""
KEEP = 3600.0
"""Seconds before a superfluous object is deleted: a member may still be reading it."""
FIELDS, CHECKSUM = 1024, 68
"""Maximum bytes of a header: its fields, and the checksum of each part."""


def seal_snapshot(envelope: Envelope, fragment: int, state: State, record: str) -> Sealed:
    """`record`: digest of the record that led to the state. The writer is not named, so equal states have equal names.
    Outer state that is all zero, as at the start, is omitted."""
    zero = not torch.count_nonzero(state.outer)
    fields = {"fragment": fragment, "index": state.index, "record": record, "fingerprint": state.fingerprint(),
              "anchor": len(state.anchor), "outer": len(state.outer), "zero": zero}  # fmt: skip
    tensors = [state.anchor] if zero else [state.anchor, state.outer]
    payload = [tensor.numpy().data.cast("B") for tensor in tensors if len(tensor)]
    name = f"{snapshot_folder(fragment)}{state.index:08d}-{DIGEST}"
    return envelope.seal(name, "snapshot", fields, b"".join(payload))


@refuses
def read_snapshot(opened: Opened, fragment: int, anchor: int, outer: int) -> State:
    """Raises Invalid."""
    check_header(opened, fragment, anchor, outer)
    values = torch.frombuffer(bytearray(opened.payload) or bytearray(4), dtype=torch.float32)
    zeros = torch.zeros(outer, dtype=torch.float32, device="cpu")
    outer_values = values[anchor : anchor + outer].clone() if not opened.header["zero"] else zeros
    state = State(opened.header["index"], values[:anchor].clone(), outer_values)
    if state.fingerprint() != opened.header["fingerprint"]:
        raise Invalid("its fingerprint does not match its values")
    if not (torch.isfinite(state.anchor).all() and torch.isfinite(state.outer).all()):
        raise Invalid("it has non-finite values")
    return state


@refuses
def check_header(opened: Opened, fragment: int, anchor: int, outer: int) -> int:
    """The index of a snapshot, judged by its header alone. Raises Invalid."""
    opened.text("record")
    opened.integer("fingerprint", 0, FINGERPRINTS)
    index, header = opened.integer("index", 0, 1 << 40), opened.header
    if snapshot_index(opened.name) != index or header["fragment"] != fragment:
        raise Invalid("it belongs to another fragment or round than its name says")
    if (header["anchor"], header["outer"]) != (anchor, outer):
        raise Invalid("its shape differs from the fragment's")
    if header["size"] != 4 * (anchor + (0 if flag(header["zero"], "zero") else outer)):
        raise Invalid(f"its payload has {header['size']} bytes, which does not fit its shape")
    return index


class Snapshots:
    """The snapshots of one fragment."""

    def __init__(
        self, rounds: RoundStore, envelope: Envelope, fragment: int, state: State, initial: str, reject: Reject
    ) -> None:
        """`state`: any state of the fragment, for its shape. `initial`: name of the run's first snapshot."""
        self._rounds, self.envelope, self.fragment, self._initial = rounds, envelope, fragment, initial
        self.reject = reject
        self.anchor, self.outer = len(state.anchor), len(state.outer)
        self.newest = -1  # highest known index
        self._demanded = -STRIDE  # the last round whose snapshot is for a waiting member
        self._due_since: float | None = None
        self._waiting: tuple[State, str] | None = None  # a copy to put, and its record
        self._floors: list[
            tuple[float, int]
        ] = []  # (since, index): objects up to the index have been superfluous since then
        self._collected = 0

    def consider(self, state: State, link: str, members: int, wanted: int, now: float, timeout: float) -> None:
        """Copy a state if a snapshot is due, or if a member waits for one of at least the index `wanted`.

        Args:
            link: digest of the record that led to the state.
            members: of the last round.
            timeout: seconds for which others may put the snapshot first. 0 for the member that closed the last round.
        """
        index = state.index
        if self.newest >= self._demanded and wanted > self.newest and index >= self._demanded + STRIDE:
            self._demanded = index
        due = index - self.newest >= max(2 * EVERY // max(members, 2), STRIDE)
        if self.newest >= self._demanded and not (due and index % STRIDE == 0):
            self._due_since = self._due_since if due else None
            return
        if self._due_since is None:
            self._due_since = now
        if not timeout or now - self._due_since > timeout:
            copy = State(index, state.anchor.clone(), state.outer.clone(), state.cached_fingerprint)
            self._waiting = copy, link

    def tick(self, frontier: int, now: float, busy: bool) -> Task[None]:
        """`busy`: a member is joining and may be reading superfluous objects."""
        if self._waiting is not None:
            (state, record), self._waiting = self._waiting, None
            if (yield from self.store(state, record)):
                yield from self.collect(now, busy)
        elif self._due_since is not None:
            yield from self.refresh(frontier)

    def list(self) -> Task[list[str]]:
        """Names, newest first. Several members may have put an initial snapshot; the one in run.json counts, even if a
        late listing does not show it."""
        listing = yield List(snapshot_folder(self.fragment))
        names = sorted((name for name in listing if snapshot_index(name) or name == self._initial), reverse=True)
        if names:  # everything before the oldest was collected with the snapshots there
            self._collected = max(self._collected, snapshot_index(names[-1]) or 0)
        return names if self._initial in names or not self._initial else [*names, self._initial]

    def refresh(self, frontier: int | None = None) -> Task[None]:
        """Find the newest snapshot, up to the frontier if given."""
        for name in (yield from self.list()):
            index = snapshot_index(name) or 0
            if index <= self.newest:
                return
            if (frontier is None or index <= frontier) and (yield from self.judge(name)) is not None:
                self.newest = max(self.newest, index)
                return

    def judge(self, name: str) -> Task[tuple[Opened, str] | None]:
        """The header, and what the next record must refer to, if the snapshot belongs to the run."""
        index = snapshot_index(name) or 0
        reading: list[Task[Any]] = [
            self.peek(name),
            self._rounds.contested(range(max(index - rules.LINKS, 1), index + 2)),
            self._rounds.records_ahead(range(max(index, 1), index + 2)),
        ]
        head, contested, _ = yield from together(reading)
        link = None if head is None else (yield from self.link_of(head, contested))
        return None if head is None or link is None else (head, link)

    def peek(self, name: str) -> Task[Opened | None]:
        """The header of a valid snapshot."""
        parts = -(-4 * (self.anchor + self.outer) // PART)
        data = yield Read(name, 0, first=PREFIX.size + FIELDS + CHECKSUM * parts)
        if data is None:
            return None
        try:
            head = self.envelope.open(name, "snapshot", data, None, head=True)
            check_header(head, self.fragment, self.anchor, self.outer)
            return head
        except Invalid as reason:
            return self.reject(name, reason)

    def link_of(self, head: Opened, contested: Collection[int]) -> Task[str | None]:
        """What the next record must refer to, if the snapshot fits the closed rounds: its record exists and counts, and
        the next record continues from its bits. `contested`: see `RoundStore.contested`."""
        index, digest = head.header["index"], head.header["record"]
        record = (yield from self._rounds.find(index, digest)) if index else None
        if record is not None and not (yield from self._rounds.is_final(record, contested)):
            return self.reject(head.name, Invalid("the run continued from another record"))
        link = "" if record is None else record.digest
        following, _, branched, _ = yield from self._rounds.record(index + 1, link, final=index + 1 in contested)
        fingerprint = head.header["fingerprint"]
        outvoted = False
        if following is not None and following.fingerprint != fingerprint:
            outvoted = yield from self._rounds.outvoted(index + 1, following.fingerprint)
        try:
            return rules.link_after(index, fingerprint, record, following, branched, outvoted)
        except Invalid as reason:
            return self.reject(head.name, reason)

    def load(self, least: int = 0, before: int | None = None) -> Task[tuple[State, str] | None]:
        """The newest valid snapshot from index `least` up to but not including `before`, and what the next record must
        refer to. If a snapshot was deleted meanwhile there are newer ones, so list them again."""
        names = None
        while (listed := (yield from self.list())) != names:
            names = listed
            for name in names:
                index = snapshot_index(name) or 0
                if index < least or (before is not None and index >= before):
                    continue
                if (judged := (yield from self.judge(name))) is None:
                    continue
                state = yield from usable(name, self._read(name, judged[0].header["size"]), self.reject)
                if isinstance(state, State):
                    self.newest = max(self.newest, state.index)
                    return state, judged[1]
        return None

    def _read(self, name: str, size: int) -> Task[State | None]:
        opened = yield from get(self.envelope, name, "snapshot", size)
        if opened is None:
            return None
        return (yield Work(lambda: read_snapshot(opened, self.fragment, self.anchor, self.outer)))

    def store(self, state: State, record: str) -> Task[bool]:
        """Put a snapshot and check that it exists."""
        sealed = yield Work(lambda: seal_snapshot(self.envelope, self.fragment, state, record))
        yield from put(sealed)
        if (yield from self.peek(sealed.name)) is None:
            return False
        self.newest = max(self.newest, state.index)
        return True

    def collect(self, now: float, busy: bool) -> Task[None]:
        """Delete deltas and snapshots that only matter before the second newest valid snapshot, once this has been so
        for a while and nobody is joining. Never delete records."""
        valid: list[int] = []
        for name in (yield from self.list()):
            index = snapshot_index(name) or 0
            if index <= self.newest and index not in valid and (yield from self.peek(name)) is not None:
                valid.append(index)
            if len(valid) == 2:
                self._floors.append((now, valid[1]))
                break
        ripe = [floor for since, floor in self._floors if now - since >= KEEP]
        if busy or not ripe:
            return
        floor = max(ripe)
        self._floors = [(since, index) for since, index in self._floors if index > floor]
        deltas, pieces = yield All([List(top, after=round_prefix(self._collected, top)) for top in (ROUNDS, PIECES)])
        older = yield List(snapshot_folder(self.fragment))
        yield All([Delete(name) for name in rules.superfluous([*deltas, *pieces, *older], self.fragment, floor)])
        self._collected = floor
