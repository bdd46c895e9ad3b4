"""A run whose members meet in a bucket: its members, how far it is, and the last rounds of every fragment."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from diloco.bucket.deltas import layout_of
from diloco.bucket.members import Member, read_members
from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import PIECES, Record, folder
from diloco.bucket.run import NAME, SHARD, below, find_run
from diloco.bucket.store.backend import open_store
from diloco.bucket.store.cipher import open_encrypted
from diloco.bucket.store.envelope import Envelope
from diloco.bucket.store.operations import List, Size
from diloco.bucket.store.store import Store
from diloco.bucket.timing import MemberOptions
from diloco.codec import Float32
from diloco.errors import ConfigError
from diloco.report import units
from diloco.report.fitted import Column, Fitted

ROUNDS = 5
"""Rounds that are shown, of all fragments together; of each fragment at least the last one."""
QUIET = 10.0
"""Seconds without a sign of life after which a member is called quiet."""
LOST = MemberOptions().ttl
"""Seconds after which the other members take it for dead, if they have the usual heartbeat."""
COLUMNS = {
    "member": (0, ""),
    "state": (0, ""),
    "round": (0, "of the fragment that is behind, and of the one that is ahead"),
    "step": (2, "the member's own count, since it joined"),
    "loss": (1, "in training, of its last step"),
    "anchors": (3, "loss of the agreed weights on held-out text"),
    "tokens/s": (4, ""),
    "step time": (5, ""),
}
"""What is shown of a member: in which order columns are left out in a narrow terminal (see `Column`), and its help."""


@dataclass(frozen=True)
class MemberRow:
    kind: str
    """training, joining, unknown (no sign of life since the first look), quiet, lost or left."""
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Sight:
    """What one look has seen, as text. Nothing in it can be trusted: whoever writes to the store chose it."""

    title: str
    share: float
    """Share of the rounds that are done; 0 if the run does not say how many it has."""
    progress: str
    members: tuple[MemberRow, ...]
    rounds: tuple[tuple[str, str, str, str], ...]


@dataclass
class _Seen:
    """The counter of a member, when it was first seen, and whether it has changed since the first look."""

    counter: int
    since: float
    alive: bool


class Watch:
    """What can be seen of a run. Signs of life are counted from the first look on, by the local clock."""

    def __init__(
        self, url: str, key: bytes | None, encrypt: bytes | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        run = find_run(url, key, encrypt=encrypt)
        if run is None and Store(open_store(url, create=False)).perform(Size(f"{SHARD.format(0)}/{NAME}")) is not None:
            url = below(url, 0)  # where members have several ranks: the ranks that hold the first shard
            run = find_run(url, key, encrypt=encrypt)
        if run is None:
            raise ConfigError(
                f"there is no run in {url}: check the address, or start one with diloco train --bucket {url}"
            )
        self.url, self.run = url, run
        self._envelope, self._store = Envelope(run.id, key), Store(open_encrypted(url, encrypt, create=False))
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._rejected = 0
        self._clock = clock
        self._pace: list[tuple[float, int, int]] = []  # time, rounds of all fragments, rounds of each: first and last

    def settle(self, pause: Callable[[float], None] = time.sleep) -> Sight:
        """Look until every member has left, has given a sign of life, or is lost."""
        sight = self.see()
        while any(row.kind in ("unknown", "quiet") for row in sight.members):
            pause(1.0)
            sight = self.see()
        return sight

    def look(self) -> RenderableType:
        return self.table(self.see())

    def table(self, seen: Sight) -> RenderableType:
        rows = [member.cells for member in seen.members]
        columns = [
            Column(name, [row[k] for row in rows], left=k < 2, spare=spare)
            for k, (name, (spare, _)) in enumerate(COLUMNS.items())
        ]
        names = ("fragment", "round", "members and their shares", "bytes")
        rounds = [Column(name, [row[k] for row in seen.rounds], left=k == 2) for k, name in enumerate(names)]
        # As text, not as markup.
        return Group(Text(seen.title), Text(seen.progress), Fitted(columns), Text(""), Fitted(rounds))

    def see(self) -> Sight:
        members = self._store.run(read_members(self._envelope, self._reject), nullcontext())
        rounds = [(f, *round) for f in range(len(self.run.snapshots)) for round in self._last(f, members)]
        rejected = f"; {self._rejected} objects cannot be used" if self._rejected else ""
        title = f"run {self.run.id} in {self.url}, {len(self.run.snapshots)} fragments{rejected}"
        share, progress = self._progress([max((r[1] for r in rounds if r[0] == f), default=0)
                                          for f in range(len(self.run.snapshots))])  # fmt: skip
        listed = tuple(
            (str(f), str(index), ", ".join(f"{name} {share:.0%}" for name, share in shares.items()), units.size(nbytes))
            for f, index, shares, nbytes in rounds
        )
        return Sight(_printable(title), share, progress, tuple(map(self._row, members)), listed)

    def _row(self, member: Member) -> MemberRow:
        values = member.published
        kind, text = self._state(member)
        return MemberRow(kind, (
            member.name, text, f"{min(member.held, default=0)}–{max(member.held, default=0)}",
            _shown(values, "step", "{:.0f}"), _shown(values, "loss", "{:.3f}"), _shown(values, "anchor_loss", "{:.3f}"),
            units.amount(values.get("tokens_per_second", 0.0)), units.duration(member.step_seconds),
        ))  # fmt: skip

    def _progress(self, closed: Sequence[int]) -> tuple[float, str]:
        """How far the run is, by the last closed round of each fragment, and how long it will take, by the pace since
        the first look."""
        now, reached = self._clock(), min(closed, default=0)
        if not self._pace or sum(closed) != self._pace[-1][1]:
            self._pace = [*self._pace[:1], (now, sum(closed), reached)]
        (began, _, first), (changed, _, _) = self._pace[0], self._pace[-1]
        total = _rounds_planned(self.run.note)
        text = f"round {reached}" + (f" of {total}" if total else "")
        if len(self._pace) > 1 or now - changed > QUIET:
            text += f", the last one {units.ago(now - changed)}"
        if total and reached > first:
            text += f", {units.duration((total - reached) * (changed - began) / (reached - first))} left"
        return min(reached / total, 1.0) if total else 0.0, text

    def _last(self, fragment: int, members: Sequence[Member]) -> Iterator[tuple[int, dict[str, float], int]]:
        """(index, share of each member, bytes of all its objects) of the last closed rounds, newest first. A member may
        claim to hold a round that was never closed: then the next lower claim is tried."""
        held = sorted({member.held[fragment] for member in members if fragment < len(member.held)}, reverse=True)
        few = max(1, ROUNDS // len(self.run.snapshots))
        rounds = RoundStore(fragment, layout_of(Float32(), 0), self._envelope, self._reject)
        newest = next((i for i in held if self._record(rounds, i) is not None), 0)
        for index in range(newest, max(newest - few, 0), -1):
            record = self._record(rounds, index)
            if record is not None:
                yield index, record.members, self._bytes(fragment, index)

    def _bytes(self, fragment: int, index: int) -> int:
        folders = folder(fragment, index), folder(fragment, index, PIECES)
        return sum(sum(self._store.perform(List(each)).values()) for each in folders)

    def _record(self, rounds: RoundStore, index: int) -> Record | None:
        return self._store.run(rounds.record(index, None), nullcontext())[0]

    def _state(self, member: Member) -> tuple[str, str]:
        """In a word, and as text."""
        key = (member.name, member.incarnation)
        if key not in self._seen or self._seen[key].counter != member.counter:
            self._seen[key] = _Seen(member.counter, self._clock(), alive=key in self._seen)
        quiet = self._clock() - self._seen[key].since
        if member.left:
            return "left", "left"
        if quiet > QUIET:
            kind = "lost" if quiet > LOST else "quiet"
            return kind, f"{kind} for {units.duration(round(quiet))}"
        kind = "unknown" if not self._seen[key].alive else "joining" if member.joining else "training"
        return kind, kind

    def _reject(self, name: str, reason: Exception) -> None:
        self._rejected += 1


def _rounds_planned(note: Mapping[str, Any]) -> int:
    """Rounds of each fragment in all of the run; 0 if its settings do not say."""
    steps, sync_every = note.get("steps"), note.get("sync_every")
    if not isinstance(steps, int) or not isinstance(sync_every, int) or steps < 1 or sync_every < 1:
        return 0
    return math.ceil(steps / sync_every)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _shown(published: dict[str, float], key: str, form: str) -> str:
    return form.format(published[key]) if key in published else "–"
