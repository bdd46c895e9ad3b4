"""DiLoCo in torchtitan: each replica is a torchtitan job, with torchtitan's parallelism inside."""

from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger  # pyright: ignore[reportMissingImports]

from diloco.errors import ConfigError
from diloco.exchange.collective import Collective
from diloco.integrations.attached import Attached, by_name


def with_diloco(config: Any) -> Any:
    """Add a section `diloco` to a config of torchtitan. The result builds the same trainer, as a replica."""
    section = ("diloco", Settings, field(default_factory=Settings))
    extended: Any = make_dataclass("Config", [section], bases=(type(config),), kw_only=True, slots=True)
    type("DiLoCoTrainer", (Replica, type(config)._owner), {"Config": extended})  # registers it as the config's trainer
    return extended(**{item.name: getattr(config, item.name) for item in fields(config)})


@dataclass(kw_only=True)
class Settings:
    at: str = ""
    """host:port where the replicas meet; the first process of replica 0 listens there."""
    replica: int = 0
    """Number of this job among the replicas, from 0."""
    replicas: int = 2
    """Number of replicas."""
    sync_every: int = 100
    """Steps between two syncs of the same fragment (H)."""
    overlap: int = 1
    """Steps between sending a fragment and applying the result (tau)."""
    keep_local: float = 0.0
    """Weight of the local value when the result is applied (alpha)."""
    fragments: str = "strided:3"
    """Fragments of the model: strided:N, sequential:N or balanced:N."""
    codec: str = "e3m0"
    """Numbers on the wire: e3m0, bfloat16, float32 or twobit."""
    outer: str = ""
    """Outer optimizer, such as nesterov:0.6,0.9 or sgd:1; empty: Nesterov with momentum that grows with the rounds."""
    streams: int = 1
    """TCP connections to use at once."""
    timeout: float = 600.0
    """Seconds after which a peer that does not answer counts as lost."""


class Replica:
    """Base class that makes a trainer of torchtitan a replica.

    It trains on this replica's part of the data, writes to replica-N in dump_folder, keeps its state in the checkpoints
    and validates the anchors. The last checkpoint is saved after the last sync: it holds the agreed model.
    """

    def __init__(self, config: Any) -> None:
        settings: Settings = config.diloco
        if not settings.at:
            raise ConfigError("set --diloco.at HOST:PORT, where the replicas meet, and --diloco.replica N")
        config.dump_folder = str(Path(config.dump_folder, f"replica-{settings.replica}"))
        config.dataloader = _Part(config.dataloader, settings.replica, settings.replicas)
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        trainer: Any = self
        self.attached = Attached(reducer=lambda: _reducer(settings), **_arguments(settings))
        self.attached.make(trainer.model_parts, list(trainer.optimizers))
        trainer.checkpointer.states["diloco"] = _RankState(self.attached.diloco)
        log = trainer.metrics_processor.log
        trainer.metrics_processor.log = lambda *args, extra_metrics=None, **more: log(
            *args, extra_metrics={**(extra_metrics or {}), **self.attached.figures()}, **more
        )
        if config.validator.enable:
            trainer.validator.validate = self.attached.agreed()(trainer.validator.validate)

    def train(self) -> None:
        trainer: Any = super()
        try:
            trainer.train()  # loads the checkpoint; the first step after it joins the others
            self._end()  # if the data ended before the last step
        except BaseException:
            self.attached.fail()
            raise

    def train_step(self, data_iterator: Any) -> None:
        trainer: Any = super()
        trainer.train_step(data_iterator)
        if not trainer.should_continue_training():
            self._end()

    def _end(self) -> None:
        if self.attached.end():
            logger.info(", ".join(f"{name} {value:g}" for name, value in self.attached.figures().items()))


def _arguments(settings: Settings) -> dict[str, Any]:
    names = ("sync_every", "overlap", "keep_local", "fragments", "codec", "outer")
    return by_name({name: value for name in names if (value := getattr(settings, name)) != ""})


def _reducer(settings: Settings) -> Collective:
    """Rank r of this job meets rank r of the others: torchtitan gives equal ranks of equal jobs the same shard."""
    names = ("at", "replica", "replicas", "streams", "timeout")
    shards = dist.group.WORLD if dist.get_world_size() > 1 else None
    return Collective(shards=shards, **{name: getattr(settings, name) for name in names})


class _Part:
    """The config of a data loader for this replica's part of the data."""

    def __init__(self, config: Any, replica: int, replicas: int) -> None:
        self._config, self._replica, self._replicas = config, replica, replicas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def build(self, *, dp_world_size: int, dp_rank: int, **kwargs: Any) -> Any:
        rank = dp_world_size * self._replica + dp_rank
        return self._config.build(dp_world_size=dp_world_size * self._replicas, dp_rank=rank, **kwargs)


class _RankState:
    """The state under this rank's name: torch.distributed.checkpoint assumes that equal names on several ranks hold
    equal values, but the stages of a pipeline differ."""

    def __init__(self, diloco: Any) -> None:
        self._diloco, self._name = diloco, f"rank {dist.get_rank()}"

    def state_dict(self) -> dict[str, Any]:
        return {self._name: self._diloco.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._diloco.load_state_dict(state_dict[self._name])
