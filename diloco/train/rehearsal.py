"""A run at its real size, without values: the model is built on the meta device, sharded by FSDP2 over ranks that only
torch knows, and cut into fragments as in a run. What DiLoCo allocates is replayed with its own functions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco.codecs import device as device_codec
from diloco.codecs.codec import Codec, codec_named
from diloco.codecs.formats import gathers
from diloco.core.fragment import Fragment, fragmenter
from diloco.core.lane import BUFFERS, already
from diloco.core.memory import Memory, Pinned
from diloco.core.payload import TRAILER, room
from diloco.core.schedule import Schedule
from diloco.core.tensors import find_layers
from diloco.core.view import FlatView, lane_sizes
from diloco.exchange.world import World
from diloco.plan.choose import Settings
from diloco.plan.traffic import CODECS, Place, Reduce, bus_bytes, round_bytes
from diloco.runs.config import TrainConfig
from diloco.runs.presets import shape_named
from diloco.train.model import Decoder, pretrained
from diloco.train.setup import spread


@dataclass(frozen=True)
class Rehearsal:
    """What one rank of a run takes."""

    fragments: int
    largest_fragment: int  # values
    largest_burst: float  # bytes sent in the largest round
    bus_bytes: float  # between host and accelerator in the largest round
    device_bytes: int
    host_bytes: int  # with the pinned ones
    pinned_bytes: int  # of the host
    last_bytes: int  # of the host in the last sync, which has all fragments in flight


class Counted(Pinned):
    """Pinned memory that has a size and one value."""

    def __init__(self) -> None:
        self.nbytes = 0

    def empty(self, n: int) -> Tensor:
        self.nbytes += 4 * n
        return torch.empty(1, dtype=torch.float32, device="cpu").expand(n)


def empty_model(spec: str, context: int) -> nn.Module:
    if spec.startswith("hf:"):
        return pretrained(spec.removeprefix("hf:"), 0, context, weights=False)
    with torch.device("meta"):
        return Decoder(shape_named(spec), context)


def rehearse(
    model: nn.Module, settings: Settings, *, replicas: int, shards: int, reduce: Reduce, state: Place = "host"
) -> Rehearsal:
    """Of rank 0, which has the largest shard."""
    layers = find_layers(model, dict(model.named_parameters()))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    fragments = fragmenter(settings.fragments).split(shapes, layers)
    if shards > 1:
        _shard(model, replicas, shards)
    tensors = dict(model.named_parameters())
    largest = max(FlatView(fragment, tensors).size for fragment in fragments)
    memory = footprint(
        fragments,
        tensors,
        codec=codec_named(settings.codec),
        schedule=Schedule(settings.sync_every, len(fragments)),
        overlap=settings.overlap,
        packs_for=replicas if reduce == "collective" else None,
        state=state,
    )
    return Rehearsal(
        fragments=len(fragments),
        largest_fragment=largest,
        largest_burst=round_bytes(largest, CODECS[settings.codec], replicas, reduce)[0],
        bus_bytes=bus_bytes(settings.codec, replicas, reduce, state) * largest,
        **memory,
    )


def footprint(
    fragments: Sequence[Fragment],
    tensors: Mapping[str, Tensor],
    *,
    codec: Codec,
    schedule: Schedule,
    overlap: int,
    packs_for: int | None,
    state: Place,
) -> dict[str, int]:
    """Peak memory of a process with an accelerator once all fragments have synced, if rounds take no time: the last
    fields of `Rehearsal`. `packs_for`: see `Identity`."""
    values = [FlatView(fragment, tensors).size for fragment in fragments]
    packs = packs_for if device_codec.supports(codec) else None
    deltas = [room(codec, n, packs) if packs else n for n in values]
    device, received = 4 * BUFFERS * sum(lane_sizes(fragments, tensors).values()), [0] * len(values)
    if state == "device":  # the host has payloads only: those in flight, and the others' on their way to the device
        assert packs, "the state of this codec or reducer is on the host"
        device += 8 * sum(values) + 4 * sum(deltas)
        received = [(packs - 1 if gathers(packs) else 1) * (delta - TRAILER // 4) for delta in deltas]
        values = [0] * len(values)
    memory = Memory(pinned=(counted := Counted()))
    anchors = [memory.anchors.take(n) for n in values]
    sent: dict[int, tuple[int, Tensor, Tensor]] = {}  # by fragment: the step, the delta, the next anchor
    most = 0
    for step in range(1, 3 * schedule.sync_every):
        for fragment, (began, delta, anchor) in list(sent.items()):
            if step >= began + overlap:
                memory.deltas.give(memory.deltas.take(received[fragment]), already)
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
    return {
        "device_bytes": device,
        "host_bytes": pinned + outers + 4 * most,
        "pinned_bytes": pinned,
        "last_bytes": counted.nbytes + 2 * outers,
    }


def _shard(model: nn.Module, replicas: int, shards: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    world = World(rank=0, size=replicas * shards, local_rank=0, shards=shards)
    dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    try:
        spread(model, TrainConfig(), world, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
