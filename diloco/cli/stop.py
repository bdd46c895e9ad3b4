"""`diloco stop RUN`: end a run on this machine as Ctrl-C would; and what to say of a run that was stopped."""

import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import ConfigError
from diloco.flags import REQUIRED, flag
from diloco.runs import folder as folders
from diloco.runs.brief import brief
from diloco.runs.reader import read_config

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """Stop a run on this machine as Ctrl-C would: it saves a checkpoint and exits."""

    run: Path = flag(REQUIRED, "The folder of the run.", positional=True)


CONFIG = StopConfig
EXAMPLES = ("diloco stop runs/tiny-streaming-1",)


def main(config: StopConfig) -> int:
    pids = folders.holders(config.run)
    if not pids:
        running = [str(folder) for folder in folders.by_age(RUNS) if folders.in_use(folder)]
        raise ConfigError(f"no process on this machine runs {config.run}; running: {', '.join(running) or 'none'}")
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    print(f"stopping {config.run}, process {', '.join(map(str, pids))}", file=sys.stderr)
    while folders.in_use(config.run):
        time.sleep(0.1)
    print(sentence(config.run))
    return 0


def sentence(folder: Path) -> str:
    run, saved = brief(folder), _saved(folder)
    of = f" of {run.steps}" if run.steps else ""
    if saved is not None:
        where = "" if folder.parent == RUNS else f" --out {shlex.quote(str(folder.parent))}"
        what = "which is saved" if saved == run.step else f"the newest checkpoint is of step {saved}"
        command = f"diloco train --resume --name {shlex.quote(folder.name)}{where}"
        if read_config(folder).get("bucket"):
            return f"stopped at step {run.step}, {what}; the same command rejoins the run"
        return f"stopped at step {run.step}{of}, {what}; go on with: {command}"
    if run.step:
        return f"stopped at step {run.step}{of}; none was saved, so there is nothing to resume"
    return "stopped; no step was done, there is nothing to resume"


def _saved(folder: Path) -> int | None:
    """The newest step of which every replica here has a checkpoint."""
    steps = [set(folders.checkpoints(replica / "checkpoints")) for replica in folder.glob("replica-*")]
    return max(set.intersection(*steps), default=None) if steps else None
