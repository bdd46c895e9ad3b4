"""What to say of a run that was stopped: how far it came, what is saved, and how to go on."""

import shlex
from pathlib import Path

from diloco.runs.brief import brief

RUNS = Path("runs")


def sentence(folder: Path) -> str:
    run, saved = brief(folder), _saved(folder)
    of = f" of {run.steps}" if run.steps else ""
    if saved is not None:
        where = "" if folder.parent == RUNS else f" --out {shlex.quote(str(folder.parent))}"
        what = "which is saved" if saved == run.step else f"the newest checkpoint is of step {saved}"
        command = f"diloco train --resume --name {shlex.quote(folder.name)}{where}"
        return f"stopped at step {run.step}{of}, {what}; go on with: {command}"
    if run.step:
        return f"stopped at step {run.step}{of}; none was saved, so there is nothing to resume"
    return "stopped; no step was done, there is nothing to resume"


def _saved(folder: Path) -> int | None:
    """The newest step of which every replica here has a checkpoint."""
    steps = [
        {int(path.name.removeprefix("step-")) for path in replica.glob("checkpoints/step-*")}
        for replica in folder.glob("replica-*")
    ]
    return max(set.intersection(*steps), default=None) if steps else None
