"""`diloco watch URL`: a run whose members meet in a bucket, live, from anywhere with read access."""

import time
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import ConfigError
from diloco.flags import REQUIRED, flag


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Show members, rounds and losses of the run in a bucket."""

    url: str = flag(REQUIRED, "The folder or s3://, gs://, az://… that the members were given.", positional=True)
    key_file: Path | None = flag(None, "The secret that the members share.", why="they have none")
    encrypt: Path | None = flag(None, "The file with which the run is encrypted.", why="it is not encrypted")
    every: float = flag(2.0, "Seconds between two looks.")
    once: bool = flag(False, "Print the state once and exit. Takes up to 30 s, if members give no sign of life.")


CONFIG = WatchConfig
EXAMPLES = ("diloco watch s3://bucket/run", "diloco watch shared/run --once")


def main(config: WatchConfig) -> int:
    place = Path(config.url).expanduser().absolute()
    if "://" not in config.url and not place.is_dir():  # before torch is imported for it
        raise ConfigError(f"there is no folder {place}: give what the members were given as --bucket")
    from rich.console import Console
    from rich.live import Live

    from diloco.bucket.store.keys import read_secret
    from diloco.report.bucket import Watch

    watch = Watch(config.url, read_secret(config.key_file), read_secret(config.encrypt))
    console = Console()
    if config.once or not console.is_terminal:
        console.print(watch.table(watch.settle()))
        return 0
    with Live(watch.look(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(config.every)
            live.update(watch.look(), refresh=True)
