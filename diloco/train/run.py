"""The run of one process, top to bottom: prepare, fit, finish."""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from diloco.exchange.world import World
from diloco.runs.config import TrainConfig
from diloco.runs.schema import Evaluation, Event, Step, Summary, bytes_data_parallel
from diloco.train import preemption
from diloco.train.model import bits_per_byte, held_out_loss, sample
from diloco.train.setup import Prepared, left_on_error, prepare, set_lr
from diloco.train.stop import Stop

DELAY = 2
"""Steps that the host may run ahead of the device."""
LARGEST_NORM = 1.0
"""Gradients are clipped to this norm."""


Reading = Callable[[], list[float]]
"""Waits until the values have arrived on the host, and returns them."""


def start_reading(*scalars: Tensor) -> Reading:
    """Start copying scalars to the host, without waiting."""
    whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in scalars]
    values = torch.stack([x.detach().float() for x in whole])
    if values.device.type == "cpu":
        return values.tolist
    event = torch.Event(values.device, blocking=True)
    host = values.to("cpu", non_blocking=True)  # torch pins it
    event.record(torch.accelerator.current_stream(values.device))

    def read() -> list[float]:
        event.synchronize()
        return host.tolist()

    return read


class Readings:
    """Steps whose loss and gradient norm are still on the device. Reading them right away would stall host and device
    in turn at every step."""

    def __init__(self, write: Callable[[Step], None]) -> None:
        self._write = write
        self._pending: deque[tuple[Reading, Callable[..., Step]]] = deque()
        self.last: Step | None = None
        """The newest step that has been read."""

    def add(self, read: Reading, step: Callable[..., Step]) -> None:
        """`step` makes the record, from loss and grad_norm."""
        self._pending.append((read, step))

    def write(self, pending: int = 0) -> None:
        """Write the steps in order, except the newest `pending` ones."""
        while len(self._pending) > pending:
            read, step = self._pending.popleft()
            loss, grad_norm = read()
            self.last = step(loss=loss, grad_norm=grad_norm)
            self._write(self.last)


def train(config: TrainConfig, world: World, folder: Path) -> Summary:
    """Train this process's part of the run and return its summary. The default process group must exist."""
    run = prepare(config, world, folder, train_step)
    with left_on_error(run), Stop(dist.distributed_c10d._get_default_store(), world.rank, world.size) as stop:
        step, stopped = fit(run, stop)
        stop.end()
        return finish(run, step, stopped)


def fit(run: Prepared, stop: Stop) -> tuple[int, bool]:
    """Train until the run ends or is asked to stop; return the last step, and whether it was stopped."""
    config, members, stats = run.config, run.members, run.stats
    step, stopped, rounds, readings = run.start, False, stats.rounds, Readings(run.writer.write)
    assert config.eval_every is not None
    if not (step or members.over):
        evaluate(run, step)
    service = config.preemption if run.world.local_rank == 0 else None
    with preemption.watched(service, stop.ask):
        try:
            while not (members.over or stopped):
                step, began = step + 1, time.perf_counter()
                lr = members.lr(step)
                read = train_step(run, lr)
                catch_up = step % config.eval_every == 0 or step % config.save_every == 0
                if catch_up:
                    read()
                readings.write(pending=0 if catch_up else DELAY - 1)
                seconds = time.perf_counter() - began
                speed = run.tokens_per_step / seconds

                readings.add(read, partial(
                    Step, step=step, seconds=run.writer.seconds(), tokens=step * run.tokens_per_step, lr=lr,
                    step_seconds=seconds, tokens_per_second=speed, **_traffic(run, step),
                ))  # fmt: skip
                if catch_up:
                    readings.write()
                rounds = _write_rounds(run, rounds)
                members.after(step, run.writer, readings.last)
                if members.over:
                    break
                if step % config.eval_every == 0:
                    evaluate(run, step)  # on all replicas at once, or the others would wait for one
                stopped = stop.after(step, seconds)
                if step % config.save_every == 0 and not stopped:
                    save(run, step)
        finally:
            readings.write()
    return step, stopped


def train_step(run: Prepared, lr: float) -> Reading:
    """Take one optimizer step on the next batch. Loss and gradient norm are read later."""
    config, device = run.config, run.device
    no_sync = run.model.no_sync if isinstance(run.model, DistributedDataParallel) else contextlib.nullcontext
    set_lr(run.optimizers, lr)
    loss = torch.zeros((), device=device)
    for part in range(1, config.accumulate + 1):
        x, y = (tensor.to(device, non_blocking=True) for tensor in run.batches.next())
        with no_sync() if part < config.accumulate else contextlib.nullcontext():
            with torch.autocast(device.type, torch.bfloat16) if device.type != "cpu" else contextlib.nullcontext():
                output = run.forward(x, y)
            (output.loss / config.accumulate).backward()
        loss += output.cross_entropy.detach() / config.accumulate
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), LARGEST_NORM)
    if run.diloco:
        run.diloco.count(run.tokens_per_step)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return start_reading(loss, norm)


