"""The methods that the lab compares: how each attaches to a training loop, and what the planner knows of it."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.record import Record
from diloco import Balanced, DiLoCo
from diloco.codecs.codec import E3M0, Codec, Float32
from diloco.exchange.collective import Collective
from diloco.plan import methods as plan
from diloco.plan.methods import model_of_shape
from diloco.plan.simulate import Method
from diloco.plan.traffic import CODECS
from studies.netlab.training import SHAPE, Training

SYNC_EVERY = 30
FRAGMENTS = 6
OVERLAP = SYNC_EVERY // FRAGMENTS
TIMEOUT = 900.0
BUCKETS = (1 << 20, 25 << 20)
"""Bytes of DDP's first bucket and of the others."""
MODEL = model_of_shape(SHAPE, "netlab")


class Sync(Protocol):
    """A method at work on one replica."""

    def step(self) -> None:
        """After each optimizer step."""
        ...

    def spent(self) -> Record:
        """Sums since the start: seconds of the training thread in the hook and, of them, waiting; bytes of payload."""
        ...

    def close(self) -> None: ...


class Setup(Protocol):
    @property
    def title(self) -> str: ...

    @property
    def lead(self) -> int:
        """Steps after which a change of the link's rate has its full effect."""
        ...

    @property
    def period(self) -> int:
        """Steps after which what is sent repeats."""
        ...

    def attach(self, training: Training, addresses: Sequence[str]) -> Sync: ...

    def predicted(self) -> Method: ...


@dataclass(frozen=True)
class DataParallel:
    title: str
    hook: Literal["fp16", "powersgd"] | None = None
    lead: int = 1
    period: int = 1

    def attach(self, training: Training, addresses: Sequence[str]) -> Sync:
        return _DataParallel(training, self.hook)

    def predicted(self) -> Method:
        if self.hook == "powersgd":
            return Method(1, lambda step: [(0, powersgd_values())], CODECS["float32"], 1, reduce="ring")
        pieces = bucketed(MODEL.pieces(), *(nbytes / 4 for nbytes in BUCKETS))  # filled with fp32, then cast
        return plan.data_parallel(pieces, CODECS["bfloat16" if self.hook == "fp16" else "float32"])


class _DataParallel:
    def __init__(self, training: Training, hook: str | None) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        # PowerSGD's collectives follow each other by callbacks: those of two buckets may come in another order on
        # another replica, and gloo then ends the process. One bucket has one order.
        cap = 100 if hook == "powersgd" else None
        training.call = wrapped = nn.parallel.DistributedDataParallel(training.model, bucket_cap_mb=cap)
        if hook == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if hook == "powersgd":  # its own settings, but from the third step on instead of the thousandth
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def step(self) -> None:
        pass

    def spent(self) -> Record:
        return {}

    def close(self) -> None:
        pass


def powersgd_values() -> float:
    """Rank 1: a row and a column of each matrix, and all values that are not in a matrix."""
    matrix = [(SHAPE.width, SHAPE.width)] * 4 + [(SHAPE.width, SHAPE.mlp)] * 3
    layer = sum(map(sum, matrix)) + SHAPE.layer_parameters - sum(map(math.prod, matrix))
    return SHAPE.layers * layer + SHAPE.vocabulary + 2 * SHAPE.width


@dataclass(frozen=True)
class Ours:
    title: str
    fragments: int
    overlap: int
    codec: Literal["e3m0", "float32"]
    streams: int = 1
    period: int = SYNC_EVERY

    @property
    def lead(self) -> int:
        return self.overlap + 1

    def attach(self, training: Training, addresses: Sequence[str]) -> Sync:
        return _Ours(training, self)

    def predicted(self) -> Method:
        fragments = MODEL.fragments(f"balanced:{self.fragments}")
        return plan.streaming(
            fragments, SHAPE.layers, SYNC_EVERY, self.overlap, CODECS[self.codec], by_fragment=True
        )  # fmt: skip


class _Ours:
    def __init__(self, training: Training, setup: Ours) -> None:
        codec: Codec = {"e3m0": E3M0(), "float32": Float32()}[setup.codec]
        reduce = Collective(streams=setup.streams, timeout=TIMEOUT)
        self.diloco = DiLoCo(
            training.model,
            sync_every=SYNC_EVERY,
            fragments=Balanced(setup.fragments),
            overlap=setup.overlap,
            codec=codec,
            reducer=reduce,
        )
        self.diloco.join()
        self.hook = 0.0

    def step(self) -> None:
        began = time.perf_counter()
        self.diloco.step()
        self.hook += time.perf_counter() - began

    def spent(self) -> Record:
        stats = self.diloco.stats
        return {"hook": self.hook, "waited": stats.seconds_exposed, "payload": stats.bytes_sent, "rounds": stats.rounds}

    def close(self) -> None:
        self.diloco.reducer.leave()


