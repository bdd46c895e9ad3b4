"""What the HTML report draws, as plain lists for JSON: aligned, thinned to what a screen can show, without nan."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from diloco.runs.reader import Replica, Run
from diloco.runs.schema import Round, Step

POINTS = 2000
"""Points of one curve, at most. Beyond, a point stands for several steps."""
ROUNDS = 6000
"""Rounds of one replica on its timeline, at most; those of the slowest sync periods are always there."""
SLOWEST = 3

Column = list[float | None]


def loss(run: Run) -> dict[str, Any]:
    """Loss of every replica in training, of the anchors and of one replica on held-out text, over common steps."""
    width = _width(max((len(replica.steps) for replica in run.replicas), default=0))
    curves = {f"replica {r.number}, training": _means(r.steps, width) for r in run.replicas}
    curves["one replica, held-out"] = {e.step: e.replica_loss for e in run.evaluations}
    curves["anchors, held-out"] = {e.step: e.loss for e in run.evaluations}
    steps = sorted({step for curve in curves.values() for step in curve})
    columns = [[_number(curve.get(step)) for step in steps] for curve in curves.values()]
    return {
        "labels": list(curves),
        "steps": steps,
        "columns": columns,
        "width": width,
        "unigram": _number(run.unigram_loss),
    }


def traffic(run: Run) -> dict[str, Any]:
    """Bytes that one replica sent, per step and in sum, beside those of data-parallel."""
    replica = next((r for r in run.replicas if r.steps), None)
    steps = replica.steps if replica else ()
    width = _width(len(steps))
    total: dict[int, float] = {_slot(step.step, width, steps): step.bytes_sent for step in steps}
    if total and run.bytes_sent:
        total[max(total)] = max(total[max(total)], run.bytes_sent)  # with the last rounds, after the last line
    bursts: dict[int, float] = defaultdict(float)
    if replica and replica.rounds:
        for round in replica.rounds:
            bursts[_first_step(round)] += round.bytes_sent
    else:
        before = [0, *(step.bytes_sent for step in steps)]
        bursts |= {step.step: step.bytes_sent - sent for step, sent in zip(steps, before, strict=False)}
    largest: dict[int, float] = {}
    for at, sent in bursts.items():
        slot = _slot(at, width, steps)
        largest[slot] = max(largest.get(slot, 0), sent)
    each = run.bytes_data_parallel / run.steps if run.bytes_data_parallel and run.steps else None
    axis = sorted(total.keys() | largest.keys())
    # A logarithmic axis has no place for zero: nothing sent is nothing drawn.
    return {
        "steps": axis,
        "width": width,
        "each": [_number(largest.get(step)) or None for step in axis],
        "total": [_number(total.get(step)) or None for step in axis],
        "data_parallel": _number(each),
    }


def timeline(run: Run) -> dict[str, Any]:
    """Steps and rounds of every replica in seconds, and the windows that are worth a look."""
    sync_every = run.config.get("sync_every")
    period = sync_every if isinstance(sync_every, int) and sync_every > 0 else 100
    slowest = _slowest(run, period)
    chosen = {number for number, _ in slowest}
    return {
        "replicas": [_lanes(replica, period, chosen) for replica in run.replicas],
        "fragments": 1 + max((round.fragment for r in run.replicas for round in r.rounds), default=-1),
        "windows": [window for _, window in slowest],
    }


def against(run: Run, setting: int) -> dict[str, Any]:
    """A run's curves for the comparison, each over steps, tokens, seconds and bytes sent."""
    steps = run.replicas[0].steps if run.replicas else ()
    at = {step.step: step for step in steps}
    width = _width(len(steps))
    curves = [_means(replica.steps, width) for replica in run.replicas]
    training = []
    for step in sorted(curves[0]) if curves else []:
        values = [curve[step] for curve in curves if step in curve]
        training.append(_point(at.get(step), step, sum(values) / len(values)))
    held_out = [_point(at.get(e.step), e.step, e.loss) for e in run.evaluations]
    return {"setting": setting, "seed": run.seed, "training": training, "heldOut": held_out}


