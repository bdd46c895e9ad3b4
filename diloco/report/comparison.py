"""Several runs side by side: what distinguishes them, and their gap to data-parallel.

A gap is taken between runs with the same seed: same initial weights, same batches. Its interval is over seeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from diloco.runs.config import distinguishes, reads
from diloco.runs.reader import RecordedRun


@dataclass(frozen=True)
class Gap:
    """Loss over that of data-parallel, minus 1: mean over seeds, and half the width of its 95 % interval."""

    mean: float
    half_width: float | None
    seeds: int


@dataclass(frozen=True)
class Row:
    """One setting: means over its seeds."""

    label: str
    """What distinguishes it, if that is short; otherwise the name of its (first) run."""
    runs: tuple[RecordedRun, ...]
    gap: Gap | None
    factor: float | None
    loss: float | None
    """In nats per token, or in bits per byte if the runs have different tokenizers."""
    bytes_sent: float | None
    largest_burst: float | None
    seconds: float | None
    seconds_exposed: float | None


_MEANS = ("bytes_sent", "largest_burst", "seconds", "seconds_exposed")
SHORT = 32
"""Characters of the longest label that says what distinguishes a setting."""


def compare(runs: Sequence[RecordedRun]) -> list[Row]:
    """One row per setting, data-parallel first, the others in the order given."""
    groups: dict[str, list[RecordedRun]] = {}
    for run, setting in zip(runs, _distinctions(runs), strict=True):
        groups.setdefault(setting, []).append(run)
    long = max(map(len, groups)) > SHORT
    rows = [_row(_name(group) if long else setting, group, runs) for setting, group in groups.items()]
    return sorted(rows, key=lambda row: row.runs[0].method != "dp")


def differences(rows: Sequence[Row]) -> dict[str, list[str]]:
    """By setting that varies: its value in each row; – where the method does not read it."""
    runs = [row.runs[0] for row in rows]
    varied = ["method"] * (len({run.method for run in runs}) > 1) + _varied(runs)
    return {key: [_setting(run, key) if reads(run.method, key) else "–" for run in runs] for key in varied}


def in_bits(runs: Sequence[RecordedRun]) -> bool:
    """Whether nats per token cannot be compared, because the runs have different tokens."""
    return len({_setting(run, "tokenizer") for run in runs}) > 1 and all(run.figures.bits_per_byte for run in runs)


def _distinctions(runs: Sequence[RecordedRun]) -> list[str]:
    """What distinguishes each run from the others, except the seed: its method, and what varies within the method."""
    return [_label(run, _varied([other for other in runs if other.method == run.method])) for run in runs]


def _name(group: Sequence[RecordedRun]) -> str:
    """The name of a run, without its seed where there are several."""
    name = group[0].name
    return name.removesuffix(f"-seed{group[0].seed}") if len(group) > 1 else name


def _quality(run: RecordedRun, bits: bool) -> float | None:
    return run.figures.bits_per_byte if bits else run.figures.loss


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half the width of its 95 % interval by Student's t; None for a single value.

    >>> mean, half = interval([1.0, 2.0, 3.0])
    >>> round(mean, 3), round(half, 3)
    (2.0, 2.484)
    """
    if len(values) < 2:
        return fmean(values), None
    return fmean(values), student(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def student(freedom: int) -> float:
    """The t such that 95 % of Student's distribution lie between -t and t.

    The probability within ±t is a finite sum in θ = atan(t/√ν) if ν is an integer
    (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    >>> [round(student(n), 3) for n in (1, 2, 5, 30)]
    [12.706, 4.303, 2.571, 2.042]
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    cosine, odd = math.cos(angle), freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def _row(label: str, group: Sequence[RecordedRun], runs: Sequence[RecordedRun]) -> Row:
    return Row(
        label=label,
        runs=tuple(group),
        gap=None if group[0].method == "dp" else _gap(group, runs),
        factor=None if group[0].method == "dp" else _mean([run.factor for run in group]),
        loss=_mean([_quality(run, in_bits(runs)) for run in group]),
        **{name: _mean([_figure(run, name) for run in group]) for name in _MEANS},
    )


def _figure(run: RecordedRun, name: str) -> float | None:
    """Data-parallel waits inside the backward pass, where nothing measures it."""
    return None if run.method == "dp" and name == "seconds_exposed" else getattr(run.figures, name)


def _gap(group: Sequence[RecordedRun], runs: Sequence[RecordedRun]) -> Gap | None:
    bits = in_bits(runs)
    data_parallel = [run for run in runs if run.method == "dp" and run.figures.loss]
    varied = _varied(data_parallel)
    gaps: dict[int, float] = {}
    for run in group:
        paired = [other for other in data_parallel if other.seed == run.seed]
        mine = _quality(run, bits)
        if paired and mine is not None:
            # If several have that seed (with different lr, say), take the one that shares most settings with this run.
            like = max(paired, key=lambda other: sum(_setting(other, key) == _setting(run, key) for key in varied))
            gaps[run.seed] = mine / (_quality(like, bits) or math.nan) - 1
    if not gaps:
        return None
    mean, half_width = interval(list(gaps.values()))
    return Gap(mean, half_width, len(gaps))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _varied(runs: Sequence[RecordedRun]) -> list[str]:
    """The settings that differ between runs which read them."""
    keys = dict.fromkeys(key for run in runs for key in run.config if distinguishes(key))
    return [key for key in keys if len({_setting(run, key) for run in runs if reads(run.method, key)}) > 1]


def _setting(run: RecordedRun, key: str) -> str:
    value = run.config.get(key)
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if text and value is not None else "default"


def _label(run: RecordedRun, varied: Sequence[str]) -> str:
    settings = [f"{key} {_setting(run, key)}" for key in varied if reads(run.method, key)]
    return ", ".join([run.method, *settings])
