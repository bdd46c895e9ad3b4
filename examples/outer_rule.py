"""A new outer rule, tried on M replicas in one process beside those that are shipped, over seeds.

    python examples/outer_rule.py                  about a minute of one core
    python examples/outer_rule.py --replicas 8 --steps 400 --seeds 5

The rule is Adam, on the mean delta as if it were a gradient (FedAdam, arXiv 2003.00295). Write your own class in its
place. Every rule sees the same data and the same first weights, so the difference in a seed is that of the rule. What
wins on this toy need not win elsewhere; docs/parity.md is about that.
"""

import argparse
import inspect
import textwrap
from dataclasses import dataclass
from statistics import mean, stdev

import torch
from torch import Tensor, nn

from diloco import SGD, DiLoCo, Nesterov
from diloco.core.outer import Outer, Stage
from diloco.exchange import local

CONTEXT = 8


@dataclass(frozen=True)
class Adam:
    """m ← β1·m + (1 − β1)·Δ; v ← β2·v + (1 − β2)·Δ²; θ ← θ − η·m̂ / (√v̂ + ε)."""

    lr: float = 0.02
    beta1: float = 0.6
    beta2: float = 0.9
    epsilon: float = 1e-5

    def state(self, n: int) -> Tensor:
        return torch.zeros(2 * n)  # m and v, one behind the other

    def step(self, anchor: Tensor, delta: Tensor, state: Tensor, stage: Stage) -> None:
        m, v = state.chunk(2)
        m.mul_(self.beta1).add_(delta * (1 - self.beta1))  # no alpha=, no addcmul: all replicas must get the same bits
        v.mul_(self.beta2).add_(delta * delta * (1 - self.beta2))
        size = (v / (1 - self.beta2**stage.index)).sqrt_().add_(self.epsilon)
        anchor.sub_(m / (1 - self.beta1**stage.index) / size * self.lr)


RULES: dict[str, Outer] = {"average": SGD(1.0), "paper": Nesterov(0.4, 0.9, follow=False), "shipped": Nesterov(),
                           "adam": Adam()}  # fmt: skip


def model_of(seed: int) -> nn.Module:
    """The next byte from the last eight."""
    torch.manual_seed(seed)
    layers = [nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(96, 256))


def loss_with(rule: Outer, seed: int, replicas: int, steps: int, sync_every: int) -> float:
    """The loss of what the replicas agree on, on text that none of them has seen."""
    text = torch.frombuffer(
        bytearray(inspect.getsource(textwrap) + inspect.getsource(argparse), "utf8"), dtype=torch.uint8
    )
    windows = text.long().unfold(0, CONTEXT + 1, 1)
    seen, unseen = windows[: len(windows) * 9 // 10], windows[len(windows) * 9 // 10 :]
    parts = seen.tensor_split(replicas)  # each replica has another part of the text, so the deltas differ

    def loop(reduce: local.Local) -> float:
        model, mine = model_of(seed), parts[reduce.replica]
        data = torch.Generator().manual_seed(1000 * seed + reduce.replica)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        with DiLoCo(model, optimizer, sync_every=sync_every, outer=rule, reducer=reduce):
            for _ in range(steps):
                batch = mine[torch.randint(len(mine), (64,), generator=data)]
                nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1]).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        with torch.no_grad():
            return nn.functional.cross_entropy(model(unseen[:, :-1]), unseen[:, -1]).item()

    return local.run(replicas, loop)[0]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("replicas", 4), ("steps", 200), ("sync-every", 10), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    setting = given.replicas, given.steps, given.sync_every
    losses = {name: [loss_with(rule, n, *setting) for n in range(given.seeds)] for name, rule in RULES.items()}
    for name, found in losses.items():
        apart = [100 * (a / b - 1) for a, b in zip(found, losses["shipped"], strict=True)]
        spread = f" ± {stdev(apart):.2f}" if len(apart) > 1 else ""
        print(f"{name:8} loss {mean(found):.4f}   {mean(apart):+.2f}{spread} % against shipped, {len(found)} seeds")


if __name__ == "__main__":
    main()
