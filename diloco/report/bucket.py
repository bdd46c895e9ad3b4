"""A run whose members meet in a bucket, as tables: its members, and the last rounds of every fragment."""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diloco.bucket.members import Member, read_members
from diloco.bucket.roster import load_lists
from diloco.bucket.round_store import RoundStore
from diloco.bucket.rounds import Record, folder
from diloco.bucket.run import NAME, SHARD, below, find_run
from diloco.bucket.store.backend import open_store
from diloco.bucket.store.cipher import open_encrypted
from diloco.bucket.store.keys import Key
from diloco.bucket.store.operations import List, Size
from diloco.bucket.store.store import Store
from diloco.codec import Float32
from diloco.errors import ConfigError
from diloco.report import units

ROUNDS = 5
"""Rounds that are shown, of all fragments together; of each fragment at least the last one."""
QUIET = 10.0
"""Seconds without a sign of life after which a member is called quiet."""


@dataclass
class _Seen:
    """The counter of a member, and when it was first seen."""

    counter: int
    since: float = field(default_factory=time.monotonic)


class Watch:
    """What can be seen of a run. Signs of life are counted from the first look on, by the local clock."""

    def __init__(self, url: str, key: Key, encrypt: bytes | None = None) -> None:
        run = find_run(url, key, encrypt=encrypt)
        if run is None and Store(open_store(url, create=False)).perform(Size(f"{SHARD.format(0)}/{NAME}")) is not None:
            url = below(url, 0)  # where members have several ranks: the ranks that hold the first shard
            run = find_run(url, key, encrypt=encrypt)
        if run is None:
            raise ConfigError(
                f"there is no run in {url}: check the address, or start one with diloco train --bucket {url}"
            )
        self.url, self.run = url, run
        self._envelope, self._store = run.envelope(key), Store(open_encrypted(url, encrypt, create=False))
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._rejected = 0

    def look(self) -> RenderableType:
        self._store.run(load_lists(self._envelope), nullcontext())
        members = self._store.run(read_members(self._envelope, self._reject), nullcontext())
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("member", "state", "round", "step", "loss", "anchors", "tokens/s", "step time"):
            table.add_column(name, justify="left" if name in ("member", "state") else "right")
        for member in members:
            values = member.published
            table.add_row(
                member.name, self._state(member), f"{min(member.held, default=0)}–{max(member.held, default=0)}",
                _shown(values, "step", "{:.0f}"), _shown(values, "loss", "{:.3f}"),
                _shown(values, "anchor_loss", "{:.3f}"),
                units.amount(values.get("tokens_per_second", 0.0)), units.duration(member.step_seconds),
            )  # fmt: skip
        rejected = f"; {self._rejected} objects cannot be used" if self._rejected else ""
        head = f"run {self.run.id} in {self.url}, {len(self.run.snapshots)} fragments{rejected}"
        # As text, not as markup, and without control characters: whoever can write to the store chose what it says.
        return Group(Text("".join(c if c.isprintable() else "?" for c in head)), table, self._rounds(members))

    def _rounds(self, members: Sequence[Member]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("fragment", "round", "members and their shares", "bytes"):
            table.add_column(name, justify="left" if name.startswith("members") else "right")
        for fragment in range(len(self.run.snapshots)):
            held = [member.held[fragment] for member in members if fragment < len(member.held)]
            for index, shares, nbytes in self._last(fragment, sorted(set(held), reverse=True)):
                listed = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
                table.add_row(str(fragment), str(index), listed, units.size(nbytes))
        return table

    def _last(self, fragment: int, held: Sequence[int]) -> Iterator[tuple[int, dict[str, float], int]]:
        """(index, share of each member, bytes of all its objects) of the last closed rounds, newest first. A member may
        claim to hold a round that was never closed: then the next lower claim is tried."""
        few, rounds = (
            max(1, ROUNDS // len(self.run.snapshots)),
            RoundStore(fragment, 0, Float32(), self._envelope, self._reject),
        )
        newest = next((i for i in held if self._record(rounds, i) is not None), 0)
        for index in range(newest, max(newest - few, 0), -1):
            record = self._record(rounds, index)
            if record is not None:
                yield index, record.members, sum(self._store.perform(List(folder(fragment, index))).values())

    def _record(self, rounds: RoundStore, index: int) -> Record | None:
        return self._store.run(rounds.record(index, None), nullcontext())[0]

    def _state(self, member: Member) -> str:
        key = (member.name, member.incarnation)
        if key not in self._seen or self._seen[key].counter != member.counter:
            self._seen[key] = _Seen(member.counter)
        quiet = time.monotonic() - self._seen[key].since
        if member.left:
            return "left"
        return "joining" if member.joining else f"quiet for {quiet:.0f} s" if quiet > QUIET else "trains"

    def _reject(self, name: str, reason: Exception) -> None:
        self._rejected += 1


def _shown(published: dict[str, float], key: str, form: str) -> str:
    return form.format(published[key]) if key in published else "–"
