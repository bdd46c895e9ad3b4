"""A run in a bucket: its members, its progress, and the last rounds of every fragment."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from diloco.bucket.leases import audit, read_ranges
from diloco.bucket.members import Member, MemberOptions, Phase, read_members
from diloco.bucket.round_store import AT_ONCE, RoundStore
from diloco.bucket.rounds import PIECES, folder
from diloco.bucket.run import NAME, SHARD, below, find_run
from diloco.bucket.store import List, Size, in_batches
from diloco.bucket.store.backend import open_store
from diloco.bucket.store.envelope import Envelope, open_encrypted
from diloco.bucket.store.store import Store
from diloco.errors import ConfigError
from diloco.report.terminal import Column, Fitted
from diloco.runs import units
from diloco.runs.reader import rounds_planned

ROUNDS = 5
"""Rounds shown in total; at least the last one of each fragment."""
QUIET = 10.0
"""Seconds without a heartbeat after which a member is called quiet."""
LOST = MemberOptions().ttl
"""Seconds after which the other members consider it dead, with the default heartbeat."""
COLUMNS = {"member": 0, "state": 0, "round": 0, "step": 3, "loss": 2, "anchors": 4, "tokens/s": 5, "step time": 6,
           "batch": 7, "counted": 1}  # fmt: skip
"""The columns of a member, and the order in which a narrow terminal drops them, see `Column.spare`."""
PHASES = ("state", "members: fragments", "waits for")


@dataclass(frozen=True)
class MemberRow:
    kind: str
    """training, joining, unknown (no heartbeat since the first look), quiet, lost or left."""
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Sight:
    """One look at the run, as text. Do not trust it: anyone who can write to the store may have chosen it."""

    title: str
    progress: str
    members: tuple[MemberRow, ...]
    rounds: tuple[tuple[str, str, str, str], ...]
    phases: tuple[tuple[str, str, str], ...]
    """What the fragments of the living members are doing: the phase, the fragments of each member, and what they wait
    for."""


@dataclass
class _Heartbeat:
    """A member's counter, when it was first seen, and whether it has changed since the first look."""

    counter: int
    since: float
    alive: bool


