"""`diloco plan`: predict utilization on a link, and recommend settings."""

import json
import math
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from diloco.codecs.formats import FORMATS, format_named
from diloco.errors import ConfigError
from diloco.plan import laws, quantity, table
from diloco.plan.choose import CODEC_LADDER, Limits, Settings, choose
from diloco.plan.costs import CODEC_NS, HOOK_NS, PCIE, PRICES, Conditions, Prices, rows
from diloco.plan.methods import Model, model_of_layers, model_of_preset
from diloco.plan.simulate import Group
from diloco.plan.traffic import ENCODED_ON_DEVICE, ROUND_SECONDS, Place
from diloco.runs.config import TUNED
from diloco.runs.flags import REQUIRED, flag, spelled
from diloco.runs.presets import PRESETS
from diloco.runs.units import amount

GROUPS = ("model and data", "replicas and link", "sync", "output")
_model, _replicas, _sync, _output = (partial(flag, group=group) for group in GROUPS)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Predict whether a link is fast enough and what a run costs, and recommend settings."""

    # fmt: off
    model: str | None = _model(None, f"A preset ({', '.join(PRESETS)}), or hf:PATH_OR_ID for a Hugging Face causal "
        "LM; or set --parameters and --layers.", why="none")
    parameters: int | None = _model(None, "Number of parameters, such as 7b, if the model is not a preset.")
    layers: int | None = _model(None, "Number of layers, if the model is not a preset.")
    tokens: int | None = _model(None, "Tokens of all replicas together, such as 25b.", why="20 per parameter")
    batch: int | None = _model(None, "Sequences per step, all replicas together.",
        why="by scaling law, as in training")
    context: int = _model(2048, "Tokens per sequence.", why="as in the scaling laws")
    step_seconds: str = _replicas(REQUIRED, "Time of one step of a replica without communication, such as 1.5 or "
        "800ms; time a few.")
    replicas: int = _replicas(2, "Number of replicas.")
    link: str = _replicas(REQUIRED, "Rate of the slowest link, in its slower direction, such as 100mbit.")
    round_trip: str = _replicas("0ms", "Round trip between replicas, such as 80ms.")
    reduce: Literal["collective", "bucket"] = _replicas("collective",
        "collective: replicas exchange deltas directly. bucket: through a folder or object store.")
    prices: tuple[float, ...] = _replicas((), "With a bucket: dollars per million PUTs, per million GETs, and per GB "
        "that leaves the store.", why="5 0.4 0.09: S3 in us-east-1, November 2026")
    codec_ns: float | None = _replicas(None, "Nanoseconds of the communication thread per value of a round: encode, "
        "decode, mean, outer step.", why=f"{CODEC_NS:g}; 0 with --state device", expert=True)
    hook_ns: float | None = _replicas(None, "Nanoseconds of the training thread per value of a round, to take the "
        "delta and write the result.", why=f"0; {HOOK_NS:g} with --bus none", expert=True)
    bus: str | None = _replicas(None, "Rate at which a rank copies to and from its accelerator, as `diloco doctor "
        "--device` prints it; none: the model is on CPUs.", why=f"{PCIE}, cautious for PCIe 4 x16")
    state: Place = _replicas("host", "Where anchors and outer momentum are: the host's memory, or the accelerator's.")
    shards: int = _replicas(1, "Ranks over which a replica is sharded. --codec-ns, --hook-ns and --bus are per rank.")
    sync_every: int | None = _sync(None, "Steps between two syncs of the same fragment.", why="chosen")
    fragments: str | None = _sync(None, "strided:N, sequential:N or balanced:N.", why="chosen")
    overlap: int | None = _sync(None, "Steps between sending a fragment and applying the result.",
        why="chosen, up to 5; a larger one may cost loss")
    codec: str | None = _sync(None, "Format of the deltas on the wire.", why="chosen", choices=FORMATS)
    rehearse: bool = _output(False, "Also build the model without its values, shard it over --shards ranks and cut it "
        "as a run would, and print what a rank with an accelerator needs next to the plan's figures.")
    json: bool = _output(False, "Print everything as JSON.")
    # fmt: on


CONFIG = PlanConfig
EXAMPLES = (
    "diloco plan --model 1b --step-seconds 1 --link 100mbit --round-trip 80ms",
    "diloco plan --model hf:meta-llama/Llama-3.1-8B --shards 8 --rehearse --step-seconds 4 --link 1gbit",
    "diloco plan --parameters 7b --layers 32 --step-seconds 4 --link 50mbit",
)


def main(config: PlanConfig) -> int:
    """Print the plan. Returns the exit code."""
    for name in ("replicas", "shards", "parameters", "layers", "tokens", "batch", "context"):
        if (number := getattr(config, name)) is not None and number < 1:
            raise ConfigError(f"{name}={number}: must be at least 1")
    conditions = _conditions(config)
    model = conditions.model
    limits = Limits(**{name: getattr(config, name) for name in TUNED}, steps=conditions.steps)
    codecs = CODEC_LADDER if config.state == "host" else ENCODED_ON_DEVICE[:1]
    choice = choose(model, conditions.group_of, conditions.rate, limits, reduce=config.reduce, codecs=codecs)
    methods = rows(conditions, choice.settings)
    answer, notes = table.verdict(conditions, methods), table.notes(conditions, choice)
    rehearsal = _rehearsal(config, choice.settings) if config.rehearse else None
    if config.json:
        plan = {"methods": [asdict(row) for row in methods], "recommended": asdict(choice), "notes": [answer, *notes]}
        print(json.dumps(_finite(plan | {"rehearsal": rehearsal} if rehearsal else plan), allow_nan=False))
    else:
        sheets = table.sheets(conditions, methods, choice)
        if rehearsal:
            sheets.append(table.rehearsed(conditions, methods[-1], choice.settings, rehearsal))
        sys.stdout.write(table.text(conditions, answer, sheets, notes))
    return 0


def _finite(value: Any) -> Any:
    """JSON has no infinity: null stands for "never"."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _conditions(config: PlanConfig) -> Conditions:
    bus = None if config.bus == "none" else quantity.bandwidth(config.bus or PCIE)
    encoded = format_named(config.codec or "e3m0").name in ENCODED_ON_DEVICE
    if config.state == "device" and not (bus and config.reduce == "collective" and encoded):
        raise ConfigError("state='device': needs accelerators, --reduce collective and --codec "
                          f"{' or '.join(ENCODED_ON_DEVICE)}; use --state host")  # fmt: skip
    defaults = {"codec_ns": CODEC_NS if config.state == "host" else 0.0, "hook_ns": 0.0 if bus else HOOK_NS}
    assumed = {name: value for name, value in defaults.items() if getattr(config, name) is None}
    ns = {name: getattr(config, name) for name in defaults if name not in assumed} | assumed
    for name, value in ns.items():
        if value < 0:
            raise ConfigError(f"{name}={value}: must be 0 or more nanoseconds per value")
    model = _read_model(config)
    seconds = config.step_seconds if config.step_seconds[-1:].isalpha() else f"{config.step_seconds}s"
    return Conditions(
        model=model,
        group=Group(
            quantity.seconds(seconds, "step_seconds", zero=False),
            config.replicas,
            quantity.seconds(config.round_trip),
            round_seconds=ROUND_SECONDS,
            **{name: value / config.shards for name, value in ns.items()},
        ),
        rate=quantity.rate(config.link),
        steps=laws.steps(model.parameters, config.replicas, config.context, config.batch, config.tokens),
        reduce=config.reduce,
        shards=config.shards,
        bus=bus,
        prices=_prices(config.prices),
        state=config.state,
        assumed=(
            *(f"{spelled(name)} {value:g}" for name, value in assumed.items() if value),
            *([] if config.bus else [f"--bus {PCIE}"]),
        ),
    )


