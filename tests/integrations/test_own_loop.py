"""The diff of docs/frameworks.md for a loop like nanoGPT's, applied to one with nanoGPT's branches: a script that reads
RANK, sets its seed in both branches, saves on its master process alone, and resumes."""

import shutil

import pytest

from tests.support.frameworks import launch_forked, shown

pytestmark = pytest.mark.slow  # processes

NANO = shown("Your own loop")
SETUP = """
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed import init_process_group
out_dir, backend, max_iters, eval_interval, sync_every, iter_num = "out", "gloo", 12, 6, 4, 0
gradient_accumulation_steps, batches = 4, []
init_from = "resume" if os.path.exists("resume") else "scratch"
torch.manual_seed(int(os.environ.get("RANK", 0)))
model = Layers()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
evaluated = []
def get_batch(split):
    number = 1000 * (seed_offset + 1) + 10 * iter_num + len(batches) % 2 if split == "train" else 0
    batches.append(number)
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
@torch.no_grad()
def estimate_loss():
    evaluated.append(model(torch.ones(1, 8)).item())
    return {"val": evaluated[-1]}
"""
END = """
estimate_loss()
report(model, losses=evaluated, rounds=diloco.stats.rounds, batches=batches)
"""


def test_the_loop_agrees_learns_saves_the_agreed_model_and_resumes_bit_for_bit(tmp_path):
    (one,), (two,) = launch_forked(tmp_path, SETUP + NANO.after + END)
    assert one["hash"] == two["hash"] and one["losses"] == two["losses"] and one["losses"][-1] < one["losses"][0]
    assert one["rounds"] >= 4
    assert len(one["batches"]) == len(two["batches"]) == 24, "half of the accumulation steps"
    assert not set(one["batches"]) & set(two["batches"])
    (tmp_path / "resume").touch()  # from the checkpoint at step 6
    for (again,) in launch_forked(tmp_path, SETUP + NANO.after + END):
        assert again["hash"] == one["hash"] and again["losses"] == one["losses"][1:]
    read = SETUP + "model.load_state_dict(torch.load('out/replica-1/agreed/ckpt.pt')['model'])\nreport(model)\n"
    assert launch_forked(tmp_path, read, replicas=1)[0][0]["hash"] == one["hash"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"replica-0", "replica-1"}
    shutil.rmtree(tmp_path / "out")
