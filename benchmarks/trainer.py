"""What the trainer costs over a bare loop. Run: python -m benchmarks.trainer

`--method local` of the trainer (logging, clipping, schedule, evaluation of nothing) against the same model in a plain
PyTorch loop, one process on one core, blocks in turn (ABBA). The trainer's time is the wall time between the log lines
of its first and last counted step, so its logging is in it.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.record import RESULTS, Target, write
from diloco.exchange.world import World
from diloco.runs.config import TrainConfig
from diloco.train.data.batches import Batches
from diloco.train.data.corpus import prepare
from diloco.train.model import build
from diloco.train.run import train

WARM_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="the trainer against a bare loop")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    config = TrainConfig(method="local", inner="adamw", replicas=1, batch=8, steps=arguments.steps + WARM_UP, lr=1e-3,
                         eval_every=10_000, save_every=10_000)  # fmt: skip
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        for i in range(arguments.pairs):
            order = (trainer, bare) if i % 2 == 0 else (bare, trainer)
            speeds = {kind: kind(config, Path(folder) / f"{i}") for kind in order}
            pairs.append((speeds[trainer], speeds[bare]))
            print(f"pair {i}: trainer {pairs[-1][0]:.0f}, bare {pairs[-1][1]:.0f} tokens/s", flush=True)
        dist.destroy_process_group()
    ratio = statistics.median(a / b for a, b in pairs)
    settings = {"pairs": arguments.pairs, "steps": arguments.steps, "model": config.model, "batch": config.batch,
                "context": config.context}  # fmt: skip
    values = {
        "ratio": ratio,
        "ratios": [a / b for a, b in pairs],
        "tokens_per_second": statistics.median(a for a, _ in pairs),
        "batch_milliseconds": 1000 * batch_seconds(),
    }
    targets = [
        Target("tokens per second, trainer ÷ bare loop", ratio, at_least=0.9),
        Target("time of a batch of 16 · 128 tokens, ms", values["batch_milliseconds"], at_most=0.5),
    ]
    write(RESULTS / "trainer.json", settings, values, targets)


def batch_seconds(count: int = 200) -> float:
    """The least of `count` batches."""
    data = Batches(np.zeros(10_000_000, np.uint16), replica=0, replicas=2, sequences=16, context=128, seed=0)
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        data.next()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def trainer(config: TrainConfig, folder: Path) -> float:
    train(config, World(0, 1, 0), folder)
    lines = [json.loads(line) for line in (folder / "replica-0/metrics.jsonl").read_text().splitlines()]
    at = {line["step"]: line["seconds"] for line in lines if line["event"] == "step"}
    assert config.steps is not None and isinstance(config.batch, int)
    return (config.steps - WARM_UP) * config.batch * config.context / (at[config.steps] - at[WARM_UP])


def bare(config: TrainConfig, folder: Path) -> float:
    corpus = prepare((), "bytes")
    model = build(config.model, corpus.tokenizer.vocabulary, config.context, 0)
    assert isinstance(config.batch, int) and config.steps is not None and config.lr is not None
    data = corpus.batches(0, 1, config.batch, config.context, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.99))
    began = 0.0
    for step in range(config.steps):
        if step == WARM_UP:
            began = time.perf_counter()
        x, y = data.next()
        model(x, y).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return (config.steps - WARM_UP) * config.batch * config.context / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
