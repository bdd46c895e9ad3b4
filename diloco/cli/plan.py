"""`diloco plan`: from flags to what is printed."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from diloco import laws
from diloco.errors import ConfigError
from diloco.plan import check as against
from diloco.plan import plot, quantity, table
from diloco.plan.choose import Choice, Limits, Settings, choose
from diloco.plan.costs import Conditions, Prices, Row, candidates, rows
from diloco.plan.model import Model, as_fragments, equal, named
from diloco.plan.recipe import recipe
from diloco.plan.simulate import Group, utilization
from diloco.plan.traffic import Link


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Predict how busy a run will be on a link, what it costs, and which settings to take."""

    model: str | None = None
    """A preset (tiny, 35m, 100m, 200m, 300m, 500m, 1b, 4b). Or give parameters and layers."""
    parameters: str | None = None
    """Parameters, such as 7b, if the model is no preset."""
    layers: int | None = None
    """Layers, if the model is no preset."""
    step_seconds: float | None = None
    """Seconds of a step of one replica that waits for nothing."""
    replicas: int = 2
    """Replicas."""
    link: tuple[str, ...] = ()
    """Rate of each replica's link: 1gbit, 100mbit, or up=50mbit,down=500mbit. One for all, or one for each replica."""
    round_trip: str = "0ms"
    """Round trip between replicas, such as 80ms."""
    reduce: Literal["collective", "bucket"] = "collective"
    """Who computes the mean: the replicas among themselves, or through a folder or object store."""
    sync_every: int | None = None
    """Steps between two syncs of the same fragment. Default: chosen."""
    fragments: str | None = None
    """strided:N, sequential:N, balanced:N, or a number of fragments. Default: chosen."""
    overlap: int | None = None
    """Steps between sending a fragment and applying the result. Default: chosen, up to most-overlap."""
    codec: str | None = None
    """e3m0, float8, int8, bfloat16 or float32. Default: chosen."""
    most_overlap: int = 5
    """The most overlap that is chosen; above 5 loss may suffer."""
    target: float | None = None
    """Utilisation that is enough, such as 0.95. Default: within 1 % of the best."""
    tokens: str | None = None
    """Tokens of all replicas together, such as 25b. Default: 20 for each parameter."""
    batch: int | None = None
    """Sequences of a step, all replicas together. Default: by scaling law, as in training."""
    context: int = 2048
    """Tokens of a sequence."""
    memory: str | None = None
    """Memory of a replica's devices together, such as 80gb: says whether weights and optimizer fit."""
    codec_ns: float = 0.0
    """Nanoseconds that encoding and decoding take for each value."""
    speeds: tuple[float, ...] = ()
    """Speed of each replica; 1 takes step-seconds a step."""
    jitter: float = 0.0
    """Standard deviation of a step's time, as a share of it."""
    mtbf: str | None = None
    """Mean time between failures of one replica, such as 7d."""
    restart: str = "10min"
    """Time that a failed replica is away."""
    save_every: int = 500
    """Steps between two checkpoints, to which all go back after a failure."""
    quorum: int | None = None
    """With a bucket: replicas that must be there to go on."""
    grace: str = "0s"
    """With a bucket: how long the others wait for one that is away."""
    egress_price: float = 0.0
    """With a bucket: price of a GB that is read."""
    put_price: float = 0.0
    """With a bucket: price of a thousand writes."""
    get_price: float = 0.0
    """With a bucket: price of a thousand reads."""
    grain: Literal["fragment", "layer"] = "fragment"
    """fragment: rounds as this library makes them; layer: layer by layer, the paper's more hopeful model."""
    write: Path | None = None
    """Write the recommendation as a recipe for `diloco train`."""
    plot: Path | None = None
    """Draw utilisation against the rate of the link, to a .html or .png file."""
    json: bool = False
    """Print as JSON."""
    paper: bool = False
    """Recompute the paper's bandwidth tables, beside the published numbers."""
    against: Path | None = None
    """Compare a finished run's folder with the prediction."""


CONFIG = PlanConfig


