"""What one process of a run holds, made from the config and, on resume, from a checkpoint."""

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from diloco import __version__
from diloco.codec import Float32, codec_named
from diloco.diloco import DiLoCo
from diloco.errors import ConfigError
from diloco.flags import to_toml
from diloco.fragment import Balanced, fragmenter
from diloco.inner import INNERS
from diloco.outer import OUTERS, Outer
from diloco.pilot import autopilot
from diloco.reduce import Reduce
from diloco.reduce.collective import Collective
from diloco.reduce.groups import gather_json
from diloco.runs import folder as folders
from diloco.runs.config import TUNED, TrainConfig, outer_settings
from diloco.runs.phase import Phase
from diloco.runs.schema import Event, Step
from diloco.runs.sinks import open_sinks
from diloco.runs.writer import Writer
from diloco.stats import Stats
from diloco.train.checkpoint import Checkpoints
from diloco.train.data import corpus as corpora
from diloco.train.data.batches import Batches
from diloco.train.data.corpus import Corpus
from diloco.train.data.tokenizer import default_tokenizer, tokenizer_digest
from diloco.train.defaults import describe, lr_at, resolve
from diloco.train.model import Windows, build
from diloco.train.preflight import wrong_batch
from diloco.world import World

log = logging.getLogger("diloco")


class Members(Protocol):
    """What the loop asks of the members of a run. `diloco.train.elastic` has those that come and go."""

    @property
    def reduce(self) -> Reduce | None:
        """None: the default process group."""
        ...

    @property
    def over(self) -> bool:
        """Whether the run has ended: no step is to come."""
        ...

    def begin(self, diloco: DiLoCo | None, start: int, folder: Path) -> None:
        """Join the run. `start` is the step of the checkpoint that was loaded."""
        ...

    def batches(self, corpus: Corpus, sequences: int) -> Batches:
        """What this process trains on, once it has joined."""
        ...

    def lr(self, step: int) -> float:
        """Inner learning rate of the step that comes next."""
        ...

    def after(self, step: int, writer: Writer, known: Step | None) -> None:
        """A step is done. `known`: the newest one whose loss is known."""
        ...

    def evaluated(self, loss: float) -> None:
        """The anchors have this loss."""
        ...

    def stopped(self) -> None:
        """This member was asked to stop, and has saved."""
        ...