class Watch:
    """Watches a run from outside. Heartbeats count from the first look on, by the local clock."""

    def __init__(
        self, url: str, key: bytes | None, encrypt: bytes | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        run = find_run(url, key, encrypt=encrypt)
        if run is None and Store(open_store(url, create=False)).perform(Size(f"{SHARD.format(0)}/{NAME}")) is not None:
            url = below(url, 0)  # members with several ranks: watch the ranks with the first shard
            run = find_run(url, key, encrypt=encrypt)
        if run is None:
            raise ConfigError(
                f"there is no run in {url}: check the address, or start a run with diloco train --bucket {url}"
            )
        self.url, self.run = url, run
        self._envelope, self._store = Envelope(run.id, key), Store(open_encrypted(url, encrypt, create=False))
        self._heartbeats: dict[tuple[str, int], _Heartbeat] = {}
        self._rejected = 0
        self._tokens: Counter[str] = Counter()  # or steps, that the records of the first fragment count
        self._counted = 0  # the last of these records
        self._rounds: dict[tuple[int, int], tuple[dict[str, float], int]] = {}  # by fragment and index, see `_closed`
        self._newest: dict[int, int] = {}  # round of each fragment
        self._clock = clock
        # (time, rounds of all fragments, fewest rounds of a fragment): first and last
        self._pace: list[tuple[float, int, int]] = []

    def settle(self, pause: Callable[[float], None] = time.sleep) -> Sight:
        """Look until every member has left, has sent a heartbeat, or is lost."""
        sight = self.see()
        while any(row.kind in ("unknown", "quiet") for row in sight.members):
            pause(1.0)
            sight = self.see()
        return sight

    def audit(self) -> Iterator[str]:
        """Which ranges of the corpus were counted, in lines of text."""
        ranges = read_ranges(self.run.note.get("ranges"))
        if ranges is None:
            yield "the members of this run lease no ranges: each draws windows in an order of its own"
            return
        for epoch in self._store.run(audit(self._envelope, ranges, self._reject), nullcontext()):
            yield (f"epoch {epoch.epoch}: {epoch.ranges} ranges of {ranges.size} windows, {epoch.once} counted once, "
                   f"{len(epoch.again)} taken again, {len(epoch.open)} open")  # fmt: skip
            for number, holders in epoch.again.items():
                yield f"  range {number} was taken by {', then by '.join(holders)}: it may be trained twice"
            for number, holder in epoch.open.items():
                yield f"  range {number} is open, held by {holder.member if holder else 'nobody who can be read'}"
        for member in self._store.run(read_members(self._envelope, self._reject), nullcontext()):
            if windows := member.published.get("unleased"):
                yield f"{member.name} took {windows:.0f} windows without a lease: the store did not answer"

    def see(self) -> Sight:
        members = self._store.run(read_members(self._envelope, self._reject), nullcontext())
        rounds = [(f, *round) for f in range(len(self.run.snapshots)) for round in self._last(f, members)]
        rejected = f"; {self._rejected} unusable objects" if self._rejected else ""
        title = f"run {self.run.id} in {self.url}, {len(self.run.snapshots)} fragments{rejected}"
        closed = [max((r[1] for r in rounds if r[0] == f), default=0) for f in range(len(self.run.snapshots))]
        listed = tuple(
            (str(f), str(index), ", ".join(f"{name} {share:.0%}" for name, share in shares.items()), units.size(nbytes))
            for f, index, shares, nbytes in rounds
        )
        self._count(closed[0] if closed else 0)
        rows = tuple(map(self._row, members))
        living = [member for member, row in zip(members, rows, strict=True) if row.kind in ("training", "joining")]
        return Sight(_printable(title), self._progress(closed), rows, listed, tuple(_phases(living)))

    def _row(self, member: Member) -> MemberRow:
        values = member.published
        kind, text = self._state(member)
        return MemberRow(kind, (
            member.name, text, f"{min(member.held, default=0)}–{max(member.held, default=0)}",
            _format(values, "step", "{:.0f}"), _format(values, "loss", "{:.3f}"),
            _format(values, "anchor_loss", "{:.3f}"),
            units.amount(values.get("tokens_per_second", 0.0)), units.duration(member.step_seconds),
            _format(values, "batch", "{:.0f}"), self._contribution(member.name),
        ))  # fmt: skip

    def _count(self, newest: int) -> None:
        """Add up the work that the records name. Every record stays in the store, and is read once."""
        rounds = RoundStore.reader(0, self._envelope, self._reject)
        tasks = [rounds.record(index, None) for index in range(self._counted + 1, newest + 1)]
        for attempts in self._store.run(in_batches(tasks, AT_ONCE), nullcontext()):
            for entry in attempts.record.entries if attempts.record else ():
                self._tokens[entry.member] += round(entry.tokens)
        self._counted = max(self._counted, newest)

    def _contribution(self, name: str) -> str:
        tokens = self._tokens[name]
        return f"{units.amount(tokens)}, {tokens / self._tokens.total():.0%}" if tokens else "–"

    def _progress(self, closed: Sequence[int]) -> str:
        """The run's progress, by the last closed round of each fragment, and the time left, by the pace since the
        first look."""
        now, reached = self._clock(), min(closed, default=0)
        if not self._pace or sum(closed) != self._pace[-1][1]:
            self._pace = [*self._pace[:1], (now, sum(closed), reached)]
        (began, _, first), (changed, _, _) = self._pace[0], self._pace[-1]
        total = rounds_planned(self.run.note)
        text = f"round {reached}" + (f" of {total}" if total else "")
        if len(self._pace) > 1 or now - changed > QUIET:
            text += f", the last one {units.ago(now - changed)}"
        if total and reached > first:
            text += f", {units.duration((total - reached) * (changed - began) / (reached - first))} left"
        return text

    def _last(self, fragment: int, members: Sequence[Member]) -> Iterator[tuple[int, dict[str, float], int]]:
        """(index, share of each member, bytes of all objects) of the last closed rounds, newest first. A member may
        claim a round that was never closed: then try the next lower claim."""
        claims = sorted({member.held[fragment] for member in members if fragment < len(member.held)}, reverse=True)
        few = max(1, ROUNDS // len(self.run.snapshots))
        rounds = RoundStore.reader(fragment, self._envelope, self._reject)
        newest = next((i for i in claims if self._closed(rounds, i) is not None), 0)
        shown = range(newest, max(newest - few, 0), -1)
        for index in shown:
            if (closed := self._closed(rounds, index)) is not None:
                yield index, *closed
        if self._newest.get(fragment) != newest:  # its shares may still be put: read it once more
            shown = shown[1:]
        self._newest[fragment] = newest
        self._rounds = {place: r for place, r in self._rounds.items() if place[0] != fragment or place[1] in shown}

    def _closed(self, rounds: RoundStore, index: int) -> tuple[dict[str, float], int] | None:
        """The share of each member in a round, and the bytes of its objects, read once; None if it is open."""
        place = rounds.fragment, index
        if place not in self._rounds:
            record = self._store.run(rounds.record(index, None), nullcontext())[0]
            if record is None:
                return None
            prefixes = folder(*place), folder(*place, PIECES)
            nbytes = sum(sum(self._store.perform(List(prefix)).values()) for prefix in prefixes)
            self._rounds[place] = record.members, nbytes
        return self._rounds[place]

    def _state(self, member: Member) -> tuple[str, str]:
        """The kind of a member's row, and its text."""
        key = (member.name, member.incarnation)
        if key not in self._heartbeats or self._heartbeats[key].counter != member.counter:
            self._heartbeats[key] = _Heartbeat(member.counter, self._clock(), alive=key in self._heartbeats)
        quiet = self._clock() - self._heartbeats[key].since
        if member.left:
            return "left", "left"
        if quiet > QUIET:
            kind = "lost" if quiet > LOST else "quiet"
            return kind, f"{kind} for {units.duration(round(quiet))}"
        kind = "unknown" if not self._heartbeats[key].alive else "joining" if member.joining else "training"
        return kind, kind

    def _reject(self, name: str, reason: Exception) -> None:
        self._rejected += 1


def table(sight: Sight) -> RenderableType:
    """For the terminal."""
    rows = [member.cells for member in sight.members]
    columns = [
        Column(name, [row[k] for row in rows], left=k < 2, spare=spare)
        for k, (name, spare) in enumerate(COLUMNS.items())
    ]
    names = ("fragment", "round", "members and their shares", "bytes")
    rounds = [Column(name, [row[k] for row in sight.rounds], left=k == 2) for k, name in enumerate(names)]
    phases = [Column(name, [row[k] for row in sight.phases], left=True) for k, name in enumerate(PHASES)]
    # Text, so that rich does not interpret markup.
    tables = Fitted(columns), Text(""), Fitted(rounds), Text(""), Fitted(phases)
    return Group(Text(sight.title), Text(sight.progress), *tables)


def _phases(members: Sequence[Member]) -> Iterator[tuple[str, str, str]]:
    for phase in Phase:
        fragments = {m.name: _ranges([f for f in range(len(m.phases)) if m.phase(f) is phase]) for m in members}
        where = "; ".join(f"{name}: {numbers}" for name, numbers in fragments.items() if numbers)
        if where:
            yield phase.name.lower(), where, phase.value


def _ranges(numbers: Sequence[int]) -> str:
    """0, 2–4, 7"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _format(published: dict[str, float], key: str, form: str) -> str:
    return form.format(published[key]) if key in published else "–"
