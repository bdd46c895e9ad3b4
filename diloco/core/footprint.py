"""The memory that DiLoCo takes beside a model, reckoned with the functions that allocate it, but without values.

Parameters may be on the meta device: a model of any size, sharded over any number of ranks, fits any machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.codecs import device as on_device
from diloco.codecs.codec import Codec
from diloco.core.fragment import Fragment
from diloco.core.lane import BUFFERS, already
from diloco.core.memory import Memory, Pinned
from diloco.core.payload import room
from diloco.core.schedule import Schedule
from diloco.core.view import FlatView, lane_sizes


@dataclass(frozen=True)
class Footprint:
    """Of one process."""

    values: tuple[int, ...]  # of each fragment
    device_bytes: int
    pinned_bytes: int
    host_bytes: int  # with the pinned ones
    last_bytes: int  # of the host in the last sync, which has all fragments in flight


class Counted(Pinned):
    """Pinned memory that has a size and one value."""

    def __init__(self) -> None:
        self.nbytes = 0

    def empty(self, n: int) -> Tensor:
        self.nbytes += 4 * n
        return torch.empty(1, dtype=torch.float32, device="cpu").expand(n)


def footprint(
    fragments: Sequence[Fragment],
    tensors: Mapping[str, Tensor],
    *,
    codec: Codec,
    schedule: Schedule,
    overlap: int,
    packs_for: int | None,
) -> Footprint:
    """Peak memory on an accelerator once all fragments have synced, if rounds take no time."""
    values = tuple(FlatView(fragment, tensors).size for fragment in fragments)
    deltas = [room(codec, n, packs_for) if packs_for and on_device.supports(codec) else n for n in values]
    memory = Memory(pinned=(counted := Counted()))
    anchors = [memory.anchors.take(n) for n in values]
    sent: dict[int, tuple[int, Tensor, Tensor]] = {}  # by fragment: the step, the delta, the next anchor
    most = 0
    for step in range(1, 3 * schedule.sync_every):
        for fragment, (began, delta, anchor) in list(sent.items()):
            if step >= began + overlap:
                memory.anchors.give(anchors[fragment], already)
                memory.deltas.give(delta, already)
                anchors[fragment] = anchor
                del sent[fragment]
        for fragment, n in enumerate(values):
            if schedule.sends_at(fragment, step):
                sent[fragment] = step, memory.deltas.take(deltas[fragment]), memory.anchors.take(n)
        most = max(most, sum(values[fragment] for fragment in sent))
    pinned, outers = counted.nbytes, 4 * sum(values)
    last = [(memory.deltas.take(deltas[f]), memory.anchors.take(n)) for f, n in enumerate(values) if f not in sent]
    assert len(last) + len(sent) == len(values)
    return Footprint(
        values,
        device_bytes=sum(4 * BUFFERS * size for size in lane_sizes(fragments, tensors).values()),
        pinned_bytes=pinned,
        host_bytes=pinned + outers + 4 * most,
        last_bytes=counted.nbytes + 2 * outers,
    )
