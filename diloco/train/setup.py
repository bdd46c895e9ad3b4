"""Set up one process of a run, from the config and, on resume, from a checkpoint."""

import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
from diloco.autopilot.pilot import autopilot
from diloco.codecs.codec import Float32, codec_named
from diloco.core.diloco import DiLoCo
from diloco.core.fragment import Balanced, fragmenter
from diloco.core.lane import has_lane
from diloco.core.muon import INNERS
from diloco.core.outer import outer_named
from diloco.core.stats import Stats
from diloco.errors import ConfigError
from diloco.exchange.collective import Collective
from diloco.exchange.contract import compare
from diloco.exchange.reducer import Reducer
from diloco.exchange.rendezvous import PATIENCE
from diloco.exchange.transport import gather_json, open_group, place_in, wait_patiently
from diloco.exchange.world import World
from diloco.runs import folder as folders
from diloco.runs.config import TUNED, TrainConfig
from diloco.runs.flags import to_toml
from diloco.runs.schema import Event
from diloco.runs.writer import Phase, Writer, open_sinks
from diloco.train.checkpoint import Checkpoints
from diloco.train.data import corpus as corpora
from diloco.train.data.batches import Batches
from diloco.train.data.corpus import Corpus
from diloco.train.data.tokenizer import Tokenizer, default_tokenizer
from diloco.train.members import CARRIES, Elastic, Fixed, Members, planned_batch, run_of, step_seconds_of
from diloco.train.model import Windows, build
from diloco.train.pace import Pace, measure
from diloco.train.settings import Derived, check_batch, describe, resolve, weight_decay

log = logging.getLogger("diloco")
EVALUATED = 16_384
"""Held-out tokens of an evaluation."""
EQUAL = ("method", "shards", "model", "context", "steps", "batch", "inner", "lr", "seed")
"""Settings that all processes must share, beyond those that DiLoCo compares."""
TIMED = 2
"""Steps to time after a warm-up step; the fastest counts."""


@dataclass(frozen=True)
class Prepared:
    """One process of a run, ready to train."""

    config: TrainConfig
    """Complete: nothing is left to derive. With a bucket, `batch` is that of all members it is planned for."""
    world: World
    device: torch.device
    corpus: Corpus
    windows: Windows
    """Held-out text."""
    model: nn.Module
    """Sharded, or wrapped for data-parallel training."""
    forward: Callable[..., Any]
    """The model, possibly compiled."""
    mesh: DeviceMesh | None
    optimizers: Sequence[Optimizer]
    writer: Writer
    checkpoints: Checkpoints
    members: Members
    phase: Phase
    batches: Batches
    parameters: int
    tokens_per_step: int
    """Of one replica."""
    start: int = 0
    """Step of the checkpoint that was loaded; 0 at the beginning of a run."""
    diloco: DiLoCo | None = None
    """None for the methods `dp` and `local`."""

    @property
    def bare(self) -> nn.Module:
        """The model without DDP: a replica may call it without the others."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @property
    def stats(self) -> Stats:
        return self.diloco.stats if self.diloco else Stats()

    @property
    def rank_key(self) -> str:
        """Key of the state that each rank of a replica saves separately."""
        return f"rank {self.world.shard}"

    def state_dict(self, moments: bool = True) -> dict[str, Any]:
        """The contents of a checkpoint. Before the first step leave out the `moments`, which torch would create."""
        state: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        if moments:
            with self.paused():
                state["optimizer"] = get_optimizer_state_dict(self.model, list(self.optimizers))
        state[self.rank_key] = {
            "data": self.batches.state_dict(),
            "metrics": self.writer.state_dict(),
            "random": random_state(self.device),
        }
        return state | ({"diloco": self.diloco} if self.diloco else {})

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Hide optimizer steps from DiLoCo: torch creates an optimizer's moments with a step."""
        return self.diloco.paused() if self.diloco else contextlib.nullcontext()


TrainStep = Callable[[Prepared, float], Callable[[], object]]
"""Does a step with a learning rate, and returns what waits for its end."""


