"""What the HTML report draws, ready for JSON: named columns, thinned to what a screen can show, without nan.

Records keep the names of their fields (`runs/schema.py`) on the way into the page's scripts.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from diloco.runs.reader import RecordedRun, Replica
from diloco.runs.schema import Round, Step

POINTS = 2000
"""Points of one curve, at most. In longer runs a point stands for several steps."""
ROUNDS = 6000
"""Rounds of one replica on its timeline, at most. Those of the slowest sync periods are always shown."""
SLOWEST = 3

PER_STEP = {
    "lr": "Learning rate",
    "grad_norm": "Norm of the gradient, before clipping",
    "tokens_per_second": "Tokens a second, of each replica",
}
"""Fields of a step that have a chart of their own, with a curve for each replica, and the titles of these charts."""

Curve = tuple[str, str, Callable[[int], float | None]]
"""Label, kind (each has its own style on the page), and value at a step."""


def charts(run: RecordedRun) -> dict[str, Any]:
    """The charts of one run over steps, by the id of the element that each is drawn in."""
    per_step = {name: _per_replica(run, name, "number") for name in PER_STEP}
    return {"loss": _loss(run), **per_step, **_traffic(run)}


def timeline(run: RecordedRun) -> dict[str, Any]:
    """Steps and rounds of every replica in seconds, and the windows to look at first."""
    sync_every = run.config.get("sync_every")
    period = sync_every if isinstance(sync_every, int) and sync_every > 0 else 100
    slowest = _slowest(run, period)
    return {
        "replicas": [_lanes(replica, period, set(slowest)) for replica in run.replicas],
        "fragments": 1 + max((round.fragment for round in run.rounds), default=-1),
        "windows": list(slowest.values()),
    }


def compared(run: RecordedRun, setting: int, bits: bool = False) -> dict[str, Any]:
    """A run's loss for the comparison, over steps, tokens, seconds and bytes sent. `bits`: held-out, per byte."""
    steps = run.replicas[0].steps if run.replicas else ()
    at = {step.step: step for step in steps}
    width = _width(len(steps))
    curves = [_means(replica.steps, "loss", width) for replica in run.replicas]
    training = []
    for step in sorted(curves[0]) if curves else []:
        values = [curve[step] for curve in curves if step in curve]
        training.append(_point(at.get(step), step, sum(values) / len(values)))
    held_out = [_point(at.get(e.step), e.step, e.bits_per_byte if bits else e.loss) for e in run.evaluations]
    return {"setting": setting, "seed": run.seed, "training": _columns(training), "held-out": _columns(held_out)}


def _loss(run: RecordedRun) -> dict[str, Any]:
    """Loss of every replica in training, of the anchors and of one replica on held-out text."""
    one, anchors = ({e.step: getattr(e, name) for e in run.evaluations} for name in ("replica_loss", "loss"))
    more: list[Curve] = [
        ("one replica, held-out", "one replica", one.get),
        ("anchors, held-out", "anchors", anchors.get),
    ]
    if (unigram := run.figures.unigram_loss) is not None:
        more.append(("unigram model", "reference", lambda step: unigram))
    return _per_replica(run, "loss", "nats", "training", sorted(anchors), more)


def _per_replica(
    run: RecordedRun, name: str, unit: str, what: str = "", steps: Sequence[int] = (), more: Sequence[Curve] = ()
) -> dict[str, Any]:
    """A field of the steps, with a curve for each replica; `more` curves have values at further `steps`."""
    width = _width(max((len(replica.steps) for replica in run.replicas), default=0))
    means = {", ".join(filter(None, (f"replica {r.number}", what))): _means(r.steps, name, width) for r in run.replicas}
    axis = sorted({step for curve in means.values() for step in curve} | set(steps))
    curves: list[Curve] = [(label, "replica", curve.get) for label, curve in means.items()]
    return _chart(axis, unit, [*curves, *more], width)


def _traffic(run: RecordedRun) -> dict[str, Any]:
    """Bytes that one replica sent, per step and in sum, beside those of data-parallel."""
    replica = next((r for r in run.replicas if r.steps), None)
    steps = replica.steps if replica else ()
    width = _width(len(steps))
    total: dict[int, float] = {_slot(step.step, width, steps): step.bytes_sent for step in steps}
    if total and run.figures.bytes_sent:
        # The last rounds end after the last step is written.
        total[max(total)] = max(total[max(total)], run.figures.bytes_sent)
    largest: dict[int, float] = {}
    for step, sent in _bursts(replica).items():
        slot = _slot(step, width, steps)
        largest[slot] = max(largest.get(slot, 0), sent)
    axis = sorted(total.keys() | largest.keys())
    # A logarithmic axis cannot show zero.
    each: list[Curve] = [("sent", "bars", lambda step: largest.get(step) or None)]
    in_sum: list[Curve] = [("sent", "line", lambda step: total.get(step) or None)]
    if run.figures.bytes_data_parallel and run.figures.steps:
        by_step = run.figures.bytes_data_parallel / run.figures.steps
        each.append(("data-parallel", "data-parallel", lambda step: by_step))
        in_sum.append(("data-parallel", "data-parallel", lambda step: by_step * step))
    return {"bytes-each": _chart(axis, "bytes", each), "bytes-total": _chart(axis, "bytes", in_sum)}


