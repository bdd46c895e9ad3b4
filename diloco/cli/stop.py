"""`diloco stop RUN`: stop a run on this machine as Ctrl-C would; and the sentence that describes a stopped run."""

import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import ConfigError
from diloco.runs import folder as folders
from diloco.runs.flags import REQUIRED, flag
from diloco.runs.reader import read_config, status


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """Stop a run on this machine as Ctrl-C would: it saves a checkpoint and exits."""

    run: Path = flag(REQUIRED, "The folder of the run.", positional=True)


CONFIG = StopConfig
EXAMPLES = ("diloco stop runs/tiny-streaming-1",)


def main(config: StopConfig) -> int:
    pids = folders.holders(config.run)
    if not pids:
        running = [str(folder) for folder in folders.by_age(folders.RUNS) if folders.in_use(folder)]
        raise ConfigError(f"no process on this machine runs {config.run}; runs in progress: "
                          f"{', '.join(running) or 'none'}")  # fmt: skip
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    print(f"stopping {config.run}, process {', '.join(map(str, pids))}", file=sys.stderr)
    while folders.in_use(config.run):
        time.sleep(0.1)
    print(sentence(config.run))
    return 0


def sentence(folder: Path) -> str:
    """Say at which step the run stopped, what is saved, and how to resume."""
    run, saved = status(folder), _saved(folder)
    if not run.step:
        return "stopped; no step was done, there is nothing to resume"
    of = f" of {run.steps}" if run.steps else ""
    if saved is None:
        return f"stopped at step {run.step}{of}; no checkpoint was saved, so there is nothing to resume"
    state = "which is saved" if saved == run.step else f"the newest checkpoint is of step {saved}"
    if read_config(folder).get("bucket"):
        return f"stopped at step {run.step}, {state}; the same command rejoins the run"
    out = "" if folder.parent == folders.RUNS else f" --out {shlex.quote(str(folder.parent))}"
    command = f"diloco train --resume --name {shlex.quote(folder.name)}{out}"
    return f"stopped at step {run.step}{of}, {state}; continue with: {command}"


def _saved(folder: Path) -> int | None:
    """The newest step for which every replica here has a checkpoint."""
    steps = [set(folders.checkpoints(replica / "checkpoints")) for replica in folder.glob("replica-*")]
    return max(set.intersection(*steps), default=None) if steps else None
