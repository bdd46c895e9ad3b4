"""`diloco export RUN --to DIR`: the agreed weights of a run as a Hugging Face folder."""

import contextlib
import copy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.cli import supervise
from diloco.errors import ConfigError, DiLoCoError
from diloco.flags import REQUIRED, flag, parse, stored
from diloco.runs import folder as folders
from diloco.runs.config import TrainConfig
from diloco.world import own_world, started_here


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write config.json, model.safetensors and the tokenizer of a run's anchors."""

    run: Path = flag(REQUIRED, "Folder of the run, as in runs/tiny-streaming-1.", positional=True)
    to: Path = flag(REQUIRED, "Folder to write.")
    step: int | None = flag(None, "Step of the checkpoint.", why="the newest")


CONFIG = ExportConfig
EXAMPLES = ("diloco export runs/tiny-streaming-1 --to tiny-hf",)


def main(config: ExportConfig) -> int:
    checkpoint, step = checkpoint_of(config.run, config.step)
    if config.to.exists() and not (config.to.is_dir() and not any(config.to.iterdir())):
        raise ConfigError(f"{config.to} is not an empty folder: give another --to, or empty it first")
    settings: TrainConfig = parse(TrainConfig, stored(config.run / "config.toml"))
    if not started_here():
        print(f"export: writing the anchors of {config.run}, step {step}; loading torch takes some seconds",
              file=sys.stderr)  # fmt: skip
    if settings.shards == 1:
        _write(settings, checkpoint, config.to)
    elif started_here():
        _write_shards(settings, checkpoint, config.to)
    else:
        _start_shards(settings.shards, [str(config.run), "--to", str(config.to), "--step", str(step)])
    if not started_here():
        print(config.to)
        print(f'export: done. Talk to it: diloco sample {config.to} "text". Load it: '
              f'AutoModelForCausalLM.from_pretrained("{config.to}")', file=sys.stderr)  # fmt: skip
    return 0


def checkpoint_of(run: Path, step: int | None) -> tuple[Path, int]:
    """The folder of a checkpoint of a run, the newest if no step is given, and its step."""
    if not (run / "config.toml").exists():
        raise ConfigError(f"{run} holds no run: give a folder with a config.toml, as in runs/tiny-streaming-1")
    paths = folders.checkpoints(run / "replica-0" / "checkpoints")
    if not paths:
        raise ConfigError(f"{run} has no complete checkpoint: there is one after --save-every steps and at the end")
    chosen = max(paths) if step is None else step
    if chosen not in paths:
        raise ConfigError(f"{run} has no checkpoint of step {chosen}; there are {sorted(paths)}")
    return paths[chosen], chosen


def _write(settings: TrainConfig, checkpoint: Path, to: Path) -> None:
    from diloco.train.export import export_module

    with_anchors(settings, checkpoint, lambda model, tokenizer: export_module(model, tokenizer, to))


def with_anchors(settings: TrainConfig, checkpoint: Path, act: Callable[[Any, Any], None]) -> None:
    """Call `act` with a model that holds the anchors of a checkpoint, and with the tokenizer."""
    import torch.distributed.checkpoint as dcp

    from diloco.reduce import local
    from diloco.train.checkpoint import alone
    from diloco.train.data.corpus import prepare
    from diloco.train.model import build
    from diloco.train.setup import attach, optimizers

    corpus = prepare(settings.data, settings.tokenizer or "bytes", text_key=settings.text_key)
    model = build(settings.model, corpus.tokenizer.vocabulary, settings.context, settings.seed)
    state: dict[str, Any] = {"model": model.state_dict()}
    with alone():
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    model.load_state_dict(state["model"])

    def take(reduce: local.Local) -> None:
        """A checkpoint holds the replica's own weights and, separately, the anchors."""
        diloco = attach(model, optimizers(model, settings), settings, None, reduce)
        if diloco:
            with alone():
                dcp.load({"diloco": diloco}, checkpoint_id=checkpoint, no_dist=True)
        with diloco.anchors() if diloco else contextlib.nullcontext():
            act(model, corpus.tokenizer)

    local.run(1, take)


def _start_shards(shards: int, words: list[str]) -> None:
    """Each rank's checkpoint has one shard of the anchors: start one process for each, to gather them."""
    with tempfile.TemporaryDirectory() as logs:
        code, reason = supervise.start(["export", *words], shards, Path(logs), shards, lambda: None)
        if code:
            said = [text for log in Path(logs).glob("replica-0/log*.txt") if (text := log.read_text().strip())]
            raise DiLoCoError(said[0].splitlines()[-1] if said else reason)


def _write_shards(settings: TrainConfig, checkpoint: Path, to: Path) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    from diloco.rendezvous import meet
    from diloco.train.data.corpus import prepare
    from diloco.train.export import export_module
    from diloco.train.model import build
    from diloco.train.setup import attach, optimizers, spread

    world = own_world(settings.shards, 1)
    assert world is not None
    meet(world)
    corpus = prepare(settings.data, settings.tokenizer or "bytes", text_key=settings.text_key)
    complete_model = build(settings.model, corpus.tokenizer.vocabulary, settings.context, settings.seed)
    model, mesh = spread(copy.deepcopy(complete_model), settings, world, torch.device("cpu"))
    diloco = attach(model, optimizers(model, settings), settings, mesh)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=checkpoint)
    set_model_state_dict(model, state["model"])
    if diloco:
        dcp.load({"diloco": diloco}, checkpoint_id=checkpoint)
    with diloco.anchors() if diloco else contextlib.nullcontext():
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if world.rank == 0:
        complete_model.load_state_dict(weights)
        export_module(complete_model, corpus.tokenizer, to)
    dist.destroy_process_group()
