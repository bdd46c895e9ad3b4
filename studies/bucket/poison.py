"""One member of four or eight lies about its delta or its work. Run: python -m studies.bucket.poison

The production code of protocol and core, one store operation at a time and on a clock of its own, so that nothing
depends on the machine's speed. Two problems: the next byte of this project's own pages, and a regression with noise.
The liar is honest in everything else: it trains, and then sends something else. Ratios are to the run of the honest
members without it, on the same batches; the loss is that of the anchors on data that nobody trained on. On the
regression that loss is what is left of the noise, and differs from one choice of batches to the next: the mean of some
of them counts.
"""

import argparse
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.record import Record, Target, write
from diloco import Float32, Nesterov
from tests.support.players import Player, World

RESULTS = Path(__file__).parent / "poison.json"
ROOT = Path(__file__).parents[2]
ATTACKS = {"−9.9 × the delta": (-9.9, 1.0), "−1 ×, 32 × the tokens": (-1.0, 32.0), "10⁶ × the delta": (1e6, 1.0),
           "−10⁶ × the delta": (-1e6, 1.0)}  # fmt: skip
SYNC_EVERY, BATCH, BYTES = 10, 32, 4
Problem = Literal["text", "regression"]
SEEDS: dict[Problem, int] = {"text": 1, "regression": 5}


class Text:
    """The next of some bytes."""

    def __init__(self) -> None:
        pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        self.data = torch.tensor(list("".join(page.read_text() for page in pages).encode("ascii", "replace")))
        places = torch.arange(len(self.data) - BYTES - 1)
        held_out = (places // 256) % 8 == 7
        self.train, self.held_out = places[~held_out], places[held_out][::7]

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(128, 8), nn.Flatten(), nn.Linear(8 * BYTES, 48), nn.Tanh(), nn.Linear(48, 128)
        )

    def loss(self, model: nn.Module, generator: torch.Generator | None) -> Tensor:
        at = self.held_out if generator is None else self.train[
            torch.randint(len(self.train), (BATCH,), generator=generator)
        ]  # fmt: skip
        x = torch.stack([self.data[at + k] for k in range(BYTES)], 1)
        return nn.functional.cross_entropy(model(x), self.data[at + BYTES])


class Regression:
    """What another model says, with noise; judged without it."""

    def __init__(self) -> None:
        torch.manual_seed(99)
        self.teacher = self.model()
        for parameter in self.teacher.parameters():
            parameter.data.mul_(2.0)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(self, model: nn.Module, generator: torch.Generator | None) -> Tensor:
        noise, count = (0.3, BATCH) if generator is not None else (0.0, 4096)
        generator = generator or torch.Generator().manual_seed(7)
        x = torch.randn(count, 8, generator=generator)
        with torch.no_grad():
            y = self.teacher(x) + noise * torch.randn(count, 1, generator=generator)
        return (model(x) - y).square().mean()


class Trainer(Player):
    def __init__(
        self, world: World, problem: Any, seed: int, number: int, attack: tuple[float, float], merge: str
    ) -> None:
        torch.manual_seed(0)
        model = problem.model()
        settings = {"sync_every": SYNC_EVERY, "overlap": 1, "outer": Nesterov(), "codec": Float32()}
        super().__init__(world, f"m{number}", model=model, settings=settings, merge=merge)
        self.problem, self.generator = problem, torch.Generator().manual_seed(1000 * seed + number)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        factor, work = attack
        send = self.reduce.send

        def altered(fragment: int, index: int, delta: Any) -> None:
            def made() -> Any:
                true = delta()
                return replace(true, values=true.values * factor, weight=true.weight * work)

            send(fragment, index, made if attack != (1.0, 1.0) else delta)

        self.reduce.send = altered

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.problem.loss(self.model, self.generator).backward()
        self.optimizer.step()
        self.diloco.step()


def trained(
    problem: Any, seed: int, members: int, rounds: int, merge: str, attack: tuple[float, float] = (1.0, 1.0)
) -> float:
    """The loss of the anchors after some rounds with all members, the last of which lies."""
    world = World(1)
    all_members = [
        Trainer(world, problem, seed, k, attack if k == members - 1 else (1.0, 1.0), merge) for k in range(members)
    ]
    for member in (*all_members, *all_members):
        member.turn()
    step = 0
    while world.closed(0) < rounds:
        step += 1
        for member in all_members:
            member.step()
        if step % SYNC_EVERY in (0, 1, 2):
            for member in (*all_members, *all_members):
                member.turn()
        world.now += 0.1
    first = all_members[0]
    judged = problem.model()
    nn.utils.vector_to_parameters(first.diloco._fragments[0].state.anchor, judged.parameters())
    with torch.no_grad():
        return float(problem.loss(judged, None))


def measured(kind: Problem, members: int, rounds: int, seed: int) -> Record:
    torch.set_num_threads(1)
    problem = Text() if kind == "text" else Regression()
    without = trained(problem, seed, members - 1, rounds, "mean")
    found: Record = {"without the liar": without}
    for merge in ("mean", "closest"):
        found[merge] = {
            name: trained(problem, seed, members, rounds, merge, attack) / without
            for name, attack in {"none": (1.0, 1.0), **ATTACKS}.items()
        }
    return found


def together(found: list[Record]) -> Record:
    """The mean over the seeds, and each of them."""
    merged = {
        merge: {name: fmean(one[merge][name] for one in found) for name in found[0][merge]}
        for merge in ("mean", "closest")
    }
    return {**merged, "seeds": found}


def save(values: Record, rounds: int) -> None:
    targets = []
    for name, found in values.items():
        for merge, most in (("closest", 1.05), ("mean", 2.0)):
            worst = max(found[merge][attack] for attack in ATTACKS)
            targets.append(Target(f"{name}, {merge}: worst loss ÷ that without the liar", worst, at_most=most))
    write(RESULTS, {"rounds": rounds, "sync_every": SYNC_EVERY, "batch": BATCH}, values, targets)


def main() -> None:
    parser = argparse.ArgumentParser(description="one member of four or eight lies")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    values: Record = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context) as pool:
        runs = {
            f"{kind}, 1 of {members}": [
                pool.submit(measured, kind, members, arguments.rounds, seed) for seed in range(seeds)
            ]
            for kind, seeds in SEEDS.items()
            for members in (4, 8)
        }
        for name, each in runs.items():
            values[name] = together([one.result() for one in each])
            print(name, json.dumps(values[name], ensure_ascii=False), flush=True)
            save(values, arguments.rounds)


if __name__ == "__main__":
    main()
