"""The rows of `diloco plan`: what each method costs on the user's link."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from diloco.core.schedule import Schedule
from diloco.plan import laws, methods
from diloco.plan.choose import Settings, method_of
from diloco.plan.methods import Model, count_values
from diloco.plan.simulate import Group, Method, required_rates, utilization
from diloco.plan.traffic import CODECS, ENCODED_ON_DEVICE, Place, Reduce, bus_bytes, delta_bytes, round_bytes

BUFFERS = 3
"""On an accelerator (core/lane.py)."""
CODEC_NS, HOOK_NS = 5.7, 2.7
"""Nanoseconds a value of a round, of the communication and of the training thread: measured in complete rounds on one
core of a server (docs/benchmarks.md). On accelerators the training thread only starts copies."""
PCIE = "20GB/s"
"""Between host and accelerator. PCIe 4 x16 has 32 GB/s, of which copies from pinned memory reach about 25."""
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
DAY = 86_400


@dataclass(frozen=True)
class Prices:
    """Dollars that a store takes for a million PUT or LIST, a million GET or HEAD, and a GB that leaves it."""

    puts: float
    gets: float
    gigabyte: float


PRICES = {"S3": Prices(5.0, 0.4, 0.09), "R2": Prices(4.5, 0.36, 0.0)}
"""List prices, first tier, November 2026; S3: us-east-1."""
PUTS, GETS, READ = 6, 40, 100e3
"""Requests of a member in a round, and the bytes that it reads besides values: with 8 members and 24 fragments, as
`make scale` counts them. Larger crowds take up to half as many more."""
MINUTE_PUTS, MINUTE_GETS = 23, 94
"""The same for heartbeats, in a minute."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Everything about the run except the method."""

    model: Model
    group: Group
    rate: float
    """Bits per second of the slowest link."""
    steps: int
    reduce: Reduce = "collective"
    shards: int = 1
    """Ranks over which a replica is sharded."""
    bus: float | None = None
    """Bytes per second between a rank and its accelerator. None: the model is on CPUs."""
    state: Place = "host"
    prices: Prices = PRICES["S3"]
    """Of the store, if the reducer is a bucket."""
    assumed: tuple[str, ...] = ()
    """Flags that were not set, with the values that are used instead."""

    def group_of(self, codec: str) -> Group:
        """With the copies that this codec needs between host and accelerator."""
        copy_ns = 1e9 * self.bus_bytes(codec) / self.bus / self.shards if self.bus else 0.0
        return replace(self.group, copy_ns=copy_ns)

    def bus_bytes(self, codec: str) -> float:
        return bus_bytes(codec, self.group.replicas, self.reduce, self.state_of(codec))

    def state_of(self, codec: str) -> Place:
        """Other codecs run on the host only."""
        return self.state if codec in ENCODED_ON_DEVICE else "host"


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    utilization: float
    needed: dict[str, float]
    """Bits per second needed for each target utilization."""
    bytes_per_day: float
    """Sent by one replica."""
    largest_burst: float
    """Bytes that one replica sends in the largest round."""
    hours: float
    device_bytes: float
    """Memory of a rank on top of data-parallel training; an upper bound, as is `host_bytes`."""
    host_bytes: float
    loss_gap: float | None


def rows(conditions: Conditions, chosen: Settings) -> list[Row]:
    """Data-parallel, the original DiLoCo, streaming with the chosen settings."""
    model, replicas = conditions.model, conditions.group.replicas
    gradients = methods.data_parallel(model.pieces(), CODECS["bfloat16"])
    diloco = methods.diloco(model.pieces(), 100, CODECS["float32"], by_fragment=True, reduce=conditions.reduce)
    sizes = [count_values(fragment) for fragment in model.fragments(chosen.fragments)]
    in_flight = max(Schedule(chosen.sync_every, len(sizes)).in_flight(chosen.overlap), 1)
    return [
        _row(conditions, "data-parallel", gradients, conditions.group),
        _row(
            conditions,
            "DiLoCo",
            diloco,
            conditions.group_of("float32"),
            memory=_memory(conditions, [model.parameters], 1, "float32"),
            loss_gap=laws.loss_gap(model.parameters, replicas, 100, 0).gap,
        ),
        _row(
            conditions,
            "streaming, recommended",
            method_of(chosen, model, conditions.reduce),
            conditions.group_of(chosen.codec),
            memory=_memory(conditions, sizes, in_flight, chosen.codec),
            loss_gap=laws.loss_gap(model.parameters, replicas, chosen.sync_every, chosen.overlap).gap,
        ),
    ]


