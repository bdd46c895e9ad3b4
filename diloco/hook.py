"""Attach to the user's optimizers through their step hooks, which fire once per real step in any loop."""

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
"""What warns of steps that no DiLoCo counts any more."""


def eager(method: F) -> F:
    """A compiled optimizer.step would compile its hooks too, and with them the outer step: other bits, or an error."""
    disable: Any = torch.compiler.disable
    return disable(torch.no_grad()(method))


def attach(
    every: Sequence[torch.optim.Optimizer], before: Callable[[], None], after: Callable[[], None]
) -> Callable[[], None]:
    """Call `before` ahead of each optimizer's step and `after` once all have stepped. Returns how to detach. The first
    step after that gives a warning, unless something else is attached by then."""
    stepped: set[int] = set()

    def hook(optimizer: Any, *_: object) -> None:
        stepped.add(id(optimizer))
        if len(stepped) == len(every):
            stepped.clear()
            after()

    handles = [optimizer.register_step_pre_hook(lambda *_: before()) for optimizer in every]
    handles += [optimizer.register_step_post_hook(hook) for optimizer in every]
    for optimizer in every:
        _disarm(optimizer)

    def detach() -> None:
        while handles:
            handles.pop().remove()
        for optimizer in every:
            _disarm(optimizer)
            _alarms[optimizer] = optimizer.register_step_pre_hook(_warn)

    return detach


def _disarm(optimizer: torch.optim.Optimizer) -> None:
    if (alarm := _alarms.pop(optimizer, None)) is not None:
        alarm.remove()


def _warn(optimizer: torch.optim.Optimizer, *_: object) -> None:
    _disarm(optimizer)
    warnings.warn(
        "the optimizer steps after DiLoCo has left the other replicas, by finish() or an error: from here on the "
        "replicas drift apart. Make a new DiLoCo to go on together",
        RuntimeWarning,
        stacklevel=2,
    )


def as_list(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """The optimizers that really step, without wrappers."""
    given = [] if optimizers is None else list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
    found = [_unwrap(optimizer) for optimizer in given]
    for optimizer in found:
        if not hasattr(optimizer, "register_step_post_hook"):
            inside = " Give its .optimizer" if hasattr(optimizer, "optimizer") else ""
            raise ConfigError(
                f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer or a list of them, or None "
                f"and call step() after each step.{inside}"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS measures the curvature from one step to the next, and merging moves the weights in between: "
                "the loss rises. Give an optimizer that works with gradients only, as AdamW, SGD or Muon"
            )
    return found


def _unwrap(optimizer: Any) -> Any:
    """The optimizer inside wrappers that are optimizers by inheritance only, as accelerate's: they have no hooks."""
    while isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "_optimizer_step_post_hooks"):
        if not hasattr(optimizer, "optimizer"):
            raise ConfigError(
                f"optimizer is a {type(optimizer).__name__} that has not called Optimizer.__init__, so it has no "
                "hooks: give the optimizer that it wraps, or None and call step() after each step"
            )
        optimizer = optimizer.optimizer  # pyright: ignore[reportAttributeAccessIssue]
    return optimizer


def lr_of(optimizers: Sequence[torch.optim.Optimizer]) -> float | torch.Tensor:
    """The learning rates of a step, added up over all groups: only how the sum changes matters. 1 if none is known."""
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    return sum(rates, 0.0) if rates else 1.0


def evaluate(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Make schedule-free optimizers put their averaged weights into the model. These agree after the last sync;
    computed after it, from what each replica has in its optimizer, they would differ."""
    for optimizer in optimizers:
        if any(group.get("train_mode") for group in optimizer.param_groups):
            optimizer.eval()  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def evaluation_mode(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Tell schedule-free optimizers that the model holds what is to be evaluated: their eval() would move it by what
    this replica alone has."""
    groups = [g for optimizer in optimizers for g in optimizer.param_groups if "train_mode" in g]
    modes = [group["train_mode"] for group in groups]
    for group in groups:
        group["train_mode"] = False
    try:
        yield
    finally:
        for group, mode in zip(groups, modes, strict=True):
            group["train_mode"] = mode
