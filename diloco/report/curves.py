"""The data that the HTML report draws, ready for JSON: named columns without nan, of a run thinned for the screen.

Steps and rounds keep the names of their fields (`Step`, `RoundStats`) on their way into the page's scripts.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

from diloco.core.stats import RoundStats
from diloco.runs import units
from diloco.runs.config import TUNED
from diloco.runs.reader import RecordedRun, Replica
from diloco.runs.schema import Event, Step

ROUNDS = 6000
"""Maximum rounds drawn per replica."""
SLOWEST = 3

PER_STEP = {
    "lr": "Learning rate",
    "grad_norm": "Gradient norm before clipping",
    "tokens_per_second": "Tokens per second of each replica",
}
"""Fields of a step that get a chart with one curve per replica, and the titles of these charts."""

MARKED = ("save", "resume", "stop", "autopilot")
"""Events marked on the timeline."""

Curve = tuple[str, str, Callable[[int], float | None]]
"""Label, kind (which selects a style on the page), and value at a step."""


def charts(run: RecordedRun) -> dict[str, Any]:
    """The charts of one run over steps, by the id of the element they are drawn in."""
    return {
        "loss": _loss(run),
        **{name: _per_replica(run, name, "number") for name in PER_STEP},
        "bytes": _total_bytes(run),
    }


def timeline(run: RecordedRun) -> dict[str, Any]:
    """Steps and rounds of every replica in seconds, and the windows to look at first."""
    stride = max((_stride(replica) for replica in run.replicas), default=1)
    lanes = [_lanes(replica, stride) for replica in run.replicas]
    return {
        "replicas": lanes,
        "fragments": 1 + max((round.fragment for round in run.rounds), default=-1),
        "windows": _slowest(run, run.config.get("sync_every") or 100),
        "seconds": _number(run.figures.seconds),
        "left_out": sum(bool(round.index % stride) for round in run.rounds),
    }


def compared(run: RecordedRun, setting: int) -> dict[str, Any]:
    """A run's loss for the comparison, over steps, tokens, seconds and bytes sent."""
    first = {step.step: step for step in (run.replicas[0].steps if run.replicas else ())}
    curves = [{step.step: step.loss for step in replica.steps} for replica in run.replicas]
    training = []
    for step in sorted(first):
        losses = [curve[step] for curve in curves if step in curve]
        training.append(_point(first[step], step, sum(losses) / len(losses)))
    held_out = [_point(first.get(e.step), e.step, e.loss) for e in run.evaluations]
    return {
        "name": run.name,
        "setting": setting,
        "seed": run.seed,
        "training": _columns(training),
        "held-out": _columns(held_out),
    }


def tuned(event: Event) -> str:
    """The autopilot's choices and the link speed they are for."""
    choices = [f"{name} {event.details[name]}" for name in TUNED if name in event.details]
    rate = event.details.get("rate")
    return ", ".join(choices) + (f"; link speed {units.rate(rate)}" if rate else "")


def _loss(run: RecordedRun) -> dict[str, Any]:
    """Training loss of every replica, held-out loss of the anchors and of one replica."""
    replica_loss, anchors = ({e.step: getattr(e, name) for e in run.evaluations} for name in ("replica_loss", "loss"))
    more: list[Curve] = [
        ("one replica, held-out", "one replica", replica_loss.get),
        ("anchors, held-out", "anchors", anchors.get),
    ]
    if (unigram := run.figures.unigram_loss) is not None:
        more.append(("unigram model", "reference", lambda step: unigram))
    return _per_replica(run, "loss", "nats", "training", sorted(anchors), more)


def _per_replica(
    run: RecordedRun, name: str, unit: str, kind: str = "", steps: Sequence[int] = (), more: Sequence[Curve] = ()
) -> dict[str, Any]:
    """A field of the steps, one curve per replica; `more` curves have values at further `steps`."""
    values = {
        ", ".join(filter(None, (f"replica {r.number}", kind))): {step.step: getattr(step, name) for step in r.steps}
        for r in run.replicas
    }
    axis = sorted({step for curve in values.values() for step in curve} | set(steps))
    curves: list[Curve] = [(label, "replica", curve.get) for label, curve in values.items()]
    stride = max((b.step - a.step for r in run.replicas for a, b in pairwise(r.steps)), default=1)
    note = f"Shows one step in {stride}." if stride > 1 else ""
    return _chart(axis, unit, [*curves, *more], note)


