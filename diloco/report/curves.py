"""What the HTML report draws, ready for JSON: named columns, without nan, of a run that was thinned for the screen.

Records keep the names of their fields (`runs/schema.py`) on the way into the page's scripts. A page that lives is sent
the same for `since` and later: it forgets what it has from that step on, and takes this in its place.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from diloco.report import units
from diloco.runs.config import TUNED
from diloco.runs.reader import RecordedRun, Replica
from diloco.runs.replica import block
from diloco.runs.schema import Event, Round, Step

SLOWEST = 3
BARS = 250
"""Bars of a chart, at most: more of them are a solid block."""

PER_STEP = {
    "lr": "Learning rate",
    "grad_norm": "Norm of the gradient, before clipping",
    "tokens_per_second": "Tokens a second, of each replica",
}
"""Fields of a step that have a chart of their own, with a curve for each replica, and the titles of these charts."""

MARKED = ("save", "resume", "stop", "autopilot")
"""Events that the timeline shows."""

Curve = tuple[str, str, Callable[[int], float | None]]
"""Label, kind (each has its own style on the page), and value at a step."""


def charts(run: RecordedRun, since: int = 0) -> dict[str, Any]:
    """The charts of one run over steps, by the id of the element that each is drawn in."""
    new = _after(run, since)
    per_step = {name: _per_replica(new, name, "number") for name in PER_STEP}
    drawn = {"loss": _loss(new), **per_step, "bytes-total": _in_sum(new)}
    complete = {"bytes-each": _per_period(run), "overlap": _overlap(run)}
    return {**{name: chart | {"since": since} for name, chart in drawn.items()}, **complete}


def timeline(run: RecordedRun, since: int = 0) -> dict[str, Any]:
    """Steps and rounds of every replica in seconds, and the windows to look at first."""
    return {
        "since": since,
        "replicas": [_lanes(replica, run.width, since) for replica in run.replicas],
        "fragments": 1 + max((round.fragment for round in run.rounds), default=-1),
        "windows": _slowest(run, _period(run)),
        "seconds": _number(run.figures.seconds),
        "left_out": sum(replica.left_out for replica in run.replicas),
    }


def compared(run: RecordedRun, setting: int, bits: bool = False, since: int = 0) -> dict[str, Any]:
    """A run's loss for the comparison, over steps, tokens, seconds and bytes sent. `bits`: held-out, per byte."""
    run = _after(run, since)
    at = {step.step: step for step in (run.replicas[0].steps if run.replicas else ())}
    curves = [{step.step: step.loss for step in replica.steps} for replica in run.replicas]
    training = []
    for step in sorted(curves[0]) if curves else []:
        values = [curve[step] for curve in curves if step in curve]
        training.append(_point(at.get(step), step, sum(values) / len(values)))
    held_out = [_point(at.get(e.step), e.step, e.bits_per_byte if bits else e.loss) for e in run.evaluations]
    drawn = {"training": _columns(training), "held-out": _columns(held_out)}
    return {"name": run.name, "setting": setting, "seed": run.seed, "since": since, **drawn}


def first_new(run: RecordedRun) -> int:
    """The `since` of what will come after this: the first step of the last block that all replicas have begun."""
    last = [replica.steps[-1].step for replica in run.replicas if replica.steps]
    return block(min(last), run.width) - run.width + 1 if last else 0


def _after(run: RecordedRun, since: int) -> RecordedRun:
    """The run from this step on."""
    if not since:
        return run
    return replace(run, replicas=tuple(
        replace(
            replica,
            steps=_from(replica.steps, since), evaluations=_from(replica.evaluations, since),
            rounds=_from(replica.rounds, since),
        )
        for replica in run.replicas
    ))  # fmt: skip


def _from(entries: Sequence[Any], since: int) -> Any:
    """Those from this step on; they are in order, and few."""
    first = len(entries)
    while first and entries[first - 1].step >= since:
        first -= 1
    return entries[first:]


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
    values = {
        ", ".join(filter(None, (f"replica {r.number}", what))): {step.step: getattr(step, name) for step in r.steps}
        for r in run.replicas
    }
    axis = sorted({step for curve in values.values() for step in curve} | set(steps))
    curves: list[Curve] = [(label, "replica", curve.get) for label, curve in values.items()]
    note = f"Each point of a replica is the mean of {run.width} steps." if run.width > 1 else ""
    return _chart(axis, unit, [*curves, *more], note)


def _in_sum(run: RecordedRun) -> dict[str, Any]:
    """Bytes that one replica has sent, beside those of data-parallel."""
    total = _total(run)
    # A logarithmic axis cannot show zero.
    curves: list[Curve] = [("sent", "line", lambda step: total.get(step) or None)]
    if by_step := _data_parallel(run):
        curves.append(("data-parallel", "data-parallel", lambda step: by_step * step))
    return _chart(sorted(total), "bytes", curves)


