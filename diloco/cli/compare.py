"""`diloco compare`: train several methods on the same number of tokens and compare them, with the spread over seeds."""

import itertools
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from diloco.cli.train import newest_saved, run_here
from diloco.errors import ConfigError
from diloco.runs import folder as folders
from diloco.runs import units
from diloco.runs.config import METHODS, TrainConfig, distinguishes
from diloco.runs.flags import flag, parse
from diloco.runs.reader import read_summary


@dataclass(frozen=True, kw_only=True)
class CompareConfig(TrainConfig):
    """Run several methods one after the other, at equal tokens and equal global batch.

    Also takes all flags of `diloco train`; see `diloco train --help`.
    """

    methods: str = flag("dp,diloco,streaming", "Methods to compare, separated by commas.", group="comparison")
    seeds: int = flag(
        1, "Number of seeds per method, starting at --seed. Gaps to data-parallel are paired by seed.",
        group="comparison"
    )  # fmt: skip


CONFIG = CompareConfig
EXAMPLES = (
    "diloco compare demo --seeds 3",
    "diloco compare --methods dp,streaming --overlap 5 --codec twobit",
)


WITH_AUTO = "compare needs equal settings: leave --auto out, and set what it would choose"


def complete(words: Sequence[str]) -> list[str]:
    if "--auto" in words:
        raise ConfigError(WITH_AUTO)
    return list(words)


def main(config: CompareConfig) -> int:
    name = config.name or folders.new(config.out, None, f"compare-{config.model}-{config.method}").name
    home = config.out / name
    cells = list(plan(config))

    from diloco.cli import report  # only now, so that errors are reported at once

    print(f"{len(cells)} runs in {home}", file=sys.stderr)
    start, trained = time.monotonic(), 0
    for number, (label, cell) in enumerate(cells, 1):
        folder = home / label
        begun = (folder / "config.toml").exists()
        if begun:
            _check_same(cell, folder)
        if _finished(folder):
            continue
        resume = begun and newest_saved(folder) is not None  # interrupted: continue where it stopped
        if begun and not resume and not config.dry_run:
            with folders.locked(folder):
                shutil.rmtree(folder)
        name = None if begun and not resume and config.dry_run else label  # it would begin again
        cell = replace(cell, out=home, name=name, resume=resume)
        left = (time.monotonic() - start) / trained * (len(cells) - number + 1) if trained else None
        estimate = f"; about {units.duration(left)} left" if left else ""
        print(f"run {number} of {len(cells)}: {label}{estimate}", file=sys.stderr)
        code, _ = run_here(cell, show=False)
        trained += 1
        if code:
            return code
    if config.dry_run:
        return 0
    runs = tuple(home / label for label, _ in cells)
    return report.main(report.ReportConfig(runs=runs, out=home / "report.html", json=config.json))


def _finished(folder: Path) -> bool:
    summary = read_summary(folder)
    return summary is not None and not summary.stopped


def _check_same(cell: TrainConfig, folder: Path) -> None:
    """Raise unless the run in the folder was started with the same settings."""
    before = parse(TrainConfig, [str(folder / "config.toml")])
    for field in fields(TrainConfig):
        now, was = getattr(cell, field.name), getattr(before, field.name)
        # The stored run has the steps that follow from its tokens, and the outer optimizer for its replicas.
        derived = field.name == "tokens" or (field.name == "outer" and now == field.default)
        if distinguishes(field.name) and not derived and now is not None and now != was:
            raise ConfigError(f"{folder} was run with {field.name} {was}, not {now}: use another --name")


def plan(config: CompareConfig) -> list[tuple[str, TrainConfig]]:
    """(label, config) of every run."""
    methods = config.methods.split(",")
    for method in methods:
        if method not in METHODS:
            raise ConfigError(f"methods={config.methods}: {method!r} is not a method; use {', '.join(METHODS)}")
    if config.bucket is not None:
        raise ConfigError("compare starts its replicas here: leave --bucket out")
    if config.auto:
        raise ConfigError(WITH_AUTO)
    if config.seeds < 1:
        raise ConfigError(f"seeds={config.seeds}: use at least 1")
    base = TrainConfig(**{f.name: getattr(config, f.name) for f in fields(TrainConfig)})
    return [
        (f"{method}-seed{seed}", replace(base, method=method, seed=seed))
        for method, seed in itertools.product(methods, range(config.seed, config.seed + config.seeds))
    ]
