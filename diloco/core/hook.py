"""Attach to optimizers through their step hooks, which fire once per real step in any training loop."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from diloco.errors import ConfigError

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None

F = TypeVar("F", bound=Callable[..., None])

_alarms: WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = WeakKeyDictionary()
"""Hooks that warn about steps that no DiLoCo counts."""


def eager(method: F) -> F:
    """Keep torch.compile out: compiling optimizer.step compiles its hooks, and with them the outer step, which then
    gives different bits or an error."""
    disable: Any = torch.compiler.disable
    return disable(torch.no_grad()(method))


class Hooks:
    """Call `before` ahead of each optimizer's step, and `after` once all have stepped."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        self._optimizers = optimizers
        if optimizers:  # without them, this cycle would keep a dropped DiLoCo, and its claim on the model, for a while
            self._before, self._after = before, after
        self._begun, self._stepped = set[int](), set[int]()
        self._paused = False
        self._handles = [optimizer.register_step_pre_hook(self._pre) for optimizer in optimizers]
        self._handles += [optimizer.register_step_post_hook(self._post) for optimizer in optimizers]
        for optimizer in optimizers:
            _disarm(optimizer)

    def _pre(self, optimizer: Any, *_: object) -> None:
        if not self._paused:
            self._before()
            self._begun.add(id(optimizer))

    def _post(self, optimizer: Any, *_: object) -> None:
        if self._paused or id(optimizer) not in self._begun:  # super().step() in a subclass may fire the hooks twice
            return
        self._begun.discard(id(optimizer))
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            self._after()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def detach(self) -> None:
        """The first step afterwards gives a warning, unless something else is attached by then."""
        while self._handles:
            self._handles.pop().remove()
        for optimizer in self._optimizers:
            _disarm(optimizer)
            _alarms[optimizer] = optimizer.register_step_pre_hook(_warn)


def _disarm(optimizer: torch.optim.Optimizer) -> None:
    if (alarm := _alarms.pop(optimizer, None)) is not None:
        alarm.remove()


def _warn(optimizer: torch.optim.Optimizer, *_: object) -> None:
    _disarm(optimizer)
    warnings.warn(
        "the optimizer stepped after DiLoCo left the other replicas, by finish() or an error: from here on the "
        "replicas drift apart. Create a new DiLoCo to keep training together",
        RuntimeWarning,
        stacklevel=2,
    )


def as_list(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """The optimizers that really step, without wrappers."""
    if optimizers is None:
        return []
    listed = optimizers if isinstance(optimizers, Sequence) else [optimizers]
    unwrapped = [_unwrap(optimizer) for optimizer in listed]
    for optimizer in unwrapped:
        if not hasattr(optimizer, "register_step_post_hook"):
            hint = " Pass its .optimizer" if hasattr(optimizer, "optimizer") else ""
            raise ConfigError(
                f"optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer or a list of them, or None "
                f"and call join() before the first step and step() after each.{hint}"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS measures the curvature from one step to the next, and merging moves the weights in between: "
                "the loss rises. Use an optimizer that needs only gradients, such as AdamW, SGD or Muon"
            )
    return list({id(optimizer): optimizer for optimizer in unwrapped}.values())


def _unwrap(optimizer: Any) -> Any:
    """The optimizer inside wrappers that only inherit from Optimizer and have no hooks, such as accelerate's."""
    while isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "_optimizer_step_post_hooks"):
        if not hasattr(optimizer, "optimizer"):
            raise ConfigError(
                f"optimizer is a {type(optimizer).__name__} that never called Optimizer.__init__, so it has no "
                "hooks: pass the optimizer that it wraps, or None and call join() before the first step and step() "
                "after each"
            )
        optimizer = optimizer.optimizer  # pyright: ignore[reportAttributeAccessIssue]
    return optimizer


def lr_of(optimizers: Sequence[torch.optim.Optimizer]) -> float | torch.Tensor:
    """The learning rates of all groups, summed: only changes of the sum matter. 1 if there is none."""
    rates = [_exact(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    return sum(rates, 0.0) if rates else 1.0


def _exact(rate: float | torch.Tensor) -> float | torch.Tensor:
    """In float64, where it exists: sums over many steps would round in float32. On a device it stays there, so nothing
    waits."""
    if isinstance(rate, torch.Tensor):
        return float(rate) if rate.device.type == "cpu" else rate.double() if rate.device.type == "cuda" else rate
    return rate


def evaluate(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Make schedule-free optimizers put their averaged weights into the model before the last sync: computed after it,
    from each replica's own optimizer state, they would differ."""
    for optimizer in optimizers:
        if any(group.get("train_mode") for group in optimizer.param_groups):
            optimizer.eval()  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def evaluation_mode(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Keep schedule-free optimizers from moving the model: their eval() would add this replica's own average."""
    groups = [g for optimizer in optimizers for g in optimizer.param_groups if "train_mode" in g]
    modes = [group["train_mode"] for group in groups]
    for group in groups:
        group["train_mode"] = False
    try:
        yield
    finally:
        for group, mode in zip(groups, modes, strict=True):
            group["train_mode"] = mode
