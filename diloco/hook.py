"""Attach to the user's optimizers through their step hooks, which fire once per real step in any loop."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from diloco.errors import ConfigError

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def attach(optimizers: Optimizers, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Call `before` ahead of each optimizer's step and `after` once all have stepped. Returns how to detach."""
    every = as_list(optimizers)
    stepped: set[int] = set()

    def hook(optimizer: Any, *_: object) -> None:
        stepped.add(id(optimizer))
        if len(stepped) == len(every):
            stepped.clear()
            after()

    handles = [optimizer.register_step_pre_hook(lambda *_: before()) for optimizer in every]
    handles += [optimizer.register_step_post_hook(hook) for optimizer in every]

    def detach() -> None:
        while handles:
            handles.pop().remove()

    return detach


def as_list(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    found = [] if optimizers is None else list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
    for optimizer in found:
        if not hasattr(optimizer, "register_step_post_hook"):
            raise ConfigError(
                f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer or a list of them, or None "
                "and call step() after each step"
            )
    return found
