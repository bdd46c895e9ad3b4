"""A member of a run in a bucket, where members come and go: its settings, lr and data, and when the run is over."""

import hashlib
import itertools
import logging
import math
import re
import socket
import sys
from dataclasses import Field, asdict, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import torch
import torch.distributed as dist

from diloco.bucket import Bucket, below, find_run
from diloco.bucket.members import check_name
from diloco.bucket.run import Run
from diloco.bucket.store.keys import read_secret
from diloco.diloco import DiLoCo
from diloco.errors import ConfigError, Mismatch
from diloco.flags import choices, spelled, value_type, words_beside
from diloco.runs.config import TrainConfig, names
from diloco.runs.schema import Event, Step
from diloco.runs.writer import Writer
from diloco.train.data.batches import Batches
from diloco.train.data.corpus import Corpus
from diloco.train.defaults import lr_at
from diloco.world import World

DIGEST = "tokenizer_digest"
CARRIES = 32
"""Rounds of work that one delta may count for: a slow member carries the work that was not counted yet."""
FROM_OUTSIDE = {"model": re.compile("[a-z0-9.]+"), "tokenizer": re.compile("bytes|train:[0-9]+")}
"""Settings of which only values like these are taken from the run without being asked for: presets, and what is made
here."""
LARGEST = {"context": 1 << 24, "batch": 1 << 24, "accumulate": 1 << 24, "replicas": 1 << 20}
log = logging.getLogger("diloco")


def member_name(config: TrainConfig) -> str:
    machine = re.sub(r"[^a-z0-9_-]", "-", socket.gethostname().lower()).strip("-")[:63]
    return check_name(config.member or machine or "member")


def as_the_run(config: TrainConfig) -> TrainConfig:
    """The config with the settings of the run in the bucket, if there is one."""
    config = replace(config, replicas=config.replicas or 2)
    if config.model.startswith("hf:"):  # whoever gives the model also trusts its tokenizer
        config = replace(config, tokenizer=config.tokenizer or config.model)
    run = _run(config)
    if run is None:
        return config
    default = TrainConfig()
    known = {field.name: field for field in fields(TrainConfig)}
    changes = {}
    for name in names("run"):
        if name not in run.note:
            continue
        mine, theirs = getattr(config, name), _taken(known[name], run.note[name])
        if name in FROM_OUTSIDE and theirs != mine and not FROM_OUTSIDE[name].fullmatch(theirs):
            raise ConfigError(f"the run has {spelled(name)} {theirs}, which is loaded from outside: give it yourself "
                              "if you trust it")  # fmt: skip
        changes[name] = theirs
        if mine not in (theirs, getattr(default, name)) and name != "replicas":
            print(f"{spelled(name)} {mine} is ignored: the run has {theirs}", file=sys.stderr)  # noqa: T201
    if run.note.get("data") and not config.data:
        raise ConfigError("the run was begun with --data, and its creator's paths mean nothing here: give --data")
    return replace(config, tokens=None, **changes)


def _taken(field: Field[Any], value: Any) -> Any:
    """A setting that the run's creator published: of the right type, and not absurd. `TrainConfig` checks the rest."""
    kind, _ = value_type(field)
    allowed = choices(field)
    if isinstance(value, str):
        good = kind is str or value in allowed
        good &= value.isprintable() and len(value) < 10_000 and (not allowed or value in allowed)
        good |= value in words_beside(field)
    elif isinstance(value, bool) or value is None:
        good = kind is bool if value is not None else NoneType in get_args(field.type)
    else:
        good = isinstance(value, (int, float)) and abs(value) <= LARGEST.get(field.name, 1e15)
        good &= kind is float or (kind is int and isinstance(value, int))
    if not good:
        raise ConfigError(f"the run in the bucket says {field.name}={value!r:.60}: that is not a value of "
                          f"{spelled(field.name)}; do not join a run that you do not trust")  # fmt: skip
    return value


