"""The rows of `diloco plan`: what each method costs on the user's link."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.core.schedule import Schedule
from diloco.plan import laws, methods
from diloco.plan.choose import Settings, method_of
from diloco.plan.methods import Model, count_values
from diloco.plan.simulate import Group, Method, required_rates, utilization
from diloco.plan.traffic import CODECS, Reduce, delta_bytes, round_bytes

BUFFERS = 3
"""On an accelerator (core/lane.py)."""
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Everything about the run except the method."""

    model: Model
    group: Group
    rate: float
    """Bits per second of the slowest link."""
    steps: int
    reduce: Reduce = "collective"
    measured_here: bool = False
    """Whether codec_ns or hook_ns was measured on this machine."""
    shards: int = 1
    """Ranks over which a replica is sharded."""
    accelerator: bool = False
    """Whether the model is on accelerators, of which each rank has its own."""


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    settings: str
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
    loss_caution: str


@dataclass(frozen=True)
class Candidate:
    """A method, its settings as text, its extra memory on device and host, and its loss estimate."""

    name: str
    settings: str
    method: Method
    memory: tuple[float, float]
    gap: laws.Estimate | None


def candidates(conditions: Conditions, chosen: Settings) -> list[Candidate]:
    """Data-parallel, the original DiLoCo, streaming as in the paper, streaming as recommended."""
    pieces = conditions.model.pieces()
    paper = Settings(100, f"strided:{min(3, len(pieces))}", 1, "e3m0")
    gradients = methods.data_parallel(pieces, CODECS["bfloat16"])
    baselines = [Candidate("data-parallel", "every step, bfloat16", gradients, (0.0, 0.0), None), _diloco(conditions)]
    if paper != chosen:
        baselines.append(_streaming(conditions, paper, "streaming, as in the paper"))
    return [*baselines, _streaming(conditions, chosen, "streaming, recommended")]


def rows(conditions: Conditions, chosen: Settings) -> list[Row]:
    return [_row(conditions, candidate) for candidate in candidates(conditions, chosen)]


def _diloco(conditions: Conditions) -> Candidate:
    model, sync_every = conditions.model, 100
    method = methods.diloco(model.pieces(), sync_every, CODECS["float32"], by_fragment=True, reduce=conditions.reduce)
    gap = laws.loss_gap(model.parameters, conditions.group.replicas, sync_every, 0)
    memory = _memory(conditions, [model.parameters], 1, "float32")
    return Candidate("DiLoCo", f"sync_every {sync_every}, float32", method, memory, gap)


def _streaming(conditions: Conditions, settings: Settings, name: str) -> Candidate:
    model = conditions.model
    sizes = [count_values(fragment) for fragment in model.fragments(settings.fragments)]
    in_flight = max(Schedule(settings.sync_every, len(sizes)).in_flight(settings.overlap), 1)
    memory = _memory(conditions, sizes, in_flight, settings.codec)
    gap = laws.loss_gap(model.parameters, conditions.group.replicas, settings.sync_every, settings.overlap)
    text = f"sync_every {settings.sync_every}, {settings.fragments}, overlap {settings.overlap}, {settings.codec}"
    return Candidate(name, text, method_of(settings, model, conditions.reduce), memory, gap)


def _memory(conditions: Conditions, sizes: Sequence[float], in_flight: int, codec: str) -> tuple[float, float]:
    """Of a rank, on the device and on the host.

    On the host: anchor and momentum of all fragments, and for each fragment in flight the next anchor and momentum, the
    delta, and what encodes it. Buffers that an accelerator copies from or to stay; fragments of about equal size share
    them. On the accelerator: three buffers of the largest fragment.
    """
    sizes = [size / conditions.shards for size in sizes]
    state, largest, encoded = 8 * sum(sizes), max(sizes), CODECS[codec](max(sizes)) / max(sizes)
    if not conditions.accelerator:
        return 0.0, state + in_flight * largest * (8 + 4 + encoded)
    delta = delta_bytes(codec, conditions.reduce)
    alike = Counter(float(f"{size:.2g}") for size in sizes)
    kept = sum(min(in_flight, count) * size for size, count in alike.items())
    encoding = in_flight * largest * encoded if delta == 4 else 0.0
    return BUFFERS * 4 * largest, state + kept * (4 + delta) + in_flight * largest * 4 + encoding


def _row(conditions: Conditions, candidate: Candidate) -> Row:
    group, method, gap = conditions.group, candidate.method, candidate.gap
    share = float(utilization(method, group, conditions.rate)[0])
    seconds = method.period * group.step_seconds / share if share else float("inf")
    sent = [
        [round_bytes(values, method.nbytes, group.replicas, method.reduce)[0] for _, values in method.sends(step)]
        for step in range(method.first, method.first + method.period)
    ]
    rates = required_rates(method, group, TARGETS)
    return Row(
        name=candidate.name,
        settings=candidate.settings,
        utilization=share,
        needed={f"{target:.0%}": rate for target, rate in zip(TARGETS, rates, strict=True)},
        bytes_per_day=sum(map(sum, sent)) / seconds * DAY,
        # Layer by layer, all messages of a step are one burst.
        largest_burst=max(max(step, default=0.0) if method.by_fragment else sum(step) for step in sent),
        hours=conditions.steps * group.step_seconds / share / 3600 if share else float("inf"),
        device_bytes=candidate.memory[0],
        host_bytes=candidate.memory[1],
        loss_gap=gap.gap if gap else None,
        loss_caution=gap.caution if gap else "",
    )
