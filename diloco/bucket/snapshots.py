"""Snapshots: a fragment's anchor and outer state after a round, and what may be deleted once there are newer ones."""

import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from diloco.bucket.rounds import FINGERPRINTS, member_of
from diloco.bucket.store.envelope import DIGEST, HEADER, PREFIX, Envelope, Invalid, Opened, Sealed, get, put
from diloco.bucket.store.operations import All, Delete, List, Read, Task, Work
from diloco.reduce import State

EVERY = 100
"""Rounds of a fragment between two snapshots: 8 bytes a value against 100 deltas of half a byte from each member."""

Reject = Callable[[str, Invalid], None]
_NAME = re.compile(r"anchors/\d{4}/(\d{8})-[0-9a-f]{64}")


def snapshot_folder(fragment: int) -> str:
    return f"anchors/{fragment:04d}/"


def seal_snapshot(envelope: Envelope, fragment: int, state: State, record: str) -> Sealed:
    """`record`: digest of the record that led to the state. The writer is not named, so equal states have equal names.
    Outer state that is all zero, as at the start, is left out."""
    zero = not torch.count_nonzero(state.outer)
    outer = b"" if zero else _bytes(state.outer)
    fields = {"fragment": fragment, "index": state.index, "record": record, "fingerprint": state.fingerprint(),
              "anchor": len(state.anchor), "outer": len(state.outer), "zero": zero}  # fmt: skip
    name = f"{snapshot_folder(fragment)}{state.index:08d}-{DIGEST}"
    return envelope.seal(name, "snapshot", fields, _bytes(state.anchor) + outer)


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

    def __init__(self, envelope: Envelope, fragment: int, state: State, initial: str, reject: Reject) -> None:
        """`state`: any state of the fragment, for its shape. `initial`: name of the run's first snapshot."""
        self.envelope, self.fragment, self._initial, self.reject = envelope, fragment, initial, reject
        self.anchor, self.outer = len(state.anchor), len(state.outer)
        self.newest = -1  # index, as far as known
        self._due_since: float | None = None
        self._waiting: tuple[State, str] | None = None  # a copy to be put, and its record

    def consider(self, state: State, record: str, wanted: int, first: bool, now: float, grace: float) -> None:
        """Copy a state that was just reached, if a snapshot is due: every EVERY rounds, or when a member waits for one
        of at least the index `wanted`. `first`: this member closed the round, so it puts the snapshot at once. The
        others do it after the grace, if there is still none."""
        if state.index - self.newest < EVERY and not self.newest < wanted <= state.index:
            self._due_since = None
            return
        if self._due_since is None:
            self._due_since = now
        if first or now - self._due_since > grace:
            self._waiting = State(state.index, state.anchor.clone(), state.outer.clone()), record

    def tick(self) -> Task[None]:
        if self._waiting is not None:
            (state, record), self._waiting = self._waiting, None
            yield from self.store(state, record)
        elif self._due_since is not None:
            yield from self.refresh()

    def list(self) -> Task[list[str]]:
        """Names, newest first. Several members may have put an initial one; the one that run.json names counts."""
        names = yield List(snapshot_folder(self.fragment))
        return sorted((name for name in names if index_of(name) or name == self._initial), reverse=True)

    def refresh(self) -> Task[None]:
        for name in (yield from self.list()):
            if (yield from self.peek(name)) is not None:
                self.newest = max(self.newest, index_of(name) or 0)
                return

    def peek(self, name: str) -> Task[Opened | None]:
        """The header, if this is a valid snapshot of the run."""
        data = yield Read(name, 0, first=PREFIX.size + HEADER)
        if data is None:
            return None
        try:
            found = self.envelope.open(name, "snapshot", data, None, head=True)
            check_header(found, self.fragment, self.anchor, self.outer)
            return found
        except Invalid as reason:
            self.reject(name, reason)
            return None

    def load(self, least: int = 0) -> Task[tuple[State, str] | None]:
        """The newest valid snapshot of at least this index, and the digest of its record."""
        for name in (yield from self.list()):
            if (index_of(name) or 0) < least:
                break
            head = yield from self.peek(name)
            if head is None:
                continue
            try:
                found = yield from get(self.envelope, name, "snapshot", head.header["size"])
                if found is None:
                    continue
                state = yield Work(lambda found=found: read_snapshot(found, self.fragment, self.anchor, self.outer))
            except Invalid as reason:
                self.reject(name, reason)
                continue
            self.newest = max(self.newest, state.index)
            return state, found.header["record"]
        return None

    def store(self, state: State, record: str) -> Task[None]:
        """Put a snapshot, check that it is there, then delete what it makes superfluous."""
        sealed = yield Work(lambda: seal_snapshot(self.envelope, self.fragment, state, record))
        yield from put(sealed)
        if (yield from self.peek(sealed.name)) is not None:
            self.newest = max(self.newest, state.index)
            yield from self.collect()

    def collect(self) -> Task[None]:
        """Delete deltas and snapshots that only matter before the second newest valid snapshot. Never records."""
        valid: list[int] = []
        for name in (yield from self.list()):
            index = index_of(name) or 0
            if index not in valid and (yield from self.peek(name)) is not None:
                valid.append(index)
            if len(valid) == 2:
                break
        else:
            return
        floor = valid[1]
        found = yield List(f"rounds/{self.fragment:04d}/")
        older = yield List(snapshot_folder(self.fragment))
        yield All([Delete(name) for name in superfluous([*found, *older], floor)])


def superfluous(names: Iterable[str], floor: int) -> list[str]:
    """Deltas up to the floor and snapshots before it, with their parts. Closing records are never deleted: otherwise a
    member that sleeps before its own put could close the round a second time, with another mean."""
    return [name for name in names if _superfluous(re.sub(r"\.p\d+$", "", name), floor)]


def _superfluous(name: str, floor: int) -> bool:
    if (index := index_of(name)) is not None:
        return index < floor
    return member_of(name) is not None and int(name.split("/")[2]) <= floor


def _bytes(values: Tensor) -> bytes:
    return values.numpy().tobytes()
