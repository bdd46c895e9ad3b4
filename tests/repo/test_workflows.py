"""The workflows: they parse, run targets that exist, pin what they run, and may do no more than they need."""

import re
from typing import Any

import pytest
import yaml

from tests.support.pages import ROOT

WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
JOBS = [pytest.param(job, id=f"{name}, {key}") for name, flow in WORKFLOWS.items() for key, job in flow["jobs"].items()]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {".venv/ready"}


@pytest.mark.parametrize("job", JOBS)
def test_a_job_pins_its_actions_by_commit_and_runs_targets_of_the_makefile(job: dict[str, Any]) -> None:
    for action in [job.get("uses"), *(step.get("uses") for step in job.get("steps", []))]:
        if action is not None and action.startswith("./"):
            assert (ROOT / action).is_file()
        elif action is not None:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action), action
    commands = [step.get("run", "") for step in job.get("steps", [])]
    for script in re.findall(r"\.ci/\S+", " ".join(commands)):
        assert (ROOT / script).is_file(), script
    commands += [entry["command"] for entry in job.get("strategy", {}).get("matrix", {}).get("include", [])]
    for command in commands:
        targets = re.findall(r"\bmake (.*)", command)
        assert set(" ".join(targets).split()) <= TARGETS, command
