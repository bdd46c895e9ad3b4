"""The part of a fragment that lives in this process: where anchors meet the model's own tensors.

The only place that knows about sharded parameters (DTensor), devices and parameter types. Values cross as flat fp32 on
the host; parameters are read and written in place, never replaced, so optimizers, compiled graphs and FSDP keep them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from diloco import kernels
from diloco.fragment import Fragment
from diloco.outer import CHUNK


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, in the same memory, with at least one dimension."""
    mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return mine.detach().unsqueeze(0) if mine.dim() == 0 else mine.detach()


def first_row(tensor: Tensor) -> int:
    """The row of the unsharded tensor at which this process's part begins."""
    if not isinstance(tensor, DTensor) or tensor.dim() == 0:
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0]


def checksum(tensor: Tensor) -> int:
    """A sum over the bits of this process's part, the same on every kind of device."""
    part = local(tensor)
    if is_traceable_wrapper_subclass(part):  # quantized, as torchao does it: the bits are in the tensors inside
        return checksum_all(getattr(part, name) for name in part.__tensor_flatten__()[0])
    octets = part.contiguous().flatten().view(torch.uint8)
    octets = octets.clone() if octets.storage_offset() % 8 else octets
    whole = len(octets) // 8 * 8  # words of 64 bits: 20 times as fast as 32
    return int(octets[:whole].view(torch.int64).sum()) + int(octets[whole:].sum())


def checksum_all(tensors: Iterable[Tensor]) -> int:
    return sum(place * checksum(tensor) for place, tensor in enumerate(tensors, 1)) % (1 << 63)


def pinned(devices: set[str]) -> bool:
    """Whether to pin host memory that is copied to and from devices of these kinds. Not for a model on the CPU: that
    would open a context on the GPU of a machine that has one."""
    return bool(devices & {"cuda", "xpu"})


@dataclass(frozen=True)
class ShardId:
    """Which shard of the model a process holds."""

    index: int
    count: int

    def __str__(self) -> str:
        """A key in saved states and in contracts on disk."""
        return f"shard {self.index} of {self.count}"


WHOLE = ShardId(0, 1)


def shard_id(tensors: Iterable[Tensor]) -> ShardId:
    """The shard that this process holds, by the mesh with the most ranks: with tensor parallelism some parameters are
    split over fewer."""
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    widest = max(meshes, key=DeviceMesh.size, default=None)
    if widest is None or widest.size() == 1:
        return WHOLE
    ranks = widest.mesh.flatten().tolist()
    return ShardId(ranks.index(widest.get_rank()), len(ranks))