@dataclass(frozen=True)
class Torchft:
    """Its DiLoCo on its own process group and lighthouse, an outer optimizer for each fragment."""

    title: str
    fragments: int
    period: int = SYNC_EVERY
    least: int | None = None
    """Replicas without which none goes on; by default all."""

    @property
    def delay(self) -> int:
        """The most it allows: one fragment in flight."""
        return SYNC_EVERY // self.fragments - 1

    @property
    def lead(self) -> int:
        return SYNC_EVERY // self.fragments

    def attach(self, training: Training, addresses: Sequence[str]) -> Sync:
        return _Torchft(training, self, addresses)

    def predicted(self) -> Method:
        fragments = MODEL.fragments(f"balanced:{self.fragments}")
        return plan.streaming(
            fragments, SHAPE.layers, SYNC_EVERY, self.delay, CODECS["float32"], by_fragment=True, reduce="ring"
        )  # fmt: skip


class _Torchft:
    PORT = 29510

    def __init__(self, training: Training, setup: Torchft, addresses: Sequence[str]) -> None:
        from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]
        from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]
        from torchft.local_sgd import DiLoCo as TheirDiLoCo  # pyright: ignore[reportMissingImports]

        rank, least = dist.get_rank(), setup.least or dist.get_world_size()
        if rank == 0:
            bind = f"[::]:{self.PORT}"
            self.lighthouse = LighthouseServer(bind=bind, min_replicas=least, join_timeout_ms=10_000)
        dist.barrier()
        # The store is where the replicas' gloo connections are arranged: it must be reachable from all of them.
        store = dist.TCPStore(addresses[rank], 0, is_master=True, wait_for_workers=False)
        wait = timedelta(seconds=TIMEOUT)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=wait),
            min_replica_size=least,
            use_async_quorum=False,
            load_state_dict=lambda state: None,
            state_dict=dict,
            replica_id=f"netlab_{rank}",
            hostname=addresses[rank],
            store_addr=addresses[rank],
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=f"http://{addresses[0]}:{self.PORT}",
            timeout=wait,
            quorum_timeout=wait,
            connect_timeout=wait,
            init_sync=False,  # the same seed everywhere
        )
        self.store = store
        fragments = modules(training.model, setup.fragments)
        outer: list[torch.optim.Optimizer] = [
            torch.optim.SGD(f.parameters(), lr=0.7, momentum=0.9, nesterov=True) for f in fragments
        ]
        self.diloco: Any = TheirDiLoCo(
            self.manager,
            [*fragments],
            training.optimizer,
            outer,
            sync_every=SYNC_EVERY,
            fragment_sync_delay=setup.delay,
        )
        self.diloco.__enter__()

    def step(self) -> None:
        pass

    def spent(self) -> Record:
        return {"rounds": self.manager.current_step()}

    def close(self) -> None:
        self.manager.shutdown(wait=False)


def modules(model: Any, number: int) -> list[nn.ModuleList]:
    """Consecutive layers; what is not a layer goes with the first."""
    layers = list(model.model.layers)
    size = len(layers) // number
    groups = [layers[i * size : (i + 1) * size] for i in range(number)]
    groups[0] += [model.model.embed_tokens, model.model.norm]
    return [nn.ModuleList(group) for group in groups]


OURS, WAN = "e3m0", "e3m0-4"
METHODS: dict[str, Setup] = {
    "ddp": DataParallel("DDP"),
    "ddp-fp16": DataParallel("DDP, fp16 hook", "fp16"),
    "ddp-powersgd": DataParallel("DDP, PowerSGD hook", "powersgd"),
    "diloco": Ours("DiLoCo", 1, 0, "float32"),
    "streaming": Ours("streaming", FRAGMENTS, 0, "float32"),
    "overlap": Ours("streaming, overlap", FRAGMENTS, OVERLAP, "float32"),
    "e3m0": Ours("streaming, overlap, E3M0", FRAGMENTS, OVERLAP, "e3m0"),
    "torchft-6": Torchft("torchft, 6 fragments", 6),
    "torchft-2": Torchft("torchft, 2 fragments", 2),
}
"""What the sweep compares."""
SETUPS = {**METHODS, WAN: Ours("streaming, overlap, E3M0, 4 streams", FRAGMENTS, OVERLAP, "e3m0", streams=4)}


def bucketed(pieces: Sequence[float], first: float, others: float) -> list[float]:
    """Layers as DDP sends them: from the last one on, in buckets that are sent once they hold this many values.

    >>> bucketed([3, 3, 3, 3], first=1, others=100)
    [9.0, 0.0, 0.0, 3.0]
    """
    buckets, size, limit = [0.0] * len(pieces), 0.0, first
    for layer in reversed(range(len(pieces))):
        size += pieces[layer]
        if size >= limit or layer == 0:
            buckets[layer], size, limit = float(size), 0.0, others
    return buckets
