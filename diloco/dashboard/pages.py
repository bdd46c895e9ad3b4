"""The pages of a dashboard. Each can be made whole, and can say what is new since a position that a browser names.

A position is made from what is on disk, so that a browser which had it from an earlier server goes on where it was.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from diloco.errors import DiLoCoError
from diloco.report import html, units
from diloco.report.curves import charts, first_new, timeline
from diloco.runs import folder as folders
from diloco.runs.brief import brief
from diloco.runs.follow import Followed
from diloco.runs.phase import read_phase
from diloco.runs.reader import RecordedRun


class News(NamedTuple):
    position: str
    parts: dict[str, str]
    """HTML by the id of the element that it goes into."""
    data: dict[str, Any]
    """For the page's scripts; empty if nothing was added."""


class Page(Protocol):
    every: float
    """Seconds between two looks."""

    def whole(self) -> str: ...
    def news(self, position: str) -> News: ...


class Progress(NamedTuple):
    share: float
    text: str


class RunPage:
    """One run."""

    every = 0.4

    def __init__(self, followed: Followed, up: str = "") -> None:
        self._followed, self._up = followed, up

    def whole(self) -> str:
        run = self._followed.look()
        data = {"position": position(run), "charts": charts(run), "timeline": timeline(run)}
        return html.page("run", self._values(run), data, live=True, up=self._up)

    def news(self, position: str) -> News:
        run = self._followed.look()
        now, since = _moved(run, position)
        parts = html.parts("run", self._values(run), live=True)
        title = f"{run.name} – diloco"
        if since is None:
            return News(now, parts | {"title": title}, {})
        return News(now, parts | {"title": title}, {"charts": charts(run, since), "timeline": timeline(run, since)})

    def _values(self, run: RecordedRun) -> dict[str, Any]:
        return html.one(run, _progress(run) if folders.in_use(run.folder) else None)


class ComparisonPage:
    """Several runs side by side."""

    every = 1.0

    def __init__(self, followed: Mapping[str, Followed], up: str = "", to_root: str = "") -> None:
        self._followed, self._up, self._to_root = followed, up, to_root

    def whole(self) -> str:
        runs = self._runs()
        data = {"position": ",".join(map(position, runs)), **html.compared_runs(runs)}
        return html.page("comparison", self._values(runs), data, live=True, up=self._up)

    def news(self, position: str) -> News:
        runs = self._runs()
        known = position.split(",") if position.count(",") == len(runs) - 1 else [""] * len(runs)
        moved = [_moved(run, before) for run, before in zip(runs, known, strict=True)]
        parts = html.parts("comparison", self._values(runs), live=True)
        now = ",".join(now for now, _ in moved)
        if all(since is None for _, since in moved):
            return News(now, parts, {})
        since = {run.folder: first_new(run) if new is None else new for run, (_, new) in zip(runs, moved, strict=True)}
        return News(now, parts, html.compared_runs(runs, since))

    def _runs(self) -> list[RecordedRun]:
        return [followed.look() for followed in self._followed.values()]

    def _values(self, runs: Sequence[RecordedRun]) -> dict[str, Any]:
        named = zip(self._followed, runs, strict=True)
        return html.several(runs, [(run.name, f"{self._to_root}run/{quote(key)}/") for key, run in named])


class ListPage:
    """All runs that were found, each with its state."""

    every = 1.0

    def __init__(self, title: str, find: Callable[[], Mapping[str, Path]]) -> None:
        self._title, self._find = title, find

    def whole(self) -> str:
        return html.page("runs", self._values(), {"position": ""}, live=True)

    def news(self, position: str) -> News:
        return News("", html.parts("runs", self._values(), live=True), {})

    def _values(self) -> dict[str, Any]:
        runs = [(key, brief(folder)) for key, folder in reversed(list(self._find().items()))]
        running = sum(run.state == "running" for _, run in runs)
        about = f"{len(runs)} run{'s' * (len(runs) != 1)}, {running} of them running"
        return {"title": self._title, "about": about, "runs": runs}


class BucketPage:
    """The members of a run in a bucket. One look serves all browsers."""

    every = 2.0

    def __init__(self, watch: Any) -> None:
        self._watch, self._lock, self._looked = watch, threading.Lock(), -math.inf
        self._seen: dict[str, Any] = {}

    def whole(self) -> str:
        return html.page("members", self._values(), {"position": ""}, live=True, source="the bucket")

    def news(self, position: str) -> News:
        return News("", html.parts("members", self._values(), live=True), {})

    def _values(self) -> dict[str, Any]:
        with self._lock:
            if time.monotonic() - self._looked >= self.every:
                self._look()
                self._looked = time.monotonic()
            return self._seen

    def _look(self) -> None:
        from diloco.report.bucket import COLUMNS

        try:
            seen = self._watch.see()
        except (DiLoCoError, OSError) as error:  # for a moment, it is hoped
            if not self._seen:
                raise
            self._seen |= {"trouble": f"The store does not answer: {error}"}
            return
        self._seen = {
            "title": f"run {self._watch.run.id}", "about": seen.title.partition(" in ")[2], "trouble": "",
            "progress": Progress(seen.share, seen.progress), "members": seen.members, "rounds": seen.rounds,
            "columns": [(name, text) for name, (_, text) in COLUMNS.items()],
        }  # fmt: skip


def position(run: RecordedRun) -> str:
    """What a browser has that was sent the whole run: when it was begun or resumed, how it is thinned, its replicas,
    whether it has a summary, which brings new curves; where new steps go; and how much there is of all."""
    times = [event.details.get("time") for r in run.replicas[:1] for event in r.events]
    begun = [int(t) for t in times if isinstance(t, (int, float)) and math.isfinite(t)]
    told = "s" if run.summary else ""
    steps = ".".join(str(replica.steps[-1].step) if replica.steps else "" for replica in run.replicas)
    rounds = sum(len(r.rounds) + r.left_out + len(r.evaluations) + len(r.events) for r in run.replicas)
    return f"{begun[-1] if begun else 0}-{run.width}-{len(run.replicas)}{told}-{first_new(run)}-{steps}-{rounds}"


def _moved(run: RecordedRun, before: str) -> tuple[str, int | None]:
    """The position now, and the step from which on there is something new: 0 if all must be sent, None if nothing."""
    now = position(run)
    if now == before:
        return now, None
    old, new = before.split("-"), now.split("-")
    same = len(old) == len(new) and old[:3] == new[:3] and old[3].isdecimal()
    return now, int(old[3]) if same else 0


def _progress(run: RecordedRun) -> Progress:
    """What a run that goes on does, and how long it will take, by its last steps."""
    phase = read_phase(run.folder / "phase") or "starting"
    if not run.steps_planned:
        return Progress(0.0, phase)
    step = min((r.steps[-1].step if r.steps else 0 for r in run.replicas), default=0)
    paces = [
        (r.steps[-1].seconds - r.steps[-k].seconds) / max(r.steps[-1].step - r.steps[-k].step, 1)
        for r in run.replicas
        if (k := min(len(r.steps), 64)) > 1
    ]
    left = f" · {units.duration(max(paces) * (run.steps_planned - step))} left" if paces else ""
    return Progress(step / run.steps_planned, f"{phase} · step {step} of {run.steps_planned}{left}")
