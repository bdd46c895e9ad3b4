"""Two replicas train one small byte model on the text of a Python module, each on its own half.

    torchrun --nproc_per_node 2 examples/minimal.py

Without the two lines marked "+" this is an ordinary loop, run twice.
"""

import inspect
import textwrap

import torch
import torch.distributed as dist
from torch import nn

from diloco import DiLoCo  # +

CONTEXT = 16


class ByteModel(nn.Module):
    """The next byte from the last 16."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width // 4)
        self.enter = nn.Linear(CONTEXT * width // 4, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.head = nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(self.embedding(x).flatten(1))
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return self.head(x)


def main() -> None:
    dist.init_process_group("gloo")
    rank, replicas = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # other weights on every replica: joining makes them equal
    text = torch.frombuffer(bytearray(inspect.getsource(textwrap) * 2, "utf8"), dtype=torch.uint8).long()
    windows = text.unfold(0, CONTEXT + 1, 1)[rank::replicas]  # this replica's own data
    model = ByteModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.zeros(())
    with DiLoCo(model, optimizer, sync_every=20) as diloco:  # +
        for step in range(1, 401):
            batch = windows[torch.randint(len(windows), (64,))]
            loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 100 == 0 and rank == 0:
                print(f"step {step}: loss of replica 0 {loss.item():.3f}")
    with torch.no_grad():
        shared = nn.functional.cross_entropy(model(windows[:4096, :-1]), windows[:4096, -1])
    stats, size = diloco.stats, sum(p.numel() for p in model.parameters())
    total = sum(p.detach().double().sum() for p in model.parameters())
    print(
        f"replica {rank}: loss {shared.item():.3f}; {stats.rounds} rounds, {stats.bytes_sent / 1e6:.2f} MB sent "
        f"(data-parallel in bf16: {400 * 2 * size / 1e6:.0f} MB), {stats.seconds_hidden:.2f} s of it hidden behind "
        f"training, {stats.seconds_exposed:.2f} s exposed; weights {total:.12f}\n",
        end="",  # one write: the lines of two processes stay apart
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