def _per_period(run: RecordedRun) -> dict[str, Any]:
    """Bytes that one replica sent in each sync period, in which every fragment is sent once."""
    total, period = _total(run), _period(run)
    last = max(total, default=0)
    several = max(1, -(-last // (period * BARS)), -(-4 * run.width // period) if run.width > 1 else 1)
    bar, sent = several * period, {}
    before = reached = 0.0
    for step in sorted(total):
        reached = total[step]
        if block(step, bar) == step or step == last:
            sent[step], before = reached - before, reached
        elif block(step, bar) < step + run.width:  # the next block ends beyond the bar
            sent[block(step, bar)], before = reached - before, reached
    curves: list[Curve] = [("sent", "bars", lambda step: sent.get(step) or None)]
    if by_step := _data_parallel(run):
        curves.append(("data-parallel", "data-parallel", lambda step: by_step * bar))
    name = f"{several} sync periods" if several > 1 else "sync period"
    note = f"Each bar is one {name} of {bar} steps." if several == 1 else f"Each bar is {name}, {bar} steps."
    end = " The last one has the sync of all fragments at the end." if run.state == "finished" and run.rounds else ""
    return _chart(sorted(sent), "bytes", curves, note + end) | {"since": 0}


def _overlap(run: RecordedRun) -> dict[str, Any]:
    """The overlap of each replica's rounds, where it changes and at the end. Empty if it was always the same one."""
    known = {r.number: [round for round in r.rounds if round.overlap is not None] for r in run.replicas}
    if len({round.overlap for rounds in known.values() for round in rounds}) < 2:
        return _chart([], "steps", []) | {"since": 0}
    curves: list[Curve] = []
    axis: set[int] = set()
    for number, rounds in ((number, rounds) for number, rounds in known.items() if rounds):
        before = (None, *(round.overlap for round in rounds[:-1]))
        changes = [round for round, was in zip(rounds, before, strict=True) if round.overlap != was]
        held = {round.step: round.overlap for round in (*changes, rounds[-1])}
        curves.append((f"replica {number}", "held", held.get))
        axis |= held.keys()
    return _chart(sorted(axis), "steps", curves) | {"since": 0}


def _total(run: RecordedRun) -> dict[int, float]:
    """Bytes that the first replica with steps has sent until the end of each of them."""
    replica = next((r for r in run.replicas if r.steps), None)
    total: dict[int, float] = {step.step: step.bytes_sent for step in replica.steps} if replica else {}
    if total and run.figures.bytes_sent:
        # The last rounds end after the last step is written.
        total[max(total)] = max(total[max(total)], run.figures.bytes_sent)
    return total


def _data_parallel(run: RecordedRun) -> float:
    """Bytes of data-parallel in a step; 0 if they are not known."""
    return (run.figures.bytes_data_parallel or 0) / max(run.figures.steps, 1)


def _period(run: RecordedRun) -> int:
    sync_every = run.config.get("sync_every")
    return sync_every if isinstance(sync_every, int) and sync_every > 0 else 100


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
    """The sync periods in which training waited longest; if it never waited, those with the most time in flight."""
    costs: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for round in run.rounds:
        cost = costs[_first_step(round) // period]
        cost[0] += round.exposed_seconds
        cost[1] += round.flight_seconds
    order = sorted(costs, key=lambda number: costs[number], reverse=True)[:SLOWEST]
    groups: dict[int, list[Round]] = {number: [] for number in order}
    for round in run.rounds:
        if (number := _first_step(round) // period) in groups:
            groups[number].append(round)
    return [_window(groups[number], costs[number][0]) for number in order]


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


def _lanes(replica: Replica, width: int, since: int) -> dict[str, Any]:
    events = [event for event in _from(replica.events, since) if event.event in MARKED]
    rounds = _from(replica.rounds, since)
    return {
        "number": replica.number,
        "steps": _columns(_blocks(replica.steps, width, since)),
        "rounds": {name: [_short(getattr(round, name)) for round in rounds] for name in _ROUND} if rounds else {},
        "events": [{"event": e.event, "seconds": _number(e.seconds), "step": e.step, "settings": tuned(e)}
                   for e in events],
    }  # fmt: skip


def tuned(event: Event) -> str:
    """What the autopilot has chosen, and for which link."""
    chosen = [f"{name} {event.details[name]}" for name in TUNED if event.details.get(name)]
    rate = event.details.get("rate")
    return ", ".join(chosen) + (f"; the link gives {units.rate(rate)}" if isinstance(rate, (int, float)) else "")


def _blocks(steps: Sequence[Step], width: int, since: int) -> list[dict[str, Any]]:
    """Steps as they are drawn: `count` of them in a block that ends with `step`."""
    blocks: list[dict[str, Any]] = []
    first = len(steps) - len(_from(steps, since))
    waited = steps[first - 1].seconds_exposed if first else 0.0
    for step in steps[first:]:
        exposed, waited = max(0.0, step.seconds_exposed - waited), step.seconds_exposed
        count = step.step - (block(step.step, width) - width)
        start = step.seconds - step.step_seconds
        blocks.append({"start": start, "end": step.seconds, "exposed": exposed, "step": step.step, "count": count})
    return blocks


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows with the same keys, as one list for each key: a third of the size."""
    return {key: [_short(row[key]) for row in rows] for key in (rows or [{}])[0]}


def _short(value: Any) -> Any:
    return _number(value) if isinstance(value, float) else value


def _number(value: float | None) -> float | None:
    """Seven digits, which halve the file. None for inf and nan."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")


_ROUND = tuple(field.name for field in fields(Round))
