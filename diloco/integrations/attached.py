"""The part that all frameworks share: join or resume, show the anchors, log, finish."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from diloco.codecs.codec import codec_named
from diloco.core.diloco import DiLoCo
from diloco.core.fragment import fragmenter
from diloco.core.hook import Optimizers
from diloco.core.outer import outer_named
from diloco.core.tensors import local, shard_id, trainable, trained_buffers
from diloco.errors import ConfigError
from diloco.exchange.launch import replica
from diloco.exchange.reducer import Reducer

Model = nn.Module | Sequence[nn.Module]
NAMED = {"codec": codec_named, "fragments": fragmenter, "outer": outer_named}
"""Settings that are objects, with the functions that parse their names."""


def by_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `DiLoCo` from a configuration or a command line."""
    return {name: NAMED[name](value) if name in NAMED else value for name, value in settings.items()}


class Attached:
    """A DiLoCo that is created once the framework has model, optimizer and checkpoint in place.

    Callbacks inherit from it.

    Args:
        reducer: the reducer, or a function that creates it when training begins, for process groups that the framework
            opens. None: one replica per process that torchrun or srun started (`diloco.replica()`).
        shard: divide the training data over the replicas. False: you pass each replica its own.
        settings: arguments of `DiLoCo`.
    """

    def __init__(
        self, *, reducer: Reducer | Callable[[], Reducer] | None = None, shard: bool = True, **settings: Any
    ) -> None:
        self._reducer = replica() if reducer is None else reducer
        self._shard, self._settings = shard, settings
        self._inside: contextlib.ExitStack | None = None
        self._training = False
        self.diloco: DiLoCo | None = None

    def open(self) -> None:
        """Call the function that creates the reducer: the framework has its process group now."""
        if callable(self._reducer):
            self._reducer = self._reducer()

    @property
    def replica(self) -> int:
        return self.place[0]

    @property
    def place(self) -> tuple[int, int]:
        """This replica's number, and how many there are."""
        identity = None if callable(self._reducer) else self._reducer.identity
        if identity is None or isinstance(identity.name, str) or identity.replicas is None:
            raise indivisible(f"{type(self._reducer).__name__} does not number its replicas")
        return identity.name, identity.replicas

    @property
    def folder(self) -> str:
        """The name of this replica's folder; empty before the reducer exists."""
        return "" if callable(self._reducer) else f"replica-{self._reducer.identity.name}"

    def make(self, model: Model, optimizers: Optimizers) -> DiLoCo:
        """Create the DiLoCo, which joins at the first step."""
        self.open()
        self.diloco = DiLoCo(model, optimizers, **self._settings, reducer=cast(Reducer, self._reducer))
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
        """DiLoCo's state and the weights that this replica trains: the framework's files hold the anchors."""
        assert self.diloco is not None
        shows_anchors = self._inside is not None
        self.hide_anchors()
        state = self.diloco.state_dict()
        (shard,) = state.values()
        shard["local"] = {name: local(p).detach().to("cpu", copy=True) for name, p in _trained(self.diloco).items()}
        if shows_anchors:
            self.show_anchors()
        return state

    def show_anchors(self) -> None:
        """Put the anchors, which all replicas agree on, into the model until `hide_anchors`."""
        if self.diloco is not None and self._training and self._inside is None:
            self._inside = contextlib.ExitStack()
            self._inside.enter_context(self.diloco.anchors())

    def hide_anchors(self) -> None:
        if self._inside is not None:
            inside, self._inside = self._inside, None
            inside.close()

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Show the anchors inside; may be nested. `agreed()(function)` shows them to a function."""
        if self._inside is not None:
            yield
            return
        self.show_anchors()
        try:
            yield
        finally:
            self.hide_anchors()

    def figures(self) -> dict[str, float]:
        """Statistics for the framework's log."""
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
        """Sync a last time, which makes all replicas equal. Returns False if training had ended before."""
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


def indivisible(reason: str) -> ConfigError:
    return ConfigError(f"{reason}, so its data cannot be divided: pass each replica its own data and set shard=False")


def overwrites(setting: str) -> ConfigError:
    """The error for a setting that replaces the weights that all replicas agree on."""
    return ConfigError(
        f"{setting} puts each replica's own weights into the model, so the replicas would end with different models. "
        "Turn it off and use the trained model or a checkpoint: both hold the weights that all replicas agree on"
    )


def _trained(diloco: DiLoCo) -> dict[str, Tensor]:
    """The tensors that anchors() replaces."""
    return {**trainable(diloco.model), **trained_buffers(diloco.model)}
