"""`diloco dashboard`: runs, or the members of a bucket, as a page that lives."""

from dataclasses import dataclass
from pathlib import Path

from diloco.dashboard.server import PORT, open_dashboard
from diloco.dashboard.site import Keys, Site
from diloco.flags import flag

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class DashboardConfig:
    """Serve runs as a page that follows them, for browsers on this machine.

    To show it to others, give --host and --token: whoever has the address may look, and can change nothing.
    """

    sources: tuple[str, ...] = flag(
        (), "Folders of runs, a folder that holds them, or the folder or s3://, gs://, az://… of a bucket.",
        positional=True, why="runs"
    )  # fmt: skip
    host: str = flag("127.0.0.1", "The address to listen at; 0.0.0.0 is all of this machine's.")
    port: int | None = flag(None, "The port to listen at; 0 is any that is free.", why=f"{PORT}, or the next free one")
    token: str | None = flag(None, "What the address must contain to be answered; auto makes one.",
        why="none, which only this machine may do without")  # fmt: skip
    key_file: Path | None = flag(None, "The secret that the members of a bucket share.", why="they have none")
    encrypt: Path | None = flag(None, "The file with which a bucket is encrypted.", why="it is not encrypted")


CONFIG = DashboardConfig
EXAMPLES = (
    "diloco dashboard",
    "diloco dashboard runs/tiny-streaming-1",
    "diloco dashboard runs/one runs/two",
    "diloco dashboard s3://bucket/run --host 0.0.0.0 --token auto",
)


def main(config: DashboardConfig) -> int:
    keys = Keys(config.key_file, config.encrypt)
    site = Site(config.sources, keys) if config.sources else Site.of_folder(RUNS)
    with open_dashboard(site, config.host, config.port, config.token) as dashboard:
        print(f"dashboard at {dashboard.address} (Ctrl-C ends it)", flush=True)
        dashboard.serve_forever()
    return 0
