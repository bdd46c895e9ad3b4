"""Ray Train itself: examples/ray_train.py and the diff of docs/frameworks.md, with two workers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.frameworks import COMMON, ROOT, after, longer, shown

pytestmark = pytest.mark.timeout(900)
RAY = shown("Ray Train")
PROGRAM = """
import ray.train.torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
def build():
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(rank)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
    model.append(Loss())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), [torch.randn(4, 8) for _ in range(12)]
class Loss(torch.nn.Module):
    def forward(self, x):
        return (x - 1).square().mean()
scaling, run = ScalingConfig(num_workers=2), RunConfig(storage_path=os.getcwd())
result = TorchTrainer(loop, scaling_config=scaling, torch_config=TorchConfig(backend="gloo"), run_config=run).fit()
print("SAID", result.metrics)
"""


def run(folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
                   "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600", "RAY_USAGE_STATS_ENABLED": "0"}  # fmt: skip
    done = subprocess.run([sys.executable, *map(str, words)], env=environment, cwd=folder, capture_output=True,
                          text=True, timeout=800)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def saved_in(folder):
    return [torch.load(Path(folder, f"replica-{rank}.pt")) for rank in range(2)]


def test_the_example_agrees_learns_and_resumes_bit_for_bit(tmp_path):
    out = run(tmp_path, ROOT / "examples/ray_train.py", "out", 20)
    first, last = sorted((tmp_path / "out/to-20-0").glob("checkpoint_*"))
    assert re.search(r"'step': 20, 'loss': 0\.\d+, 'rounds': [4-9], 'bytes_sent': \d{4}", out), out
    one, two = saved_in(last)
    assert all(torch.equal(one["model"][name], two["model"][name]) for name in one["model"])
    middle = saved_in(first)
    assert not torch.equal(middle[0]["model"]["layers.0.weight"], middle[1]["model"]["layers.0.weight"])
    run(tmp_path, ROOT / "examples/ray_train.py", "out", 20, first)
    (again,) = (tmp_path / "out/to-20-1").glob("checkpoint_*")
    for saved in saved_in(again):
        assert all(torch.equal(saved["model"][name], one["model"][name]) for name in one["model"])


def test_the_diff_runs_and_its_figures_are_in_the_report(tmp_path):
    assert longer(RAY) <= 3
    (tmp_path / "program.py").write_text(COMMON + after(RAY) + PROGRAM)
    out = run(tmp_path, "program.py")
    assert re.search(r"SAID {'loss': [\d.]+, 'rounds': [4-9], 'bytes': \d{3,}}", out), out