class Fixed:
    """A number of replicas that stays the same, all of which do `config.steps` steps."""

    reduce = None

    def __init__(self, config: TrainConfig, world: World) -> None:
        assert config.steps is not None
        self._config, self._world, self._steps, self.over = config, world, config.steps, False

    def begin(self, diloco: DiLoCo | None, start: int, folder: Path) -> None:
        self.over = start >= self._steps
        if diloco:
            diloco.join()

    def batches(self, corpus: Corpus, sequences: int) -> Batches:
        return corpus.batches(self._world.rank, self._world.size, sequences, self._config.context, self._config.seed)

    def lr(self, step: int) -> float:
        return lr_at(self._config, step)

    def after(self, step: int, writer: Writer, known: Step | None) -> None:
        self.over = step >= self._steps

    def evaluated(self, loss: float) -> None: ...

    def stopped(self) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """One process of a run, ready to train."""

    config: TrainConfig
    """Every value is filled in. With a bucket, `batch` is that of this member."""
    world: World
    device: torch.device
    corpus: Corpus
    windows: Windows
    """Held-out text."""
    model: nn.Module
    """Sharded, or wrapped for data-parallel training."""
    forward: Callable[..., Any]
    """The model, compiled if the config says so."""
    mesh: DeviceMesh | None
    optimizers: Sequence[Optimizer]
    writer: Writer
    checkpoints: Checkpoints
    members: Members
    phase: Phase
    batches: Batches
    parameters: int
    tokens_per_step: int
    """One replica's."""
    start: int = 0
    """Step of the checkpoint that was loaded; 0 at the beginning of a run."""
    diloco: DiLoCo | None = None
    """None for the methods `dp` and `local`."""

    @property
    def bare(self) -> nn.Module:
        """The model that one replica may call alone."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @property
    def stats(self) -> Stats:
        return self.diloco.stats if self.diloco else Stats()

    @property
    def own(self) -> str:
        """Key of what each rank of a replica saves for itself."""
        return f"rank {self.world.shard}"

    def state_dict(self, moments: bool = True) -> dict[str, Any]:
        """What a checkpoint holds, besides DiLoCo itself. Before the first step the optimizers have no `moments`:
        torch would make them with a step, which a hook would count."""
        shared: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        if moments:
            shared["optimizer"] = get_optimizer_state_dict(self.model, list(self.optimizers))
        sums = {name: value for name, value in vars(self.stats).items() if name != "last"}
        own = {"data": self.batches.state_dict(), "metrics": self.writer.state_dict(), "sums": sums,
               "random": random_state(self.device)}  # fmt: skip
        return shared | {self.own: own}


def prepare(config: TrainConfig, world: World, folder: Path) -> Prepared:
    """Build this process's part of the run in `folder`, load the newest checkpoint on resume, and join the others."""
    device = device_for(config, world)
    config = replace(config, tokenizer=config.tokenizer or default_tokenizer(config.model))
    phase = Phase(folder / "phase" if world.rank == 0 else None)
    corpus = _corpus(config, world, phase)
    phase.say("making the model")
    tokenizer = _agreed_tokenizer(corpus)
    model = build(config.model, corpus.tokenizer.vocabulary, config.context, config.seed).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    replicas = config.replicas or 2 if config.bucket else world.replicas
    config, rules = resolve(config, parameters, replicas, corpus.train_tokens)
    config, members = _members(config, world, tokenizer)
    if config.auto and "overlap" not in config.kept:
        config = replace(config, overlap="auto")  # this member's own, so not among what a bucket publishes
    assert config.batch is not None
    if config.batch % (world.size * config.accumulate):
        raise wrong_batch(config.batch, world.size * config.accumulate)
    sequences = config.batch // world.size // config.accumulate
    batches = Fixed(config, world).batches(corpus, sequences)
    windows = corpus.evaluation(config.context, config.eval_tokens)
    model, mesh = spread(model, config, world, device)
    home = folder / f"replica-{world.replica}"
    leader = world.shard == 0
    sinks = open_sinks(config.track, f"{folder.name}-{world.replica}", asdict(config), home) if leader else []
    ranks = mesh.get_group("shard") if mesh else None
    run = Prepared(
        config=config, world=world, device=device, corpus=corpus, windows=windows, model=model, mesh=mesh,
        forward=torch.compile(model) if config.compile else model, optimizers=optimizers(model, config),
        writer=Writer(home if leader else home / f"shard-{world.shard}", sinks),
        checkpoints=Checkpoints(home / "checkpoints", config.keep, ranks, leader), members=members, batches=batches,
        phase=phase,
        parameters=parameters, tokens_per_step=config.batch // world.replicas * config.context,
    )  # fmt: skip
    phase.say("joining the others")
    with run.writer.closed_on_error():
        run = _join(_load(run, folder), folder, sequences)
    _store(config, world, folder)
    if world.rank == 0:
        text = describe(rules, parameters, config, corpus.name, run.start)
        (folder / "derived.txt").write_text(text + "\n")
        log.info(text)
    about = {"parameters": parameters, "time": time.time(), "host": socket.gethostname(), "device": str(device),
             "torch": torch.__version__, "diloco": __version__}  # fmt: skip
    run.writer.write(Event("resume" if run.start else "start", run.writer.seconds(), run.start, about))
    if run.diloco and config.auto and config.method == "streaming":
        _start_autopilot(run.diloco, run, folder)
    phase.say("training")
    return run


