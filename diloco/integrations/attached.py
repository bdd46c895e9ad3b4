"""What every framework's callback does with DiLoCo: begin or resume, show the anchors, count, end."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import nn

from diloco.diloco import DiLoCo
from diloco.errors import ConfigError
from diloco.hook import Optimizers
from diloco.launch import replica
from diloco.mistakes import known_as
from diloco.reduce import Reduce

Model = nn.Module | Sequence[nn.Module]
F = TypeVar("F", bound=Callable[..., Any])


class Attached:
    """A DiLoCo that is made when the framework has model, optimizer and checkpoint in place.

    Args:
        reduce: who computes the mean, or a function that makes it when training begins, for groups that the framework
            opens. None: the processes that torchrun or srun has started, each a replica: `diloco.replica()`.
        settings: of DiLoCo.
    """

    def __init__(self, reduce: Reduce | Callable[[], Reduce] | None, settings: Mapping[str, Any]) -> None:
        self._reduce = replica() if reduce is None else reduce
        self._settings = dict(settings)
        self._inside = contextlib.ExitStack()
        self._training = False
        self.diloco: DiLoCo | None = None

    @property
    def replica(self) -> int:
        return self._of_reduce("replica")

    @property
    def replicas(self) -> int:
        return self._of_reduce("replicas")

    @property
    def folder(self) -> str:
        """The name of a folder that is this replica's own."""
        named = known_as(self._reduce)
        return "" if named is None else f"replica-{named}"

    def make(self, model: Model, optimizers: Optimizers) -> DiLoCo:
        """It joins the others at the first step."""
        reduce: Any = self._reduce if hasattr(self._reduce, "take") else self._reduce()  # pyright: ignore
        self.diloco = DiLoCo(model, optimizers, **self._settings, reduce=reduce)
        self._training = True
        return self.diloco

    def begin(self, model: Model, optimizers: Optimizers, state: dict[str, Any] | None) -> None:
        """Join the others, from the saved state if there is one."""
        diloco = self.make(model, optimizers)
        if state is not None:
            diloco.load_state_dict(state)
        diloco.join()

    def show_anchors(self) -> None:
        """Until `hide_anchors`, the model holds what all replicas agree on."""
        self.hide_anchors()
        if self.diloco is not None and self._training:
            self._inside.enter_context(self.diloco.anchors())

    def hide_anchors(self) -> None:
        self._inside.close()

    def on_anchors(self, evaluate: F) -> F:
        """The same evaluation, of what all replicas agree on."""

        @functools.wraps(evaluate)
        def shown(*args: Any, **given: Any) -> Any:
            self.show_anchors()
            try:
                return evaluate(*args, **given)
            finally:
                self.hide_anchors()

        return cast(F, shown)

    def figures(self) -> dict[str, float]:
        """For the framework's log."""
        if self.diloco is None:
            return {}
        stats = self.diloco.stats
        return {
            "diloco/rounds": stats.rounds,
            "diloco/bytes_sent": stats.bytes_sent,
            "diloco/bytes_received": stats.bytes_received,
            "diloco/seconds_exposed": round(stats.seconds_exposed, 3),
        }

    def end(self) -> bool:
        """The last sync: all replicas are equal then. False if it was before."""
        ends, self._training = self._training, False
        if self.diloco is not None:
            self.diloco.finish()
        return ends

    def fail(self, error: BaseException) -> None:
        """Training ended with an error: leave at once, so that the others do not wait for this replica."""
        self.hide_anchors()
        self._training = False
        if self.diloco is not None:
            self.diloco.leave()

    def _of_reduce(self, name: str) -> int:
        if not hasattr(self._reduce, name):
            raise ConfigError(f"{type(self._reduce).__name__} gives no {name}: divide the data by names of your own")
        return getattr(self._reduce, name)


class AttachedCallback:
    """What users ask of a framework's callback: its DiLoCo, and which part of the data is this replica's."""

    _attached: Attached

    @property
    def diloco(self) -> Any:
        return self._attached.diloco

    @property
    def replica(self) -> int:
        return self._attached.replica

    @property
    def replicas(self) -> int:
        return self._attached.replicas
