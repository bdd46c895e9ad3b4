"""A running run, from the files that its replicas write: a panel in a terminal, plain lines elsewhere."""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco.errors import ConfigError
from diloco.report.terminal import Column, Fitted
from diloco.runs import units
from diloco.runs.reader import Follower, RecordedRun, Replica, read_phase, rounds_planned
from diloco.runs.schema import Figures

_BLOCKS = "▁▂▃▄▅▆▇█"
COLUMNS = {
    "replica": 0, "step": 0, "loss": 0, "": 3, "tokens/s": 1, "in flight": 5, "sent": 2, "hidden": 6, "exposed": 4,
}  # fmt: skip
"""The columns of a replica's row, and the order in which a narrow terminal drops them, see `Column.spare`."""


class Live:
    """Show a run in the terminal that started it. Call `refresh` as often as is convenient; it limits its own rate.

    Args:
        folder: the run directory; it may still be empty.
        steps: steps of the complete run; 0 takes them from config.toml once it is written.
        interval: seconds between two plain lines, when `stream` is not a terminal.
        show_derived: print the derived settings; False if the caller prints them.
    """

    def __init__(
        self,
        folder: Path,
        steps: int = 0,
        stream: TextIO | None = None,
        *,
        interval: float = 5.0,
        show_derived: bool = True,
    ) -> None:
        self.folder, self._steps, self._show_derived = folder, steps, show_derived
        self._follower = Follower(folder)
        self.console = Console(file=stream or sys.stderr)
        in_panel = self.console.is_terminal and not self.console.is_dumb_terminal
        self._screen = Screen(console=self.console, auto_refresh=False, transient=False) if in_panel else None
        self._interval = 0.25 if in_panel else interval
        self._start, self._last_refresh = time.monotonic(), -math.inf
        self._printed_step, self._derived = 0, ""

    def __enter__(self) -> Self:
        if self._screen:
            self._screen.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh(force=True)
        if self._screen:
            self._screen.stop()

    def refresh(self, force: bool = False) -> None:
        """Read what was written since the last call, and show it if it is time to."""
        now = time.monotonic()
        if not force and now - self._last_refresh < self._interval:
            return
        self._last_refresh = now
        self._print_derived()
        try:
            run = self._follower.read()
        except ConfigError:  # nothing is written yet
            run = RecordedRun(self.folder, {}, None, Figures(), ())
        if self._screen:
            self._screen.update(self._panel(run, now - self._start), refresh=True)
        elif run.step not in (0, self._printed_step):
            self._printed_step = run.step
            line = _line(run, progress_of(run, self._steps), now - self._start)
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _print_derived(self) -> None:
        """Print the derived settings; the autopilot adds its choices later."""
        path = self.folder / "derived.txt"
        if self._show_derived and path.exists() and (text := path.read_text()) != self._derived:
            new = text.removeprefix(self._derived)
            self._derived = text
            self.console.print(new.rstrip(), markup=False, highlight=False, soft_wrap=self._screen is None)

    def _panel(self, run: RecordedRun, elapsed: float) -> RenderableType:
        width = 24 if self.console.width >= 100 else 10
        rows = [_cells(replica, width) for replica in run.replicas if replica.steps]
        columns = [
            Column(name, [row[k] for row in rows], left=name == "", spare=spare, style="cyan" if name == "" else "")
            for k, (name, spare) in enumerate(COLUMNS.items())
        ]
        progress = progress_of(run, self._steps)
        times = f"{_clock(elapsed)} elapsed, {units.duration(progress.seconds_left)} left"
        bar = Table.grid(padding=(0, 1))
        room = self.console.width - len(f" {progress.share:4.0%} {progress} {times} ")
        filled = ProgressBar(total=1.0, completed=progress.share, width=max(min(32, room), 4))
        bar.add_row(filled, f"{progress.share:4.0%}", Text(str(progress)), Text(times, "dim"))
        parts: list[RenderableType] = [Fitted(columns)] if rows else []
        return Group(*parts, bar, Text(_state(run, read_phase(self.folder)), overflow="fold"))