def forget_not_finite(optimizer: torch.optim.Optimizer) -> None:
    """Clear the optimizer's state of each parameter for which it holds inf or nan."""
    for state in optimizer.state.values():
        values = [local(v) for v in state.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
        if not all(bool(v.isfinite().all()) for v in values):
            state.clear()


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(modules: Iterable[FSDPModule]) -> None:
    """Make FSDP2 drop gathered parameters: it keeps the root's after a forward without a backward, and would use them
    although the shards have changed."""
    for module in modules:
        module.reshard()


SMALL = 1 << 12
"""Values. Neighbors that are smaller are handled together: with thousands of experts, a few Python calls for each would
take longer than the work on their values."""


@dataclass(frozen=True)
class Span:
    """Rows of one local tensor, and where they lie in the fragment's flat values."""

    name: str
    tensor: Tensor
    start: int
    stop: int
    position: int
    size: int

    def rows(self) -> Tensor:
        return local(self.tensor)[self.start : self.stop]

    def of(self, flat: Tensor) -> Tensor:
        """The same rows of flat values."""
        return flat[self.position : self.position + self.size].view(self.rows().shape)

    @property
    def small(self) -> bool:
        plain = type(self.tensor) in (Tensor, nn.Parameter)
        return plain and self.size < SMALL and self.size == self.tensor.numel()


@dataclass(frozen=True)
class Small:
    """Neighboring spans, each of a whole small tensor."""

    tensors: list[Tensor]
    here: slice  # of the fragment's flat values

    def of(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The same values of a flat tensor, in the shapes of the tensors."""
        return _unflatten_dense_tensors(flat[self.here], self.tensors)


def _together(spans: Iterable[Span]) -> Iterator[Span | Small]:
    for small, run in groupby(spans, key=lambda span: span.small):
        neighbors = list(run)
        if not small:
            yield from neighbors
            continue
        first, last = neighbors[0], neighbors[-1]
        yield Small([span.tensor for span in neighbors], slice(first.position, last.position + last.size))


def _chunks(rows: Tensor) -> list[slice]:
    """Rows to compute with at once: on a CPU so few that intermediate results stay in the cache."""
    n = len(rows)
    step = max(CHUNK * n // max(rows.numel(), 1), 1) if rows.device.type == "cpu" else max(n, 1)
    return [slice(i, i + step) for i in range(0, n, step)]


class FlatView:
    """A fragment's values in this process, in the fragment's order."""

    def __init__(self, fragment: Fragment, tensors: Mapping[str, Tensor]) -> None:
        self.spans: list[Span] = []
        self.size = 0
        for piece in fragment:
            tensor = tensors[piece.name]
            mine, begin = local(tensor), first_row(tensor)
            start = min(max(piece.start - begin, 0), len(mine))
            stop = min(max(piece.stop - begin, start), len(mine))
            self.spans.append(Span(piece.name, tensor, start, stop, self.size, mine[start:stop].numel()))
            self.size += self.spans[-1].size
        self._parts = list(_together(self.spans))
        self.pinned = pinned({span.tensor.device.type for span in self.spans})

    @torch.no_grad()
    def read(self, out: Tensor) -> None:
        """out ← the model's values."""
        for part in self._parts:
            if isinstance(part, Small):
                torch._foreach_copy_(part.of(out), part.tensors)
            else:
                part.of(out).copy_(part.rows())

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """The model's values ← values."""
        for part in self._parts:
            if isinstance(part, Small):
                torch._foreach_copy_(part.tensors, part.of(values), non_blocking=True)
                continue
            rows, new = part.rows(), part.of(values)
            if kernels.passes(rows, new):
                kernels.copy(new, rows)
                torch.autograd.graph.increment_version(rows)  # a live graph must notice, as it does after copy_
            else:
                rows.copy_(new, non_blocking=True)

    @torch.no_grad()
    def subtract(self, anchor: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """out ← anchor − the model's values (+ residual). Complete once what `mark` returned has returned."""
        on_cpu = all(span.tensor.device.type == "cpu" for span in self.spans)
        for part in self._parts if on_cpu else self.spans:
            if isinstance(part, Small):
                out[part.here] = anchor[part.here]
                torch._foreach_sub_(part.of(out), part.tensors)
                continue
            rows, a, o = part.rows(), part.of(anchor), part.of(out)
            if on_cpu:
                kernels.subtract(a, rows, o) if kernels.passes(a, rows, o) else torch.sub(a, rows, out=o)
            else:
                delta = a.to(rows.device, non_blocking=True) - rows
                if residual is not None:
                    delta += part.of(residual).to(rows.device, non_blocking=True)
                o.copy_(delta, non_blocking=True)
        if on_cpu and residual is not None:
            out.add_(residual)

    def mark(self) -> Callable[[], None]:
        """A function that waits for all copies so far, both ways. Call it before you use what was read, and before
        you change memory that was written from."""
        devices = {span.tensor.device for span in self.spans} - {torch.device("cpu")}
        # Blocking: a thread that waits for it sleeps instead of keeping a core busy.
        events = [(torch.Event(device, blocking=True), torch.accelerator.current_stream(device)) for device in devices]
        for event, stream in events:
            event.record(stream)  # the device need not be the current one

        def wait() -> None:
            for event, _ in events:
                event.synchronize()

        return wait

    def merge(self, anchor: Tensor, keep_local: float) -> None:
        """local ← keep_local · local + (1 − keep_local) · anchor."""
        if keep_local == 0:
            self.write(anchor)
        for span in self.spans if 0 < keep_local < 1 else ():
            rows, target = span.rows(), span.of(anchor)
            for part in _chunks(rows):
                moved = target[part].to(rows.device, non_blocking=True) * (1 - keep_local)
                rows[part] = (rows[part].float() * keep_local).add_(moved)

    def carry(self, new: Tensor, old: Tensor) -> None:
        """local ← local + new − old: follow the anchor and keep all local work."""
        for span in self.spans:
            rows = span.rows()
            rows.copy_(rows.float() + (span.of(new) - span.of(old)).to(rows.device))

    def find_fault(self, values: Tensor) -> int | None:
        """The first span with inf or nan. A sum, at a quarter of the cost, is enough to know that there is none."""
        if torch.isfinite(values.sum()):
            return None
        faulty = (i for i, span in enumerate(self.spans) if not torch.isfinite(span.of(values)).all())
        return next(faulty, None)