def _point(step: Step | None, number: int, value: float) -> list[float | None]:
    if step is None:
        return [number, None, None, None, _number(value)]
    return [number, step.tokens, _number(step.seconds), step.bytes_sent or None, _number(value)]


def _slowest(run: Run, period: int) -> list[tuple[int, dict[str, Any]]]:
    """The sync periods in which training waited longest; where it never waited, those with most time in flight."""
    groups: dict[int, list[Round]] = defaultdict(list)
    for replica in run.replicas:
        for round in replica.rounds:
            groups[_first_step(round) // period].append(round)
    waited = {number: sum(round.exposed_seconds for round in rounds) for number, rounds in groups.items()}
    flight = {number: sum(round.flight_seconds for round in rounds) for number, rounds in groups.items()}
    order = sorted(groups, key=lambda number: (-waited[number], -flight[number]))[:SLOWEST]
    return [(number, _window(groups[number], waited[number])) for number in order]


def _first_step(round: Round) -> int:
    """The step after which it was sent; where this replica did not send, the step after which it was applied."""
    return round.step if round.sent_step is None else round.sent_step


def _window(rounds: Sequence[Round], waited: float) -> dict[str, Any]:
    start = min(round.sent_seconds for round in rounds)
    end = max(max(round.seconds, round.sent_seconds + round.flight_seconds) for round in rounds)
    margin = 0.04 * (end - start)
    steps = (min(map(_first_step, rounds)), max(round.step for round in rounds))
    return {"start": _number(start - margin), "end": _number(end + margin), "steps": steps, "exposed": _number(waited)}


def _lanes(replica: Replica, period: int, chosen: set[int]) -> dict[str, Any]:
    rounds: Iterable[Round] = replica.rounds
    if len(replica.rounds) > ROUNDS:
        every = -(-len(replica.rounds) // ROUNDS)
        rounds = [r for k, r in enumerate(replica.rounds) if _first_step(r) // period in chosen or k % every == 0]
    return {
        "number": replica.number,
        "steps": _blocks(replica.steps),
        "rounds": [_bar(round) for round in rounds],
        "left_out": len(replica.rounds) - len(list(rounds)),
        "events": [[event.event, _number(event.seconds), event.step] for event in replica.events],
    }


def _bar(round: Round) -> list[float | None]:
    seconds = (round.sent_seconds, round.flight_seconds, round.seconds, round.exposed_seconds)
    numbers = (round.fragment, round.index, round.sent_step, round.step, round.bytes_sent, round.members)
    return [*map(_number, seconds), *numbers]


def _blocks(steps: Sequence[Step]) -> list[list[float | None]]:
    """Start, end, seconds waited, last step and number of steps of every block that is drawn as one."""
    width = _width(len(steps))
    blocks: list[list[float | None]] = []
    waited = 0.0
    for k in range(0, len(steps), width):
        first, last = steps[k], steps[min(k + width, len(steps)) - 1]
        exposed = max(0.0, last.seconds_exposed - waited)
        waited = last.seconds_exposed
        start = first.seconds - first.step_seconds
        blocks.append([_number(start), _number(last.seconds), _number(exposed), last.step, min(width, len(steps) - k)])
    return blocks


def _means(steps: Sequence[Step], width: int) -> dict[int, float]:
    slots: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        slots[_slot(step.step, width, steps)].append(step.loss)
    return {slot: sum(values) / len(values) for slot, values in slots.items()}


def _slot(step: int, width: int, steps: Sequence[Step]) -> int:
    """The step that stands for this one: the last of its `width`, so that replicas share their points."""
    return min(-(-step // width) * width, max(step, steps[-1].step)) if steps else step


def _width(steps: int) -> int:
    return max(1, -(-steps // POINTS))


def _number(value: float | None) -> float | None:
    """Seven digits: what a screen shows, at half the size of the file."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")
