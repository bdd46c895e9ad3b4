"""DiLoCo in `transformers.Trainer` and in what is built on it: TRL, peft, sentence-transformers, Axolotl."""

import contextlib
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import IterableDataset, Subset
from transformers import Trainer, TrainerCallback

from diloco.errors import ConfigError
from diloco.exchange.reducer import Shard
from diloco.integrations.attached import Attached, indivisible, overwrites

STATE = "diloco.pt"


class DiLoCoCallback(Attached, TrainerCallback):
    """Make this process a replica, and keep its model in agreement with the others.

    Create it before `TrainingArguments`, which reads torchrun's variables; then `Trainer(callbacks=[…])`. Each replica
    trains on its part of the training data and saves to `replica-N` in `output_dir`. Evaluations, predictions and saved
    models are of the anchors, which all replicas agree on; the weights that a replica trains are in the checkpoint's
    `diloco.pt`. After `train()` the model is the agreed one. See `Attached` for the arguments.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._part: object = None
        self._checkpoint: Path | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._take_folder(args)

    def prepare(self, trainer: Trainer, resume_from: str | bool | None) -> str | bool | None:
        """Give the trainer this replica's data, folder and checkpoint, before it looks at any of them."""
        self.open()
        self._take_folder(trainer.args)
        if self._shard and (self._part is None or trainer.train_dataset is not self._part):
            trainer.train_dataset = self._part = part(trainer.train_dataset, *self.place)
        self._checkpoint = None
        if resume_from and not isinstance(resume_from, bool):
            # A script's flag gives all replicas the same path.
            path = re.sub(r"(^|/)replica-\d+(?=/|$)", rf"\1{self.folder}", str(resume_from))
            self._checkpoint = Path(path)
            return path
        return resume_from

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        if self._shard and self._part is None:
            raise indivisible("this trainer overrides train()")
        for setting in ("load_best_model_at_end", "sync_ref_model"):  # the second is TRL's
            if getattr(args, setting, False):
                raise overwrites(f"{setting}=True")
        checkpoint = self._checkpoint or Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.begin(model, optimizer, _saved(checkpoint) if state.global_step else None)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        figures = self.figures()
        for log in [logs, *state.log_history[-1:]]:  # the history has its own copy already
            if log is not None:
                log.update(figures)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved = self.state()
        (shard,) = saved
        if args.should_save or shard != str(Shard()):  # the ranks of DDP inside a replica have equal states
            name = STATE if shard == str(Shard()) else f"diloco {shard}.pt"
            torch.save(saved, Path(args.output_dir, f"checkpoint-{state.global_step}", name))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end()

    def _take_folder(self, args: Any) -> None:
        if args.output_dir and self.folder and Path(args.output_dir).name != self.folder:
            args.output_dir = str(Path(args.output_dir, self.folder))


def part(dataset: Any, replica: int, replicas: int) -> Any:
    """This replica's part of a dataset of any kind that a Trainer takes."""
    if isinstance(dataset, dict):  # as sentence-transformers takes them
        return type(dataset)({name: part(rows, replica, replicas) for name, rows in dataset.items()})
    if hasattr(dataset, "shard"):  # of the package datasets
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(dataset, rank=replica, world_size=replicas)
    if isinstance(dataset, IterableDataset):
        return IterableDatasetShard(dataset, 1, drop_last=True, num_processes=replicas, process_index=replica)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise indivisible(f"train_dataset is a {type(dataset).__name__}")
    return Subset(dataset, range(replica, len(dataset), replicas))


def _saved(folder: Path) -> dict[str, Any]:
    files = list(folder.glob("diloco*.pt"))  # one for each shard
    if not files:
        raise ConfigError(f"{folder} holds no {STATE}: resume from a checkpoint that this replica saved")
    states = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    return {shard: part for state in states for shard, part in state.items()}


# A Trainer does not tell its callbacks which Trainer it is, or that an evaluation begins. So these methods look for a
# DiLoCoCallback; without one they behave as before.


def _callback(trainer: Trainer) -> DiLoCoCallback | None:
    return next((c for c in trainer.callback_handler.callbacks if isinstance(c, DiLoCoCallback)), None)


def _as_replica(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def wrapped(self: Trainer, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        callback = _callback(self)
        if callback is None:
            return train(self, resume_from_checkpoint, *args, **kwargs)
        try:
            return train(self, callback.prepare(self, resume_from_checkpoint), *args, **kwargs)
        except BaseException:
            callback.fail()
            raise

    return wrapped


def _of_anchors(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        callback = _callback(self)
        with callback.agreed() if callback else contextlib.nullcontext():
            return method(self, *args, **kwargs)

    return wrapped


Trainer.train = _as_replica(Trainer.train)
Trainer.evaluate = _of_anchors(Trainer.evaluate)
Trainer.predict = _of_anchors(Trainer.predict)
Trainer.save_model = _of_anchors(Trainer.save_model)
