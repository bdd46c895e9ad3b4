"""Under a real Slurm, with two nodes on this machine: `make test-slurm`."""

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.slurm import cluster, script

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)
TRAIN = f"{sys.executable} -m diloco train --model tiny --context 32 --batch 4 --sync-every 4"
LOOP = """
import hashlib, torch
from diloco import DiLoCo, replica
reduce = replica()
torch.manual_seed(reduce.replica)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with DiLoCo(model, optimizer, sync_every=4, reducer=reduce) as diloco:
    for step in range(9):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("SAID", reduce.replica, "of", reduce.replicas, hashlib.sha256(values).hexdigest(), diloco.stats.rounds)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def submit(slurm, tmp_path):
    def run(*words):
        done = slurm.submit(*map(str, words), cwd=tmp_path, PYTHONPATH=str(ROOT), HOME=str(tmp_path))
        logs = "".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))
        return done.returncode, done.stdout + done.stderr + logs

    return run


def test_tasks_of_srun_on_two_nodes_become_replicas_and_end_equal(submit, tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    code, out = submit("srun", "-N", "2", "-n", "2", sys.executable, "loop.py")
    replicas = sorted(re.findall(r"SAID (\d) of 2 (\w+) (\d+)", out))
    assert code == 0 and [number for number, _, _ in replicas] == ["0", "1"], out
    assert replicas[0][1] == replicas[1][1] and int(replicas[0][2]) > 0


def test_the_trainer_is_one_run_on_two_nodes(submit, tmp_path):
    code, out = submit("srun", "-N", "2", "-n", "2", *TRAIN.split(), "--steps", "6", "--name", "pair")
    assert code == 0, out
    assert (tmp_path / "runs/pair/replica-1/metrics.jsonl").exists() and "loss of the anchors" in out


def test_a_batch_shell_without_srun_starts_its_own_replicas_and_waits_for_no_task(submit, tmp_path):
    batch = script(tmp_path / "batch", ["-n 2"], f"{TRAIN} --steps 4 --replicas 2 --name alone\n")
    code, out = submit("sbatch", "--wait", batch)
    assert code == 0 and "waiting for" not in out, out
    assert (tmp_path / "runs/alone/replica-1/metrics.jsonl").exists()


def test_two_steps_of_one_job_are_two_runs(submit, tmp_path):
    """At the same time, on the same nodes."""
    step = f"srun --overlap -N 2 -n 2 {TRAIN} --steps 4 --name"
    batch = script(tmp_path / "batch", ["-N 2", "-n 4"], f"{step} a & first=$!\n{step} b & wait $! && wait $first\n")
    code, out = submit("sbatch", "--wait", batch)
    assert code == 0, out
    for name in "ab":
        replicas = {path.parent.name for path in tmp_path.glob(f"runs/{name}/replica-*/metrics.jsonl")}
        assert replicas == {"replica-0", "replica-1"}, out


def test_a_job_array_is_as_many_runs(submit, tmp_path):
    body = f'srun -n 2 {TRAIN} --steps 4 --name "each-$SLURM_ARRAY_TASK_ID"\n'
    code, out = submit("sbatch", "--wait", "--array=0-1", script(tmp_path / "batch", ["-n 2"], body))
    assert code == 0, out
    assert len(list(tmp_path.glob("runs/each-*/replica-1/metrics.jsonl"))) == 2


def test_two_sites_with_the_template_meet_in_the_bucket_and_end_equal(submit, tmp_path):
    """examples/clusters/slurm.sbatch as it is, but for the GPUs, and with two tasks instead of eight: two jobs are two
    sites."""
    text = (ROOT / "examples/clusters/slurm.sbatch").read_text().replace("#SBATCH --gpus-per-node=8\n", "")
    (tmp_path / "site").write_text(text)
    (tmp_path / "diloco").write_text(f'#!/bin/sh\nexec {sys.executable} -m diloco "$@"\n')
    (tmp_path / "diloco").chmod(0o755)
    environment = f"ALL,BUCKET={tmp_path}/bucket,PATH={tmp_path}:{os.environ['PATH']}"
    words = [*TRAIN.split()[4:], "--steps", "8"]
    batch = ["sbatch", "--wait", "--ntasks-per-node=2"]
    jobs = [[*batch, f"--export={environment},MEMBER={name}", "site", *words] for name in ("lab", "office")]
    with ThreadPoolExecutor(2) as sites:
        ends = list(sites.map(lambda job: submit(*job), jobs))
    assert [code for code, _ in ends] == [0, 0], ends[0][1]
    losses = [json.loads((tmp_path / f"runs/bucket-{name}/summary.json").read_text()) for name in ("lab", "office")]
    assert losses[0]["loss"] == losses[1]["loss"]