class Elastic:
    """Implements `Members`. `config.batch` is that of all replicas that the run was planned for."""

    def __init__(self, config: TrainConfig, per_step: int, world: World, tokenizer: str) -> None:
        assert config.bucket is not None and config.steps is not None
        self._config, self._world, self._tokenizer = config, world, tokenizer
        self.rounds = math.ceil(config.steps / config.sync_every)
        settled = {k: v for k, v in asdict(config).items() if k in (*names("run"), "data")} | {DIGEST: tokenizer}
        self.reduce = Bucket(
            config.bucket, member_name(config), key=read_secret(config.key_file), encrypt=read_secret(config.encrypt),
            join_only=config.join_only, pace=config.pace, quorum=config.quorum, grace=config.grace, rounds=self.rounds,
            max_work=float(CARRIES * config.sync_every * per_step), note=settled,
        )  # fmt: skip
        self._position = self._joined_at = self._index = self._order = 0
        self._warm = self.over = False  # over: the run had ended when this member joined

    def begin(self, diloco: DiLoCo | None, start: int, folder: Path) -> None:
        """Join, and say where. `start`: the step of the checkpoint that was loaded."""
        assert diloco is not None
        diloco.join()
        run = self.reduce.run
        assert run is not None
        if run.note.get(DIGEST, self._tokenizer) != self._tokenizer:
            raise Mismatch("the run has another tokenizer than this member: give the same tokenizer.json, or with "
                           "train:SIZE the run's --data")  # fmt: skip
        self._diloco, self._joined_at, self._warm = diloco, start, bool(start)
        self._index, _ = self._agree()
        self.over = min(self._least(*diloco.indices)) >= self.rounds
        index = self._index
        self._position = max(start, self._config.sync_every * index)
        self._warm |= index == 0
        self._order = self._order_of(folder / f"order-{self._world.shard}", bool(start))
        if self._world.shard == 0:
            (folder / "run-id").write_text(run.id)
            what = f"created run {run.id}" if run.created else f"joined run {run.id} at round {index}"
            print(f"{what}, as {self.reduce.name}", file=sys.stderr, flush=True)  # noqa: T201
            if self.over:
                print(f"it has ended, after {self.rounds} rounds: this member takes the result", file=sys.stderr)  # noqa: T201

    def _order_of(self, known: Path, resumed: bool) -> int:
        """Number of the order in which this member takes windows.

        A member that resumes keeps the order in which its checkpoint has a position. Any other takes a new one:
        otherwise it would begin with the same windows again.
        """
        assert self.reduce.session is not None
        if not (resumed and known.exists()):
            known.write_text(str(self.reduce.session.mine.incarnation))
        return int(known.read_text())

    def batches(self, corpus: Corpus, sequences: int) -> Batches:
        """Windows in an order that only this member has."""
        assert self.reduce.run is not None
        which = f"{self.reduce.run.id} {self.reduce.name} {self._order}"
        digest = hashlib.blake2b(which.encode(), digest_size=6).digest()
        return corpus.batches(0, 1, sequences, self._config.context, int.from_bytes(digest, "big"))

    def lr(self, step: int) -> float:
        """Follows the progress of the run and never goes back. A new member warms up: its AdamW has no moments yet."""
        self._position = max(self._position + 1, self._config.sync_every * self._index)
        lr = lr_at(self._config, self._position)
        warmup = min(100, self._config.sync_every)
        return lr if self._warm else lr * min((step - self._joined_at) / warmup, 1.0)

    def after(self, step: int, writer: Writer, known: Step | None) -> None:
        """Publish how this member does, write what happened, see whether the run has ended."""
        self.reduce.publish(step=step)
        if known:
            self.reduce.publish(loss=known.loss, tokens_per_second=known.tokens_per_second)
        for event in self.reduce.events():
            writer.write(Event(event.pop("event"), writer.seconds(), step, event))
        self._index, self.over = self._agree()

    def evaluated(self, loss: float) -> None:
        self.reduce.publish(anchor_loss=loss)

    def stopped(self) -> None:
        self.reduce.leave()  # the others know at once

    def _agree(self) -> tuple[int, bool]:
        """How far the run has come and whether it has ended, the same on all ranks of this member."""
        index, ended = self._least(self._diloco.indices[0], self.reduce.ended)
        return index, bool(ended)

    def _least(self, *mine: int) -> list[int]:
        """The least value of all ranks of this member, for each value."""
        values = torch.tensor(mine)
        if self._world.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MIN)
        return values.tolist()


def member_folder(config: TrainConfig) -> tuple[Path, bool]:
    """The folder of this member, and whether it holds an earlier life of the member in this run.

    Unless `name` is given, it is named after the bucket and the member, with a number if an earlier run has that name.
    """
    assert config.bucket is not None
    run = _run(config)
    last = re.sub(r"[^\w.-]", "-", config.bucket.rstrip("/").rpartition("/")[2]).strip(".-") or "bucket"
    stem = config.name or f"{last}-{member_name(config)}"
    for folder in (config.out / (stem if n == 1 else f"{stem}-{n}") for n in itertools.count(1)):
        known = folder / "run-id"
        if not known.exists():
            return folder, False
        if run is not None and run.id == known.read_text():
            return folder, True
        if config.name is not None:
            raise ConfigError(f"{folder} belongs to run {known.read_text()}, but the bucket has "
                              f"{run.id if run else 'no run'}: give another --name")  # fmt: skip
    raise AssertionError


def _run(config: TrainConfig) -> Run | None:
    assert config.bucket is not None
    url = config.bucket if config.shards == 1 else below(config.bucket, 0)
    if config.dry_run and "://" not in url and not Path(url).exists():
        return None
    return find_run(url, read_secret(config.key_file), encrypt=read_secret(config.encrypt), create=not config.join_only)
