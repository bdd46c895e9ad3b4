"""`diloco report RUN…`: the table of a run, or of several, and one HTML file."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from diloco.errors import ConfigError
from diloco.flags import flag
from diloco.report import html, terminal
from diloco.runs import folder as folders
from diloco.runs.reader import read
from diloco.runs.schema import to_summary

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Show a run, or compare several."""

    runs: tuple[Path, ...] = flag(
        (), "Folders of runs, as in runs/tiny-streaming-1, or a folder that holds them.", positional=True,
        why="the newest in runs"
    )  # fmt: skip
    out: Path | None = flag(None, "The HTML file to write.", why="report.html in the run, or beside several")
    json: bool = flag(False, "Print the summaries as JSON.")


CONFIG = ReportConfig
EXAMPLES = (
    "diloco report",
    "diloco report runs/tiny-streaming-1",
    "diloco report runs/one runs/two --out both.html",
)


def main(config: ReportConfig) -> int:
    given = config.runs or _newest()
    folders_of_runs = _expand(given)
    runs = [read(folder) for folder in folders_of_runs]
    out = config.out or _beside(given, folders_of_runs)
    html.write(folders_of_runs, out)
    if config.json:
        found = [(run, to_summary(run.summary) if run.summary else {}) for run in runs]
        print(json.dumps([{"run": str(run.folder), **summary} for run, summary in found]))
    else:
        Console().print(terminal.table(runs[0], out) if len(runs) == 1 else terminal.comparison(runs))
        if len(runs) > 1:
            Console().print(f"report: {out}", highlight=False, soft_wrap=True)
    return 0


def _newest() -> tuple[Path, ...]:
    if not (found := folders.by_age(RUNS)):
        raise ConfigError(f"there is no run in {RUNS}: give the folder of one, or train one with diloco train")
    return (found[-1],)


def _expand(given: Sequence[Path]) -> list[Path]:
    """Each folder, or the runs in it. Files are left out if there are several: a shell's * gives them too."""
    found: list[Path] = []
    for path in given if len(given) == 1 else [path for path in given if not path.is_file()]:
        inside = sorted(config.parent for config in path.glob("*/config.toml"))
        found += [path] if not inside or (path / "config.toml").is_file() else inside
    return found


def _beside(given: Sequence[Path], runs: Sequence[Path]) -> Path:
    """Where the report goes if nobody says: never over that of another run."""
    if len(runs) == 1:
        return runs[0] / "report.html"
    if len(given) == 1:
        return given[0] / "report.html"
    common = Path(os.path.commonpath([run.absolute().parent for run in runs])) / "comparison.html"
    return common.relative_to(Path.cwd()) if common.is_relative_to(Path.cwd()) else common
