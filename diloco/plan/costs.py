"""What each method would cost on the user's link: the rows of `diloco plan`."""

from dataclasses import dataclass, replace

from diloco import laws
from diloco.formats import FORMATS
from diloco.plan import methods
from diloco.plan.choose import Settings, method_of
from diloco.plan.failures import Fleet, outcome
from diloco.plan.model import Model, count_values
from diloco.plan.simulate import Group, Method, required_rates, utilization
from diloco.plan.traffic import CODECS, Link, Reduce, gathers, round_bytes
from diloco.schedule import Schedule

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
DAY = 86_400
BUCKET_PUTS, BUCKET_GETS = 2, 1
"""Objects of a round that a member writes (delta, closing record) and reads besides the others' deltas (the record)."""
SHARED_PUTS, SHARED_BY_ALL, SHARED_GETS = 2, 18, 40
"""The same if each averages a share: head and pieces of the delta; 16 shares, record and heads by all members together;
16 pieces, 16 shares, and what is asked to know that they are there (studies/bucket)."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What an object store charges, in any currency: for a GB that is read, for a thousand writes, for a thousand
    reads."""

    egress: float = 0.0
    puts: float = 0.0
    gets: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Everything about the run except the method."""

    model: Model
    group: Group
    link: Link
    steps: int
    reduce: Reduce = "collective"
    mtbf: float = float("inf")
    restart: float = 600.0
    save_every: int = 500
    quorum: int | None = None
    grace: float = 0.0
    prices: Prices | None = None
    measured_here: bool = False
    """Whether the time of codec and hook is that of this machine."""


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    settings: str
    utilization: float
    goodput: float
    """Share of the computed steps that count when replicas fail."""
    needed: dict[str, float]
    """Bits a second, by the utilization that they give."""
    bytes_per_day: float
    """What one replica sends."""
    largest_burst: float
    """Bytes that one replica sends in the largest round."""
    hours: float
    device_bytes: float
    """At most this much more than data-parallel needs."""
    host_bytes: float
    loss_gap: float | None
    loss_caution: str
    price_per_day: float | None
    """For all replicas."""


@dataclass(frozen=True)
class Candidate:
    """A method with its settings in words, more memory on device and host, and the estimate of its loss."""

    name: str
    settings: str
    method: Method
    memory: tuple[float, float]
    gap: laws.Estimate | None


def candidates(conditions: Conditions, chosen: Settings) -> list[Candidate]:
    """Data-parallel, DiLoCo as it was, streaming as in the paper, streaming as recommended."""
    pieces = conditions.model.pieces()
    papers = Settings(100, f"strided:{min(3, len(pieces))}", 1, "e3m0")
    gradients = methods.data_parallel(pieces, CODECS["bfloat16"])
    out = [Candidate("data-parallel", "every step, bfloat16", gradients, (0.0, 0.0), None), _diloco(conditions, 100)]
    if papers != chosen:
        out.append(_streaming(conditions, papers, "streaming, as in the paper"))
    return [*out, _streaming(conditions, chosen, "streaming, recommended")]


def rows(conditions: Conditions, chosen: Settings) -> list[Row]:
    return [_row(conditions, candidate) for candidate in candidates(conditions, chosen)]


def _diloco(conditions: Conditions, sync_every: int) -> Candidate:
    model, codec = conditions.model, CODECS["float32"]
    method = methods.diloco(model.pieces(), sync_every, codec, by_fragment=True, reduce=conditions.reduce)
    gap = laws.loss_gap(model.parameters, conditions.group.replicas, sync_every, 0)
    memory = _memory(model.parameters, model.parameters, 1, 4)
    return Candidate("DiLoCo", f"sync_every {sync_every}, float32", method, memory, gap)


def _streaming(conditions: Conditions, settings: Settings, name: str) -> Candidate:
    model = conditions.model
    sizes = [count_values(fragment) for fragment in model.fragments(settings.fragments)]
    in_flight = max(Schedule(settings.sync_every, len(sizes)).in_flight(settings.overlap), 1)
    encoded = CODECS[settings.codec](max(sizes)) / max(sizes)
    residual = 4 * model.parameters if FORMATS[settings.codec].feedback else 0.0
    device, host = _memory(model.parameters, max(sizes), in_flight, encoded)
    memory = device, host + residual
    gap = laws.loss_gap(model.parameters, conditions.group.replicas, settings.sync_every, settings.overlap)
    text = f"sync_every {settings.sync_every}, {settings.fragments}, overlap {settings.overlap}, {settings.codec}"
    return Candidate(name, text, method_of(settings, model, conditions.reduce), memory, gap)


def _row(conditions: Conditions, candidate: Candidate) -> Row:
    group, method, gap = conditions.group, candidate.method, candidate.gap
    share = float(utilization(method, group, conditions.link)[0])
    seconds = method.period * group.step_seconds / share if share else float("inf")
    rounds = [n for t in range(method.first, method.first + method.period) for _, n in method.sends(t)]
    traffic = [round_bytes(n, method.nbytes, group.replicas, method.reduce) for n in rounds]
    good = _goodput(conditions, method)
    rates = required_rates(method, group, TARGETS, conditions.link)
    return Row(
        name=candidate.name,
        settings=candidate.settings,
        utilization=share,
        goodput=good,
        needed={f"{target:.0%}": rate for target, rate in zip(TARGETS, rates, strict=True)},
        bytes_per_day=sum(up for up, _ in traffic) / seconds * DAY,
        largest_burst=_largest_burst(method, group),
        hours=conditions.steps * group.step_seconds / (share * good) / 3600 if share * good else float("inf"),
        device_bytes=candidate.memory[0],
        host_bytes=candidate.memory[1],
        loss_gap=gap.gap if gap else None,
        loss_caution=gap.caution if gap else "",
        price_per_day=_price(conditions, method, traffic, DAY / seconds),
    )


def _largest_burst(method: Method, group: Group) -> float:
    """The most that is sent after one step; layer by layer, all messages of the step are one burst."""
    steps = range(method.first, method.first + method.period)
    by_step = (
        [round_bytes(n, method.nbytes, group.replicas, method.reduce)[0] for _, n in method.sends(t)] for t in steps
    )
    return max((max(sent, default=0.0) if method.by_fragment else sum(sent)) for sent in by_step)


def _memory(parameters: float, largest: float, in_flight: int, encoded: float) -> tuple[float, float]:
    """On the device: anchor and momentum of the largest fragment, if they are copied there at all. On the host: both of
    all fragments, and the delta and encoded delta of those in flight."""
    return 8 * largest, 8 * parameters + in_flight * largest * (4 + encoded)


def _goodput(conditions: Conditions, method: Method) -> float:
    """The share of computed steps that count: a replica is one chip of a fleet, back after `restart`.

    With a quorum the others train on, and the failed replica takes their state: it loses what it had not yet sent.
    """
    group = conditions.group
    fleet = Fleet(chips=group.replicas, mtbf=conditions.mtbf, restart=conditions.restart)
    if method.reduce == "bucket" and conditions.quorum is not None:
        grace = max(conditions.grace - method.overlap * group.step_seconds, 0.0)  # overlap hides a part of it
        round_seconds = method.period * group.step_seconds
        fleet = replace(fleet, quorum=conditions.quorum, grace=grace, save_every=round_seconds)
        return outcome(fleet, group.replicas, elastic=False).goodput
    fleet = replace(fleet, save_every=conditions.save_every * group.step_seconds)
    return outcome(fleet, 1, elastic=False).goodput


def _price(conditions: Conditions, method: Method, traffic: list[tuple[float, float]], periods: float) -> float | None:
    """The price of a day, for all replicas together."""
    prices, replicas = conditions.prices, conditions.group.replicas
    if prices is None or method.reduce != "bucket":
        return None
    read = sum(down for _, down in traffic) / 1e9 * prices.egress
    puts, gets = BUCKET_PUTS, replicas - 1 + BUCKET_GETS
    if not gathers(method.nbytes, replicas):
        puts, gets = SHARED_PUTS + SHARED_BY_ALL / replicas, SHARED_GETS
    requests = puts * prices.puts / 1000 + gets * prices.gets / 1000
    return replicas * periods * (read + len(traffic) * requests)
