"""`diloco watch URL`: watch a run in a bucket live, from anywhere with read access."""

import time
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import ConfigError
from diloco.runs.flags import REQUIRED, flag

INTERVAL = 2.0
"""Seconds between two looks."""


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Show the members, rounds and losses of a run in a bucket, live."""

    url: str = flag(REQUIRED, "The folder or s3://, gs://, az://… of the bucket.", positional=True)
    key_file: Path | None = flag(None, "File with the secret that the members share.", why="no secret")
    encrypt: Path | None = flag(None, "File with the encryption key of the bucket.", why="not encrypted")
    audit: bool = flag(False, "Print which ranges of the corpus each epoch has counted, and which were trained twice.")
    once: bool = flag(False, "Print the state once and exit. Takes up to 30 s if members send no heartbeat.")


CONFIG = WatchConfig
EXAMPLES = ("diloco watch s3://bucket/run", "diloco watch shared/run --once", "diloco watch shared/run --audit")


def main(config: WatchConfig) -> int:
    folder = Path(config.url).expanduser().absolute()
    if "://" not in config.url and not folder.is_dir():  # fail before the slow import of torch
        raise ConfigError(f"there is no folder {folder}: pass the --bucket of the members")
    from rich.console import Console
    from rich.live import Live

    from diloco.bucket.store.envelope import read_secret
    from diloco.report.bucket import Watch, table

    watch = Watch(config.url, read_secret(config.key_file), read_secret(config.encrypt))
    console = Console()
    if config.audit:
        console.print("\n".join(watch.audit()), markup=False, highlight=False, soft_wrap=True)
        return 0
    if config.once or not console.is_terminal:
        console.print(table(watch.settle()))
        return 0
    with Live(table(watch.see()), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(INTERVAL)
            live.update(table(watch.see()), refresh=True)
