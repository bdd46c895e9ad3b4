"""The diff of docs/frameworks.md for nanochat, applied to a loop of its shape: an optimizer that looks for a default
process group, a loader that divides by RANK, weights that are loaded before, a file for each rank."""

import shutil

from tests.support.frameworks import launch_forked, shown

SETUP = """
import torch.distributed as dist
def dist_info():
    if "RANK" not in os.environ:
        return False, 0, 0, 1
    return True, *(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
def compute_init(device_type):
    ddp, rank, local_rank, size = dist_info()
    if ddp:
        dist.init_process_group("gloo")
    return ddp, rank, local_rank, size, device_type
class MuonAdamW(torch.optim.AdamW):
    def step(self, closure=None):
        if dist.is_initialized():  # what would make one data-parallel job of the replicas
            for group in self.param_groups:
                for p in group["params"]:
                    dist.all_reduce(p.grad)
        return super().step(closure)
class GPT(Layers):
    def forward(self, x):
        used.extend(hash(x) for x in x.flatten()[:1].tolist() if self.training and torch.is_grad_enabled())
        return super().forward(x)
    def setup_optimizer(self):
        return MuonAdamW(self.parameters(), lr=1e-2)
def loader(first):
    _, rank, _, size = dist_info()
    number = 2 * first + rank  # in the first 6 steps each of the two replicas has used every second one of 12
    while True:
        yield torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        number += size
def save_checkpoint(folder, step, model_data, optimizer_data, meta_data, rank):
    os.makedirs(folder, exist_ok=True)
    torch.save((model_data, optimizer_data, json.loads(json.dumps(meta_data))), f"{folder}/{step}-{rank}.pt")
def load_checkpoint(folder, step, device):
    return torch.load(f"{folder}/{step}-0.pt")
@torch.no_grad()
def evaluate_bpb(model):
    evaluated.append(model(torch.ones(1, 8)).item())
resuming = os.path.exists("resume")
checkpoint_dir, device_type, sync_every, num_iterations, save_every, resume_from_step = "out", "cpu", 4, 12, 6, 6
eval_every, evaluated, used = 3, [], []
step, train_loader = 0, loader(6 if resuming else 0)
torch.manual_seed(int(os.environ.get("RANK", 0)))
with torch.device("meta"):
    model = GPT()
model.to_empty(device="cpu")
model.load_state_dict({name: torch.randn_like(p) / 3 for name, p in model.state_dict().items()}, assign=True)
for p in model.parameters():
    p.requires_grad_(True)
"""
END = """
saved = load_checkpoint(checkpoint_dir, 12, device)[0]
report(model, rounds=diloco.stats.rounds, group=dist.is_initialized(), evaluated=evaluated, used=used,
     agreed=all(p.equal(saved[name]) for name, p in model.state_dict().items()))
"""


def test_a_loop_of_its_shape_agrees_learns_saves_the_agreed_model_and_resumes_bit_for_bit(tmp_path):
    code = SETUP + shown("nanochat").after + END
    (one,), (two,) = launch_forked(tmp_path, code)
    assert one["hash"] == two["hash"] and one["rounds"] >= 4 and not one["group"] and one["agreed"] and two["agreed"]
    assert one["evaluated"] == two["evaluated"] and one["evaluated"][-1] < one["evaluated"][0]
    assert len(one["used"]) == 12 and not set(one["used"]) & set(two["used"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"replica-0", "replica-1"}
    (tmp_path / "resume").touch()
    for (again,) in launch_forked(tmp_path, code):
        assert again["hash"] == one["hash"]
    shutil.rmtree(tmp_path / "out")
