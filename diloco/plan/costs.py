"""What each method would cost on the user's link: the rows of `diloco plan`."""

from dataclasses import dataclass

from diloco import laws
from diloco.plan import failures
from diloco.plan import methods as method
from diloco.plan.choose import Settings, built
from diloco.plan.model import Model, size
from diloco.plan.simulate import Group, Method, needed, utilization
from diloco.plan.traffic import CODECS, Link, Reduce, moved
from diloco.schedule import Schedule

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
DAY = 86_400
BUCKET_PUTS, BUCKET_GETS = 2, 1
"""Objects of a round that a member writes (delta, closing record) and reads besides the others' deltas (the record)."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Of an object store, in any currency."""

    egress: float = 0.0
    """Of a GB that is read."""
    puts: float = 0.0
    """Of a thousand writes."""
    gets: float = 0.0
    """Of a thousand reads."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Everything about the run but the method."""

    model: Model
    group: Group
    link: Link
    steps: int
    reduce: Reduce = "collective"
    in_turn: bool = True
    mtbf: float = float("inf")
    restart: float = 600.0
    save_every: int = 500
    quorum: int | None = None
    grace: float = 0.0
    prices: Prices | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    settings: str
    utilization: float
    goodput: float
    """Share of the steps that count, with failures."""
    needed: dict[str, float]
    """Bits a second for a utilisation."""
    bytes_per_day: float
    """Sent by a replica."""
    largest_burst: float
    """Bytes of the largest round, sent by a replica."""
    hours: float
    device_bytes: float
    """More than data-parallel needs, at most."""
    host_bytes: float
    loss_gap: float | None
    loss_caution: str
    price_per_day: float | None
    """Of all replicas."""


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
    gradients = method.data_parallel(pieces, CODECS["bfloat16"])
    out = [Candidate("data-parallel", "every step, bfloat16", gradients, (0.0, 0.0), None), _diloco(conditions, 100)]
    if papers != chosen:
        out.append(_streaming(conditions, papers, "streaming, as in the paper"))
    return [*out, _streaming(conditions, chosen, "streaming, recommended")]


def rows(conditions: Conditions, chosen: Settings) -> list[Row]:
    return [_row(conditions, candidate) for candidate in candidates(conditions, chosen)]


def _diloco(conditions: Conditions, sync_every: int) -> Candidate:
    model, codec = conditions.model, CODECS["float32"]
    each = method.diloco(model.pieces(), sync_every, codec, in_turn=conditions.in_turn, reduce=conditions.reduce)
    gap = laws.loss_gap(model.parameters, conditions.group.replicas, sync_every, 0)
    memory = _memory(model.parameters, model.parameters, 1, 4)
    return Candidate("DiLoCo", f"sync_every {sync_every}, float32", each, memory, gap)


def _streaming(conditions: Conditions, settings: Settings, name: str) -> Candidate:
    model = conditions.model
    each = built(settings, model, conditions.reduce, in_turn=conditions.in_turn)
    sizes = [size(fragment) for fragment in model.fragments(settings.fragments)]
    under_way = max(Schedule(settings.sync_every, len(sizes)).in_flight(settings.overlap), 1)
    encoded = CODECS[settings.codec](max(sizes)) / max(sizes)
    memory = _memory(model.parameters, max(sizes), under_way, encoded)
    gap = laws.loss_gap(model.parameters, conditions.group.replicas, settings.sync_every, settings.overlap)
    text = f"sync_every {settings.sync_every}, {settings.fragments}, overlap {settings.overlap}, {settings.codec}"
    return Candidate(name, text, each, memory, gap)


def _row(conditions: Conditions, candidate: Candidate) -> Row:
    group, each, gap = conditions.group, candidate.method, candidate.gap
    share = float(utilization(each, group, conditions.link)[0])
    seconds = each.period * group.step_seconds / share if share else float("inf")
    rounds = [n for t in range(each.first, each.first + each.period) for _, n in each.sends(t)]
    traffic = [moved(n, each.nbytes, group.replicas, each.reduce) for n in rounds]
    good = _goodput(conditions, each)
    return Row(
        name=candidate.name,
        settings=candidate.settings,
        utilization=share,
        goodput=good,
        needed={
            f"{t:.0%}": rate for t, rate in zip(TARGETS, needed(each, group, TARGETS, conditions.link), strict=True)
        },
        bytes_per_day=sum(up for up, _ in traffic) / seconds * DAY,
        largest_burst=_largest_burst(each, group),
        hours=conditions.steps * group.step_seconds / (share * good) / 3600 if share * good else float("inf"),
        device_bytes=candidate.memory[0],
        host_bytes=candidate.memory[1],
        loss_gap=gap.gap if gap else None,
        loss_caution=gap.caution if gap else "",
        price_per_day=_price(conditions, each, traffic, DAY / seconds),
    )


def _largest_burst(each: Method, group: Group) -> float:
    """The most that is sent after one step; in the paper's grain a fragment is several messages."""
    steps = range(each.first, each.first + each.period)
    by_step = ([moved(n, each.nbytes, group.replicas, each.reduce)[0] for _, n in each.sends(t)] for t in steps)
    return max((max(sent, default=0.0) if each.in_turn else sum(sent)) for sent in by_step)


def _memory(parameters: float, largest: float, under_way: int, encoded: float) -> tuple[float, float]:
    """On the device anchor and momentum of the largest fragment, if they are moved there at all.

    On the host both of all fragments, and delta and encoded delta of those under way.
    """
    return 8 * largest, 8 * parameters + under_way * largest * (4 + encoded)


def _goodput(conditions: Conditions, each: Method) -> float:
    group = conditions.group
    if each.reduce == "bucket" and conditions.quorum is not None:
        grace = max(conditions.grace - each.overlap * group.step_seconds, 0.0)  # what overlap hides is not waited for
        lost = each.period * group.step_seconds / 2
        return failures.quorum(group.replicas, conditions.mtbf, conditions.restart, conditions.quorum, grace, lost)
    save_seconds = conditions.save_every * group.step_seconds
    return failures.synchronous(group.replicas, conditions.mtbf, conditions.restart, save_seconds)


def _price(conditions: Conditions, each: Method, traffic: list[tuple[float, float]], periods: float) -> float | None:
    """Of a day, all replicas together."""
    prices, replicas = conditions.prices, conditions.group.replicas
    if prices is None or each.reduce != "bucket":
        return None
    read = sum(down for _, down in traffic) / 1e9 * prices.egress
    requests = BUCKET_PUTS * prices.puts / 1000 + (replicas - 1 + BUCKET_GETS) * prices.gets / 1000
    return replicas * periods * (read + len(traffic) * requests)
