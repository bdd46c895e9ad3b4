"""`diloco watch URL`: a run that meets in a bucket, live, from anywhere with read access."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from diloco.errors import ConfigError
from diloco.flags import REQUIRED, flag
from diloco.report import units


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Show members, rounds and losses of the run in a bucket."""

    url: str = flag(REQUIRED, "The folder or s3://, gs://, az://… that the members were given.", positional=True)
    key_file: Path | None = flag(None, "The key of a signed run.", why="the run is not signed")
    every: float = flag(2.0, "Seconds between two looks.")
    once: bool = flag(False, "Look once and end.")


CONFIG = WatchConfig
EXAMPLES = ("diloco watch s3://bucket/run", "diloco watch shared/run --once")


@dataclass
class _Seen:
    """What was seen of a member: the counter, and when it last changed."""

    counter: int = -1
    since: float = field(default_factory=time.monotonic)


def main(config: WatchConfig) -> int:
    watch = Watch(config.url, config.key_file.read_bytes().strip() if config.key_file else None)
    console = Console()
    if config.once or not console.is_terminal:
        console.print(watch.look())
        return 0
    with Live(watch.look(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(config.every)
            live.update(watch.look(), refresh=True)


class Watch:
    LAST = 5

    def __init__(self, url: str, key: bytes | None) -> None:
        from diloco.bucket.run import below, find_run
        from diloco.bucket.store.backend import open_store
        from diloco.bucket.store.envelope import Envelope
        from diloco.bucket.store.store import Store

        run = find_run(url, key)
        if run is None and (run := find_run(below(url, 0), key)) is not None:
            url = below(url, 0)  # of replicas with several ranks, those with the first shard
        if run is None:
            raise ConfigError(f"{url} holds no run: check the address")
        self.url, self.run = url, run
        self._envelope, self._store = Envelope(run.id, key), Store(open_store(url, create=False))
        self._seen: dict[str, _Seen] = {}
        self._rejected = 0

    def look(self) -> RenderableType:
        from diloco.bucket.members import read_members

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
        head = f"run {self.run.id} in {self.url}, {len(self.run.snapshots)} fragments"
        rejected = f"; {self._rejected} objects are not usable" if self._rejected else ""
        return Group(head + rejected, table, self._rounds(members))

    def _rounds(self, members: list[Any]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("fragment", "round", "members and their shares", "bytes"):
            table.add_column(name, justify="left" if name.startswith("members") else "right")
        for fragment in range(len(self.run.snapshots)):
            held = [member.held[fragment] for member in members if fragment < len(member.held)]
            for index, shares, nbytes in self._last(fragment, max(held, default=0)):
                listed = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
                table.add_row(str(fragment), str(index), listed, units.size(nbytes))
        return table

    def _last(self, fragment: int, newest: int) -> Iterator[tuple[int, dict[str, float], int]]:
        """The last closed rounds up to this one, newest first."""
        from diloco.bucket.rounds import folder, read_record, record_name
        from diloco.bucket.store.envelope import Invalid
        from diloco.bucket.store.operations import List, Read

        few = max(1, self.LAST // len(self.run.snapshots))
        for index in range(newest, max(newest - few, 0), -1):
            sizes = self._store.perform(List(folder(fragment, index)))
            for slot in range(len(sizes)):
                name = record_name(fragment, index, slot)
                data = self._store.perform(Read(name, 1 << 20))
                try:
                    if data is not None:
                        found = self._envelope.open(name, "record", data, 0)
                        record = read_record(found, fragment, index, found.text("previous"))
                        yield index, record.members, sum(sizes.values())
                        break
                except Invalid as reason:
                    self._reject(name, reason)

    def _state(self, member: Any) -> str:
        seen = self._seen.setdefault(f"{member.name}/{member.incarnation}", _Seen())
        if member.counter != seen.counter:
            self._seen[f"{member.name}/{member.incarnation}"] = _Seen(member.counter)
            seen = self._seen[f"{member.name}/{member.incarnation}"]
        quiet = time.monotonic() - seen.since
        if member.left:
            return "left"
        return "joining" if member.joining else f"quiet for {quiet:.0f} s" if quiet > 10 else "trains"

    def _reject(self, name: str, reason: Exception) -> None:
        self._rejected += 1


def _shown(published: dict[str, float], key: str, form: str) -> str:
    return form.format(published[key]) if key in published else "–"
