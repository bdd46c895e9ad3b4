"""Ray Train itself: examples/ray_train.py, with two workers in one small cluster."""

import os
import subprocess
import sys
from ast import literal_eval

import pytest
import torch

from tests.support.frameworks import COMMON, ROOT

pytestmark = pytest.mark.timeout(1500)
CLUSTER = """
import ray, runpy, sys
ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, object_store_memory=100_000_000)
"""
FAILS = """
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_post_hook
from examples import ray_train
undisturbed, marker = ray_train.loop, Path("died").absolute()
def dies_once(config):
    \"\"\"The second worker is gone after its 14th step, as after kill -9.\"\"\"
    steps = []
    def hook(*_):
        steps.append(1)
        if len(steps) == 14 and not marker.exists() and ray.train.get_context().get_world_rank() == 1:
            marker.touch()
            os._exit(9)
    register_optimizer_step_post_hook(hook)
    undisturbed(config)
ray_train.loop = dies_once
sys.argv[1:] = ["disturbed", "20"]
ray_train.main()
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """All in one cluster: to start one, and its workers, takes most of the time."""
    folder = tmp_path_factory.mktemp("ray")
    example = f"""
sys.argv[1:] = ["undisturbed", "20"]
runpy.run_path("{ROOT}/examples/ray_train.py", run_name="__main__")
"""
    (folder / "program.py").write_text(COMMON + CLUSTER + example + FAILS + "\nray.shutdown()\n")
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "1200",  # a worker's imports take a minute on a busy machine
        "RAY_memory_monitor_refresh_ms": "0",  # it would end workers because of what others have in memory
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "program.py"], env=environment, cwd=folder, capture_output=True, text=True,
                          timeout=1400)  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-20_000:]
    return folder, done.stdout


def checkpoints(folder):
    """Of each checkpoint, in their order, what each replica has saved."""
    return [
        [torch.load(path / f"replica-{rank}.pt") for rank in range(2)] for path in sorted(folder.glob("checkpoint_2*"))
    ]


def equal(one, other):
    return all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])


def test_the_example_agrees_and_learns_and_every_replica_has_its_file(ran):
    folder, out = ran
    middle, last = checkpoints(folder / "undisturbed")
    assert [replica["step"] for replica in middle + last] == [10, 10, 20, 20]
    assert equal(*last) and not equal(*middle)
    (line,) = [line for line in out.splitlines() if line.startswith("{'step': 20") and "undisturbed" in line]
    figures = literal_eval(line.split(" in ")[0])
    assert figures["rounds"] >= 4 and figures["bytes_sent"] > 1000 and figures["loss"] < 0.95 * 2.0


def test_after_the_death_of_a_worker_it_ends_with_the_same_bits(ran):
    folder, _ = ran
    assert (folder / "died").exists()
    expected = checkpoints(folder / "undisturbed")[-1]
    for one, other in zip(expected, checkpoints(folder / "disturbed")[-1], strict=True):
        assert equal(one, other)
