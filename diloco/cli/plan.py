"""`diloco plan`: from flags to what is printed."""

import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from diloco import laws, speed
from diloco.errors import ConfigError
from diloco.flags import flag
from diloco.formats import FORMATS, format_named
from diloco.plan import check, plot, quantity, table
from diloco.plan.choose import Choice, Limits, Settings, choose
from diloco.plan.costs import Conditions, Prices, Row, candidates, rows
from diloco.plan.model import Model, model_of_layers, model_of_preset, parse_fragments
from diloco.plan.simulate import Group, utilization
from diloco.plan.traffic import ROUND_SECONDS, Link
from diloco.presets import PRESETS
from diloco.report import units

GROUPS = ("model and data", "members and link", "sync", "failures and prices", "output")
GENTLE = (
    "What is recommended is for your link: the settings that raise the loss least among those that keep training about "
    "as busy there as the best. On a slower link they may lie below the paper's, which sync less often; for such a "
    "link others would be recommended."
)
_model, _members, _sync, _failures, _output = (partial(flag, group=group) for group in GROUPS)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Predict how busy a run will be on a link and what it costs, and recommend settings."""

    # fmt: off
    model: str | None = _model(None, f"A preset ({', '.join(PRESETS)}), or give --parameters and --layers.",
        why="none")
    parameters: str | None = _model(None, "Number of parameters, such as 7b, if the model is not a preset.")
    layers: int | None = _model(None, "Number of layers, if the model is not a preset.")
    tokens: str | None = _model(None, "Tokens of all replicas together, such as 25b.", why="20 per parameter")
    batch: int | None = _model(None, "Sequences per step, all replicas together.",
        why="by scaling law, as in training")
    context: int = _model(2048, "Tokens per sequence.", why="as in the scaling laws")
    step_seconds: str | None = _members(None, "Time of one step of a replica without communication, such as 1.5 or "
        "800ms. Required.")
    replicas: int = _members(2, "Number of replicas.")
    link: tuple[str, ...] = _members((), "Rate of each replica's link: 1gbit, 100mbit, or up=50mbit,down=500mbit. Give "
        "one for all, or one for each replica. Required.")
    round_trip: str = _members("0ms", "Round trip between replicas, such as 80ms.")
    reduce: Literal["collective", "bucket"] = _members("collective",
        "Who computes the mean. collective: the replicas among themselves. bucket: through a folder or object store.")
    speeds: tuple[float, ...] = _members((), "Speed of each replica; at 1 a step takes --step-seconds.", why="all 1",
        expert=True)
    jitter: float = _members(0.0, "Standard deviation of a step's time, as a share of it.", expert=True)
    codec_ns: float | None = _members(None, "Nanoseconds of the communication thread for each value of a round: "
        "encode, decode, mean, outer step.", why="as measured on this machine")
    hook_ns: float | None = _members(None, "Nanoseconds of the training thread for each value of a round, to take the "
        "delta and write the result; 0 if values are copied while training runs, as for an accelerator.",
        why="as measured on this machine")
    memory: str | None = _members(None, "Memory of a replica's devices together, such as 80gb, to check whether "
        "weights and optimizer fit.", why="not checked")
    sync_every: int | None = _sync(None, "Steps between two syncs of the same fragment.", why="chosen")
    fragments: str | None = _sync(None, "strided:N, sequential:N, balanced:N, or a number of fragments.", why="chosen")
    overlap: int | None = _sync(None, "Steps between sending a fragment and applying the result.",
        why="chosen, up to --most-overlap")
    codec: str | None = _sync(None, "Format of the deltas on the wire.", why="chosen", choices=FORMATS)
    most_overlap: int = _sync(5, "The largest overlap to choose.", why="a larger one may cost loss", expert=True)
    target: float | None = _sync(None, "Utilization that is enough, such as 0.95.", why="within 1 % of the best")
    mtbf: str | None = _failures(None, "Mean time between failures of one replica, such as 7d.", why="no failures")
    restart: str = _failures("10min", "Time that a failed replica is away.", expert=True)
    save_every: int = _failures(500, "Steps between two checkpoints, to which all return after a failure.",
        expert=True)
    quorum: int | None = _failures(None, "With --reduce bucket: the fewest replicas that continue without the others.",
        why="all replicas", expert=True)
    grace: str = _failures("0s", "With --reduce bucket: how long the others wait for a replica that is away.",
        expert=True)
    egress_price: float = _failures(0.0, "With --reduce bucket: price of a GB read.", expert=True)
    put_price: float = _failures(0.0, "With --reduce bucket: price of a thousand writes.", expert=True)
    get_price: float = _failures(0.0, "With --reduce bucket: price of a thousand reads.", expert=True)
    write: Path | None = _output(None, "Write the recommendation to this file, as a recipe for `diloco train`.")
    plot: Path | None = _output(None, "Plot utilization over the rate of the link, to a .html, .svg or .png file.")
    json: bool = _output(False, "Print everything as JSON.")
    check: Path | None = _output(None, "Compare the prediction with a finished run, given by its folder.")
    # fmt: on


CONFIG = PlanConfig
EXAMPLES = (
    "diloco plan --model 1b --step-seconds 1 --link 100mbit --round-trip 80ms",
    "diloco plan --parameters 7b --layers 32 --step-seconds 4 --link up=50mbit,down=500mbit --write recipe.toml",
    "diloco plan --check runs/tiny-streaming-1",
)


def main(config: PlanConfig) -> int:
    """Print the plan. Returns the exit code."""
    if config.check is not None:
        return _check_run(config, config.check)
    if config.plot is not None:
        plot.check(config.plot)
    model, group, link = _read_model(config), _group(config), _link(config)
    steps = _steps(config, model)
    limits = Limits(
        sync_every=config.sync_every,
        fragments=None if config.fragments is None else parse_fragments(config.fragments, len(model.layers)),
        overlap=config.overlap,
        codec=config.codec,
        most_overlap=config.most_overlap,
        steps=steps,
        target=config.target,
    )
    conditions = _conditions(config, model, group, link, steps)
    memory = None if config.memory is None else quantity.size(config.memory)
    codec_ns, hook_ns = _nanoseconds(config)  # may take seconds, and nothing is wrong with what was given
    group = replace(group, codec_ns=codec_ns, hook_ns=hook_ns)
    conditions = replace(conditions, group=group)
    choice = choose(model, group, link, limits, reduce=config.reduce)
    lines = rows(conditions, choice.settings)
    notes = table.notes(conditions, choice, memory)
    answer = table.verdict(conditions, lines, config.target, memory)
    shown = table.sheets(conditions, lines, choice)
    if config.plot is not None:
        plot.write(config.plot, _plot(conditions, choice.settings), plot.Beside(answer, shown, notes))
    if config.write is not None:
        given = {"batch": config.batch, "context": config.context}
        given["tokens"] = None if config.tokens is None else quantity.count(config.tokens)
        extra = {name: value for name, value in given.items() if value is not None}
        config.write.parent.mkdir(parents=True, exist_ok=True)
        config.write.write_text(table.recipe(choice, config.replicas, config.model, extra), encoding="utf-8")
    text = table.plan_tables(conditions, shown, notes, answer)
    _print(_as_json(lines, choice, [answer, *notes]) if config.json else text)
    return 0


def _check_run(config: PlanConfig, folder: Path) -> int:
    link = _link(config) if config.link else None
    comparison = check.compare(folder, link, quantity.seconds(config.round_trip))
    _print(json.dumps(asdict(comparison)) + "\n" if config.json else f"{comparison.name}: {comparison}\n")
    return 0


def _read_model(config: PlanConfig) -> Model:
    if config.model is not None:
        if config.parameters is not None or config.layers is not None:
            raise ConfigError(f"model={config.model!r} and parameters or layers: give either a preset or both numbers")
        return model_of_preset(config.model)
    if config.parameters is None or config.layers is None:
        raise ConfigError("no model: give --model 1b, or --parameters 7b and --layers 32")
    if config.layers < 1:
        raise ConfigError(f"layers={config.layers}: give a whole number of at least 1")
    return model_of_layers(quantity.count(config.parameters, "parameters"), config.layers, config.parameters)


def _group(config: PlanConfig) -> Group:
    if config.step_seconds is None:
        raise ConfigError("no step time: give --step-seconds, the seconds of a step without waiting; time a few steps")
    given = config.step_seconds if config.step_seconds[-1:].isalpha() else f"{config.step_seconds}s"
    step_seconds = quantity.seconds(given, "step_seconds", zero=False)
    if config.replicas < 1:
        raise ConfigError(f"replicas={config.replicas}: give a whole number of at least 1")
    if config.speeds and (len(config.speeds) != config.replicas or min(config.speeds) <= 0):
        raise ConfigError(f"speeds={config.speeds}: give {config.replicas} numbers above 0, one for each replica")
    if not 0 <= config.jitter < 1:
        raise ConfigError(f"jitter={config.jitter}: give a share from 0 to 1, such as 0.1")
    for name in ("codec_ns", "hook_ns"):
        if (value := getattr(config, name)) is not None and value < 0:
            raise ConfigError(f"{name}={value}: give 0 or more nanoseconds a value")
    return Group(step_seconds, config.replicas, quantity.seconds(config.round_trip), speeds=config.speeds,
                 jitter=config.jitter, round_seconds=ROUND_SECONDS)  # fmt: skip


def _nanoseconds(config: PlanConfig) -> tuple[float, float]:
    """What a value of a round costs the communication thread and the training thread."""
    if config.codec_ns is not None and config.hook_ns is not None:
        return config.codec_ns, config.hook_ns
    machine, codec = speed.known(), format_named(config.codec or "e3m0").name
    codec_ns = machine.codec_ns(codec, config.replicas) if config.codec_ns is None else config.codec_ns
    return codec_ns, machine.hook if config.hook_ns is None else config.hook_ns


def _link(config: PlanConfig) -> Link:
    if not config.link:
        raise ConfigError(
            "no link: give --link 1gbit, or --link up=50mbit,down=500mbit, one for all replicas or one each"
        )
    if len(config.link) not in (1, config.replicas):
        raise ConfigError(f"{len(config.link)} links for {config.replicas} replicas: give one for all, or one for each")
    rates = [quantity.up_down(text) for text in config.link]
    return Link(min(up for up, _ in rates), min(down for _, down in rates))


def _steps(config: PlanConfig, model: Model) -> int:
    for name in ("batch", "context"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: give a whole number of at least 1")
    tokens = None if config.tokens is None else quantity.count(config.tokens)
    return laws.steps(model.parameters, config.replicas, config.context, config.batch, tokens)


def _conditions(config: PlanConfig, model: Model, group: Group, link: Link, steps: int) -> Conditions:
    if config.quorum is not None and not 1 <= config.quorum <= config.replicas:
        raise ConfigError(f"quorum={config.quorum}: give 1 to {config.replicas}, the number of replicas")
    if config.quorum is not None and config.reduce != "bucket":
        raise ConfigError("quorum without a bucket: only --reduce bucket goes on without a replica")
    prices = Prices(egress=config.egress_price, puts=config.put_price, gets=config.get_price)
    return Conditions(
        model=model,
        group=group,
        link=link,
        steps=steps,
        reduce=config.reduce,
        mtbf=float("inf") if config.mtbf is None else quantity.seconds(config.mtbf, "mtbf", zero=False),
        restart=quantity.seconds(config.restart, "restart"),
        save_every=config.save_every,
        quorum=config.quorum,
        grace=quantity.seconds(config.grace, "grace"),
        prices=prices if prices != Prices() else None,
        measured_here=None in (config.codec_ns, config.hook_ns),
    )


def _plot(conditions: Conditions, chosen: Settings) -> plot.Plot:
    group, middle = conditions.group, conditions.link.rate
    rates = np.union1d(np.geomspace(min(1e6, middle / 10), max(1e12, middle * 10), 200), middle)
    return plot.Plot(
        title=f"{conditions.model.name}, {group.replicas} replicas, {group.step_seconds:g} s a step",
        share="utilization",
        axis="rate of the link (of its slower direction)",
        tick=units.rate,
        unit="bit/s",
        curves={
            f"{each.name} ({each.settings})": (
                rates.tolist(),
                utilization(each.method, group, conditions.link.scaled(rates)).tolist(),
            )
            for each in candidates(conditions, chosen)
        },
        mark=(middle, f"your link, {units.rate(middle)}"),
        caption=GENTLE,
    )


def _as_json(lines: list[Row], choice: Choice, notes: list[str]) -> str:
    return json.dumps({"methods": [asdict(row) for row in lines], "recommended": asdict(choice), "notes": notes}) + "\n"


def _print(text: str) -> None:
    sys.stdout.write(text)
