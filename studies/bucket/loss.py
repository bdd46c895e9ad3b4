"""What the bucket does to the loss: without faults, and with a slow member (late work carried or given up)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.record import Record
from diloco import Nesterov
from diloco.core.muon import adamw
from diloco.runs.config import TrainConfig
from diloco.runs.presets import Shape
from diloco.train.data.corpus import Corpus, prepare
from diloco.train.model import Decoder, held_out_loss
from diloco.train.settings import lr_at
from tests.support.players import Player, World

SEEDS = 4
WORDS = ["--model", "tiny", "--batch", "16", "--context", "64", "--sync-every", "10", "--fragments", "balanced:3",
         "--overlap", "2", "--replicas", "2", "--steps", "500", "--eval-every", "100000", "--save-every", "100000",
         "--lr", "0.004"]  # fmt: skip


def loss(folder: str) -> Record:
    """The same command with the collective reducer and with two members of a bucket. The seed gives the weights at the
    start; members of a bucket have an order of the data of their own, so pairs differ by that too."""
    pairs = []
    for seed in range(SEEDS):
        place = Path(f"{folder}-{seed}")
        together = [_start(place, "collective", seed)]
        collective = _loss(together, place / "collective")
        bucket = [
            "--bucket",
            str(place / "bucket"),
            "--quorum",
            "2",
        ]  # otherwise the first to start would close rounds alone
        members = [_start(place, name, seed, *bucket, "--member", name) for name in "ab"]
        pairs.append((collective, _loss(members, place / "a")))
    ratios = [b / a for a, b in pairs]
    mean = sum(ratios) / len(ratios)
    spread = (sum((r - mean) ** 2 for r in ratios) / (len(ratios) - 1)) ** 0.5
    return {"pairs": pairs, "ratio": mean, "error": spread / len(ratios) ** 0.5}


def _start(place: Path, name: str, seed: int, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "diloco", "train", "--name", name, "--out", str(place), "--seed", str(seed)]
    return subprocess.Popen([*command, *WORDS, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            stdin=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip


def _loss(processes: list[subprocess.Popen[bytes]], run: Path) -> float:
    for process in processes:
        if code := process.wait(300):
            raise RuntimeError(f"{process.args} ended with {code}")
    return json.loads((run / "summary.json").read_text())["loss"]


TICKS, SLOWER, STRAGGLER_TIMEOUT, BATCH, CONTEXT = 300, 10, 3.0, 8, 64
"""Steps of the fast; how much slower the third is; steps of the fast that a round waits, so that it is late for most;
sequences of a member's step; tokens of each."""
SETTINGS = {"sync_every": 20, "overlap": 2, "outer": Nesterov(0.7)}
CPU = torch.device("cpu")


def carrying(folder: str) -> Record:
    """Two fast members alone; with a third at a tenth of their speed; and with one that gives up what came too late.

    In one process with a clock of its own, so that only the arms differ.
    """
    torch.set_num_threads(1)  # with two, a step on busy cores takes twenty times as long
    corpus = prepare((), "bytes")
    arms: dict[str, list[Record]] = {"alone": [], "carried": [], "given up": []}
    for seed in range(3):
        for arm, found in arms.items():
            found.append(_train(corpus, arm, seed))
    return {
        arm: {
            "losses": [each["loss"] for each in found],
            "ratio": sum(a["loss"] / b["loss"] for a, b in zip(found, arms["alone"], strict=True)) / len(found),
            "share": sum(each["share"] for each in found) / len(found),
            "counted": found[0]["counted"],
        }
        for arm, found in arms.items()
    } | {"settings": {"ticks": TICKS, "slower": SLOWER, "sync_every": SETTINGS["sync_every"]}}


class _Member:
    def __init__(self, world: World, name: str, corpus: Corpus, config: TrainConfig, number: int) -> None:
        self.model = Decoder(Shape(6, 32, 1, 96, corpus.tokenizer.vocabulary), CONTEXT)
        self.model.initialize(torch.Generator().manual_seed(config.seed))
        assert config.lr is not None
        (self.optimizer,) = adamw(self.model, config.lr, 1 / TICKS)
        self.config = config
        self.data = corpus.batches(number, 3, BATCH, CONTEXT, config.seed)
        self.player = Player(world, name, model=self.model, settings=SETTINGS, straggler_timeout=STRAGGLER_TIMEOUT)
        self.player.turn()

    def step(self, tick: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(self.config, tick)
        self.model(*self.data.next()).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.player.diloco.step()

    def give_up(self) -> None:
        """Put local back to the anchor after rounds that did not count it."""
        diloco = self.player.diloco
        for part in diloco._fragments:
            late = [r for r in diloco.stats.last if r.fragment == part.number and r.applied_step == diloco.step_count]
            if late and not late[-1].counted:
                part.jump(part.state, diloco.replica.work)


def _train(corpus: Corpus, arm: str, seed: int) -> Record:
    config = TrainConfig(lr=8e-3, steps=TICKS, seed=seed)
    world = World(fragments=3)
    members = [_Member(world, name, corpus, config, k) for k, name in enumerate("ab" if arm == "alone" else "abs")]
    for tick in range(1, TICKS + 1):
        world.now += 1.0
        for number, member in enumerate(members):
            if number < 2 or tick % SLOWER == 0:
                member.step(tick)
                if arm == "given up" and number == 2:
                    member.give_up()
        for member in members:
            member.player.turn()
    first = members[0]
    with first.player.diloco.anchors():
        final = held_out_loss(first.model, corpus.evaluation(CONTEXT, 65_536), CPU)
    weights = [(m.get("s", 0.0), sum(m.values())) for m in _rounds(first.player)]
    slow = members[2].player.diloco.stats.last if arm != "alone" else []
    return {"loss": final, "share": sum(a for a, _ in weights) / sum(b for _, b in weights),
            "counted": [sum(r.counted for r in slow), len(slow)]}  # fmt: skip


def _rounds(player: Player) -> list[dict[str, float]]:
    return [dict(outcome.members) for _, outcome in player.reduce.outcomes if hasattr(outcome, "members")]
