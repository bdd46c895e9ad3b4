"""DiLoCo in Lightning's Trainer."""

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only  # pyright: ignore[reportMissingImports]
from lightning.pytorch.callbacks import (  # pyright: ignore[reportMissingImports]
    Callback,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.connectors.data_connector import (  # pyright: ignore[reportMissingImports]
    _get_distributed_sampler,
)
from lightning.pytorch.utilities.data import (  # pyright: ignore[reportMissingImports]
    _update_dataloader,
    has_iterable_dataset,
)
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from diloco.errors import ConfigError
from diloco.exchange.reducer import Reducer
from diloco.integrations.attached import Attached, indivisible, overwrites


class DiLoCoCallback(Attached, Callback):
    """Make this process a replica, and keep its model in agreement with the others.

    Create it before the Trainer, which takes `devices=1` and `callbacks=[…]`. Each replica trains on its part of the
    training data; set a folder for it (`default_root_dir`). Validation and the weights in a checkpoint are of the
    anchors, which all replicas agree on; the weights that a replica trains are in the callback's part of the
    checkpoint. `fit()` leaves the agreed model.

    See `Attached` for the arguments. With `strategy="ddp"` or FSDP inside a replica, each replica is a job: pass
    `reducer=lambda: Collective(at="host:port", …)`.
    """

    def __init__(self, *, reducer: Reducer | Callable[[], Reducer] | None = None, **settings: Any) -> None:
        super().__init__(reducer=reducer, **settings)
        self._jobs = reducer is not None
        self._saved: dict[str, Any] | None = None
        if reducer is None:
            rank_zero_only.rank = 0  # read from RANK when lightning was imported: others would log nothing

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.world_size > 1 and not self._jobs:
            raise ConfigError(
                f"the Trainer runs {trainer.world_size} processes that train one model: set devices=1, num_nodes=1 so "
                "that each process is a replica; or make each replica a job and pass reducer="
            )
        for other in trainer.callbacks:
            if isinstance(other, (WeightAveraging, StochasticWeightAveraging)):
                raise overwrites(type(other).__name__)
        self.open()
        self._saved, strategy = None, trainer.strategy
        weights = strategy.lightning_module_state_dict
        strategy.lightning_module_state_dict = self.agreed()(lambda: _copied(weights()))
        if self._shard:
            process = strategy.process_dataloader
            strategy.process_dataloader = lambda loader: process(self._part(trainer, loader))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for name in ("lightning_module_state_dict", "process_dataloader"):
            vars(trainer.strategy).pop(name, None)

    def _part(self, trainer: Any, loader: Any) -> Any:
        """The loader of this replica's part. Lightning has divided it over the ranks of DDP inside the replica."""
        if not trainer.training:
            return loader
        if not isinstance(loader, DataLoader) or has_iterable_dataset(loader):
            raise indivisible(f"the training data is a {type(getattr(loader, 'dataset', loader)).__name__}")
        rank, size = (trainer.global_rank, trainer.world_size) if self._jobs else (0, 1)
        replica, replicas = self.place
        place: dict[str, Any] = {"num_replicas": replicas * size, "rank": replica * size + rank}
        if isinstance(sampler := loader.sampler, DistributedSampler):
            if size == 1:  # the user's own
                return loader
            place |= {"shuffle": sampler.shuffle, "seed": sampler.seed, "drop_last": sampler.drop_last}
            DistributedSampler.__init__(sampler, sampler.dataset, **place)  # Lightning has made it for this loader
            return loader
        shuffle = not isinstance(sampler, SequentialSampler)
        return _update_dataloader(loader, _get_distributed_sampler(loader, shuffle, trainer.overfit_batches, **place))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin(pl_module, trainer.optimizers, self._saved)
        self._saved = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.log_dict(self.figures())

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.show_anchors()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.hide_anchors()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.fail()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.diloco is None else {"diloco": self.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict.get("diloco")


def _copied(weights: dict[str, Any]) -> dict[str, Any]:
    """Copy weights, to the CPU where possible: the model holds the anchors for a moment only."""
    return {n: w.detach().clone() if isinstance(w, DTensor) else w.detach().to("cpu", copy=True)
            for n, w in weights.items()}  # fmt: skip