def _prices(prices: tuple[float, ...]) -> Prices:
    if prices and (len(prices) != 3 or min(prices) < 0):
        raise ConfigError(f"prices={prices}: give three numbers, 0 or more, such as 5 0.4 0.09 for S3")
    return Prices(*prices) if prices else PRICES["S3"]


def _read_model(config: PlanConfig) -> Model:
    if config.model is not None:
        if config.parameters is not None or config.layers is not None:
            raise ConfigError(f"model={config.model!r} with parameters or layers: set either the preset or the two")
        if not config.model.startswith("hf:"):
            return model_of_preset(config.model)
        from diloco.autopilot.pilot import model_of
        from diloco.train.rehearsal import empty_model

        model = empty_model(config.model, config.context)
        return model_of(model, dict(model.named_parameters()), config.model)
    if config.parameters is None or config.layers is None:
        raise ConfigError("no model: set --model 1b, or --parameters 7b and --layers 32")
    return model_of_layers(config.parameters, config.layers, f"{amount(config.parameters)} parameters")


def _rehearsal(config: PlanConfig, settings: Settings) -> dict[str, float]:
    if config.model is None:
        raise ConfigError("--rehearse needs a whole model: set --model to a preset or to hf:PATH_OR_ID")
    if config.bus == "none":
        raise ConfigError("--rehearse needs an accelerator: leave out --bus none")
    from diloco.train.rehearsal import empty_model, rehearse

    model = empty_model(config.model.lower() if config.model.lower() in PRESETS else config.model, config.context)
    place = {"replicas": config.replicas, "shards": config.shards, "reduce": config.reduce, "state": config.state}
    return asdict(rehearse(model, settings, **place))
