"""examples/clusters: checked by shellcheck, hadolint and Kubeflow's models, and started on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api import models  # pyright: ignore[reportMissingImports]

from tests.support.pages import ROOT

pytestmark = pytest.mark.timeout(900)
BIN = Path(sys.executable).parent
FOLDER = ROOT / "examples/clusters"
TINY = ["--model", "tiny", "--context", "32", "--batch", "8", "--sync-every", "4"]
TINY += ["--steps", "8"]


def run(*words, **options):
    result = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=800, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_shellcheck_and_hadolint_find_nothing():
    run(BIN / "shellcheck", FOLDER / "member.sh", FOLDER / "slurm.sbatch")
    run(BIN / "hadolint", FOLDER / "Containerfile")


@pytest.mark.parametrize(
    ("name", "kind"), [("trainjob", "TrainerV1alpha1TrainJob"), ("jobset", "JobsetV1alpha2JobSet")]
)
def test_manifests_have_only_fields_of_kubeflow(name, kind):
    schema, document = getattr(models, kind), yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    assert schema.from_dict(document).to_dict() == document  # the models drop unknown fields


def test_two_members_of_two_processes_end_equal(tmp_path):
    environment = {**os.environ, "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}", "BUCKET": str(tmp_path / "run"),
                   "DEVICES": "2", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path}
    members = [
        subprocess.Popen([FOLDER / "member.sh", *TINY], env=environment | {"MEMBER": name}, **pipes)
        for name in ("east", "west")
    ]
    outs = [member.communicate(timeout=800)[0] for member in members]
    assert [member.returncode for member in members] == [0, 0], outs
    ends = [json.loads((tmp_path / f"runs/run-{name}/summary.json").read_text()) for name in ("east", "west")]
    assert ends[0]["loss"] == ends[1]["loss"]  # of the anchors
