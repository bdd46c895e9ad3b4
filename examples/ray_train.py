"""Two workers of Ray Train are two replicas of one small model, each on data of its own.

    pip install 'ray[train]'
    python examples/ray_train.py out 20

Ray merges what all workers put into a checkpoint, so each replica's file has its number in its name. Started again with
the same folder, or after a worker has died, the run goes on from its last checkpoint.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train  # pyright: ignore[reportMissingImports]
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model  # pyright: ignore[reportMissingImports]
from torch import nn

from diloco import DiLoCo


class Model(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return (x - 1).square().mean()


def loop(config: dict[str, Any]) -> None:
    """What each worker runs."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(rank)
    model = prepare_model(Model(), parallel_strategy=None)  # no DDP: each worker is a replica
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    diloco = DiLoCo(model, optimizer, sync_every=5)
    parts, step, loss = {"model": model, "optimizer": optimizer, "diloco": diloco}, 0, torch.zeros(())
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, f"replica-{rank}.pt"), weights_only=True)
        step = saved.pop("step")
        for name, state in saved.items():
            parts[name].load_state_dict(state)
    with diloco:
        while step < config["steps"]:
            step += 1
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * rank + step))
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0 and step < config["steps"]:
                report(rank, step, loss.item(), parts)
    report(rank, step, loss.item(), parts)  # after the last sync: all replicas are equal


def report(rank: int, step: int, loss: float, parts: dict[str, Any]) -> None:
    """Save everything that this replica needs to go on, and give Ray the figures."""
    stats = parts["diloco"].stats
    figures = {"step": step, "loss": loss, "rounds": stats.rounds, "bytes_sent": stats.bytes_sent}
    with tempfile.TemporaryDirectory() as folder:
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({"step": step, **states}, Path(folder, f"replica-{rank}.pt"))
        ray.train.report(figures, checkpoint=ray.train.Checkpoint.from_directory(folder))


def main() -> None:
    out, steps = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    result = TorchTrainer(
        loop,
        train_loop_config={"steps": steps},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),  # for CPUs; leave it out with GPUs
        run_config=ray.train.RunConfig(
            storage_path=str(out.parent),
            name=out.name,
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    ).fit()
    print(f"{result.metrics} in {result.checkpoint.path}")


if __name__ == "__main__":
    main()
