"""Measure what DiLoCo costs an accelerator, with a model of 113M values.

The model trains with DiLoCo attached and paused in turn, a period of `sync_every` steps each, so that both see the same
machine. It is the only replica, but takes, encodes, decodes and applies its own deltas as it would with others.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco import __version__
from diloco.codecs import device as on_device
from diloco.codecs.codec import CHUNK, E3M0, BFloat16
from diloco.codecs.kernels import Rule
from diloco.core.diloco import DiLoCo
from diloco.core.lane import has_lane
from diloco.exchange.collective import Collective
from diloco.runs import units

SECONDS = 25.0
"""For the steps; copies and codecs take the rest of half a minute."""
WIDTH, LAYERS, BATCH = 3072, 12, 2048
"""113M values, 1.4 TFLOP a step."""
SYNC_EVERY = 20
COPY = 1 << 28
"""Bytes of a copy."""


@dataclass(frozen=True)
class Cost:
    accelerator: str
    alone: float  # seconds of a step
    attached: float
    values: int  # of the model
    pinned: bool  # whether the copies are from and to pinned memory
    up: float  # bytes a second, host to device
    down: float
    pinned_bytes: int  # that DiLoCo takes for this model
    other_bits: tuple[str, ...]  # results that differ between device and host

    @property
    def hook_ns(self) -> float:
        """Device time per value and round: `--hook-ns` of `diloco plan`."""
        return max(self.attached - self.alone, 0.0) * SYNC_EVERY / self.values * 1e9

    def line(self) -> str:
        """All figures in one line, to paste into an issue."""
        return (
            f"diloco {__version__}, torch {torch.__version__}, {self.accelerator}, {units.amount(self.values)} values, "
            f"sync_every {SYNC_EVERY}: step {1e3 * self.alone:.3f} ms alone, {1e3 * self.attached:.3f} ms attached, "
            f"{self.hook_ns:.3f} ns a value and round; {'pinned' if self.pinned else 'pageable'} copies "
            f"{self.up / 1e9:.2f} GB/s up, {self.down / 1e9:.2f} GB/s down; {units.size(self.pinned_bytes)} pinned; "
            f"other bits: {', '.join(self.other_bits) or 'none'}"
        )


def measure(device: torch.device) -> Cost:
    alone, attached, values, pinned_bytes = _steps(device)
    up, down = _bandwidth(device)
    return Cost(
        accelerator=_name(device),
        alone=alone,
        attached=attached,
        values=values,
        pinned=has_lane(device),
        up=up,
        down=down,
        pinned_bytes=pinned_bytes,
        other_bits=tuple(other_bits(device)),
    )


def _name(device: torch.device) -> str:
    module = torch.get_device_module(device)
    return f"{device.type} {module.get_device_name()}" if hasattr(module, "get_device_name") else device.type


def _steps(device: torch.device) -> tuple[float, float, int, int]:
    """Seconds of a step alone and with DiLoCo attached, values of the model, bytes of pinned memory meanwhile."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(BATCH, WIDTH).to(device)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def period() -> float:
        return _seconds(lambda: [step() for _ in range(SYNC_EVERY)]) / SYNC_EVERY

    reducer = Collective(at=dist.HashStore(), replica=0, replicas=1)
    alone: list[float] = []
    attached: list[float] = []
    with DiLoCo(model, optimizer, sync_every=SYNC_EVERY, reducer=reducer) as diloco:
        for _ in range(2):  # the first rounds allocate memory
            period()
        end = time.monotonic() + SECONDS
        while not alone or time.monotonic() < end:
            with diloco.paused():
                alone.append(period())
            attached.append(period())
    values = sum(p.numel() for p in model.parameters())
    return statistics.median(alone), statistics.median(attached), values, diloco.replica.memory.pinned_bytes


def _bandwidth(device: torch.device) -> tuple[float, float]:
    """Bytes a second, up and down: the best of a few copies."""
    host = torch.empty(COPY, dtype=torch.uint8, pin_memory=has_lane(device)).zero_()
    on_device = host.to(device)
    up = min(_seconds(lambda: on_device.copy_(host, non_blocking=True)) for _ in range(5))
    down = min(_seconds(lambda: host.copy_(on_device, non_blocking=True)) for _ in range(5))
    return COPY / up, COPY / down


def _seconds(act: Callable[[], object]) -> float:
    torch.accelerator.synchronize()
    began = time.perf_counter()
    act()
    torch.accelerator.synchronize()
    return time.perf_counter() - began


def other_bits(device: torch.device) -> list[str]:
    """Results of the codecs and the outer step that differ from the host's in any bit, or that fail on the device."""
    out: list[str] = []
    for codec in (E3M0(), BFloat16()):
        host = _computed(codec, torch.device("cpu"))
        try:
            computed = {name: tensor.cpu() for name, tensor in _computed(codec, device).items()}
        except (RuntimeError, NotImplementedError, TypeError) as error:
            out.append(f"{codec!r} ({str(error).splitlines()[0][:80]})")
            continue
        out += [f"{codec!r} {name}" for name, tensor in host.items() if not _same(tensor, computed[name])]
    return out


def _computed(codec: E3M0 | BFloat16, device: torch.device) -> dict[str, Tensor]:
    n, generator = 5 * CHUNK + 3, torch.Generator().manual_seed(0)
    normal = [torch.randn(n, generator=generator) for _ in range(3)]
    powers = torch.exp2(torch.randint(-149, 127, (n,), generator=generator).float())  # down to denormals
    x, anchor, velocity = (tensor.to(device) for tensor in (normal[0] * powers, *normal[1:]))
    payload = torch.empty(codec.nbytes(n), dtype=torch.uint8, device=device)
    finite = on_device.encode(codec, x, payload)
    new = torch.empty_like(anchor), torch.empty_like(velocity)
    on_device.advance(codec, [payload, payload], [0.3, 0.7], Rule(0.4, 0.9, 0.7), (anchor, velocity), new)
    names = ("payload", "finite", "anchor", "velocity", "fingerprint")
    return dict(zip(names, (payload, finite, *new, on_device.words(new[0])), strict=True))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)))
