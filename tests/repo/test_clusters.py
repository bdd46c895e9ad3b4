"""The scripts of examples/clusters, with stand-ins for Slurm's programs."""

import subprocess

import pytest

from tests.support.pages import ROOT

FOLDER = ROOT / "examples/clusters"
BUCKET = "s3://my-bucket/run-1"


@pytest.mark.slow
def test_slurm_requeues_only_a_job_that_was_told_to_stop(tmp_path):
    """The exit code of the trainer decides."""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/calls\nexit ${{CODE_{name}:-0}}\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "BUCKET": BUCKET, "MEMBER": "lab", "SLURM_NTASKS": "8",
                   "SLURM_JOB_ID": "7"}  # fmt: skip
    train = f"srun --kill-on-bad-exit=1 diloco train --bucket {BUCKET} --member lab --shards 8 --model 1b"
    for code, calls in ((0, [train]), (1, [train]), (130, [train, "scontrol requeue 7"])):
        (tmp_path / "calls").unlink(missing_ok=True)
        result = subprocess.run(["bash", FOLDER / "slurm.sbatch", "--model", "1b"],
                                env=environment | {"CODE_srun": str(code)})  # fmt: skip
        assert result.returncode == code and (tmp_path / "calls").read_text().splitlines() == calls