def prepare(config: TrainConfig, world: World, folder: Path, step: TrainStep) -> Prepared:
    """Build this process's part of the run in `folder`, load the newest checkpoint on resume, and join the others.
    `--batch auto` times `step`."""
    device = device_for(config, world)
    phase = Phase(folder / "phase" if world.rank == 0 else None)
    config = replace(config, tokenizer=config.tokenizer or default_tokenizer(config.model))
    corpus = _corpus(config, world, phase)
    phase.say("making the model")
    digest = _agreed_tokenizer(corpus)
    tokenizer = folder / "tokenizer"
    kept = world.local_rank > 0 or _keep_tokenizer(tokenizer, corpus.tokenizer, config.resume, world.rank)
    if not all(gather_json(dist.group.WORLD, kept)):
        raise ConfigError(f"this run was started with another tokenizer, which is in {tokenizer}: leave "
                          "--tokenizer out; with train:SIZE, resume with the same --data")  # fmt: skip
    model = build(config.model, corpus.tokenizer.vocabulary, config.context, config.seed).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    replicas = config.replicas or 2 if config.bucket else world.replicas
    train_tokens = min(gather_json(dist.group.WORLD, corpus.train_tokens))  # sites may have different data
    config, derived = resolve(config, parameters, replicas, train_tokens)
    settings = gather_json(dist.group.WORLD, {name: getattr(config, name) for name in EQUAL})
    compare(settings, [f"process {rank}" for rank in range(world.size)])
    check_batch(config, world.size * (replicas if config.bucket else 1))
    agreed = config
    if "overlap" in config.auto:  # each member's choice: a bucket publishes the number
        config = replace(config, overlap="auto")
    model, mesh = spread(model, config, world, device)
    leader, home = world.shard == 0, folder / f"replica-{world.replica}"
    sinks = open_sinks(config.track, f"{folder.name}-{world.replica}", asdict(config), home) if leader else []
    run = Prepared(
        config=config,
        world=world,
        device=device,
        corpus=corpus,
        windows=corpus.evaluation(config.context, EVALUATED),
        model=model,
        forward=torch.compile(model) if config.compile else model,
        mesh=mesh,
        optimizers=optimizers(model, config),
        writer=Writer(home if leader else home / f"shard-{world.shard}", sinks),
        checkpoints=Checkpoints(home / "checkpoints", group=mesh.get_group("shard") if mesh else None, leader=leader),
        members=Fixed(config, world),
        phase=phase,
        batches=_batches(Fixed(config, world), corpus, world),
        parameters=parameters,
        tokens_per_step=planned_batch(config, world).sequences * config.context,
    )
    if config.bucket:
        pace = _pace(run, step) if config.share == "auto" else None
        run = replace(run, members=Elastic(agreed, world, digest, corpus, pace))
    phase.say("joining the others")
    run = _load(run, folder)
    with left_on_error(run):
        run = _join(run, folder)
        _write_settings(run, folder, derived, asked=config.accumulate)
        about = {"parameters": parameters, "time": time.time(), "host": socket.gethostname(), "device": str(device),
                 "torch": torch.__version__, "diloco": __version__}  # fmt: skip
        run.writer.write(Event("resume" if run.start else "start", run.writer.seconds(), run.start, about))
        if run.diloco and run.config.auto and run.config.method == "streaming":
            _start_autopilot(run.diloco, run, folder)
    phase.say("training")
    return run


@contextlib.contextmanager
def left_on_error(run: Prepared) -> Iterator[None]:
    """On an error, leave the others, which would otherwise wait for a timeout."""
    try:
        yield
    except BaseException:
        if run.diloco:
            run.diloco.leave()
        raise


def _corpus(config: TrainConfig, world: World, phase: Phase) -> Corpus:
    """The first process of each machine prepares the corpus. The others wait as long as it takes, beyond the limit of
    torch's groups, and read it from the cache."""
    everyone = open_group("corpus", place_in(dist.group.WORLD), PATIENCE, patient=True) if world.size > 1 else None
    if everyone and world.local_rank > 0:
        wait_patiently(everyone.barrier())
    corpus = corpora.prepare(config.data, config.tokenizer or "bytes", text_key=config.text_key, phase=phase)
    if everyone and world.local_rank == 0:
        wait_patiently(everyone.barrier())
    return corpus


def _agreed_tokenizer(corpus: Corpus) -> str:
    """Digest of the tokenizer. Raise unless all replicas have the same, or token ids would mean different text."""
    digests = gather_json(dist.group.WORLD, corpus.tokenizer.digest())
    if len(set(digests)) > 1:
        raise ConfigError("the replicas have different tokenizers: use the same tokenizer.json or, with train:SIZE, "
                          "the same --data")  # fmt: skip
    return digests[0]


def _keep_tokenizer(folder: Path, tokenizer: Tokenizer, resume: bool, rank: int) -> bool:
    """Save the tokenizer with the run. False if the run resumes with another one. Where machines share the folder, a
    process on each of them does."""
    digest, new = folder / "digest", folder / f"digest.{rank}"
    if resume and digest.exists():
        return digest.read_text() == tokenizer.digest()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    new.write_text(tokenizer.digest())
    new.replace(digest)
    return True


