"""Compare several runs: what distinguishes them, and their gap to data-parallel training.

A gap is taken between runs with the same seed (same initial weights, same batches); its interval is over seeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from diloco.runs.config import distinguishes, reads
from diloco.runs.reader import RecordedRun


@dataclass(frozen=True)
class Gap:
    """Loss relative to data-parallel, minus 1: mean over seeds and half-width of its 95 % interval."""

    mean: float
    half_width: float | None
    seeds: int


@dataclass(frozen=True)
class Row:
    """One setting, averaged over its seeds."""

    label: str
    """The settings that distinguish it, if that is short; otherwise the name of its first run."""
    runs: tuple[RecordedRun, ...]
    gap: Gap | None
    factor: float | None
    loss: float | None
    """In nats per token, which only runs with the same tokenizer have in common."""
    bits_per_byte: float | None
    bytes_sent: float | None
    largest_burst: float | None
    seconds: float | None
    seconds_exposed: float | None


_MEANS = ("loss", "bits_per_byte", "bytes_sent", "largest_burst", "seconds", "seconds_exposed")
SHORT = 32
"""Maximum length of a label made of settings."""
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def compare(runs: Sequence[RecordedRun]) -> list[Row]:
    """One row per setting, data-parallel first, the rest in their original order."""
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        varied = _varied([other for other in runs if other.method == run.method])
        groups.setdefault(_label(run, varied), []).append(run)
    long = max(map(len, groups)) > SHORT
    rows = [_row(name_of(group) if long else setting, group, runs) for setting, group in groups.items()]
    return sorted(rows, key=lambda row: row.runs[0].method != "dp")


def differences(rows: Sequence[Row]) -> dict[str, list[str]]:
    """For each setting that varies, its value in each row; – where the method does not read it."""
    runs = [row.runs[0] for row in rows]
    varied = ["method"] * (len({run.method for run in runs}) > 1) + _varied(runs)
    return {key: [_setting(run, key) if reads(run.method, key) else "–" for run in runs] for key in varied}


def name_of(group: Sequence[RecordedRun]) -> str:
    """The name of the first run, without its seed if there are several."""
    name = group[0].name
    return name.removesuffix(f"-seed{group[0].seed}") if len(group) > 1 else name


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half-width of its 95 % interval by Student's t; None for a single value.

    >>> mean, half = interval([1.0, 2.0, 3.0])
    >>> round(mean, 3), round(half, 3)
    (2.0, 2.484)
    """
    if len(values) < 2:
        return fmean(values), None
    return fmean(values), student(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def student(freedom: int) -> float:
    """The t such that 95 % of Student's distribution is between -t and t. Above 30 degrees of freedom its expansion is
    right to 3e-4."""
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.95996 + 2.37227 / freedom + 2.8225 / freedom**2


def _row(label: str, group: Sequence[RecordedRun], runs: Sequence[RecordedRun]) -> Row:
    return Row(
        label=label,
        runs=tuple(group),
        gap=None if group[0].method == "dp" else _gap(group, runs),
        factor=None if group[0].method == "dp" else _mean([run.factor for run in group]),
        **{name: _mean([_figure(run, name) for run in group]) for name in _MEANS},
    )


def _figure(run: RecordedRun, name: str) -> float | None:
    """Exposed seconds of data-parallel are inside the backward pass, where they are not measured."""
    return None if run.method == "dp" and name == "seconds_exposed" else getattr(run.figures, name)


def _gap(group: Sequence[RecordedRun], runs: Sequence[RecordedRun]) -> Gap | None:
    data_parallel = [run for run in runs if run.method == "dp" and run.figures.bits_per_byte]
    varied = _varied(data_parallel)
    gaps: dict[int, float] = {}
    for run in group:
        paired = [other for other in data_parallel if other.seed == run.seed]
        loss = run.figures.bits_per_byte  # with the same tokenizer, the gap is the same in nats
        if paired and loss is not None:
            # If several have that seed (with different lr, say), take the one that shares the most settings.
            closest = max(paired, key=lambda other: sum(_setting(other, key) == _setting(run, key) for key in varied))
            gaps[run.seed] = loss / (closest.figures.bits_per_byte or math.nan) - 1
    if not gaps:
        return None
    mean, half_width = interval(list(gaps.values()))
    return Gap(mean, half_width, len(gaps))


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def _varied(runs: Sequence[RecordedRun]) -> list[str]:
    """The settings that differ between the runs that read them."""
    keys = dict.fromkeys(key for run in runs for key in run.config if distinguishes(key))
    return [key for key in keys if len({_setting(run, key) for run in runs if reads(run.method, key)}) > 1]


def _setting(run: RecordedRun, key: str) -> str:
    value = run.config.get(key)
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if text and value is not None else "default"


def _label(run: RecordedRun, varied: Sequence[str]) -> str:
    settings = [f"{key} {_setting(run, key)}" for key in varied if reads(run.method, key)]
    return ", ".join([run.method, *settings])
