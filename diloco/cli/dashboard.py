"""`diloco dashboard`: serve runs as a live page."""

from dataclasses import dataclass
from pathlib import Path

from diloco.errors import ConfigError
from diloco.report.dashboard import PORT, open_dashboard
from diloco.runs.flags import flag
from diloco.runs.folder import RUNS


@dataclass(frozen=True, kw_only=True)
class DashboardConfig:
    """Serve a live page of one run or of all runs in a folder, to browsers on this machine."""

    folder: Path = flag(RUNS, "Folder of a run, or a folder that contains runs.", positional=True)
    port: int | None = flag(None, "Port to listen on; 0 picks a free one.", why=f"{PORT}, or any free one")


CONFIG = DashboardConfig
EXAMPLES = ("diloco dashboard", "diloco dashboard runs/tiny-streaming-1")


def main(config: DashboardConfig) -> int:
    if config.folder != RUNS and not config.folder.is_dir():
        raise ConfigError(f"there is no folder {config.folder}: pass the folder of a run, or a folder of runs")
    with open_dashboard(config.folder, config.port) as dashboard:
        print(f"dashboard at {dashboard.address} (Ctrl-C to stop)", flush=True)
        dashboard.serve_forever()
    return 0
