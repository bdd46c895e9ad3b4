"""The diff of docs/frameworks.md for a loop like nanoGPT's, applied to one: a script that reads RANK, saves on its
master process alone, and resumes."""

import shutil

from tests.support.frameworks import after, launch_forked, shown

NANO = shown("Loops of one's own")
SETUP = """
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed import init_process_group
out_dir, backend, max_iters, eval_interval, sync_every, iter_num, seed_offset = "out", "gloo", 12, 6, 4, 0, 0
init_from = "resume" if os.path.exists("resume") else "scratch"
torch.manual_seed(int(os.environ.get("RANK", 0)))
model = Layers()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
def get_batch(split):
    number = 1000 * (seed_offset + 1) + iter_num if split == "train" else 0
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
@torch.no_grad()
def estimate_loss():
    losses.append(model(get_batch("val")).item())
    return losses[-1]
"""
END = """
estimate_loss()
said(model, losses=losses, rounds=diloco.stats.rounds)
"""


def test_the_diff_is_short_and_the_loop_agrees_learns_and_resumes_bit_for_bit(tmp_path):
    added = sum(line[0] == "+" for line in NANO.splitlines())
    assert added - sum(line[0] == "-" for line in NANO.splitlines()) <= 12
    (one,), (two,) = launch_forked(tmp_path, SETUP + after(NANO) + END)
    assert one["hash"] == two["hash"] and one["losses"] == two["losses"] and one["losses"][-1] < one["losses"][0]
    assert one["rounds"] >= 4
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"replica-0", "replica-1"}
    (tmp_path / "resume").touch()  # from the checkpoint at step 6
    for (again,) in launch_forked(tmp_path, SETUP + after(NANO) + END):
        assert again["hash"] == one["hash"] and again["losses"] == one["losses"][1:]
    shutil.rmtree(tmp_path / "out")


def test_without_the_diff_it_is_a_loop_that_uses_ddp(tmp_path):
    """So the test above has changed what such a script does."""
    before = "\n".join(line[1:] for line in NANO.splitlines() if not line.startswith("+"))
    said = launch_forked(tmp_path, SETUP + before + "\nsaid(model, wrapped=type(model).__name__)\n")
    assert [each["wrapped"] for (each,) in said] == ["DistributedDataParallel"] * 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ckpt.pt"]
