"""`diloco compare`: several methods or settings at equal tokens, side by side, with the spread over seeds."""

import itertools
import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from diloco.cli.train import run_here
from diloco.errors import ConfigError
from diloco.recipe import flags, parse
from diloco.runs import folder as folders
from diloco.runs.config import METHODS, TrainConfig


@dataclass(frozen=True, kw_only=True)
class CompareConfig(TrainConfig):
    """Run several methods or settings one after the other, at equal tokens and equal global batch.

    Takes all flags of `diloco train` besides its own.
    """

    methods: str = "dp,diloco,streaming"
    """Methods to compare, separated by commas."""
    vary: tuple[str, ...] = ()
    """Settings to vary, as in overlap=0,1,5; every combination is run."""
    seeds: int = 1
    """Seeds of each, counted from --seed. Gaps to data-parallel are paired by seed."""


CONFIG = CompareConfig


def main(config: CompareConfig) -> int:
    from rich.console import Console

    from diloco.report import html, terminal
    from diloco.runs.reader import read

    name = config.name or folders.new(config.out, None, f"compare-{config.model}-{config.method}").name
    home = config.out / name
    cells = list(plan(config))
    print(f"{len(cells)} runs in {home}", file=sys.stderr)
    runs: list[Path] = []
    for label, cell in cells:
        cell = replace(cell, out=home, name=label)
        begun = (home / label / "config.toml").exists()  # interrupted before: go on where it stopped
        if begun:
            _check_same(cell, home / label)
        if _finished(home / label):
            runs.append(home / label)
            continue
        code, folder = run_here(replace(cell, resume=begun), show=False)
        if code:
            return code
        runs.append(folder)
    html.write(runs, home / "report.html")
    if config.json:
        print(json.dumps([{"run": str(r), **json.loads((r / "summary.json").read_text())} for r in runs]))
    else:
        Console().print(terminal.comparison([read(run) for run in runs]))
        Console().print(f"report: {home / 'report.html'}", highlight=False, soft_wrap=True)
    return 0


def _finished(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.exists() and not json.loads(summary.read_text())["stopped"]


def _check_same(cell: TrainConfig, folder: Path) -> None:
    """What was given must be what the run there was made with."""
    before = parse(TrainConfig, flags(folder / "config.toml"), "config.toml")
    for field in fields(TrainConfig):
        given, was = getattr(cell, field.name), getattr(before, field.name)
        if field.name not in ("name", "out", "resume", "json", "tokens") and given is not None and given != was:
            raise ConfigError(f"{folder} was run with {field.name} {was}, not {given}: give another --name")


def plan(config: CompareConfig) -> list[tuple[str, TrainConfig]]:
    """(label, config) of every run. A setting that a method does not read does not multiply its runs."""
    methods = config.methods.split(",")
    for method in methods:
        if method not in METHODS:
            raise ConfigError(f"methods={config.methods}: {method!r} is none of {', '.join(METHODS)}")
    if config.seeds < 1:
        raise ConfigError(f"seeds={config.seeds}: give at least 1")
    axes = [[(key, value) for value in values.split(",")] for key, values in map(_axis, config.vary)]
    base = TrainConfig(**{f.name: getattr(config, f.name) for f in fields(TrainConfig)})
    cells: dict[str, TrainConfig] = {}
    for method, choice, seed in itertools.product(methods, itertools.product(*axes), range(config.seeds)):
        read = [(key, value) for key, value in choice if _reads(method, key)]
        named = (f"{key}={value.replace('/', '-')}" for key, value in read)
        label = "-".join([method, *named, f"seed{config.seed + seed}"])
        values = {key: _value(key, value) for key, value in read}
        cells[label] = replace(base, method=method, seed=config.seed + seed, **values)
    return list(cells.items())


_SYNC = ("sync_every", "outer_lr", "outer_momentum")
_STREAMING = (*_SYNC, "fragments", "overlap", "keep_local", "codec")


def _reads(method: str, key: str) -> bool:
    if key in _STREAMING:
        return method == "streaming" or (method == "diloco" and key in _SYNC)
    return True


def _axis(text: str) -> tuple[str, str]:
    key, _, values = text.partition("=")
    key = key.replace("-", "_")
    fixed = ("method", "seed", "name", "out", "resume", "json", "bucket", "member", "track")
    known = [f.name for f in fields(TrainConfig) if f.name not in fixed]
    if key not in known or not values:
        raise ConfigError(f"vary={text!r}: give SETTING=VALUE,VALUE with a setting of {', '.join(known)}")
    return key, values


def _value(key: str, text: str) -> Any:
    """The value as the field's type has it."""
    declared = next(f.type for f in fields(TrainConfig) if f.name == key)
    kinds = get_args(declared) or (declared,)
    if get_origin(declared) is Literal or bool in kinds:
        values: dict[str, Any] = {"true": True, "false": False} if bool in kinds else {str(k): k for k in kinds}
        if text not in values:
            raise ConfigError(f"vary {key}={text!r}: give some of {', '.join(values)}")
        return values[text]
    if get_origin(declared) is tuple:
        return (text,)
    try:
        if int in kinds:
            return int(text)
        return float(text) if float in kinds else text
    except ValueError:
        raise ConfigError(f"vary {key}={text!r}: give numbers") from None
