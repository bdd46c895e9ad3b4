"""Snapshots: a fragment's anchor and outer state after a round, and what may be deleted once there are newer ones."""

import re
from collections.abc import Callable, Iterable

import torch

from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import FINGERPRINTS, PIECES, ROUNDS, Link, Record, is_record, place_of, round_prefix
from diloco.bucket.store.envelope import DIGEST, PART, PREFIX, Envelope, Invalid, Opened, Sealed, get, put, refuses
from diloco.bucket.store.operations import All, Delete, List, Read, Task, Work, together
from diloco.reduce import State

EVERY = 100
"""The most rounds of a fragment between two snapshots."""
MOVED = 25
"""A snapshot is put when the members have moved this many times its bytes since the last one, and a member that comes
would have to read more than its bytes: so snapshots are at most 4 % of the traffic."""
STRIDE = 16
"""Snapshots are put after rounds whose index is a multiple of this, so that several members that put one put the same.
If somebody waits for one, it is put at once, but only once in this many rounds: a member that keeps asking must not
make the others upload without end."""
KEEP = 3600.0
"""Seconds for which a member that is reading something superfluous may go on reading it."""
FIELDS, CHECKSUM = 1024, 68
"""Bytes of a header, at most: its fields, and the checksum of each part."""

Reject = Callable[[str, Invalid], None]
_NAME = re.compile(r"anchors/[0-9]{4}/([0-9]{8})-[0-9a-f]{64}")
_PART = re.compile(r"\.p[0-9]+$")


def snapshot_folder(fragment: int) -> str:
    return f"anchors/{fragment:04d}/"


def seal_snapshot(envelope: Envelope, fragment: int, state: State, record: str) -> Sealed:
    """`record`: digest of the record that led to the state. The writer is not named, so equal states have equal names.
    Outer state that is all zero, as at the start, is left out."""
    zero = not torch.count_nonzero(state.outer)
    fields = {"fragment": fragment, "index": state.index, "record": record, "fingerprint": state.fingerprint(),
              "anchor": len(state.anchor), "outer": len(state.outer), "zero": zero}  # fmt: skip
    values = [state.anchor] if zero else [state.anchor, state.outer]
    payload = [each.numpy().data.cast("B") for each in values if len(each)]
    name = f"{snapshot_folder(fragment)}{state.index:08d}-{DIGEST}"
    return envelope.seal(name, "snapshot", fields, b"".join(payload))


@refuses
def read_snapshot(found: Opened, fragment: int, anchor: int, outer: int) -> State:
    """Raises Invalid."""
    check_header(found, fragment, anchor, outer)
    values = torch.frombuffer(bytearray(found.payload) or bytearray(4), dtype=torch.float32)
    zeros = torch.zeros(outer, dtype=torch.float32, device="cpu")
    rest = values[anchor : anchor + outer].clone() if not found.header["zero"] else zeros
    state = State(found.header["index"], values[:anchor].clone(), rest)
    if state.fingerprint() != found.integer("fingerprint", 0, FINGERPRINTS):
        raise Invalid("its fingerprint is not that of its values")
    if not (torch.isfinite(state.anchor).all() and torch.isfinite(state.outer).all()):
        raise Invalid("it holds inf or nan")
    return state


@refuses
def check_header(found: Opened, fragment: int, anchor: int, outer: int) -> int:
    """The index of a snapshot, judged by its header alone. Raises Invalid."""
    match = _NAME.fullmatch(found.name)
    index = found.integer("index", 0, 1 << 40)
    if match is None or int(match[1]) != index or found.header.get("fragment") != fragment:
        raise Invalid("it belongs to another fragment or round than its name says")
    if (found.header.get("anchor"), found.header.get("outer")) != (anchor, outer):
        raise Invalid("its shape differs from that of the fragment")
    if not isinstance(found.header.get("zero"), bool) or not isinstance(found.header.get("record"), str):
        raise Invalid("its fields are not those of a snapshot")
    if found.header["size"] != 4 * (anchor + (0 if found.header["zero"] else outer)):
        raise Invalid(f"its payload has {found.header['size']} bytes, which does not fit its shape")
    return index


