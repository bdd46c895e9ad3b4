"""`diloco ls`: the runs in a folder, the newest first, each with its state."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from diloco.errors import ConfigError
from diloco.flags import flag
from diloco.report import units
from diloco.report.fitted import Column, Fitted
from diloco.runs import folder as folders
from diloco.runs.brief import brief


@dataclass(frozen=True, kw_only=True)
class LsConfig:
    """List runs, the newest first: running, finished, stopped (--resume continues it), or ended without a summary."""

    folder: Path = flag(Path("runs"), "The folder of the runs.", positional=True)
    json: bool = flag(False, "Print them as JSON.")


CONFIG = LsConfig
EXAMPLES = ("diloco ls", "diloco ls runs/compare-1")


def main(config: LsConfig) -> int:
    runs = [brief(folder) for folder in reversed(folders.by_age(config.folder))]
    if config.json:
        print(json.dumps([asdict(run) | {"folder": str(run.folder)} for run in runs]))
        return 0
    if not runs:
        raise ConfigError(f"there is no run in {config.folder}: give another folder, or train one with diloco train")
    columns = [
        Column("run", [str(run.folder) for run in runs], left=True),
        Column("state", [run.state for run in runs], left=True),
        Column("method", [run.method for run in runs], left=True, spare=2),
        Column("model", [run.model for run in runs], left=True, spare=3),
        Column("progress", [run.progress for run in runs]),
        Column("loss", [units.loss(run.loss) for run in runs]),
        Column("last sign", [f"{units.duration(max(round(run.age), 1))} ago" for run in runs], spare=1),
    ]
    Console().print(Fitted(columns))
    return 0