def _total_bytes(run: RecordedRun) -> dict[str, Any]:
    """Bytes sent by the first replica with steps by the end of each step, compared with data-parallel training."""
    replica = next((r for r in run.replicas if r.steps), None)
    total: dict[int, float] = {step.step: step.bytes_sent for step in replica.steps} if replica else {}
    if total and run.figures.bytes_sent:
        # The last rounds end after the last step is written.
        total[max(total)] = max(total[max(total)], run.figures.bytes_sent)
    # A logarithmic axis cannot show zero.
    curves: list[Curve] = [("sent", "line", lambda step: total.get(step) or None)]
    if data_parallel := run.figures.bytes_data_parallel:
        per_step = data_parallel / max(run.figures.steps, 1)
        curves.append(("data-parallel", "data-parallel", lambda step: per_step * step))
    return _chart(sorted(total), "bytes", curves)


def _chart(steps: Sequence[int], unit: str, curves: Sequence[Curve], note: str = "") -> dict[str, Any]:
    drawn = [
        {"label": label, "kind": kind, "values": [_number(value(step)) for step in steps]}
        for label, kind, value in curves
    ]
    return {"steps": steps, "unit": unit, "curves": drawn, "note": note}


def _point(step: Step | None, number: int, loss: float) -> dict[str, Any]:
    tokens, seconds, sent = (step.tokens, step.seconds, step.bytes_sent or None) if step else (None, None, None)
    return {"step": number, "tokens": tokens, "seconds": seconds, "bytes_sent": sent, "loss": loss}


def _slowest(run: RecordedRun, period: int) -> list[dict[str, Any]]:
    """The sync periods with the most exposed seconds; if none has any, those with the most seconds in flight."""
    groups: dict[int, list[RoundStats]] = defaultdict(list)
    for round in run.rounds:
        groups[_first_step(round) // period].append(round)

    def cost(rounds: Sequence[RoundStats]) -> tuple[float, float]:
        return sum(round.seconds_exposed for round in rounds), sum(round.seconds for round in rounds)

    return [_window(rounds, cost(rounds)[0]) for rounds in sorted(groups.values(), key=cost, reverse=True)[:SLOWEST]]


def _window(rounds: Sequence[RoundStats], exposed: float) -> dict[str, Any]:
    start, end = min(round.sent_at for round in rounds), max(map(_arrived_at, rounds))
    margin = 0.04 * (end - start)
    return {
        "start": _number(start - margin),
        "end": _number(end + margin),
        "first_step": min(map(_first_step, rounds)),
        "last_step": max(round.applied_step for round in rounds),
        "seconds_exposed": _number(exposed),
    }


def _first_step(round: RoundStats) -> int:
    """The step after which the round was sent or, if this replica did not send, applied."""
    return round.applied_step if round.sent_step is None else round.sent_step


def _arrived_at(round: RoundStats) -> float:
    return round.sent_at + round.seconds


def _stride(replica: Replica) -> int:
    """Draw every n-th round of each fragment, so that at most `ROUNDS` are drawn."""
    stride = 1
    while sum(not round.index % stride for round in replica.rounds) > ROUNDS:
        stride *= 2
    return stride


def _lanes(replica: Replica, stride: int) -> dict[str, Any]:
    rounds = [round for round in replica.rounds if not round.index % stride]
    columns = {name: [_short(getattr(round, name)) for round in rounds] for name in _ROUND}
    # A result is applied at the end of a step; after the last step, as soon as it arrives.
    step_ends = {step.step: step.seconds for step in replica.steps}
    applied = [max(_arrived_at(round), step_ends.get(round.applied_step, 0.0)) for round in rounds]
    return {
        "number": replica.number,
        "steps": _columns(_blocks(replica.steps)),
        "rounds": columns | {"applied_at": list(map(_short, applied))} if rounds else {},
        "events": [
            {"event": e.event, "seconds": _number(e.seconds), "step": e.step, "settings": tuned(e)}
            for e in replica.events
            if e.event in MARKED
        ],
    }


def _blocks(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Steps as they are drawn: `count` of them in a block that ends with `step`."""
    blocks: list[dict[str, Any]] = []
    number, end, exposed = 0, 0.0, 0.0
    for step in steps:
        count = step.step - number
        start = end if count > 1 else step.seconds - step.step_seconds
        more = max(0.0, step.seconds_exposed - exposed)
        blocks.append({"start": start, "end": step.seconds, "exposed": more, "step": step.step, "count": count})
        number, end, exposed = step.step, step.seconds, step.seconds_exposed
    return blocks


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn rows with the same keys into one list per key: a third of the size."""
    return {key: [_short(row[key]) for row in rows] for key in (rows or [{}])[0]}


def _short(value: Any) -> Any:
    return _number(value) if isinstance(value, float) else value


def _number(value: float | None) -> float | None:
    """Round to seven digits, which halves the file. None for inf and nan."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")


_ROUND = tuple(field.name for field in fields(RoundStats))