def storage_day(conditions: Conditions, chosen: Settings, *, direct: bool) -> tuple[float, float]:
    """What a member of a bucket pays in a day for requests and for what it reads, in dollars. `direct`: all members
    reach each other, and read only records and lists from the store."""
    method, group = method_of(chosen, conditions.model, "bucket"), conditions.group_of(chosen.codec)
    share = float(utilization(method, group, conditions.rate)[0])
    periods = DAY * share / (method.period * group.step_seconds)
    messages = [n for step in range(method.first, method.first + method.period) for _, n in method.sends(step)]
    values = sum(round_bytes(n, method.nbytes, group.replicas, "bucket")[1] for n in messages)
    # Each shard has rounds and heartbeats of its own.
    shards, prices = conditions.shards, conditions.prices
    rounds, minutes = shards * periods * len(messages), shards * DAY / 60
    read = rounds * READ + (0.0 if direct else periods * values)
    puts, gets = rounds * PUTS + minutes * MINUTE_PUTS, rounds * GETS + minutes * MINUTE_GETS
    return (puts * prices.puts + gets * prices.gets) / 1e6, read / 1e9 * prices.gigabyte


def _memory(conditions: Conditions, sizes: Sequence[float], in_flight: int, codec: str) -> tuple[float, float]:
    """Of a rank, on the device and on the host.

    On the host: anchor and momentum of all fragments, and for each fragment in flight the next anchor and momentum, the
    delta, and what encodes it. Buffers that an accelerator copies from or to stay; fragments of about equal size share
    them. On the accelerator: three buffers of the largest fragment. With the state there, also anchor, momentum and a
    payload of all fragments; the host then holds only payloads.
    """
    sizes = [size / conditions.shards for size in sizes]
    state, largest, encoded = 8 * sum(sizes), max(sizes), CODECS[codec](max(sizes)) / max(sizes)
    if conditions.bus is None:
        return 0.0, state + in_flight * largest * (8 + 4 + encoded)
    buffers, delta = BUFFERS * 4 * largest, delta_bytes(codec, conditions.reduce)
    alike = Counter(float(f"{size:.2g}") for size in sizes)
    kept = sum(min(in_flight, count) * size for size, count in alike.items())
    if conditions.state_of(codec) == "device":
        received = conditions.bus_bytes(codec) - delta
        return buffers + state + delta * sum(sizes), kept * delta + received * sum(alike)
    encoding = in_flight * largest * encoded if delta == 4 else 0.0
    return buffers, state + kept * (4 + delta) + in_flight * largest * 4 + encoding


def _row(
    conditions: Conditions,
    name: str,
    method: Method,
    group: Group,
    *,
    memory: tuple[float, float] = (0.0, 0.0),
    loss_gap: float | None = None,
) -> Row:
    share = float(utilization(method, group, conditions.rate)[0])
    seconds = method.period * group.step_seconds / share if share else float("inf")
    sent = [
        [round_bytes(values, method.nbytes, group.replicas, method.reduce)[0] for _, values in method.sends(step)]
        for step in range(method.first, method.first + method.period)
    ]
    rates = required_rates(method, group, TARGETS)
    return Row(
        name=name,
        utilization=share,
        needed={f"{target:.0%}": rate for target, rate in zip(TARGETS, rates, strict=True)},
        bytes_per_day=sum(map(sum, sent)) / seconds * DAY,
        # Layer by layer, all messages of a step are one burst.
        largest_burst=max(max(step, default=0.0) if method.by_fragment else sum(step) for step in sent),
        hours=conditions.steps * group.step_seconds / share / 3600 if share else float("inf"),
        device_bytes=memory[0],
        host_bytes=memory[1],
        loss_gap=loss_gap,
    )
