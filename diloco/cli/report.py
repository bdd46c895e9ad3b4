"""`diloco report [RUN…]`: a list of all runs, or the table and the HTML file of one run or of several."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from diloco.errors import ConfigError
from diloco.report import html, terminal
from diloco.runs import folder as folders
from diloco.runs.flags import flag
from diloco.runs.reader import read, status
from diloco.runs.schema import to_summary


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Show a run or compare several. Without a folder, list all runs with their state, newest first."""

    runs: tuple[Path, ...] = flag(
        (), "Folders of runs, such as runs/tiny-streaming-1, or a folder that contains runs.", positional=True,
        why="list the runs in runs"
    )  # fmt: skip
    out: Path | None = flag(
        None, "The HTML file to write.", why="report.html in the run, or comparison.html next to several"
    )
    json: bool = flag(False, "Print the summaries, or the list, as JSON.")


CONFIG = ReportConfig
EXAMPLES = (
    "diloco report",
    "diloco report runs/tiny-streaming-1",
    "diloco report runs/one runs/two --out both.html",
)


def main(config: ReportConfig) -> int:
    if not config.runs:
        return _list(config)
    paths = _expand(config.runs)
    runs = [read(folder) for folder in paths]
    # Several runs: next to them, never over the report of one of them.
    out = config.out or (paths[0] / "report.html" if len(paths) == 1 else paths[0].parent / "comparison.html")
    html.write(paths, out)
    if config.json:
        summaries = [{"run": str(run.folder), **(to_summary(run.summary) if run.summary else {})} for run in runs]
        print(json.dumps(summaries))
    elif len(runs) == 1:
        Console().print(terminal.table(runs[0], out))
    else:
        Console().print(terminal.comparison(runs))
        Console().print(f"report: {out}", highlight=False, soft_wrap=True)
    return 0


def _list(config: ReportConfig) -> int:
    if config.out:
        raise ConfigError(f"--out {config.out}: pass the run to report on, such as {folders.RUNS}/NAME")
    runs = [status(folder) for folder in reversed(folders.by_age(folders.RUNS))]
    if config.json:
        print(json.dumps([asdict(run) | {"folder": str(run.folder)} for run in runs]))
    elif runs:
        Console().print(terminal.listing(runs))
    else:
        raise ConfigError(
            f"there is no run in {folders.RUNS}: pass the folder of a run, or start one with diloco train"
        )
    return 0


def _expand(paths: Sequence[Path]) -> list[Path]:
    """Each run, or the runs in each folder. Skip files if there are several paths: a shell's * includes them."""
    runs: list[Path] = []
    for path in paths if len(paths) == 1 else [path for path in paths if not path.is_file()]:
        inside = sorted(config.parent for config in path.glob("*/config.toml"))
        runs += [path] if not inside or (path / "config.toml").is_file() else inside
    if not runs:
        raise ConfigError("no run to report on: pass at least one folder written by `diloco train`")
    return runs