@contextlib.contextmanager
def shown_in_background(live: Live) -> Iterator[None]:
    """Show a run from a thread of the process that trains it."""
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(0.5):
            with contextlib.suppress(OSError):
                live.refresh()

    thread = threading.Thread(target=show, name="live view", daemon=True)
    with live:
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@dataclass(frozen=True)
class Progress:
    """How far a run is, in steps; in a bucket in rounds, because members take different numbers of steps."""

    unit: str
    done: int
    total: int
    """0 if unknown."""
    seconds_left: float | None

    @property
    def share(self) -> float:
        return min(self.done / self.total, 1.0) if self.total else 0.0

    def __str__(self) -> str:
        return f"{self.unit} {self.done}/{self.total}" if self.total else f"{self.unit} {self.done}"


def progress_of(run: RecordedRun, steps: int = 0) -> Progress:
    """Estimate the time left from the recent pace of the slowest replica, including evaluations and saving.

    `steps`: those of the complete run, if its config is not written yet. Replicas on other machines do not write here.
    """
    replicas = [replica for replica in run.replicas if replica.steps]
    planned = rounds_planned(run.config) if "bucket" in run.config else 0
    if planned:
        rounds = [round for round in replicas[0].rounds if round.fragment == 0] if replicas else []
        unit, done, total = "round", rounds[-1].index if rounds else 0, planned
        marks = [[(round.index, round.sent_at + round.seconds) for round in rounds[-16:]]]
    else:
        unit, done, total = "step", run.step, steps or run.steps_planned or 0
        marks = [[(step.step, step.seconds) for step in replica.steps[-64:]] for replica in replicas]
    paces = [
        max(0.0, last[1] - first[1]) / max(1, last[0] - first[0])
        for first, *_, last in (series for series in marks if len(series) > 1)
    ]
    complete = paces and len(paces) == len(marks)
    return Progress(unit, done, total, max(paces) * max(0, total - done) if complete else None)


def _line(run: RecordedRun, progress: Progress, elapsed: float) -> str:
    steps = [replica.steps[-1] for replica in run.replicas if replica.steps]
    losses = " ".join(f"{step.loss:.3f}" for step in steps)
    speed = units.amount(sum(step.tokens_per_second for step in steps))
    sent = units.size(max(step.bytes_sent for step in steps))
    left = units.duration(progress.seconds_left)
    return f"{_clock(elapsed)}  {progress}  loss {losses}  {speed} tokens/s  sent {sent}  left {left}"


def _cells(replica: Replica, width: int) -> list[str]:
    step = replica.steps[-1]
    return [
        str(replica.number),
        str(step.step),
        f"{step.loss:.4f}",
        sparkline([step.loss for step in replica.steps], width).ljust(width),  # full width from the first step on
        units.amount(step.tokens_per_second),
        str(step.in_flight),
        units.size(step.bytes_sent),
        units.duration(step.seconds_hidden),
        units.duration(step.seconds_exposed),
    ]


def _state(run: RecordedRun, phase: str) -> str:
    """What the run is doing, and its figures so far."""
    replica = next((replica for replica in run.replicas if replica.steps), None)
    parts = [phase or "starting Python and torch"]
    if run.evaluations:
        parts.append(f"held-out {run.evaluations[-1].loss:.4f}")
    if replica and run.method in ("streaming", "diloco"):
        if run.factor and math.isfinite(run.factor):
            parts.append(f"{units.factor(run.factor)} less than data-parallel")
        parts.append(f"{units.percent(run.utilization, digits=1)} utilization")
    if replica:
        parts.append(f"lr {replica.steps[-1].lr:.3g}")
    if replica and replica.rounds and "bucket" in run.config:
        members = replica.rounds[-1].members
        parts.append(f"{members} member{'s' * (members > 1)} in the last round")
    return " · ".join(parts)


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """A one-line curve in eight heights, from the lowest to the highest value.

    >>> sparkline([8, 4, 2, 1], width=4)
    '█▄▂▁'
    """
    cells = min(width, len(values))
    means = []
    for k in range(cells):
        part = values[k * len(values) // cells : (k + 1) * len(values) // cells]
        means.append(sum(part) / len(part))
    finite = [mean for mean in means if abs(mean) < float("inf")]
    # Halved, so that no difference of two finite numbers is infinite.
    low, span = min(finite, default=0.0) / 2, max(finite, default=0.0) / 2 - min(finite, default=0.0) / 2
    heights = [(mean / 2 - low) / span if span > 0 else 0.0 for mean in means]
    return "".join(_BLOCKS[round(height * 7)] if abs(height) <= 1 else "?" for height in heights)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
