"""A run at its real size, without values: the model is built on the meta device, sharded by FSDP2 over ranks that only
torch knows, and cut into fragments as in a run."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from diloco.codecs.codec import codec_named
from diloco.core.footprint import footprint
from diloco.core.fragment import fragmenter
from diloco.core.schedule import Schedule
from diloco.core.tensors import find_layers
from diloco.exchange.world import World
from diloco.plan.choose import Settings
from diloco.plan.traffic import CODECS, Reduce, bus_bytes, round_bytes
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
    host_bytes: int
    pinned_bytes: int  # of the host
    last_bytes: int  # of the host, in the last sync


def empty_model(spec: str, context: int) -> nn.Module:
    if spec.startswith("hf:"):
        return pretrained(spec.removeprefix("hf:"), 0, context, weights=False)
    with torch.device("meta"):
        return Decoder(shape_named(spec), context)


def rehearse(model: nn.Module, settings: Settings, *, replicas: int, shards: int, reduce: Reduce) -> Rehearsal:
    """Of rank 0, which has the largest shard."""
    layers = find_layers(model, dict(model.named_parameters()))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    fragments = fragmenter(settings.fragments).split(shapes, layers)
    if shards > 1:
        _shard(model, replicas, shards)
    taken = footprint(
        fragments,
        dict(model.named_parameters()),
        codec=codec_named(settings.codec),
        schedule=Schedule(settings.sync_every, len(fragments)),
        overlap=settings.overlap,
        packs_for=replicas if reduce == "collective" else None,
    )
    largest = max(taken.values)
    return Rehearsal(
        fragments=len(taken.values),
        largest_fragment=largest,
        largest_burst=round_bytes(largest, CODECS[settings.codec], replicas, reduce)[0],
        bus_bytes=bus_bytes(settings.codec, reduce) * largest,
        device_bytes=taken.device_bytes,
        host_bytes=taken.host_bytes,
        pinned_bytes=taken.pinned_bytes,
        last_bytes=taken.last_bytes,
    )


def _shard(model: nn.Module, replicas: int, shards: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    world = World(rank=0, size=replicas * shards, local_rank=0, shards=shards)
    dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    try:
        spread(model, TrainConfig(), world, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
