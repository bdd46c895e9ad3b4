"""DiLoCo in `transformers.Trainer` and in all that is built on it: TRL's trainers, peft, Axolotl."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from diloco.errors import ConfigError
from diloco.flat import WHOLE
from diloco.integrations.attached import Attached, AttachedCallback
from diloco.reduce import Reduce

STATE = "diloco.pt"


class DiLoCoCallback(AttachedCallback, TrainerCallback):
    """Make this process a replica, and keep its model in agreement with the others'.

    Make it before `TrainingArguments`, which looks at the variables of torchrun; then `Trainer(callbacks=[…])`. Every
    replica trains on data of its own: `dataset.shard(callback.replicas, callback.replica)`. Its checkpoints go to
    `replica-N` in `output_dir`, each with a `diloco.pt`. Evaluations during training are of the anchors, which all
    replicas agree on; after `train()` the model is the agreed one.

    Args:
        reduce: who computes the mean, or a function that makes it when training begins. None: `diloco.replica()`, for
            processes that torchrun or srun has started.
        resume_from: the checkpoint that `train(resume_from_checkpoint=…)` is given, if it lies elsewhere than in this
            replica's folder: a Trainer does not tell callbacks.
        settings: of `DiLoCo`.
    """

    def __init__(
        self,
        *,
        reduce: Reduce | Callable[[], Reduce] | None = None,
        resume_from: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self._attached, self._resume_from = Attached(reduce, settings), resume_from

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._take_folder(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        self._take_folder(args)
        if args.load_best_model_at_end:
            raise ConfigError(
                "load_best_model_at_end=True: the Trainer would load the best weights of each replica before the last "
                "sync, which mixes them. Set it to False, and take the model that train() leaves, or a checkpoint"
            )
        saved = self._saved(args, state) if state.global_step else None
        self._attached.begin(model, optimizer, saved)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_evaluate:  # there is no event before an evaluation
            self._attached.show_anchors()

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._attached.hide_anchors()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        figures = self._attached.figures()
        for log in [logs, *state.log_history[-1:]]:  # a copy of the one is in the other already
            if log is not None:
                log.update(figures)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved = self.diloco.state_dict()
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

    def _saved(self, args: Any, state: Any) -> dict[str, Any]:
        folder = self._resume_from or Path(args.output_dir, f"checkpoint-{state.global_step}")
        found = list(Path(folder).glob("diloco*.pt"))  # one for each shard
        if not found:
            raise ConfigError(
                f"the Trainer resumes at step {state.global_step}, and {folder} holds no {STATE}: give the checkpoint "
                "with DiLoCoCallback(resume_from=…), as to train(resume_from_checkpoint=…). It must be of this replica"
            )
        states = [torch.load(path, map_location="cpu", weights_only=True) for path in found]
        return {shard: part for each in states for shard, part in each.items()}