def _start_autopilot(diloco: DiLoCo, run: Prepared, folder: Path) -> None:
    """What it chooses is shown, written down, and stored as the run's settings."""
    config, world, writer = run.config, run.world, run.writer

    def say(text: str, values: Mapping[str, Any]) -> None:
        if values and world.shard == 0:
            writer.write(Event("autopilot", writer.seconds(), diloco.step_count, values))
        if values and world.local_rank == 0:  # on every machine, each of which may resume
            # A checkpoint cannot be loaded without these; the overlap stays auto.
            stored = {name: values[name] for name in TUNED if name != "overlap"}
            folders.store(folder, to_toml(replace(config, **stored)), world.rank)
        if world.rank:
            return
        log.info(text)
        with (folder / "derived.txt").open("a") as file:
            file.write(text + "\n")

    autopilot(diloco, keep=config.kept, steps=config.steps, say=say)


def _store(config: TrainConfig, world: World, folder: Path) -> None:
    """Write the settings on every machine, each of which may resume. Where they share the folder, the first process has
    the last word."""
    if world.rank and not world.local_rank:
        folders.store(folder, to_toml(config), world.rank)
    dist.barrier()
    if world.rank == 0:
        folders.store(folder, to_toml(config), world.rank)


def _corpus(config: TrainConfig, world: World, phase: Phase) -> Corpus:
    """The first process prepares it, the others find it prepared."""
    if world.rank > 0:
        dist.barrier()
    corpus = corpora.prepare(config.data, config.tokenizer or "bytes", text_key=config.text_key, phase=phase)
    if world.rank == 0:
        dist.barrier()
    return corpus


def _agreed_tokenizer(corpus: Corpus) -> str:
    """Digest of the tokenizer, which must be the same on all replicas: other ids would mean other text."""
    digests = gather_json(dist.group.WORLD, tokenizer_digest(corpus.tokenizer))
    if len(set(digests)) > 1:
        raise ConfigError("the replicas have different tokenizers: give all the same tokenizer.json, or with "
                          "train:SIZE the same --data")  # fmt: skip
    return digests[0]


def _members(config: TrainConfig, world: World, tokenizer: str) -> tuple[TrainConfig, Members]:
    """The members of the run, and the config with the batch that they share or, with a bucket, that of one member."""
    if not config.bucket:
        return config, Fixed(config, world)
    from diloco.train.elastic import Elastic

    assert config.batch is not None and config.replicas is not None
    if config.batch % config.replicas:
        raise wrong_batch(config.batch, config.replicas * world.size * config.accumulate)
    batch = config.batch // config.replicas
    return replace(config, batch=batch), Elastic(config, batch * config.context, world, tokenizer)


