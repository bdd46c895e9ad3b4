"""DiLoCo in Lightning's Trainer."""

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only  # pyright: ignore[reportMissingImports]
from lightning.pytorch.callbacks import Callback  # pyright: ignore[reportMissingImports]

from diloco.errors import ConfigError
from diloco.integrations.attached import Attached, AttachedCallback
from diloco.reduce import Reduce


class DiLoCoCallback(AttachedCallback, Callback):
    """Make this process a replica, and keep its model in agreement with the others'.

    Make it before the Trainer, which takes `devices=1` and `callbacks=[…]`. Every replica trains on data of its own
    (`.replica` of `.replicas`) and saves into a folder of its own (`default_root_dir`); its state is in the checkpoint.
    Validation during training is of the anchors, which all replicas agree on; `fit()` leaves the agreed model.

    Args:
        reduce: who computes the mean, or a function that makes it when training begins. None: `diloco.replica()`, for
            processes that torchrun or srun has started. With `strategy="ddp"` or FSDP inside a replica, which is a job
            of its own then, give `lambda: Collective(at="host:port", …)`.
        settings: of `DiLoCo`.
    """

    def __init__(self, *, reduce: Reduce | Callable[[], Reduce] | None = None, **settings: Any) -> None:
        self._attached, self._saved, self._jobs = Attached(reduce, settings), None, reduce is not None
        if reduce is None:
            rank_zero_only.rank = 0  # read from RANK when lightning was imported: others would log nothing

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.world_size > 1 and not self._jobs:
            raise ConfigError(
                f"the Trainer has a world of {trainer.world_size} processes that train one model: set devices=1, "
                "num_nodes=1, each process is a replica; or make each replica a job of its own and give reduce="
            )
        self._attached.begin(pl_module, trainer.optimizers, self._saved)
        self._saved = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.log_dict(self._attached.figures())

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._attached.show_anchors()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._attached.hide_anchors()  # before ModelCheckpoint, which comes last

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._attached.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._attached.fail(exception)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.diloco is None else {"diloco": self.diloco.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict.get("diloco")
