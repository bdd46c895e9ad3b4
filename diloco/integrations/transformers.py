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
from diloco.flat import WHOLE
from diloco.integrations.attached import Attached, AttachedCallback, refuse
from diloco.reduce import Reduce

STATE = "diloco.pt"


class DiLoCoCallback(AttachedCallback, TrainerCallback):
    """Make this process a replica, and keep its model in agreement with the others.

    Create it before `TrainingArguments`, which reads torchrun's variables; then `Trainer(callbacks=[…])`. Each replica
    trains on its part of the training data and saves to `replica-N` in `output_dir`. Evaluations, predictions and saved
    models are of the anchors, which all replicas agree on; the weights that a replica trains are in the checkpoint's
    `diloco.pt`. After `train()` the model is the agreed one.

    Args:
        reduce: the reducer, or a function that creates it when training begins. None: `diloco.replica()`, for processes
            that torchrun or srun started.
        shard: divide the training data over the replicas. False: you give each replica its own.
        settings: arguments of `DiLoCo`.
    """

    def __init__(
        self, *, reduce: Reduce | Callable[[], Reduce] | None = None, shard: bool = True, **settings: Any
    ) -> None:
        self._attached, self._shard = Attached(reduce, settings), shard
        self.agreed, self.fail = self._attached.agreed, self._attached.fail
        self._part: object = None
        self._checkpoint: Path | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._take_folder(args)

    def prepare(self, trainer: Trainer, resume_from: str | bool | None) -> str | bool | None:
        """Give the trainer this replica's data, folder and checkpoint, before it looks at any of them."""
        self._attached.open()
        self._take_folder(trainer.args)
        if self._shard and (self._part is None or trainer.train_dataset is not self._part):
            trainer.train_dataset = self._part = part(trainer.train_dataset, self.replica, self.replicas)
        self._checkpoint = None
        if resume_from and not isinstance(resume_from, bool):
            # A script's flag gives all replicas the same path.
            own = re.sub(r"(^|/)replica-\d+(?=/|$)", rf"\1{self._attached.folder}", str(resume_from))
            self._checkpoint = Path(own)
            return own
        return resume_from

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        if self._shard and self._part is None:
            raise ConfigError(
                "this trainer has a train() of its own, so the callback could not divide its data: give each replica "
                "its own data and set shard=False"
            )
        for setting in ("load_best_model_at_end", "sync_ref_model"):  # the second is TRL's
            if getattr(args, setting, False):
                refuse(f"{setting}=True")
        checkpoint = self._checkpoint or Path(args.output_dir, f"checkpoint-{state.global_step}")
        self._attached.begin(model, optimizer, _saved(checkpoint) if state.global_step else None)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        figures = self._attached.figures()
        for log in [logs, *state.log_history[-1:]]:  # the history has its own copy already
            if log is not None:
                log.update(figures)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved = self._attached.state()
        (shard,) = saved
        if args.should_save or shard != str(WHOLE):  # the ranks of DDP inside a replica have equal states
            name = STATE if shard == str(WHOLE) else f"diloco {shard}.pt"
            torch.save(saved, Path(args.output_dir, f"checkpoint-{state.global_step}", name))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._attached.end()

    def _take_folder(self, args: Any) -> None:
        own = self._attached.folder
        if args.output_dir and own and Path(args.output_dir).name != own:
            args.output_dir = str(Path(args.output_dir, own))


def part(dataset: Any, replica: int, replicas: int) -> Any:
    """This replica's part of a dataset of any kind that a Trainer takes."""
    if isinstance(dataset, dict):  # as sentence-transformers takes them
        return type(dataset)({name: part(each, replica, replicas) for name, each in dataset.items()})
    if hasattr(dataset, "shard"):  # of the package datasets
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(dataset, rank=replica, world_size=replicas)
    if isinstance(dataset, IterableDataset):
        return IterableDatasetShard(dataset, 1, drop_last=True, num_processes=replicas, process_index=replica)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"train_dataset is a {type(dataset).__name__}, which cannot be divided over the replicas: give each "
            "replica its own data and set shard=False"
        )
    return Subset(dataset, range(replica, len(dataset), replicas))


def _saved(folder: Path) -> dict[str, Any]:
    files = list(folder.glob("diloco*.pt"))  # one for each shard
    if not files:
        raise ConfigError(f"{folder} holds no {STATE}: resume from a checkpoint that this replica saved")
    states = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    return {shard: part for state in states for shard, part in state.items()}


# A Trainer tells its callbacks neither which Trainer it is nor that an evaluation begins. So these methods look for a
# DiLoCoCallback; without one they do what they always did.


def _callback(trainer: Trainer) -> DiLoCoCallback | None:
    return next((c for c in trainer.callback_handler.callbacks if isinstance(c, DiLoCoCallback)), None)


def _as_replica(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def wrapped(self: Trainer, resume_from_checkpoint: str | bool | None = None, *args: Any, **given: Any) -> Any:
        callback = _callback(self)
        if callback is None:
            return train(self, resume_from_checkpoint, *args, **given)
        try:
            return train(self, callback.prepare(self, resume_from_checkpoint), *args, **given)
        except BaseException:
            callback.fail()
            raise

    return wrapped


def _of_anchors(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: Trainer, *args: Any, **given: Any) -> Any:
        callback = _callback(self)
        with callback.agreed() if callback else contextlib.nullcontext():
            return method(self, *args, **given)

    return wrapped


Trainer.train = _as_replica(Trainer.train)
Trainer.evaluate = _of_anchors(Trainer.evaluate)
Trainer.predict = _of_anchors(Trainer.predict)
Trainer.save_model = _of_anchors(Trainer.save_model)