def index_of(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class Snapshots:
    """The snapshots of one fragment."""

    def __init__(self, rounds: RoundStore, envelope: Envelope, fragment: int, state: State, initial: str,
                 reject: Reject, delta: int) -> None:  # fmt: skip
        """`state`: any state of the fragment, for its shape. `initial`: name of the run's first snapshot. `delta`: its
        bytes."""
        self._rounds, self.envelope, self.fragment, self._initial = rounds, envelope, fragment, initial
        self.reject, self._delta = reject, delta
        self.anchor, self.outer = len(state.anchor), len(state.outer)
        self.newest = -1  # index, as far as known
        self._since: dict[int, tuple[int, int]] = {}  # index of a round since the newest: what it weighs, in deltas
        self._demanded = -STRIDE  # the round after which a snapshot was last put, or is to be put, for who waits for it
        self._due_since: float | None = None
        self._waiting: tuple[State, str] | None = None  # a copy to be put, and its record
        self._floors: list[tuple[float, int]] = []  # since when what is not after this index is superfluous
        self._collected = 0

    def followed(self, record: Record) -> None:
        """A member that follows a round later reads all its deltas, or its averaged shares; in it the members moved
        this."""
        members = len(record.entries)
        self._since[record.index] = (1, 3 * members) if record.heads else (members, members**2)

    @property
    def _heavy(self) -> bool:
        """Whether the rounds since the newest snapshot weigh enough for another one. Headers weigh too: those of small
        deltas, with their records, are more than the values, and what a member that comes has to read."""
        self._since = {index: weight for index, weight in self._since.items() if index > self.newest}
        mine, delta = 4 * (self.anchor + self.outer) + FIELDS, self._delta + FIELDS
        read, moved = (delta * sum(each[i] for each in self._since.values()) for i in (0, 1))
        return len(self._since) >= EVERY or (moved >= MOVED * mine and read >= mine)

    def consider(self, state: State, record: str, wanted: int, first: bool, now: float, grace: float) -> None:
        """Copy a state that was just reached, if a snapshot is due, or a member waits for one of at least the index
        `wanted`. `first`: this member closed the round, so it puts the snapshot at once. The others do it after the
        grace, if there is still none."""
        if self.newest >= self._demanded and wanted > self.newest and state.index >= self._demanded + STRIDE:
            self._demanded = state.index
        if self.newest >= self._demanded and not (self._heavy and state.index % STRIDE == 0):
            self._due_since = self._due_since if self._heavy else None
            return
        if self._due_since is None:
            self._due_since = now
        if first or now - self._due_since > grace:
            self._waiting = State(state.index, state.anchor.clone(), state.outer.clone()), record

    def tick(self, frontier: int, now: float, busy: bool) -> Task[None]:
        """`busy`: somebody is joining, and may read what is superfluous."""
        if self._waiting is not None:
            (state, record), self._waiting = self._waiting, None
            if (yield from self.store(state, record)):
                yield from self.collect(now, busy)
        elif self._due_since is not None:
            yield from self.refresh(frontier)

    def list(self) -> Task[list[str]]:
        """Names, newest first. Several members may have put an initial one; the one that run.json names counts, also if
        the listing is late and does not show it."""
        found = yield List(snapshot_folder(self.fragment))
        names = sorted((name for name in found if index_of(name) or name == self._initial), reverse=True)
        if names:  # what is before the oldest was collected together with the snapshots there
            self._collected = max(self._collected, index_of(names[-1]) or 0)
        return names if self._initial in names or not self._initial else [*names, self._initial]

    def refresh(self, frontier: int | None = None) -> Task[None]:
        """Find the newest, among those that are not ahead of the frontier if one is given."""
        for name in (yield from self.list()):
            index = index_of(name) or 0
            if index <= self.newest:
                return
            if (frontier is None or index <= frontier) and (yield from self.judge(name)) is not None:
                self.newest = max(self.newest, index)
                return

    def judge(self, name: str) -> Task[tuple[Opened, Link] | None]:
        """The header, and what the next record has to follow, if a snapshot is one of the run."""
        index = index_of(name) or 0
        records = self._rounds.records_ahead(range(max(index, 1), index + 2))
        head, _ = yield from together([self.peek(name), records])
        link = None if head is None else (yield from self.tied(head))
        return None if head is None or link is None else (head, link)

    def peek(self, name: str) -> Task[Opened | None]:
        """The header, if this is a valid snapshot of the run."""
        parts = -(-4 * (self.anchor + self.outer) // PART)
        data = yield Read(name, 0, first=PREFIX.size + FIELDS + CHECKSUM * parts)
        if data is None:
            return None
        try:
            found = self.envelope.open(name, "snapshot", data, None, head=True)
            check_header(found, self.fragment, self.anchor, self.outer)
            return found
        except Invalid as reason:
            self.reject(name, reason)
            return None

    def tied(self, head: Opened) -> Task[Link | None]:
        """What the next record has to follow, if a snapshot belongs to the rounds that were closed: its record is
        there, and the next one goes on from its bits."""
        index, digest = head.header["index"], head.header["record"]
        link = Link()
        if index:
            record = yield from self._rounds.find(index, digest)
            if record is None:
                self.reject(head.name, Invalid("the record that it names is not there"))
                return None
            link = record.link
        following, _, branched = yield from self._rounds.record(index + 1, link)
        if following is None and branched:
            self.reject(head.name, Invalid("the run went on from another record than it names"))
            return None
        other = following is not None and following.fingerprint != head.header["fingerprint"]
        if following is not None and other and not (yield from self._rounds.outvoted(following)):
            self.reject(head.name, Invalid("the run went on from other bits"))
            return None
        return link

    def load(self, least: int = 0, before: int | None = None) -> Task[tuple[State, Link] | None]:
        """The newest valid snapshot from one index on and before another, and what the next record has to follow. If
        one was deleted meanwhile, there are newer ones: look again."""
        names = None
        while (listed := (yield from self.list())) != names:
            names = listed
            for name in names:
                if (index_of(name) or 0) < least:
                    continue
                if before is not None and (index_of(name) or 0) >= before:
                    continue
                if (judged := (yield from self.judge(name))) is None:
                    continue
                if (state := (yield from self._read(name, judged[0].header["size"]))) is not None:
                    self.newest = max(self.newest, state.index)
                    return state, judged[1]
        return None

    def _read(self, name: str, size: int) -> Task[State | None]:
        try:
            found = yield from get(self.envelope, name, "snapshot", size)
            if found is None:
                return None
            return (yield Work(lambda: read_snapshot(found, self.fragment, self.anchor, self.outer)))
        except Invalid as reason:
            self.reject(name, reason)
            return None

    def store(self, state: State, record: str) -> Task[bool]:
        """Put a snapshot and check that it is there."""
        sealed = yield Work(lambda: seal_snapshot(self.envelope, self.fragment, state, record))
        yield from put(sealed)
        if (yield from self.peek(sealed.name)) is None:
            return False
        self.newest = max(self.newest, state.index)
        return True

    def collect(self, now: float, busy: bool) -> Task[None]:
        """Delete deltas and snapshots that only matter before the second newest valid snapshot, once this has been so
        for a while and nobody is joining. Never records."""
        valid: list[int] = []
        for name in (yield from self.list()):
            index = index_of(name) or 0
            if index <= self.newest and index not in valid and (yield from self.peek(name)) is not None:
                valid.append(index)
            if len(valid) == 2:
                self._floors.append((now, valid[1]))
                break
        ripe = [floor for since, floor in self._floors if now - since >= KEEP]
        if busy or not ripe:
            return
        floor = max(ripe)
        self._floors = [(since, each) for since, each in self._floors if each > floor]
        found = yield All([List(top, after=round_prefix(self._collected, top)) for top in (ROUNDS, PIECES)])
        older = yield List(snapshot_folder(self.fragment))
        names = [*found[0], *found[1], *older]
        yield All([Delete(name) for name in superfluous(names, self.fragment, floor)])
        self._collected = floor


def superfluous(names: Iterable[str], fragment: int, floor: int) -> list[str]:
    """Deltas and shares up to the floor and snapshots before it, with their parts. Closing records are never deleted:
    otherwise a member that sleeps before its own put could close the round a second time, with another mean. A share
    that is put late is the same one again."""
    return [name for name in names if _superfluous(_PART.sub("", name), fragment, floor)]


def _superfluous(name: str, fragment: int, floor: int) -> bool:
    if (index := index_of(name)) is not None:
        return index < floor
    place = place_of(name)
    return place is not None and not is_record(name) and place[0] == fragment and place[1] <= floor
