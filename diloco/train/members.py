"""Who takes part in a run: a fixed set of replicas, or the members of a bucket, which come and go.

This determines the learning rate, the batch, the data and the end of the run.
"""

import contextlib
import hashlib
import itertools
import math
import re
import socket
import sys
from argparse import ArgumentTypeError
from dataclasses import Field, asdict, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, Protocol, get_args

import torch
import torch.distributed as dist

from diloco.bucket import Bucket, below, find_run
from diloco.bucket.leases import Leases, Ranges, ranges_of, read_ranges
from diloco.bucket.members import Phase, check_name
from diloco.bucket.run import Run
from diloco.bucket.store.envelope import read_secret
from diloco.core.diloco import DiLoCo
from diloco.errors import ConfigError, Mismatch
from diloco.exchange.reducer import Reducer
from diloco.exchange.world import World
from diloco.runs.config import TrainConfig, names
from diloco.runs.flags import from_value, spelled
from diloco.runs.schema import Event, Step
from diloco.runs.writer import Writer
from diloco.train.data.batches import Batches, LeasedBatches
from diloco.train.data.corpus import Corpus
from diloco.train.pace import Batch, Pace, batch_for, seconds_of
from diloco.train.settings import lr_at

DIGEST = "tokenizer_digest"
RANGES = "ranges"
STEP_SECONDS = "step_seconds"
"""Published in the note of the run if its creator timed its steps. `--batch auto` matches it."""
NOTICE = 20.0
"""Seconds in which a member that is asked to stop hands its last steps to the others. Clouds give at least 30 s, and a
checkpoint is saved afterwards."""
CARRIES = 32
"""Largest work of one delta, in rounds. A slow member carries over the work that no round has counted yet."""
SAFE = {"model": re.compile("[a-z0-9.]+"), "tokenizer": re.compile("bytes|train:[0-9]+")}
"""Values adopted from the run without asking: presets, and tokenizers built locally. Anything else is loaded from
elsewhere, so the user must name it."""
LARGEST = {"context": 1 << 24, "batch": 1 << 24, "accumulate": 1 << 24, "replicas": 1 << 20}


class Members(Protocol):
    """Who takes part in the run, as the training loop sees it."""

    batch: Batch
    """Of this replica. Final after `begin`."""

    @property
    def reducer(self) -> Reducer | None:
        """None: the default process group."""
        ...

    @property
    def over(self) -> bool:
        """Whether the run has ended, so that no step follows."""
        ...

    def begin(self, diloco: DiLoCo | None, start: int, folder: Path) -> None:
        """Join the run. `start` is the step of the checkpoint that was loaded."""
        ...

    def batches(self, corpus: Corpus, sequences: int) -> Batches:
        """The training data of this process. Call it after `begin`."""
        ...

    def lr(self, step: int) -> float:
        """Inner learning rate of the next step."""
        ...

    def after(self, step: int, writer: Writer, last: Step | None) -> None:
        """Note that a step is done. `last`: the newest step whose loss has been read."""
        ...

    def evaluated(self, loss: float) -> None:
        """Note the loss of the anchors."""
        ...

    def finish(self, stopped: bool) -> int:
        """Sync a last time. `stopped`: this process was asked to stop, before the end of the run. Returns the steps
        that the others will lack."""
        ...

    def leave(self) -> None:
        """Leave the others, after a checkpoint was saved."""
        ...


class Fixed:
    """A constant number of replicas, all of which do `config.steps` steps."""

    reducer = None

    def __init__(self, config: TrainConfig, world: World) -> None:
        assert config.steps is not None
        self._config, self._world, self._steps, self.over = config, world, config.steps, False
        self.batch = planned_batch(config, world)

    def begin(self, diloco: DiLoCo | None, start: int, folder: Path) -> None:
        self.over, self._diloco = start >= self._steps, diloco
        if diloco:
            diloco.join()

    def batches(self, corpus: Corpus, sequences: int) -> Batches:
        return corpus.batches(self._world.rank, self._world.size, sequences, self._config.context, self._config.seed)

    def lr(self, step: int) -> float:
        return lr_at(self._config, step)

    def after(self, step: int, writer: Writer, last: Step | None) -> None:
        self.over = step >= self._steps

    def evaluated(self, loss: float) -> None: ...

    def finish(self, stopped: bool) -> int:
        if self._diloco and not stopped:  # all stop after the same step, and resume there
            self._diloco.finish()
        return 0

    def leave(self) -> None: ...


