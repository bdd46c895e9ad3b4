"""`diloco report RUN…`: the table of a run, or of several, and one HTML file."""

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from diloco.errors import ConfigError
from diloco.flags import flag
from diloco.report import html, terminal
from diloco.runs.reader import read


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Show a run, or compare several."""

    runs: tuple[Path, ...] = flag((), "Folders of runs, as in runs/tiny-streaming-1.", positional=True)
    out: Path | None = flag(None, "The HTML file to write.", why="report.html in the (first) run")
    json: bool = flag(False, "Print the summaries as JSON.")


CONFIG = ReportConfig
EXAMPLES = ("diloco report runs/tiny-streaming-1", "diloco report runs/one runs/two --out both.html")


def main(config: ReportConfig) -> int:
    if not config.runs:
        raise ConfigError("which run? Give its folder, as in runs/tiny-streaming-1")
    runs = [read(folder) for folder in config.runs]
    out = config.out or config.runs[0] / "report.html"
    html.write(config.runs, out)
    if config.json:
        print(json.dumps([{"run": str(run.folder), **run.summary} for run in runs]))
    else:
        Console().print(terminal.table(runs[0], out) if len(runs) == 1 else terminal.comparison(runs))
        if len(runs) > 1:
            Console().print(f"report: {out}", highlight=False, soft_wrap=True)
    return 0
