"""A run while it goes on, from the files that its replicas write: a panel in a terminal, plain lines elsewhere."""

import contextlib
import math
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco.report import units
from diloco.report.fitted import Column, Fitted
from diloco.runs.follow import Tail
from diloco.runs.phase import read_phase
from diloco.runs.reader import read_config
from diloco.runs.schema import Evaluation, Event, Round, Step, bytes_data_parallel

_BLOCKS = "▁▂▃▄▅▆▇█"
_HISTORY = 512
COLUMNS = (("replica", 0), ("step", 0), ("loss", 0), ("", 3), ("tokens/s", 1), ("in flight", 5), ("sent", 2),
           ("hidden", 6), ("exposed", 4))  # fmt: skip
"""The columns of a replica's row, and the order in which they are left out in a narrow terminal, see `Column`."""


class Live:
    """Show a run in the terminal that started it. Call `refresh` as often as is convenient; it keeps its own pace.

    Args:
        folder: the run directory; it may still be empty.
        steps: steps of the complete run; 0: take them from config.toml as soon as it is written.
        every: seconds between two plain lines, when `stream` is not a terminal.
        told: whether somebody else has printed the derived settings.
    """

    def __init__(
        self, folder: Path, replicas: int, steps: int, stream: TextIO | None = None, *, every: float = 5.0,
        told: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self.steps = folder, steps
        self.watched = [_Watched(folder / f"replica-{number}") for number in range(replicas)]
        self.console = Console(file=stream or sys.stderr)
        self.panel = self.console.is_terminal and not self.console.is_dumb_terminal
        self.pace = 0.25 if self.panel else every
        self.screen = Screen(console=self.console, auto_refresh=False, transient=False) if self.panel else None
        self.began = time.monotonic()
        self.shown = -float("inf")
        self.printed, self.derived, self.told = -1, "", told
        self.sync_every, self.method, self.phase, self.bucket, self.replicas = 0, "", "", False, replicas
        self.echo: list[Any] | None = None

    def __enter__(self) -> Self:
        if self.screen:
            self._set_echo()
            self.screen.start()
        return self

    def _set_echo(self) -> None:
        """Keep the terminal from printing ^C, which would shift the panel by a line."""
        with contextlib.suppress(termios.error, OSError, ValueError):  # the input is not a terminal
            self.echo = termios.tcgetattr(sys.stdin)
            quiet = [*self.echo]
            quiet[3] &= ~termios.ECHOCTL
            termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refresh(force=True)
        if self.screen:
            self.screen.stop()
        if self.echo:
            with contextlib.suppress(termios.error, OSError, ValueError):
                termios.tcsetattr(sys.stdin, termios.TCSANOW, self.echo)

    def refresh(self, force: bool = False) -> None:
        """Read what was written since the last call, and show it if it is time to."""
        now = time.monotonic()
        if not force and now - self.shown < self.pace:
            return
        self.shown = now
        if not self.sync_every:
            config = read_config(self.folder)
            self.sync_every, self.steps = config.get("sync_every", 0), self.steps or config.get("steps", 0)
            self.method, self.bucket = config.get("method", ""), "bucket" in config
            self.replicas = config.get("replicas", self.replicas)
        self.phase = read_phase(self.folder / "phase")
        for replica in self.watched:
            replica.read()
        if (file := self.folder / "derived.txt").exists() and (text := file.read_text()) != self.derived:
            more = text.removeprefix(self.derived)  # what the autopilot has chosen follows later
            self.derived, self.sync_every = text, 0  # read the config again
            if not self.told:
                self.console.print(more.rstrip(), markup=False, highlight=False, soft_wrap=not self.panel)
        if self.screen:
            self.screen.update(self._panel(), refresh=True)
        elif self.step != self.printed and any(replica.last for replica in self.watched):
            self.printed = self.step
            self.console.print(self._line(now - self.began), soft_wrap=True, markup=False, highlight=False)

    @property
    def here(self) -> list["_Watched"]:
        """The replicas that write here; those on other machines do not."""
        return [replica for replica in self.watched if replica.last] or self.watched

    @property
    def step(self) -> int:
        """The step that all replicas have done."""
        return min(replica.last.step if replica.last else 0 for replica in self.here)

    @property
    def way(self) -> tuple[str, int, int]:
        """What is counted, how much of it is done, and how much there is: steps; with a bucket, where each member has
        its own number of them, rounds."""
        if not self.bucket or not self.sync_every:
            return "step", self.step, self.steps
        return (
            "round",
            self.watched[0].rounds[-1][0] if self.watched[0].rounds else 0,
            math.ceil(self.steps / self.sync_every),
        )

    @property
    def seconds_left(self) -> float | None:
        """By the pace of the slowest replica over its last lines, evaluations and saving included."""
        _, done, total = self.way
        paces = [replica.seconds_per_round if self.bucket else replica.seconds_per_step for replica in self.here]
        if any(pace is None for pace in paces):
            return None
        return max(pace for pace in paces if pace is not None) * max(0, total - done)

    def _line(self, elapsed: float) -> str:
        last = [replica.last for replica in self.here]
        losses = " ".join(f"{step.loss:.3f}" if step else "–" for step in last)
        speed = units.amount(sum(step.tokens_per_second for step in last if step))
        sent = units.size(max((step.bytes_sent for step in last if step), default=0))
        left = units.duration(self.seconds_left)
        what, done, total = self.way
        much = f"{_clock(elapsed)}  {what} {done}/{total}"
        return f"{much}  loss {losses}  {speed} tokens/s  sent {sent}  left {left}"

    def _panel(self) -> RenderableType:
        curve = 24 if self.console.width >= 100 else 10
        rows = [[replica.number, *replica.cells(self.sync_every, curve)] for replica in self.here]
        columns = [
            Column(name, [row[k] for row in rows], left=name == "", spare=spare, style="cyan" if name == "" else "")
            for k, (name, spare) in enumerate(COLUMNS)
        ]
        what, reached, total = self.way
        done = min(reached / total, 1.0) if total else 0.0
        gone = f"{_clock(time.monotonic() - self.began)} gone, {units.duration(self.seconds_left)} left"
        where = f"{what} {reached}/{total}" if total else f"{what} {reached}"
        bar = Table.grid(padding=(0, 1))
        room = self.console.width - len(f" {done:4.0%} {where} {gone} ")
        bar.add_row(ProgressBar(total=1.0, completed=done, width=max(min(32, room), 4)), f"{done:4.0%}", Text(where),
                    Text(gone, "dim"))  # fmt: skip
        parts: list[RenderableType] = [Fitted(columns)] if any(replica.last for replica in self.watched) else []
        return Group(*parts, bar, Text(self._state(), overflow="fold"))

    def _state(self) -> str:
        """What the run does at the moment, and its figures so far."""
        first = self.here[0]
        parts = [self.phase or "starting Python and torch"]
        if first.held_out is not None:
            parts.append(f"held-out {first.held_out:.4f}")
        step = first.last
        if step and step.bytes_sent and first.parameters and self.method in ("streaming", "diloco"):
            data_parallel = bytes_data_parallel(first.parameters, self.replicas, step.step)
            parts.append(f"{units.factor(data_parallel / step.bytes_sent)} less than data-parallel")
        if step and self.method in ("streaming", "diloco"):
            busy = min(replica.busy for replica in self.here)
            parts.append(f"{units.percent(busy, digits=1)} busy")
        if step:
            parts.append(f"lr {step.lr:.3g}")
        if self.bucket and first.members:
            parts.append(f"{first.members} member{'s' * (first.members > 1)} in the last round")
        return " · ".join(parts)


@contextlib.contextmanager
def beside(live: Live) -> Iterator[None]:
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


class _Watched:
    """One replica's files, read on from where the last look ended."""

    def __init__(self, folder: Path) -> None:
        self.number = folder.name.removeprefix("replica-")
        self.metrics, self.events = Tail(folder / "metrics.jsonl"), Tail(folder / "events.jsonl")
        self.parameters = 0
        self._clear()

    def _clear(self) -> None:
        self.held_out: float | None = None
        self.trained = 0.0  # seconds of all steps, waiting included
        self.last: Step | None = None
        self.recent: deque[Step] = deque(maxlen=64)
        self.losses: list[float] = []
        self.width = 1  # steps that one entry of `losses` is the mean of
        self.pending: list[float] = []
        self.sent: dict[int, int] = {}  # fragment: step at which its last known round was sent
        self.rounds: deque[tuple[int, float]] = deque(maxlen=16)  # index and time of the last rounds of one fragment
        self.members = 0

    def read(self) -> None:
        for record in self.metrics.records():
            if isinstance(record, Evaluation):
                self.held_out = record.loss
            elif isinstance(record, Step):
                if self.last and record.step <= self.last.step:  # resumed: what was written later was cut off
                    self._clear()
                    self.metrics.offset = 0
                    return
                self.last = record
                self.recent.append(record)
                self.trained += record.step_seconds
                self._remember(record.loss)
        for record in self.events.records():
            if isinstance(record, Round):
                self.members = record.members
                if record.sent_step is not None:
                    self.sent[record.fragment] = record.sent_step
                if record.fragment == 0:
                    self.rounds.append((record.index, record.seconds))
            elif isinstance(record, Event):
                self.parameters = int(record.details.get("parameters", self.parameters))
                if record.event == "resume":
                    self.recent.clear()  # the clock of the earlier lines says nothing about the pace

    @property
    def busy(self) -> float:
        """The share of the steps' time in which training did not wait."""
        return 1 - self.last.seconds_exposed / self.trained if self.last and self.trained else 1.0

    @property
    def seconds_per_step(self) -> float | None:
        if len(self.recent) < 2:
            return None
        first, last = self.recent[0], self.recent[-1]
        return max(0.0, last.seconds - first.seconds) / max(1, last.step - first.step)

    @property
    def seconds_per_round(self) -> float | None:
        if len(self.rounds) < 2:
            return None
        (first, began), (last, ended) = self.rounds[0], self.rounds[-1]
        return max(0.0, ended - began) / max(1, last - first)

    def cells(self, sync_every: int, width: int) -> list[str]:
        step = self.last
        if step is None:
            return [""] * 8
        return [
            str(step.step),
            f"{step.loss:.4f}",
            sparkline(self.losses or [step.loss], width).ljust(width),  # as wide from the first step on
            units.amount(step.tokens_per_second),
            self._in_flight(step, sync_every),
            units.size(step.bytes_sent),
            units.duration(step.seconds_hidden),
            units.duration(step.seconds_exposed),
        ]

    def _in_flight(self, step: Step, sync_every: int) -> str:
        """The fragments, as f3, if the rounds so far tell which they are and they are few; otherwise how many."""
        due = sorted(f for f, sent in self.sent.items() if sync_every and sent + sync_every <= step.step)
        if 0 < step.in_flight == len(due) <= 3:
            return " ".join(f"f{fragment}" for fragment in due)
        return f"{step.in_flight} of them" if step.in_flight else "–"

    def _remember(self, loss: float) -> None:
        self.pending.append(loss)
        if len(self.pending) == self.width:
            self.losses.append(sum(self.pending) / self.width)
            self.pending.clear()
        if len(self.losses) == _HISTORY:
            self.losses = [(a + b) / 2 for a, b in zip(self.losses[::2], self.losses[1::2], strict=True)]
            self.width *= 2


def sparkline(values: list[float], width: int = 20) -> str:
    """A curve of one line in eight heights, from the lowest to the highest value.

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