def main(config: PlanConfig) -> int:
    """Print the plan. Returns the exit code."""
    if config.paper:
        _print(table.paper_json() if config.json else table.paper_tables())
        return 0
    if config.against is not None:
        return _against(config, config.against)
    model, group, link = _model(config), _group(config), _link(config)
    steps = _steps(config, model)
    limits = Limits(
        sync_every=config.sync_every,
        fragments=None if config.fragments is None else as_fragments(config.fragments, len(model.layers)),
        overlap=config.overlap,
        codec=config.codec,
        most_overlap=config.most_overlap,
        steps=steps,
        target=config.target,
    )
    conditions = _conditions(config, model, group, link, steps)
    choice = choose(model, group, link, limits, reduce=config.reduce, in_turn=conditions.in_turn)
    lines = rows(conditions, choice.settings)
    notes = table.notes(conditions, choice, None if config.memory is None else quantity.size(config.memory))
    if config.plot is not None:
        title = f"{model.name}, {config.replicas} replicas, {group.step_seconds:g} s a step"
        plot.write(config.plot, _curves(conditions, choice.settings), link.rate, title)
    if config.write is not None:
        given = {"batch": config.batch, "context": config.context if config.batch is not None else None}
        given["tokens"] = None if config.tokens is None else quantity.count(config.tokens)
        extra = {name: value for name, value in given.items() if value is not None}
        config.write.write_text(recipe(choice, config.replicas, config.model, extra), encoding="utf-8")
    _print(_as_json(lines, choice, notes) if config.json else table.plan_tables(conditions, lines, choice, notes))
    return 0


def _against(config: PlanConfig, folder: Path) -> int:
    link = _link(config) if config.link else None
    comparison = against.compare(folder, link, quantity.seconds(config.round_trip))
    _print(json.dumps(asdict(comparison)) + "\n" if config.json else f"{comparison.name}: {comparison}\n")
    return 0


def _model(config: PlanConfig) -> Model:
    if config.model is not None:
        if config.parameters is not None or config.layers is not None:
            raise ConfigError(f"model={config.model!r} and parameters or layers: give either a preset or both numbers")
        return named(config.model)
    if config.parameters is None or config.layers is None:
        raise ConfigError("no model: give --model 1b, or --parameters 7b and --layers 32")
    if config.layers < 1:
        raise ConfigError(f"layers={config.layers}: give a whole number of at least 1")
    return equal(quantity.count(config.parameters, "parameters"), config.layers, config.parameters)


def _group(config: PlanConfig) -> Group:
    if config.step_seconds is None or not config.step_seconds > 0:
        given = "none" if config.step_seconds is None else f"{config.step_seconds:g}"
        raise ConfigError(
            f"step_seconds={given}: give the seconds of a step without waiting, above 0; time a few steps"
        )
    if config.replicas < 1:
        raise ConfigError(f"replicas={config.replicas}: give a whole number of at least 1")
    if config.speeds and (len(config.speeds) != config.replicas or min(config.speeds) <= 0):
        raise ConfigError(f"speeds={config.speeds}: give {config.replicas} numbers above 0, one for each replica")
    if not 0 <= config.jitter < 1:
        raise ConfigError(f"jitter={config.jitter}: give a share from 0 to 1, such as 0.1")
    if config.codec_ns < 0:
        raise ConfigError(f"codec_ns={config.codec_ns}: give 0 or more nanoseconds a value")
    round_trip = quantity.seconds(config.round_trip)
    return Group(config.step_seconds, config.replicas, round_trip, config.codec_ns, config.speeds, config.jitter)


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
        in_turn=config.grain == "fragment",
        mtbf=float("inf") if config.mtbf is None else quantity.seconds(config.mtbf, "mtbf", zero=False),
        restart=quantity.seconds(config.restart, "restart"),
        save_every=config.save_every,
        quorum=config.quorum,
        grace=quantity.seconds(config.grace, "grace"),
        prices=prices if prices != Prices() else None,
    )


def _curves(conditions: Conditions, chosen: Settings) -> plot.Curves:
    middle = conditions.link.rate
    rates = np.geomspace(min(1e6, middle / 10), max(1e12, middle * 10), 200)
    return {
        f"{each.name} ({each.settings})": (
            rates.tolist(),
            utilization(each.method, conditions.group, conditions.link.scaled(rates)).tolist(),
        )
        for each in candidates(conditions, chosen)
    }


def _as_json(lines: list[Row], choice: Choice, notes: list[str]) -> str:
    return json.dumps({"methods": [asdict(row) for row in lines], "recommended": asdict(choice), "notes": notes}) + "\n"


def _print(text: str) -> None:
    sys.stdout.write(text)
