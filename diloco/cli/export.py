"""`diloco export RUN --to DIR`: the agreed weights of a run as a Hugging Face folder."""

import contextlib
import copy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.cli import supervise
from diloco.errors import ConfigError, DiLoCoError
from diloco.exchange.world import World, own_world, started_here
from diloco.runs import folder as folders
from diloco.runs.config import TrainConfig
from diloco.runs.flags import REQUIRED, flag, parse


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write config.json, model.safetensors and the tokenizer of a run's anchors."""

    run: Path = flag(REQUIRED, "Folder of the run, such as runs/tiny-streaming-1.", positional=True)
    to: Path = flag(REQUIRED, "Folder to write.")
    step: int | None = flag(None, "Step of the checkpoint.", why="the newest")


CONFIG = ExportConfig
EXAMPLES = ("diloco export runs/tiny-streaming-1 --to tiny-hf",)


def main(config: ExportConfig) -> int:
    checkpoint, step = checkpoint_of(config.run, config.step)
    if config.to.exists() and not (config.to.is_dir() and not any(config.to.iterdir())):
        raise ConfigError(f"{config.to} is not an empty folder: use another --to, or empty it first")
    settings: TrainConfig = parse(TrainConfig, [str(config.run / "config.toml")])
    if not started_here():
        print(f"export: writing the anchors of {config.run}, step {step}; loading torch takes a few seconds",
              file=sys.stderr)  # fmt: skip
    if settings.shards > 1 and not started_here():
        _start_ranks(settings.shards, [str(config.run), "--to", str(config.to), "--step", str(step)])
    else:
        from diloco.train.model import export

        model, tokenizer, rank = load_anchors(config.run, settings, checkpoint)
        if rank == 0:
            export(model, tokenizer, config.to)
    if not started_here():
        print(config.to)
        print(f'export: done. Try it: diloco sample {config.to} "text". Load it: '
              f'AutoModelForCausalLM.from_pretrained("{config.to}")', file=sys.stderr)  # fmt: skip
    return 0


def checkpoint_of(run: Path, step: int | None) -> tuple[Path, int]:
    """The folder and step of a run's checkpoint, the newest unless `step` is set."""
    if not (run / "config.toml").exists():
        raise ConfigError(f"{run} holds no run: use a folder with a config.toml, such as runs/tiny-streaming-1")
    paths = folders.checkpoints(run / "replica-0" / "checkpoints")
    if not paths:
        raise ConfigError(f"{run} has no complete checkpoint: runs save one every --save-every steps and at the end")
    step = max(paths) if step is None else step
    if step not in paths:
        raise ConfigError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, sorted(paths)))}")
    return paths[step], step


def load_anchors(run: Path, settings: TrainConfig, checkpoint: Path) -> tuple[Any, Any, int]:
    """A model that holds the anchors of a checkpoint, its tokenizer, and the rank of this process.

    A sharded run needs one process per rank, as `_start_ranks` starts them; only the first of them has the anchors.
    """
    import torch.distributed as dist

    from diloco.exchange import local
    from diloco.exchange.rendezvous import meet
    from diloco.train.data.tokenizer import load_tokenizer
    from diloco.train.model import build

    spec = settings.tokenizer or "bytes"
    tokenizer = load_tokenizer(spec if spec == "bytes" else str(run / "tokenizer"))
    model = build(settings.model, tokenizer.vocabulary, settings.context, settings.seed)
    if settings.shards == 1:
        world = World(0, 1, 0)
        local.run(1, lambda reduce: _load_anchors(model, settings, checkpoint, world, reduce))
    else:
        world = own_world(settings.shards, 1)
        assert world is not None
        meet(world)
        _load_anchors(model, settings, checkpoint, world, None)
        dist.destroy_process_group()
    return model, tokenizer, world.rank


def _load_anchors(model: Any, settings: TrainConfig, checkpoint: Path, world: World, reduce: Any) -> None:
    """Fill the model with the anchors. A checkpoint holds the replica's weights and, separately, the anchors."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    from diloco.train.checkpoint import alone
    from diloco.train.setup import attach, optimizers, spread

    sharded, mesh = spread(copy.deepcopy(model), settings, world, torch.device("cpu"))
    diloco = attach(sharded, optimizers(sharded, settings), settings, mesh, reduce)
    state = {"model": get_model_state_dict(sharded)}
    with alone():
        dcp.load(state | ({"diloco": diloco} if diloco else {}), checkpoint_id=checkpoint, no_dist=world.size == 1)
    set_model_state_dict(sharded, state["model"])
    with diloco.anchors() if diloco else contextlib.nullcontext():
        weights = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if world.rank == 0:
            model.load_state_dict(weights)


def _start_ranks(shards: int, words: list[str]) -> None:
    """Start one process per shard of the anchors, to gather them."""
    with tempfile.TemporaryDirectory() as logs:
        code, reason = supervise.start(["export", *words], shards, Path(logs), shards, lambda: None)
        if code:
            texts = [text for log in Path(logs).glob("replica-0/log*.txt") if (text := log.read_text().strip())]
            raise DiLoCoError(texts[0].splitlines()[-1] if texts else reason)