def planned_batch(config: TrainConfig, world: World) -> Batch:
    """One replica's equal part of the batch."""
    assert isinstance(config.batch, int) and config.replicas is not None
    sequences = config.batch // (config.replicas if config.bucket else world.replicas)
    return Batch(max(sequences, 1), config.accumulate)


def member_name(config: TrainConfig) -> str:
    machine = re.sub(r"[^a-z0-9_-]", "-", socket.gethostname().lower()).strip("-")[:63]
    return check_name(config.member or machine or "member")


def adopt_settings(config: TrainConfig) -> TrainConfig:
    """Replace the shared settings by those of the run in the bucket, if there is one."""
    config = replace(config, replicas=config.replicas or 2)
    if config.batch == "auto":  # the run has a number for all, and this member its own
        config = replace(config, batch=None, share=config.share or "auto")
    if config.model.startswith("hf:"):  # a user who names the model also trusts its tokenizer
        config = replace(config, tokenizer=config.tokenizer or config.model)
    run = run_of(config)
    if run is None:
        return config
    settings = {field.name: field for field in fields(TrainConfig)}
    adopted = {}
    for name in names("run"):
        if name not in run.note:
            continue
        local, shared = getattr(config, name), _checked(settings[name], run.note[name])
        if name in SAFE and shared != local and not SAFE[name].fullmatch(shared):
            raise ConfigError(f"the run uses {spelled(name)} {shared}, which is loaded from elsewhere: if you trust "
                              "it, set it yourself")  # fmt: skip
        adopted[name] = shared
        if local not in (shared, settings[name].default) and name != "replicas":
            print(f"{spelled(name)} {local} is ignored: the run has {shared}", file=sys.stderr)  # noqa: T201
    if run.note.get("data") and not config.data:
        raise ConfigError("this run was created with --data: set --data to your local path")
    return replace(config, **adopted)


def _checked(field: Field[Any], value: Any) -> Any:
    """A setting that the run's creator published: of its flag's type, and not absurd. `TrainConfig` checks the rest."""
    if value is None and NoneType in get_args(field.type):
        return None
    with contextlib.suppress(ArgumentTypeError, ValueError):
        checked = from_value(field, value)
        large = isinstance(checked, (int, float)) and abs(checked) > LARGEST.get(field.name, 1e15)
        if not large and str(checked).isprintable() and len(str(checked)) < 10_000:
            return checked
    raise ConfigError(f"the run in the bucket has {field.name}={value!r:.60}, which is not a valid "
                      f"{spelled(field.name)}; do not join a run that you do not trust")  # fmt: skip