def _load(run: Prepared, folder: Path) -> Prepared:
    """The run with its DiLoCo and, on resume, as it was at the newest checkpoint that all replicas have."""
    start = run.checkpoints.newest_common() if run.config.resume else 0
    if start is None and not run.config.bucket:  # with a bucket it begins again: only its own work is lost
        raise ConfigError(f"{folder} has no checkpoint that all replicas have: there is nothing to resume")
    start = start or 0
    saved = run.state_dict() if start else {}  # before DiLoCo is attached: it makes moments
    diloco = attach(run.model, run.optimizers, run.config, run.mesh, run.members.reduce)
    if start:
        run.checkpoints.load(start, saved | ({"diloco": diloco} if diloco else {}))
        set_state_dict(run.model, run.optimizers, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        run.batches.load_state_dict(saved[run.own]["data"])
        run.writer.load_state_dict(saved[run.own]["metrics"])
        set_random_state(run.device, saved[run.own]["random"])
    if diloco and start:
        vars(diloco.stats).update(saved[run.own]["sums"])
    return replace(run, start=start, diloco=diloco)


def _join(run: Prepared, folder: Path, sequences: int) -> Prepared:
    """Join the others. The members may have batches of their own, in which training continues where it was."""
    run.members.begin(run.diloco, run.start, folder)
    batches = run.members.batches(run.corpus, sequences)
    batches.load_state_dict(run.batches.state_dict())
    return replace(run, batches=batches)


def device_for(config: TrainConfig, world: World) -> torch.device:
    if config.device != "auto":
        try:
            device = torch.device(config.device)
        except RuntimeError:
            raise ConfigError(f"device={config.device!r}: give auto, cpu, cuda or another torch device") from None
    else:
        found = torch.accelerator.current_accelerator(check_available=True)
        device = torch.device("cpu") if found is None or found.type == "mps" else found
    if device.type != "cpu":
        count = torch.accelerator.device_count()
        if world.local_rank >= count:
            raise ConfigError(f"process {world.local_rank} of this machine finds only {count} {device.type} devices: "
                              "start fewer processes here, or give --device cpu")  # fmt: skip
        device = torch.device(device.type, world.local_rank)
        torch.accelerator.set_device_index(world.local_rank)
    return device


def random_state(device: torch.device) -> dict[str, Tensor]:
    """State of the generators that dropout draws from."""
    state = {"cpu": torch.get_rng_state()}
    return state if device.type == "cpu" else state | {"device": torch.get_device_module(device).get_rng_state(device)}


def set_random_state(device: torch.device, state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"], device)


def spread(
    model: nn.Module, config: TrainConfig, world: World, device: torch.device
) -> tuple[nn.Module, DeviceMesh | None]:
    """Shard the model inside the replica (FSDP2) and, for data-parallel, copy it over the replicas."""
    if world.shards > 1:
        mesh = init_device_mesh(device.type, (world.replicas, world.shards), mesh_dim_names=("replica", "shard"))
        over = mesh if config.method == "dp" else mesh["shard"]  # two dimensions: shard over one, copy over the other
        for module in list(model.modules()):
            if isinstance(module, nn.ModuleList):
                for layer in module:
                    fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
        return model, mesh
    if config.method == "dp" and world.replicas > 1:
        model = DistributedDataParallel(model, device_ids=[device.index] if device.index is not None else None)
    return model, None


def optimizers(model: nn.Module, config: TrainConfig) -> list[Optimizer]:
    assert config.lr is not None and config.weight_decay is not None
    return INNERS[config.inner or "adamw"](model, config.lr, config.weight_decay)


def set_lr(optimizers: Sequence[Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def attach(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    config: TrainConfig,
    mesh: DeviceMesh | None,
    reduce: Reduce | None = None,
) -> DiLoCo | None:
    """The sync of the method: none for `dp` and `local`."""
    if config.method not in ("streaming", "diloco"):
        return None
    streaming = config.method == "streaming"
    if reduce is None:
        group, shards = (mesh.get_group("replica"), mesh.get_group("shard")) if mesh else (None, None)
        mean_codec = codec_named(config.mean_codec) if streaming and config.mean_codec else None
        reduce = Collective(group, shards=shards, streams=config.streams, timeout=config.timeout, mean_codec=mean_codec)
    return DiLoCo(
        model,
        optimizers,
        sync_every=config.sync_every,
        fragments=fragmenter(config.fragments) if streaming else Balanced(1),
        overlap=config.overlap if streaming else 0,
        keep_local=config.keep_local if streaming else 0.0,
        codec=codec_named(config.codec) if streaming else Float32(),
        outer=outer(config),
        feedback=config.feedback,
        reduce=reduce,
    )


def outer(config: TrainConfig) -> Outer:
    rule = OUTERS[config.outer]
    given = {name.removeprefix("outer_"): getattr(config, name) for name in outer_settings(config.outer)}
    numbers = {name: value for name, value in given.items() if value is not None}
    follow = {"follow": config.outer_follow} if any(field.name == "follow" for field in fields(rule)) else {}
    return rule(**numbers, **follow)
