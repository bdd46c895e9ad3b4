"""Check the simulator with a finished run: replay the measured step times over the link.

Measured utilization is the time of all steps without what they waited for rounds, divided by the time of all steps.
Predicted is the simulator's, given the run's step times, the bytes of its rounds and the link. If the link is not
given, it is read from the rounds: bytes over flight time of the replica that waited least for the others.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diloco.errors import ConfigError
from diloco.plan.simulate import Group, Message, Method, Sends, simulate
from diloco.plan.traffic import Array, Link
from diloco.report import units
from diloco.runs.reader import RecordedRun, read
from diloco.schedule import Schedule


@dataclass(frozen=True)
class Comparison:
    name: str
    measured: float
    predicted: float
    rate: float
    """Bits a second of the link that the prediction used; 0 if nothing was sent."""
    estimated: bool
    """Whether the rate was read from the run's rounds."""

    def __str__(self) -> str:
        link = f"link {units.rate(self.rate)}" if self.rate else "nothing was sent"
        source = ", as its rounds ran" if self.rate and self.estimated else ""
        predicted, measured = units.percent(self.predicted, digits=1), units.percent(self.measured, digits=1)
        return f"utilization: predicted {predicted}, measured {measured} ({link}{source})"


def compare(folder: Path, link: Link | None = None, round_trip: float = 0.0) -> Comparison:
    run = read(folder)
    if run.config.get("bucket"):
        raise ConfigError(f"{folder}: a member of a bucket never waits for a round; give a run without a bucket")
    _check_complete(run)
    computing, waiting = _times(run)
    measured = float(computing.sum() / (computing + waiting).sum())
    replicas, steps = computing.shape
    if run.method == "dp":
        raise ConfigError(f"{folder}: method dp hides its waiting in the backward pass; give a diloco or streaming run")
    if run.method == "local" or replicas == 1 or not _rounds(run):
        return Comparison(run.name, measured, 1.0, 0.0, link is None)
    # A round's bytes are what one replica sends, so it counts as an exchange of two whatever the reducer did.
    method = Method(
        1, _sends(run), lambda n: n, int(run.config.get("sync_every", 100)), _overlap(run), by_fragment=True
    )
    group = Group(float(computing.mean()), 2, round_trip)
    used = link or Link.same(_rate(run))
    predicted = float(simulate(method, group, used, steps, times=computing)[0])
    return Comparison(run.name, measured, predicted, used.rate, link is None)


def _check_complete(run: RecordedRun) -> None:
    """On several machines each has the records of its own replicas only."""
    members, found = max((round.members for round in run.rounds), default=1), len(run.replicas)
    if found < members:
        raise ConfigError(f"{run.folder} has the records of {found} of {members} replicas: copy the folders replica-* "
                          "of the other machines beside it")  # fmt: skip


def _times(run: RecordedRun) -> tuple[Array, Array]:
    """Seconds of computing and of waiting, by replica and step; the steps that all replicas have."""
    replicas = [replica for replica in run.replicas if replica.steps]
    if not replicas:
        raise ConfigError(f"{run.folder}: no steps in replica-*/metrics.jsonl; give a run that trained")
    steps = min(len(replica.steps) for replica in replicas)
    total = np.array([[s.step_seconds for s in replica.steps[:steps]] for replica in replicas])
    sums = np.array([[s.seconds_exposed for s in replica.steps[:steps]] for replica in replicas])
    # The sums begin again when a run is resumed.
    waited = np.maximum(np.diff(sums, axis=1, prepend=0.0), 0.0)
    waiting = np.minimum(waited, total)
    return total - waiting, waiting


def _rounds(run: RecordedRun) -> bool:
    return any(replica.rounds for replica in run.replicas)


def _overlap(run: RecordedRun) -> int:
    """The usual one of a replica that chooses it for itself."""
    given = run.config.get("overlap", 1)
    if run.method == "diloco" or given != "auto":
        return 0 if run.method == "diloco" else int(given)
    return round(float(np.median([r.overlap or 1 for replica in run.replicas for r in replica.rounds])))


def _sends(run: RecordedRun) -> Sends:
    """What is sent after which step: by the schedule or, where the autopilot may have changed that, as it was."""
    if run.config.get("auto"):
        sent: dict[int, list[Message]] = {}
        for round in next(replica.rounds for replica in run.replicas if replica.rounds):
            if round.sent_step is not None:
                sent.setdefault(round.sent_step, []).append((0, float(round.bytes_sent)))
        return lambda step: sent.get(step, ())
    nbytes = _bytes(run)
    schedule = Schedule(int(run.config.get("sync_every", 100)), len(nbytes))
    return lambda step: [(0, nbytes[fragment]) for fragment in schedule.sends(step)]


def _bytes(run: RecordedRun) -> list[float]:
    """Bytes that a replica sends for each fragment, as its rounds did."""
    seen: dict[int, float] = {}
    for replica in run.replicas:
        for round in replica.rounds:
            seen[round.fragment] = max(seen.get(round.fragment, 0.0), float(round.bytes_sent))
    return [seen.get(fragment, 0.0) for fragment in range(max(seen) + 1)]


def _rate(run: RecordedRun) -> float:
    """Bits a second: the median over rounds; in each, the replica that came last waited for nobody."""
    flights: dict[tuple[int, int], tuple[float, float]] = {}
    for replica in run.replicas:
        for round in replica.rounds:
            key = (round.fragment, round.index)
            flights[key] = min(flights.get(key, (np.inf, 0.0)), (round.flight_seconds, float(round.bytes_sent)))
    rates = [8 * sent / seconds for seconds, sent in flights.values() if seconds > 0 and sent > 0]
    if not rates:
        raise ConfigError(f"{run.folder}: no rate can be read from its rounds: give --link")
    return float(np.median(rates))