def _batches(members: Members, corpus: Corpus, world: World) -> Batches:
    return members.batches(corpus, members.batch.sequences // world.shards // members.batch.accumulate)


def _pace(run: Prepared, step: TrainStep) -> Pace | None:
    """Time this member's steps, up to the length of the run's own steps, or up to the planned batch if the run does not
    exist yet. Nothing is trained: the learning rate is 0 and the optimizers are thrown away."""
    config, planned, shared = run.config, planned_batch(run.config, run.world).sequences, run_of(run.config)
    until = math.inf if shared is None else step_seconds_of(shared)
    if until is None:
        return None
    windows = (run.corpus.train_tokens - 1) // config.context // config.accumulate * config.accumulate
    most = planned if shared is None else min(CARRIES * planned, windows)
    random = random_state(run.device)

    def seconds(sequences: int) -> float | None:
        batches = run.corpus.batches(0, 1, sequences // config.accumulate, config.context, config.seed)
        trial = replace(run, batches=batches, optimizers=optimizers(run.model, config),
                        tokens_per_step=sequences * config.context)  # fmt: skip
        try:
            times = []
            for _ in range(1 + TIMED):
                began = time.perf_counter()
                step(trial, 0.0)()
                times.append(time.perf_counter() - began)
            return min(times[1:])
        except torch.OutOfMemoryError:
            run.model.zero_grad()
            return None

    run.phase.say("timing steps")
    try:
        return measure(seconds, first=config.accumulate, until=until, most=most)
    finally:
        set_random_state(run.device, random)


def _load(run: Prepared, folder: Path) -> Prepared:
    """Attach DiLoCo and, on resume, load the newest checkpoint that all replicas have."""
    start = run.checkpoints.newest_common() if run.config.resume else 0
    if start is None and not run.config.bucket:  # a member of a bucket starts over: it loses only its own work
        raise ConfigError(f"{folder} has no checkpoint that all replicas have: there is nothing to resume")
    start = start or 0
    run = replace(run, start=start, diloco=attach(run.model, run.optimizers, run.config, run.mesh, run.members.reducer))
    if start:
        state = run.state_dict()
        run.checkpoints.load(start, state)
        with run.paused():
            set_state_dict(run.model, run.optimizers, model_state_dict=state["model"],
                           optim_state_dict=state["optimizer"])  # fmt: skip
        rank_state = state[run.rank_key]
        run.batches.load_state_dict(rank_state["data"])
        run.writer.load_state_dict(rank_state["metrics"])
        set_random_state(run.device, rank_state["random"])
    else:
        run.writer.clear()
    return run


def _join(run: Prepared, folder: Path) -> Prepared:
    """Join the others, which settles batch and data, and continue at the position that was loaded."""
    run.members.begin(run.diloco, run.start, folder)
    batch, config = run.members.batch, run.config
    if config.share:
        config = replace(config, share=batch.sequences, accumulate=batch.accumulate)
    batches = _batches(run.members, run.corpus, run.world)
    batches.load_state_dict(run.batches.state_dict())
    return replace(run, config=config, batches=batches, tokens_per_step=batch.sequences * config.context)


def _write_settings(run: Prepared, folder: Path, derived: Sequence[Derived], *, asked: int) -> None:
    """config.toml, and what was derived, with the reasons. `asked`: the micro-batches that were asked for."""
    config, world, batch = run.config, run.world, run.members.batch
    _store(config, world, folder)
    if world.rank > 0:
        return
    values = [*derived, *placed(run.diloco, run.device)]
    if batch.why:
        values.append(Derived("share", batch.sequences, batch.why))
    if batch.accumulate > asked:
        values.append(Derived("accumulate", batch.accumulate, "larger micro-batches do not fit in memory"))
    (folder / "summary.json").unlink(missing_ok=True)  # from before this resume
    text = describe(values, run.parameters, config, run.corpus.name, run.start)
    (folder / "derived.txt").write_text(text + "\n", encoding="utf-8")
    log.info(text)


def _store(config: TrainConfig, world: World, folder: Path) -> None:
    """Write config.toml on every machine, because each may resume. In a shared folder the first process writes last."""
    if world.rank and not world.local_rank:
        folders.store(folder, to_toml(config), world.rank)
    dist.barrier()
    if world.rank == 0:
        folders.store(folder, to_toml(config), world.rank)


def _start_autopilot(diloco: DiLoCo, run: Prepared, folder: Path) -> None:
    """Start the autopilot; print its choice, log it as an event, and store it in config.toml."""
    config, world, writer = run.config, run.world, run.writer

    def say(text: str, values: Mapping[str, Any]) -> None:
        if values and world.shard == 0:
            writer.write(Event("autopilot", writer.seconds(), diloco.step_count, values))
        if values and world.local_rank == 0:  # on every machine, because each may resume
            # Loading a checkpoint needs these; the overlap stays auto.
            stored = {name: values[name] for name in TUNED if name != "overlap"}
            folders.store(folder, to_toml(replace(config, **stored)), world.rank)
        if world.rank:
            return
        log.info(text)
        with (folder / "derived.txt").open("a") as file:
            file.write(text + "\n")

    autopilot(diloco, keep=[name for name in TUNED if name not in config.auto], steps=config.steps, say=say)


def device_for(config: TrainConfig, world: World) -> torch.device:
    if config.device != "auto":
        try:
            device = torch.device(config.device)
        except RuntimeError:
            raise ConfigError(f"device={config.device!r}: use auto, cpu, cuda or another torch device") from None
    else:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = torch.device("cpu") if accelerator is None or accelerator.type == "mps" else accelerator
    if device.type != "cpu":
        count = torch.accelerator.device_count()
        if device.index is not None and world.size > 1:
            raise ConfigError(f"device={config.device!r} with {world.size} processes: use --device {device.type}, and "
                              "choose devices with a variable such as CUDA_VISIBLE_DEVICES")  # fmt: skip
        by_srun = "SLURM_STEP_ID" in os.environ and "LOCAL_RANK" not in os.environ
        own = own_device(world.local_rank, count, by_srun=by_srun)
        device = torch.device(device.type, own if device.index is None else device.index)
        torch.accelerator.set_device_index(device.index or 0)
    return device


def own_device(local_rank: int, count: int, *, by_srun: bool) -> int:
    """Which of `count` devices a process takes. srun may show each task only its own.

    >>> own_device(1, 8, by_srun=True), own_device(1, 1, by_srun=True)
    (1, 0)
    """
    if count == 1 and by_srun:
        return 0
    if local_rank >= count:
        raise ConfigError(f"process {local_rank} needs its own device, but this machine has {count}: start fewer "
                          "processes here, or use --device cpu")  # fmt: skip
    return local_rank


def random_state(device: torch.device) -> dict[str, Tensor]:
    """State of the random generators that dropout uses."""
    state = {"cpu": torch.get_rng_state()}
    return state if device.type == "cpu" else state | {"device": torch.get_device_module(device).get_rng_state(device)}


def set_random_state(device: torch.device, state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"], device)


def spread(
    model: nn.Module, config: TrainConfig, world: World, device: torch.device
) -> tuple[nn.Module, DeviceMesh | None]:
    """Shard the model inside the replica (FSDP2) and, for data-parallel, replicate it over the replicas."""
    if world.shards > 1:
        mesh = init_device_mesh(device.type, (world.replicas, world.shards), mesh_dim_names=("replica", "shard"))
        # Over two dimensions FSDP2 replicates on the first and shards on the second.
        sharded_over = mesh if config.method == "dp" else mesh["shard"]
        for module in list(model.modules()):
            if isinstance(module, nn.ModuleList):
                for layer in module:
                    fully_shard(layer, mesh=sharded_over)
        fully_shard(model, mesh=sharded_over)
        return model, mesh
    if config.method == "dp" and world.replicas > 1:
        model = DistributedDataParallel(model, device_ids=[device.index] if device.index is not None else None)
    return model, None


def optimizers(model: nn.Module, config: TrainConfig) -> list[Optimizer]:
    assert config.lr is not None
    return INNERS[config.inner or "adamw"](model, config.lr, weight_decay(config))


def set_lr(optimizers: Sequence[Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def attach(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    config: TrainConfig,
    mesh: DeviceMesh | None,
    reducer: Reducer | None = None,
) -> DiLoCo | None:
    """Create the DiLoCo of this method; None for `dp` and `local`."""
    if config.method not in ("streaming", "diloco"):
        return None
    streaming = config.method == "streaming"
    if reducer is None:
        group, shards = (mesh.get_group("replica"), mesh.get_group("shard")) if mesh else (None, None)
        reducer = Collective(group, shards=shards, streams=config.streams, timeout=config.timeout)
    return DiLoCo(
        model,
        optimizers,
        sync_every=config.sync_every,
        fragments=fragmenter(config.fragments) if streaming else Balanced(1),
        overlap=config.overlap if streaming else 0,
        codec=codec_named(config.codec) if streaming else Float32(),
        outer=outer_named(config.outer),
        reducer=reducer,
        state="auto",
    )


def placed(diloco: DiLoCo | None, device: torch.device) -> list[Derived]:
    """Where DiLoCo keeps its state, if the device leaves a choice."""
    if diloco is None or not has_lane(device):
        return []
    return [Derived("state", diloco.replica.where, diloco.replica.why)]