def evaluate(run: Prepared, step: int, replica_loss: float | None = None) -> Evaluation:
    """Evaluate the anchors and, for comparison, this replica's weights, unless `replica_loss` is known."""
    run.phase.say("evaluating")
    replica_loss = _held_out_loss(run) if replica_loss is None else replica_loss
    with _anchors(run):
        loss = _held_out_loss(run) if run.diloco else replica_loss
    bits = bits_per_byte(loss, run.corpus.bytes_per_token)
    evaluation = Evaluation(step=step, seconds=run.writer.seconds(), tokens=step * run.tokens_per_step, loss=loss,
                            bits_per_byte=bits, replica_loss=replica_loss)  # fmt: skip
    run.writer.write(evaluation)
    run.members.evaluated(loss)
    run.phase.say("training")
    return evaluation


def save(run: Prepared, step: int) -> None:
    run.phase.say("saving")
    run.checkpoints.save(step, run.state_dict(moments=step > 0))
    run.writer.write(Event("save", run.writer.seconds(), step))
    run.phase.say("training")


def finish(run: Prepared, step: int, stopped: bool) -> Summary:
    """Sync a last time, save, evaluate, and summarize. Save before evaluating: a stopped run may have little time."""
    replica_loss, rounds, end = None, run.stats.rounds, Event("finish", run.writer.seconds(), step)
    if not stopped:
        run.phase.say("evaluating")
        replica_loss = _held_out_loss(run)
    run.phase.say("last sync")
    lost = run.members.finish(stopped)
    if stopped:
        end = Event("stop", run.writer.seconds(), step, {"steps_lost": lost})
    _write_rounds(run, rounds)
    try:
        save(run, step)
    finally:
        if stopped:
            run.members.leave()
    run.writer.write(end)
    evaluation = evaluate(run, step, replica_loss)
    samples = []
    if run.world.replica == 0:  # only its summary is written
        run.phase.say("writing a sample")
        run.bare.eval()
        with _anchors(run):
            samples.append(sample(run.bare, run.corpus.tokenizer, "def ", 200, run.config.context, run.device))
    if run.diloco and stopped:
        run.diloco.leave()
    seconds = run.writer.seconds()
    run.writer.close()
    return _summary(run, step, stopped, seconds, evaluation, samples)


def _summary(
    run: Prepared, step: int, stopped: bool, seconds: float, evaluation: Evaluation, samples: list[str]
) -> Summary:
    config, corpus, stats = run.config, run.corpus, run.stats
    assert config.replicas is not None
    sent = _traffic(run, step)["bytes_sent"]
    return Summary(
        method=config.method,
        replicas=run.world.replicas,
        parameters=run.parameters,
        steps=step,
        stopped=stopped,
        tokens=step * run.tokens_per_step * run.world.replicas,
        seconds=seconds,
        loss=evaluation.loss,
        bits_per_byte=evaluation.bits_per_byte,
        replica_loss=evaluation.replica_loss,
        unigram_loss=corpus.unigram_loss(),
        bytes_sent=sent,
        bytes_data_parallel=bytes_data_parallel(run.parameters, config.replicas, step),
        largest_burst=run.world.shards * stats.largest_round if run.diloco else round(sent / max(step, 1)),
        seconds_hidden=stats.seconds_hidden,
        seconds_exposed=stats.seconds_exposed,
        corpus={"name": corpus.name, "sha256": corpus.sha256, "bytes": corpus.nbytes},
        samples=samples,
    )


def _held_out_loss(run: Prepared) -> float:
    return held_out_loss(run.bare, run.windows, run.device)


def _anchors(run: Prepared) -> contextlib.AbstractContextManager[None]:
    """Hold the anchors in the model inside this context, if there are any."""
    return run.diloco.anchors() if run.diloco else contextlib.nullcontext()


def _write_rounds(run: Prepared, written: int) -> int:
    """Write the rounds after the first `written`, and return the number of rounds so far."""
    for finished in run.stats.since(written):
        run.writer.round(finished, ranks=run.world.shards)
    return run.stats.rounds


def _traffic(run: Prepared, step: int) -> dict[str, Any]:
    """Traffic so far of this replica: each of its ranks sends its shard. For data-parallel training it is computed, not
    counted: fp32 gradients, sent during backward."""
    stats, in_flight, ranks = run.stats, run.diloco.in_flight if run.diloco else 0, run.world.shards
    sent, received = ranks * stats.bytes_sent, ranks * stats.bytes_received
    if run.config.method == "dp":
        sent = received = bytes_data_parallel(run.parameters, run.world.replicas, step, width=4)
    return {"bytes_sent": sent, "bytes_received": received, "seconds_hidden": stats.seconds_hidden,
            "seconds_exposed": stats.seconds_exposed, "in_flight": in_flight}  # fmt: skip
