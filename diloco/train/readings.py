"""Loss and norm of the gradient of each step, read from the device some steps later.

Reading them at once would make the host wait for the device after every step, and then the device for the host.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from diloco.runs.schema import Step

DELAY = 2
"""Steps that the host may be ahead of the device."""


@dataclass(frozen=True)
class Reading:
    """Values on their way to the host."""

    values: Tensor
    wait: Callable[[], object]


def start(*scalars: Tensor) -> Reading:
    """Begin to copy scalars to the host. Returns at once."""
    whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in scalars]
    values = torch.stack([x.detach().float() for x in whole])
    if values.device.type == "cpu":
        return Reading(values, lambda: None)
    event = torch.Event(values.device, blocking=True)
    host = values.to("cpu", non_blocking=True)  # torch pins it
    event.record(torch.accelerator.current_stream(values.device))
    return Reading(host, event.synchronize)


class Readings:
    """The steps whose values are not read yet."""

    def __init__(self, write: Callable[[Step], None]) -> None:
        self._write = write
        self._pending: deque[tuple[Reading, Callable[..., Step]]] = deque()
        self.last: Step | None = None
        """The newest step that is known."""

    def add(self, reading: Reading, step: Callable[..., Step]) -> None:
        """`step` makes the record from its loss and grad_norm."""
        self._pending.append((reading, step))

    def write(self, but: int = 0) -> None:
        """Write all steps in their order, but not the newest `but`."""
        while len(self._pending) > but:
            reading, step = self._pending.popleft()
            reading.wait()
            loss, grad_norm = reading.values.tolist()
            self.last = step(loss=loss, grad_norm=grad_norm)
            self._write(self.last)