def _bursts(replica: Replica | None) -> Mapping[int, float]:
    """Bytes sent after each step, from the rounds; without rounds (data-parallel), from the sums of the steps."""
    if replica is None:
        return {}
    bursts: dict[int, float] = defaultdict(float)
    for round in replica.rounds:
        bursts[_first_step(round)] += round.bytes_sent
    before = [0, *(step.bytes_sent for step in replica.steps)]
    return bursts or {step.step: step.bytes_sent - sent for step, sent in zip(replica.steps, before, strict=False)}


def _chart(steps: Sequence[int], unit: str, curves: Sequence[Curve], width: int = 1) -> dict[str, Any]:
    drawn = [
        {"label": label, "kind": kind, "values": [_number(value(step)) for step in steps]}
        for label, kind, value in curves
    ]
    note = f"Each point of a replica is the mean of {width} steps." if width > 1 else ""
    return {"steps": steps, "unit": unit, "curves": drawn, "note": note}


def _point(step: Step | None, number: int, loss: float) -> dict[str, Any]:
    tokens, seconds, sent = (step.tokens, step.seconds, step.bytes_sent or None) if step else (None, None, None)
    return {"step": number, "tokens": tokens, "seconds": seconds, "bytes_sent": sent, "loss": loss}


def _slowest(run: RecordedRun, period: int) -> dict[int, dict[str, Any]]:
    """The sync periods in which training waited longest; if it never waited, those with the most time in flight."""
    groups: dict[int, list[Round]] = defaultdict(list)
    for round in run.rounds:
        groups[_first_step(round) // period].append(round)

    def cost(number: int) -> tuple[float, float]:
        rounds = groups[number]
        return sum(round.exposed_seconds for round in rounds), sum(round.flight_seconds for round in rounds)

    order = sorted(groups, key=cost, reverse=True)[:SLOWEST]
    return {number: _window(groups[number], cost(number)[0]) for number in order}


def _window(rounds: Sequence[Round], exposed: float) -> dict[str, Any]:
    start = min(round.sent_seconds for round in rounds)
    end = max(max(round.seconds, round.sent_seconds + round.flight_seconds) for round in rounds)
    margin = 0.04 * (end - start)
    return {
        "start": _number(start - margin),
        "end": _number(end + margin),
        "first_step": min(map(_first_step, rounds)),
        "last_step": max(round.step for round in rounds),
        "exposed_seconds": _number(exposed),
    }


def _first_step(round: Round) -> int:
    """The step after which it was sent; if this replica did not send, the step after which it was applied."""
    return round.step if round.sent_step is None else round.sent_step


def _lanes(replica: Replica, period: int, slowest: set[int]) -> dict[str, Any]:
    every = -(-len(replica.rounds) // ROUNDS)
    rounds = [r for k, r in enumerate(replica.rounds) if k % every == 0 or _first_step(r) // period in slowest]
    events = [event for event in replica.events if event.event in ("save", "resume", "stop")]
    return {
        "number": replica.number,
        "steps": _columns(_blocks(replica.steps)),
        "rounds": _columns([asdict(round) for round in rounds]),
        "left_out": len(replica.rounds) - len(rounds),
        "events": [{"event": e.event, "seconds": _number(e.seconds), "step": e.step} for e in events],
    }


def _blocks(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Steps as they are drawn: `count` of them in a block that ends with `step`."""
    width = _width(len(steps))
    blocks: list[dict[str, Any]] = []
    waited = 0.0
    for k in range(0, len(steps), width):
        first, last = steps[k], steps[min(k + width, len(steps)) - 1]
        start, count = first.seconds - first.step_seconds, min(width, len(steps) - k)
        exposed, waited = max(0.0, last.seconds_exposed - waited), last.seconds_exposed
        blocks.append({"start": start, "end": last.seconds, "exposed": exposed, "step": last.step, "count": count})
    return blocks


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows with the same keys, as one list for each key: a third of the size."""
    return {key: [_number(v) if isinstance(v := row[key], float) else v for row in rows] for key in (rows or [{}])[0]}


def _means(steps: Sequence[Step], name: str, width: int) -> dict[int, float]:
    slots: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        slots[_slot(step.step, width, steps)].append(getattr(step, name))
    return {slot: sum(values) / len(values) for slot, values in slots.items()}


def _slot(step: int, width: int, steps: Sequence[Step]) -> int:
    """The step that stands for this one: the last of its `width` steps, the same on all replicas."""
    return min(-(-step // width) * width, max(step, steps[-1].step)) if steps else step


def _width(steps: int) -> int:
    return max(1, -(-steps // POINTS))


def _number(value: float | None) -> float | None:
    """Seven digits, which halve the file. None for inf and nan."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")
