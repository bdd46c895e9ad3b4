"""What the callbacks of all frameworks share: join or resume, show the anchors, log, finish."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from diloco.codec import codec_named
from diloco.diloco import DiLoCo
from diloco.errors import ConfigError
from diloco.flat import local, shard_id
from diloco.fragment import fragmenter
from diloco.hook import Optimizers
from diloco.launch import replica
from diloco.mistakes import known_as
from diloco.module import trainable, trained_buffers
from diloco.outer import outer_named
from diloco.reduce import Reduce

Model = nn.Module | Sequence[nn.Module]
F = TypeVar("F", bound=Callable[..., Any])
NAMED = {"codec": codec_named, "fragments": fragmenter, "outer": outer_named}
"""Settings that are objects, by their names in `diloco train`."""


def by_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `DiLoCo` from a configuration or a command line."""
    return {name: NAMED[name](value) if name in NAMED else value for name, value in settings.items()}


class Attached:
    """A DiLoCo that is created once the framework has model, optimizer and checkpoint in place.

    Args:
        reduce: the reducer, or a function that creates it when training begins, for process groups that the framework
            opens. None: one replica per process that torchrun or srun started (`diloco.replica()`).
        settings: arguments of `DiLoCo`.
    """

    def __init__(self, reduce: Reduce | Callable[[], Reduce] | None, settings: Mapping[str, Any]) -> None:
        self._given = replica() if reduce is None else reduce
        self._settings = dict(settings)
        self._inside: contextlib.ExitStack | None = None
        self._training = False
        self.diloco: DiLoCo | None = None

    def open(self) -> None:
        """Create the reducer if a function was given: the framework has its process group now."""
        if callable(self._given):
            self._given = self._given()

    @property
    def replica(self) -> int:
        return self._of_reduce("replica")

    @property
    def replicas(self) -> int:
        return self._of_reduce("replicas")

    @property
    def folder(self) -> str:
        """The name of this replica's own folder."""
        name = known_as(self._given)
        return "" if name is None else f"replica-{name}"

    def make(self, model: Model, optimizers: Optimizers) -> DiLoCo:
        """It joins the others at the first step."""
        self.open()
        self.diloco = DiLoCo(model, optimizers, **self._settings, reduce=cast(Reduce, self._given))
        self._training = True
        return self.diloco

    def begin(self, model: Model, optimizers: Optimizers, state: Mapping[str, Any] | None) -> None:
        """Join the others, from a saved `state()` if there is one."""
        diloco = self.make(model, optimizers)
        if state is not None:
            tensors = _trained(diloco)
            weights = state[str(shard_id(tensors.values()))]["local"]
            with torch.no_grad():
                for name, tensor in tensors.items():
                    local(tensor).copy_(weights[name])
            diloco.load_state_dict(dict(state))
        diloco.join()

    def state(self) -> dict[str, Any]:
        """DiLoCo's state and the weights that this replica trains: the framework's own files hold the anchors."""
        assert self.diloco is not None
        shown = self._inside is not None
        self.hide_anchors()
        state = self.diloco.state_dict()
        (own,) = state.values()
        own["local"] = {name: local(p).detach().to("cpu", copy=True) for name, p in _trained(self.diloco).items()}
        if shown:
            self.show_anchors()
        return state

    def show_anchors(self) -> None:
        """Until `hide_anchors`, the model holds what all replicas agree on."""
        if self.diloco is not None and self._training and self._inside is None:
            self._inside = contextlib.ExitStack()
            self._inside.enter_context(self.diloco.anchors())

    def hide_anchors(self) -> None:
        if self._inside is not None:
            inside, self._inside = self._inside, None
            inside.close()

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """The model holds the anchors inside. May be nested."""
        if self._inside is not None:
            yield
            return
        self.show_anchors()
        try:
            yield
        finally:
            self.hide_anchors()

    def on_anchors(self, function: F) -> F:
        """The same function, called with the anchors in the model."""

        @functools.wraps(function)
        def wrapped(*args: Any, **given: Any) -> Any:
            with self.agreed():
                return function(*args, **given)

        return cast(F, wrapped)

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
        """Sync a last time, which makes all replicas equal. False if that was done before."""
        ends, self._training = self._training, False
        if self.diloco is not None:
            self.diloco.finish()
        return ends

    def fail(self) -> None:
        """Training raised an error: leave at once, so that the others do not wait for this replica."""
        self.hide_anchors()
        self._training = False
        if self.diloco is not None:
            self.diloco.leave()

    def _of_reduce(self, name: str) -> int:
        if not hasattr(self._given, name):
            raise ConfigError(
                f"{type(self._given).__name__} has no {name} number, so the data cannot be divided by it: give each "
                "replica its own data and set shard=False"
            )
        return getattr(self._given, name)


class AttachedCallback:
    """What users read from a framework's callback."""

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


def refuse(setting: str) -> None:
    """Refuse what would put other weights into the model than those that the replicas agree on."""
    raise ConfigError(
        f"{setting} puts each replica's own weights into the model, so the replicas would end with different models. "
        "Turn it off, and use the model that training leaves, or a checkpoint: both hold the weights that all replicas "
        "agree on"
    )


def _trained(diloco: DiLoCo) -> dict[str, Tensor]:
    """What anchors() replaces."""
    return {**trainable(diloco.model), **trained_buffers(diloco.model)}
