"""The run, top to bottom."""

import contextlib
import logging
import time
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from diloco.diloco import DiLoCo
from diloco.errors import ConfigError
from diloco.flags import to_toml
from diloco.runs.config import TrainConfig
from diloco.runs.schema import Evaluation, Event, Step
from diloco.runs.sinks import open_sinks
from diloco.runs.writer import Writer
from diloco.stats import Stats
from diloco.train.checkpoint import Checkpoints
from diloco.train.data.corpus import Corpus, prepare
from diloco.train.data.tokenizer import digest
from diloco.train.defaults import describe, lr_at, resolve
from diloco.train.evaluate import bits_per_byte, loss_of, sample
from diloco.train.model import build
from diloco.train.setup import adamw, attach, device_for, random_state, set_random_state, spread
from diloco.train.stop import Stop
from diloco.world import World

SAY_EVERY = 10.0
SUMS = ("rounds", "bytes_sent", "bytes_received", "largest_round", "seconds_hidden", "seconds_exposed")

log = logging.getLogger("diloco")


def train(config: TrainConfig, world: World, folder: Path) -> dict[str, Any]:
    """Train this process's part of the run and return its summary. The default process group is there."""
    device = device_for(config, world)
    if world.rank > 0:
        dist.barrier()  # one process prepares the corpus, the others find it
    corpus = prepare(config.data, config.tokenizer)
    if world.rank == 0:
        dist.barrier()
    tokenizer = _agreed_tokenizer(corpus)
    model = build(config.model, corpus.tokenizer.vocabulary, config.context, config.seed).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    config, rules = resolve(config, parameters, config.replicas or 2 if config.bucket else world.replicas)
    assert config.steps is not None and config.batch is not None and config.replicas is not None
    planned, elastic = config.replicas, None
    if config.bucket:  # the batch is that of all replicas; here is one of them
        from diloco.train.elastic import Elastic

        elastic = Elastic(config, config.batch // config.replicas * config.context, world, tokenizer)
        config = replace(config, batch=config.batch // config.replicas)
        assert config.steps is not None and config.batch is not None
    if config.batch % (world.size * config.accumulate):
        raise ConfigError(
            f"batch={config.batch}: give a multiple of ranks · accumulate, {world.size * config.accumulate}"
        )
    sequences = config.batch // world.size // config.accumulate
    per_step = config.batch // world.replicas * config.context  # tokens of a replica
    data = corpus.batches(world.rank, world.size, sequences, config.context, config.seed)
    windows = corpus.evaluation(config.context, config.eval_tokens)

    model, mesh = spread(model, config, world, device)
    bare = model.module if isinstance(model, DistributedDataParallel) else model  # which one replica may call alone
    compiled: Any = torch.compile(model) if config.compile else model
    optimizer = adamw(model, config)
    home = folder / f"replica-{world.replica}"
    sinks = open_sinks(config.track, f"{folder.name}-{world.replica}", asdict(config), home) if world.shard == 0 else []
    writer = Writer(home if world.shard == 0 else home / f"shard-{world.shard}", sinks)
    inner = mesh.get_group("shard") if mesh else None
    checkpoints = Checkpoints(home / "checkpoints", config.keep, inner, world.shard == 0)
    own, stats = f"rank {world.shard}", Stats()

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        sums = {name: getattr(stats, name) for name in SUMS}
        return {"model": weights, "optimizer": moments,
                own: {"data": data.state_dict(), "metrics": writer.state_dict(), "sums": sums,
                      "random": random_state(device)}}  # fmt: skip

    start = checkpoints.newest_common() if config.resume else 0
    if start is None and elastic:
        start = 0  # it was killed before it saved: the bucket has all but its own work
    if start is None:
        raise ConfigError(f"{folder} has no checkpoint that all replicas have: there is nothing to resume")
    saved = state() if start else {}
    if start:
        checkpoints.load(start, saved)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        data.load_state_dict(saved[own]["data"])
        writer.load_state_dict(saved[own]["metrics"])
        set_random_state(device, saved[own]["random"])
    diloco = attach(model, optimizer, config, mesh, elastic.reduce if elastic else None)
    if diloco:
        stats = diloco.stats
        if start:
            checkpoints.load(start, {"diloco": diloco})
            for name in SUMS:
                setattr(stats, name, saved[own]["sums"][name])
        if elastic:
            elastic.begin(diloco, start, folder)
            data = elastic.data(corpus, sequences)
            if start:
                data.load_state_dict(saved[own]["data"])
        diloco.join()

    def save(step: int) -> None:
        checkpoints.save(step, state() | ({"diloco": diloco} if diloco else {}))
        writer.write(Event("save", writer.seconds(), step))

    def evaluate(step: int, replica_loss: float | None = None) -> Evaluation:
        """The anchors, and for comparison this replica's own weights."""
        replica_loss = loss_of(bare, windows, device) if replica_loss is None else replica_loss
        with diloco.anchors() if diloco else contextlib.nullcontext():
            loss = loss_of(bare, windows, device) if diloco else replica_loss
        bits = bits_per_byte(loss, corpus.bytes_per_token)
        evaluation = Evaluation(step, writer.seconds(), step * per_step, loss, bits, replica_loss)
        writer.write(evaluation)
        if elastic:
            elastic.reduce.publish(anchor_loss=loss)
        return evaluation

    if world.rank == 0:
        (folder / "config.toml").write_text(to_toml(config))
        text = describe(rules, parameters, config, corpus.name, start)
        (folder / "derived.txt").write_text(text + "\n")
        log.info(text)
    writer.write(Event("resume" if start else "start", writer.seconds(), start))
    stop = Stop(dist.distributed_c10d._get_default_store(), world.rank, world.size).__enter__()
    autocast = torch.autocast(device.type, torch.bfloat16) if device.type != "cpu" else contextlib.nullcontext()
    no_sync = model.no_sync if isinstance(model, DistributedDataParallel) else contextlib.nullcontext
    step, stopped, rounds, said = start, False, stats.rounds, 0.0

    over = elastic is not None and elastic.over
    for step in () if over else count(start + 1) if elastic else range(start + 1, config.steps + 1):
        began = time.perf_counter()
        lr = elastic.lr(step) if elastic else lr_at(config, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = torch.zeros((), device=device)
        for micro in range(1, config.accumulate + 1):
            x, y = (part.to(device, non_blocking=True) for part in data.next())
            with no_sync() if micro < config.accumulate else contextlib.nullcontext():
                with autocast:
                    output = compiled(x, y)
                (output.loss / config.accumulate).backward()
            loss += output.cross_entropy.detach() / config.accumulate
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        if diloco:
            diloco.count(per_step)
        optimizer.step()
        optimizer.zero_grad()
        value, seconds = loss.item(), time.perf_counter() - began

        writer.write(Step(
            step, writer.seconds(), step * per_step, loss=value, lr=lr, grad_norm=float(norm), step_seconds=seconds,
            tokens_per_second=per_step / seconds, **_traffic(config, world, parameters, step, diloco),
        ))  # fmt: skip
        for finished in stats.since(rounds):
            writer.round(finished)
        rounds = stats.rounds
        if world.rank == 0 and writer.seconds() > said + SAY_EVERY:
            said = writer.seconds()
            log.info("step %d/%d, loss %.3f, %.0f tokens/s, sent %.3g MB", step, config.steps, value,
                     per_step / seconds, stats.bytes_sent / 1e6)  # fmt: skip
        if elastic and elastic.after(step, writer, loss=value, tokens_per_second=per_step / seconds):
            break
        if step % config.eval_every == 0 and (elastic or step < config.steps):
            evaluate(step)  # on all replicas: one alone would keep the others waiting
        if stopped := stop.after(step, seconds):
            break
        if step % config.save_every == 0 and (elastic or step < config.steps):
            save(step)

    stop.__exit__(None)
    replica_loss = loss_of(bare, windows, device)
    if diloco and not stopped:
        diloco.finish()
        for finished in stats.since(rounds):
            writer.round(finished)
    if step > start or (over and not start):
        save(step)
    if elastic and stopped:
        elastic.reduce.leave()  # the others know at once
    writer.write(Event("stop" if stopped else "finish", writer.seconds(), step))
    evaluation = evaluate(step, replica_loss)
    with diloco.anchors() if diloco else contextlib.nullcontext():
        text = sample(bare, corpus.tokenizer, "def ", 200, config.context, device)
    if diloco and stopped:
        diloco.reduce.leave()
    seconds = writer.seconds()
    writer.close()
    traffic = _traffic(config, world, parameters, step, diloco)
    return {
        "method": config.method, "replicas": world.replicas, "parameters": parameters, "steps": step,
        "stopped": stopped, "tokens": step * per_step * world.replicas, "seconds": seconds,
        "eval/loss": evaluation.loss, "eval/bits_per_byte": evaluation.bits_per_byte,
        "eval/replica_loss": evaluation.replica_loss, "unigram_loss": corpus.unigram_loss(),
        "bytes_sent": traffic["bytes_sent"],
        "bytes_data_parallel": round(_per_step(planned) * 2 * parameters * step),
        "largest_burst": stats.largest_round if diloco else round(traffic["bytes_sent"] / max(step, 1)),
        "seconds_hidden": stats.seconds_hidden, "seconds_exposed": stats.seconds_exposed,
        "corpus": {"name": corpus.name, "sha256": corpus.sha256, "bytes": corpus.nbytes}, "samples": [text],
    }  # fmt: skip


def _agreed_tokenizer(corpus: Corpus) -> str:
    """Its digest, which must be that of all replicas: ids of another one would mean other text."""
    found = [""] * dist.get_world_size()
    dist.all_gather_object(found, digest(corpus.tokenizer))
    if len(set(found)) > 1:
        raise ConfigError("the replicas have different tokenizers: give all the same tokenizer.json, or with "
                          "train:SIZE the same --data")  # fmt: skip
    return found[0]


def _per_step(replicas: int) -> float:
    """How often a ring all-reduce sends every value, each way."""
    return 2 * (replicas - 1) / replicas


def _traffic(config: TrainConfig, world: World, parameters: int, step: int, diloco: DiLoCo | None) -> dict[str, Any]:
    """Sums so far. Data-parallel on fp32 gradients is reckoned, not counted; it hides and exposes inside backward."""
    if diloco is None:
        sent = round(_per_step(world.replicas) * 4 * parameters * step) if config.method == "dp" else 0
        return {"bytes_sent": sent, "bytes_received": sent, "seconds_hidden": 0.0, "seconds_exposed": 0.0,
                "in_flight": 0}  # fmt: skip
    stats = diloco.stats
    return {"bytes_sent": stats.bytes_sent, "bytes_received": stats.bytes_received,
            "seconds_hidden": stats.seconds_hidden, "seconds_exposed": stats.seconds_exposed,
            "in_flight": diloco.in_flight}  # fmt: skip
