"""`diloco dashboard`: runs, or the members of a bucket, as a page that lives."""

from dataclasses import dataclass
from pathlib import Path

from diloco.dashboard.server import PORT, open_dashboard
from diloco.dashboard.site import Keys, Site
from diloco.flags import flag

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class DashboardConfig:
    """Serve a live page of runs, for browsers on this machine.

    To show it to others, give --host: the address that is printed then holds a secret token. Whoever has it can look,
    and can change nothing.
    """

    sources: tuple[str, ...] = flag(
        (), "Folders of runs, a folder that holds them, or the folder or s3://, gs://, az://… of a bucket.",
        positional=True, why="runs"
    )  # fmt: skip
    host: str = flag("127.0.0.1", "Address to listen on; 0.0.0.0 is every interface of this machine.")
    port: int | None = flag(None, "Port to listen on; 0 picks a free one.", why=f"{PORT}, or the next free one")
    key_file: Path | None = flag(None, "The secret that the members of a bucket share.", why="they have none")
    encrypt: Path | None = flag(None, "The file with which a bucket is encrypted.", why="it is not encrypted")


CONFIG = DashboardConfig
EXAMPLES = (
    "diloco dashboard",
    "diloco dashboard runs/tiny-streaming-1",
    "diloco dashboard runs/one runs/two",
    "diloco dashboard s3://bucket/run --host 0.0.0.0",
)


def main(config: DashboardConfig) -> int:
    keys = Keys(config.key_file, config.encrypt)
    site = Site(config.sources, keys) if config.sources else Site.of_folder(RUNS)
    with open_dashboard(site, config.host, config.port) as dashboard:
        print(f"dashboard at {dashboard.address} (Ctrl-C ends it)", flush=True)
        dashboard.serve_forever()
    return 0
