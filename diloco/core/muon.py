"""The inner optimizer: AdamW for everything, or Muon for the matrices of the layers and AdamW for the rest.

Muon (MuLoCo, arXiv 2505.23725) moves every direction of a matrix by the same amount. Its updates have the size of
AdamW's ("match_rms_adamw", arXiv 2502.16982), so learning rate, weight decay and warm-up are those of AdamW.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from diloco.core.tensors import find_layers, trainable, unwrap

BETAS = (0.9, 0.99)


def adamw(model: nn.Module, lr: float, weight_decay: float = 0.0) -> list[Optimizer]:
    """AdamW, with weight decay on matrices only. Fused: a third of the time of the default on small models."""
    return [_adamw(list(model.parameters()), lr, weight_decay)]


def muon(model: nn.Module, lr: float, weight_decay: float = 0.0) -> list[Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, head, norms and biases: two optimizers, or AdamW alone
    where no layers are found. Give the list to `DiLoCo`, and set the learning rate of both alike."""
    parameters = dict(trainable(unwrap(model)))
    layers = find_layers(unwrap(model), parameters)
    matrices = [parameters[name] for layer in layers for name in layer if parameters[name].dim() == 2]
    of_muon = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in of_muon]
    inside: list[Optimizer] = [Muon(matrices, lr, weight_decay)] if matrices else []
    return [*inside, _adamw(rest, lr, weight_decay)] if rest else inside


def _adamw(parameters: list[nn.Parameter], lr: float, weight_decay: float) -> Optimizer:
    matrices = [p for p in parameters if p.dim() >= 2]
    rest = [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=BETAS, fused=True)


INNERS: dict[str, Callable[[nn.Module, float, float], list[Optimizer]]] = {"adamw": adamw, "muon": muon}
"""By the name of the flag."""


class Muon(torch.optim.Muon):
    """torch's Muon, in fewer and faster operations: matrices of one shape are orthogonalised together, and on a CPU in
    fp32, where most processors have no fast bf16. At width 64 that takes a fifteenth of the time."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, momentum: float = 0.95) -> None:
        super().__init__(params, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Any) -> float: ...
    @torch.no_grad()
    def step(self, closure: Any = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    update = self._update(p, p.grad, group)
                    alike[update.shape, update.device].append((p, update))
            for moved in alike.values():
                self._move(moved, group)
        return loss

    def _update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """The momentum of the complete matrix, on every rank that holds a shard of it."""
        state, momentum = self.state[p], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        return update.full_tensor() if isinstance(update, DTensor) else update

    def _move(self, moved: Sequence[tuple[Tensor, Tensor]], group: dict[str, Any]) -> None:
        lr, decay = float(group["lr"]), float(group["lr"]) * group["weight_decay"]
        directions = orthogonal(
            torch.stack([update for _, update in moved]), group["ns_coefficients"], group["ns_steps"]
        )
        size = 0.2 * max(moved[0][1].shape) ** 0.5
        for (p, _), direction in zip(moved, directions, strict=True):
            p.mul_(1 - decay)
            p.add_(_like(direction.to(p.dtype), p), alpha=-lr * size)


def orthogonal(matrices: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Each matrix with its singular values brought near 1, by Newton-Schulz iterations of fifth order."""
    a, b, c = coefficients
    x = matrices.to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)  # singular values of at most 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _like(whole: Tensor, p: Tensor) -> Tensor:
    """The part of a matrix that this rank holds of the parameter."""
    if not isinstance(p, DTensor):
        return whole
    everywhere = [Replicate()] * p.device_mesh.ndim
    return DTensor.from_local(whole, p.device_mesh, everywhere, run_check=False).redistribute(placements=p.placements)