class Elastic:
    """A member of a bucket. `config.batch` is that of all members the run was planned for."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        tokenizer: str,
        corpus: Corpus | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`corpus`: lease its windows from the other members; None: sample alone. `pace`: the times of this member's
        steps, which with `--batch auto` decide its batch."""
        assert config.bucket is not None and config.steps is not None
        self.batch, self._pace = planned_batch(config, world), pace
        per_step = self.batch.sequences * config.context
        self._config, self._world, self._tokenizer = config, world, tokenizer
        self.rounds = math.ceil(config.steps / config.sync_every)
        shared = {k: v for k, v in asdict(config).items() if k in (*names("run"), "data")} | {DIGEST: tokenizer}
        self._leases: Leases | None = None
        self._ranges = self._cut(corpus, per_step) if corpus else {}
        shared |= {RANGES: self._ranges}
        if pace:
            shared |= {STEP_SECONDS: seconds_of(pace, self.batch.sequences)}
        self.reducer = Bucket(
            config.bucket, member_name(config), key=read_secret(config.key_file), encrypt=read_secret(config.encrypt),
            join_only=config.join_only, announce=config.announce, quorum=config.quorum,
            rounds=self.rounds, max_work=float(CARRIES * config.sync_every * per_step), note=shared,
        )  # fmt: skip
        self._position = self._joined_at = self._index = self._order = 0
        self._warm = self.over = False

    def begin(self, diloco: DiLoCo | None, start: int, folder: Path) -> None:
        assert diloco is not None
        diloco.join()
        run = self.reducer.run
        assert run is not None
        if run.note.get(DIGEST, self._tokenizer) != self._tokenizer:
            raise Mismatch("the run has a different tokenizer: use its tokenizer.json or, with train:SIZE, the same "
                           "--data")  # fmt: skip
        self._diloco, self._joined_at, self._warm = diloco, start, bool(start)
        self.batch = self._own_batch(run)
        self.reducer.publish(batch=self.batch.sequences)
        self._fragments = folder / "fragments"  # their phases, for the dashboard
        self._shown = 0  # the newest step with figures when that was written
        self._index, _ = self._agree()
        self.over = min(self._least(*diloco.indices)) >= self.rounds
        index = self._index
        self._position = max(start, self._config.sync_every * index)
        self._warm |= index == 0
        self._order = self._data_order(folder / f"order-{self._world.shard}", bool(start))
        if self._world.shard == 0 and not (folder / "run-id").exists():
            (folder / "run-id.new").write_text(run.id)  # a full disk must not empty the name of the run
            (folder / "run-id.new").replace(folder / "run-id")
        event = f"created run {run.id}" if run.created else f"joined run {run.id} at round {index}"
        self._say(f"{event}, as {self.reducer.name}")
        if self.over:
            self._say(f"it ended after {self.rounds} rounds: this member takes the result")

    def _own_batch(self, run: Run) -> Batch:
        """The number that is set, an equal part, or what this member trains in the time of a step of the run."""
        if isinstance(self._config.share, int):
            return Batch(self._config.share, self._config.accumulate)
        if self._config.share is None:
            return self.batch
        seconds = step_seconds_of(run)
        if self._pace is None or seconds is None:
            return replace(self.batch, why="batch ÷ replicas, because the run was created without --batch auto")
        batch = batch_for(self._pace, seconds, accumulate=self._config.accumulate)
        return replace(batch, why=f"what this member trains in {seconds:.3g} s, a step of the run")

    def _cut(self, corpus: Corpus, per_step: int) -> dict[str, object]:
        """Divide this rank's windows into ranges to lease, and name the corpus they belong to."""
        config, world = self._config, self._world
        windows = (max(corpus.train_tokens - 1, 0) // config.context - world.shard + world.size - 1) // world.size
        ranges = ranges_of(max(windows, 1), per_step // config.context // world.size * config.sync_every)
        return {"corpus": corpus.sha256, **asdict(ranges)}

    def _shared_ranges(self) -> Ranges | None:
        """The ranges of the run, if this member has the same corpus as the run's creator."""
        assert self.reducer.run is not None
        shared: Any = self.reducer.run.note.get(RANGES)
        if not self._ranges:
            return None
        ranges = read_ranges(shared)
        if ranges is None or any(shared.get(k) != self._ranges[k] for k in ("corpus", "windows")):
            self._say("this member's data differs from the run's: it samples its own, without leases")
            return None
        return ranges

    def _data_order(self, path: Path, resumed: bool) -> int:
        """Number of the order in which this member visits the windows, stored in `path`.

        On resume the order stays, because the position in the checkpoint refers to it. Otherwise it is a new one, or
        the member would start with the same windows again.
        """
        if not (resumed and path.exists()):
            path.write_text(str(self.reducer.incarnation))
        return int(path.read_text())

    def batches(self, corpus: Corpus, sequences: int) -> Batches:
        """Leased windows if all members have the same text; otherwise all windows, in an order of this member."""
        assert self.reducer.run is not None
        order = f"{self.reducer.run.id} {self.reducer.name} {self._order}"
        digest = hashlib.blake2b(order.encode(), digest_size=6).digest()
        own = corpus.batches(0, 1, sequences, self._config.context, int.from_bytes(digest, "big"))
        ranges, world = self._shared_ranges(), self._world
        if ranges is None:
            return own
        self._leases = leases = self.reducer.lease(ranges)
        place = {"shard": world.shard, "shards": world.size, "seed": self._config.seed}
        return LeasedBatches(own, leases, lambda: self._diloco.step_count + 1, **place)

    def lr(self, step: int) -> float:
        """Follow the progress of the run, never backwards. A new member warms up, because AdamW has no moments yet."""
        self._position = max(self._position + 1, self._config.sync_every * self._index)
        lr = lr_at(self._config, self._position)
        warmup = min(100, self._config.sync_every)
        return lr if self._warm else lr * min((step - self._joined_at) / warmup, 1.0)

    def after(self, step: int, writer: Writer, last: Step | None) -> None:
        """Publish the progress of this member, write events, check whether the run has ended."""
        self.reducer.publish(step=step)
        if self._leases:
            self._leases.trained(self._diloco.replica.counted_steps, self._diloco.replica.lost_steps)
            self.reducer.publish(unleased=self._leases.unleased)
        if last:
            self.reducer.publish(loss=last.loss, tokens_per_second=last.tokens_per_second)
        for event in self.reducer.events():
            writer.write(Event(event.pop("event"), writer.seconds(), step, event))
        if last and last.step != self._shown and self._world.shard == 0:
            self._shown = last.step
            fragments: dict[Phase, list[str]] = {}
            for number, phase in enumerate(self.reducer.phases):
                fragments.setdefault(phase, []).append(str(number))
            rows = ((phase.name.lower(), ", ".join(fragments[phase]), phase.value) for phase in fragments)
            self._fragments.write_text("\n".join(map("\t".join, rows)))
        self._index, self.over = self._agree()

    def evaluated(self, loss: float) -> None:
        self.reducer.publish(anchor_loss=loss)

    def finish(self, stopped: bool) -> int:
        lost = 0
        if not stopped:
            self._diloco.finish()
        else:
            lost = self._diloco.flush(NOTICE)
            text = f"the other members do not have this member's last {lost} steps; its checkpoint does"
            self._say(text if lost else "the other members have all of this member's steps")
        if self._leases:
            self._leases.trained(self._diloco.replica.counted_steps, self._diloco.replica.lost_steps)
            if not stopped:
                self.reducer.release(self._leases)
        return lost

    def leave(self) -> None:
        if self._leases:  # after the checkpoint: a store that does not answer takes seconds of the notice
            self.reducer.release(self._leases)
        self.reducer.leave()  # so that the others need not wait for a timeout

    def _say(self, text: str) -> None:
        if self._world.shard == 0:
            print(text, file=sys.stderr, flush=True)  # noqa: T201

    def _agree(self) -> tuple[int, bool]:
        """The current round of the run and whether it has ended, equal on all ranks of this member."""
        index, ended = self._least(self._diloco.indices[0], self.reducer.ended)
        return index, bool(ended)

    def _least(self, *numbers: int) -> list[int]:
        """The minimum of each number over all ranks of this member."""
        values = torch.tensor(numbers)
        if self._world.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MIN)
        return values.tolist()


def member_folder(config: TrainConfig) -> tuple[Path, bool]:
    """The folder of this member, and whether it holds an earlier incarnation of the member in this run.

    Unless `name` is set, it is named after the bucket and the member, with a number if an earlier run has that name.
    """
    assert config.bucket is not None
    run = run_of(config)
    last = re.sub(r"[^\w.-]", "-", config.bucket.rstrip("/").rpartition("/")[2]).strip(".-") or "bucket"
    stem = config.name or f"{last}-{member_name(config)}"
    for folder in (config.out / (stem if n == 1 else f"{stem}-{n}") for n in itertools.count(1)):
        stored_id = folder / "run-id"
        if not stored_id.exists():
            if not (folder / "config.toml").exists():
                return folder, False
            if config.name is not None:
                raise ConfigError(f"{folder} holds a run without a bucket: use another --name")
            continue
        if run is not None and run.id == stored_id.read_text():
            return folder, True
        if config.name is not None:
            raise ConfigError(f"{folder} belongs to run {stored_id.read_text()}, but the bucket has "
                              f"{run.id if run else 'no run'}: use another --name")  # fmt: skip
    raise AssertionError


def run_of(config: TrainConfig) -> Run | None:
    """The run in the bucket, if there is one."""
    assert config.bucket is not None
    url = config.bucket if config.shards == 1 else below(config.bucket, 0)
    if config.dry_run and not config.join_only and "://" not in url and not Path(url).exists():
        return None
    return find_run(url, read_secret(config.key_file), encrypt=read_secret(config.encrypt), create=not config.join_only)


def step_seconds_of(run: Run) -> float | None:
    """Seconds of a step, if the member that created the run was timed."""
    seconds = run.note.get(STEP_SECONDS)
    if isinstance(seconds, (int, float)) and 0 < seconds < 1e6:
        return float(seconds)
    return None
