"""`diloco compare`: run several methods or settings at equal tokens and compare them, with the spread over seeds."""

import itertools
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from diloco.cli.train import run_here
from diloco.errors import ConfigError
from diloco.runs import folder as folders
from diloco.runs import units
from diloco.runs.config import METHODS, TrainConfig, distinguishes, reads
from diloco.runs.flags import convert, flag, parse, stored, value_type
from diloco.runs.reader import read_summary


@dataclass(frozen=True, kw_only=True)
class CompareConfig(TrainConfig):
    """Run several methods or settings one after the other, at equal tokens and equal global batch.

    Also takes all flags of `diloco train`; see `diloco train --help`.
    """

    methods: str = flag("dp,diloco,streaming", "Methods to compare, separated by commas.", group="comparison")
    vary: tuple[str, ...] = flag(
        (), "Settings to vary, such as overlap=0,1,5. Every combination is run.", group="comparison", why="none"
    )
    seeds: int = flag(
        1,
        "Number of seeds per setting, starting at --seed. Gaps to data-parallel are paired by seed.",
        group="comparison",
    )


CONFIG = CompareConfig
EXAMPLES = (
    "diloco compare demo --seeds 3",
    "diloco compare --methods dp,streaming --vary overlap=0,1,5 codec=e3m0,float32",
)


def main(config: CompareConfig) -> int:
    name = config.name or folders.new(config.out, None, f"compare-{config.model}-{config.method}").name
    home = config.out / name
    cells = list(plan(config))

    from diloco.cli import report  # only now, so that errors are reported at once

    print(f"{len(cells)} runs in {home}", file=sys.stderr)
    start, trained = time.monotonic(), 0
    for number, (label, cell) in enumerate(cells, 1):
        resume = (home / label / "config.toml").exists()  # interrupted: continue where it stopped
        cell = replace(cell, out=home, name=label, resume=resume)
        if resume:
            _check_same(cell, home / label)
        if _finished(home / label):
            continue
        left = (time.monotonic() - start) / trained * (len(cells) - number + 1) if trained else None
        estimate = f"; about {units.duration(left)} left" if left else ""
        print(f"run {number} of {len(cells)}: {label}{estimate}", file=sys.stderr)
        code, _ = run_here(cell, show=False)
        trained += 1
        if code:
            return code
    runs = tuple(home / label for label, _ in cells)
    return report.main(report.ReportConfig(runs=runs, out=home / "report.html", json=config.json))


def _finished(folder: Path) -> bool:
    summary = read_summary(folder)
    return summary is not None and not summary.stopped


def _check_same(cell: TrainConfig, folder: Path) -> None:
    """Raise unless the run in the folder was started with the same settings."""
    before = parse(TrainConfig, stored(folder / "config.toml"))
    for field in fields(TrainConfig):
        now, was = getattr(cell, field.name), getattr(before, field.name)
        if distinguishes(field.name) and now is not None and now != was:
            raise ConfigError(f"{folder} was run with {field.name} {was}, not {now}: use another --name")


def plan(config: CompareConfig) -> list[tuple[str, TrainConfig]]:
    """(label, config) of every run. A setting that a method does not read does not multiply its runs."""
    methods = config.methods.split(",")
    for method in methods:
        if method not in METHODS:
            raise ConfigError(f"methods={config.methods}: {method!r} is not a method; use {', '.join(METHODS)}")
    if config.bucket is not None:
        raise ConfigError("compare starts its replicas here: leave --bucket out")
    if config.seeds < 1:
        raise ConfigError(f"seeds={config.seeds}: use at least 1")
    axes = [[(key, value) for value in values.split(",")] for key, values in map(_axis, config.vary)]
    base = TrainConfig(**{f.name: getattr(config, f.name) for f in fields(TrainConfig)})
    cells: dict[str, TrainConfig] = {}
    for method, choice, seed in itertools.product(methods, itertools.product(*axes), range(config.seeds)):
        settings = {key: value for key, value in choice if reads(method, key)}
        parts = (f"{key}={value.replace('/', '-')}" for key, value in settings.items())
        label = "-".join([method, *parts, f"seed{config.seed + seed}"])
        values = {key: _value(key, value) for key, value in settings.items()}
        cells[label] = replace(base, method=method, seed=config.seed + seed, **values)
    return list(cells.items())


def _axis(text: str) -> tuple[str, str]:
    key, _, values = text.partition("=")
    key = key.replace("-", "_")
    settings = [f.name for f in fields(TrainConfig) if distinguishes(f.name)]
    if key not in settings or not values:
        raise ConfigError(f"vary={text!r}: use SETTING=VALUE,VALUE with one of {', '.join(settings)}")
    return key, values


def _value(key: str, text: str) -> Any:
    """Convert the value to the field's type."""
    field = next(f for f in fields(TrainConfig) if f.name == key)
    value = convert(field, text)
    return (value,) if value_type(field)[1] else value
