"""DiLoCo in torchtitan: each replica is a torchtitan job of its own, with torchtitan's parallelism inside.

`--module diloco.integrations.torchtitan --config llama3.llama3_8b` is torchtitan's `--module llama3 --config llama3_8b`
with a section `diloco`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.config import ConfigManager  # pyright: ignore[reportMissingImports]
from torchtitan.tools.logging import logger  # pyright: ignore[reportMissingImports]

from diloco.errors import ConfigError
from diloco.integrations.attached import Attached, by_name
from diloco.reduce.collective import Collective


def __getattr__(name: str) -> Callable[[], Any]:
    """The configuration that torchtitan has under this name, MODULE.CONFIG, with a section `diloco`."""
    module, _, config = name.rpartition(".")
    if not module or name.startswith("__"):
        raise AttributeError(f"no configuration {name!r}: give --config MODULE.CONFIG, as in llama3.llama3_8b")
    return lambda: with_diloco(ConfigManager().parse_args(["--module", module, "--config", config]))


def with_diloco(config: Any) -> Any:
    """The same configuration with a section `diloco`. It builds a trainer of the same class that is a replica."""
    section = ("diloco", Settings, field(default_factory=Settings))
    made: Any = make_dataclass("Config", [section], bases=(type(config),), kw_only=True, slots=True)
    type("DiLoCoTrainer", (Replica, type(config)._owner), {"Config": made})  # which makes it what the config builds
    return made(**{each.name: getattr(config, each.name) for each in fields(config)})


@dataclass(kw_only=True)
class Settings:
    at: str = ""
    """host:port where the replicas meet; the first process of replica 0 listens there."""
    replica: int = 0
    """The number of this job among the replicas, from 0."""
    replicas: int = 2
    """How many replicas there are."""
    sync_every: int = 100
    """Steps between two syncs of the same fragment (H)."""
    overlap: int = 1
    """Steps between sending a fragment and applying the result (tau)."""
    keep_local: float = 0.0
    """Weight of the local value when the result is applied (alpha)."""
    fragments: str = "strided:3"
    """How the model is cut: strided:N, sequential:N, balanced:N or named:PATTERNS."""
    codec: str = "e3m0"
    """Numbers on the wire: e3m0, bfloat16, float32, twobit or topk."""
    outer: str = ""
    """The outer rule, as in nesterov:0.6,0.9 or sgd:1; empty: Nesterov, with momentum that grows with the rounds."""
    streams: int = 1
    """TCP connections to use at once."""
    timeout: float = 600.0
    """Seconds that an exchange may take; then a peer counts as lost."""


class Replica:
    """What a trainer of torchtitan does besides, as one of several replicas.

    Its data are this replica's part, its folder is replica-N in dump_folder, its state is in the checkpoints, its
    validation is of the anchors. The last checkpoint is saved after the last sync: it holds the agreed model.
    """

    def __init__(self, config: Any) -> None:
        given: Settings = config.diloco
        if not given.at:
            raise ConfigError("give --diloco.at HOST:PORT, where the replicas meet, and --diloco.replica N of "
                              "--diloco.replicas M")  # fmt: skip
        config.dump_folder = str(Path(config.dump_folder, f"replica-{given.replica}"))
        config.dataloader = _OwnPart(config.dataloader, given.replica, given.replicas)
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        trainer: Any = self
        self.attached = Attached(lambda: _reduce(given), _settings(given))
        self.attached.make(trainer.model_parts, list(trainer.optimizers))
        trainer.checkpointer.states["diloco"] = _OfThisRank(self.attached.diloco)
        log = trainer.metrics_processor.log
        trainer.metrics_processor.log = lambda *args, extra_metrics=None, **more: log(
            *args, extra_metrics={**(extra_metrics or {}), **self.attached.figures()}, **more
        )
        if config.validator.enable:
            trainer.validator.validate = self.attached.on_anchors(trainer.validator.validate)

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


def _settings(given: Settings) -> dict[str, Any]:
    names = ("sync_every", "overlap", "keep_local", "fragments", "codec", "outer")
    return by_name({name: value for name in names if (value := getattr(given, name)) != ""})


def _reduce(given: Settings) -> Collective:
    """Rank r of this job meets rank r of the others: torchtitan gives equal ranks of equal jobs the same part."""
    inside = dist.group.WORLD if dist.get_world_size() > 1 else None
    return Collective(
        at=given.at, replica=given.replica, replicas=given.replicas, shards=inside, streams=given.streams,
        timeout=given.timeout,
    )  # fmt: skip


class _OwnPart:
    """The configuration of a data loader, for this replica's part of the data."""

    def __init__(self, config: Any, replica: int, replicas: int) -> None:
        self._config, self._replica, self._replicas = config, replica, replicas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def build(self, *, dp_world_size: int, dp_rank: int, **given: Any) -> Any:
        whole, mine = dp_world_size * self._replicas, dp_world_size * self._replica + dp_rank
        return self._config.build(dp_world_size=whole, dp_rank=mine, **given)


class _OfThisRank:
    """The state under a name of its own: torch.distributed.checkpoint takes equal names on several ranks for equal
    values, and the stages of a pipeline have other ones."""

    def __init__(self, diloco: Any) -> None:
        self._diloco, self._name = diloco, f"rank {dist.get_rank()}"

    def state_dict(self) -> dict[str, Any]:
        return {self._name: self._diloco.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._diloco.load_state_dict(state_dict[self._name])
