"""Autopilot: measure the first steps and the link, and let the planner choose the settings.

Nothing is sent in the first `sync_every` steps, so settings chosen during them take effect as if the run had started
with them. After that only the overlap follows the link, with `overlap="auto"` (core/overlap.py).
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from diloco.autopilot import speed
from diloco.codecs.codec import codec_named, name_of
from diloco.core.diloco import DiLoCo
from diloco.core.fragment import Balanced, Sequential, Strided, fragmenter
from diloco.core.tensors import find_layers, trainable
from diloco.errors import ConfigError
from diloco.exchange.collective import Collective
from diloco.plan.choose import Choice, Limits, Settings, choose
from diloco.plan.methods import Model
from diloco.plan.simulate import Group
from diloco.plan.traffic import ROUND_SECONDS
from diloco.runs import units
from diloco.runs.config import TUNED

FIRST_STEPS = 10
"""Steps whose median is the step time. The first ones compile and fill caches."""
SHORTEST = 500
"""Steps. A shorter run is planned as if it had this many, which limits sync_every to 10."""
Say = Callable[[str, Mapping[str, Any]], None]
log = logging.getLogger("diloco")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Measurements of one replica."""

    step_seconds: float
    rate: float
    """Bits of payload per second, each way, while all replicas send."""
    round_trip: float
    codec_ns: Mapping[str, float]
    """Nanoseconds of the communication thread per value of a round, by codec."""
    hook_ns: float
    """Nanoseconds of the training thread per value of a round."""

    def group(self, codec: str, replicas: int) -> Group:
        return Group(self.step_seconds, replicas=replicas, round_trip=self.round_trip, codec_ns=self.codec_ns[codec],
                     hook_ns=self.hook_ns, round_seconds=ROUND_SECONDS)  # fmt: skip

    def __str__(self) -> str:
        link = f"{units.rate(self.rate)} each way, round trip {self.round_trip * 1e3:.3g} ms"
        return f"a step takes {self.step_seconds:.3g} s; the link carries {link}"


def autopilot(
    diloco: DiLoCo,
    *,
    keep: Collection[str] = (),
    steps: int | None = None,
    say: Say = lambda text, values: log.info(text),
) -> "Autopilot | None":
    """Choose the settings of a DiLoCo from measurements. Call it on all replicas, before the first step.

    After the tenth step the replicas measure their step time and the link between them, and adopt the settings that the
    planner chooses for both. Pass `overlap="auto"` to DiLoCo if the overlap should follow the link from then on.

    Args:
        keep: settings to leave alone: any of sync_every, fragments, overlap, codec.
        steps: length of the run, if known: a short run needs a smaller sync_every.
        say: called with a text and the values in it.

    Returns the object that will hold the choice, or None if there is nothing to choose: with a bucket, whose members
    change only their own overlap, and with a single replica.
    """
    if unknown := set(keep) - set(TUNED):
        raise ConfigError(f"keep={sorted(unknown)}: use any of {', '.join(TUNED)}")
    if not isinstance(diloco.reducer, Collective):
        kind = type(diloco.reducer).__name__
        say(f"autopilot: with a {kind}, sync_every, fragments and codec are not changed; overlap={diloco.overlap}", {})
        return None
    if diloco.reducer.replicas == 1:
        say("autopilot: a single replica has no link to measure; the settings are not changed", {})
        return None
    pilot = Autopilot(diloco, diloco.reducer, keep, steps, say)
    diloco.after_step = pilot.after_step
    return pilot


class Autopilot:
    """Created by `autopilot`."""

    def __init__(self, diloco: DiLoCo, reducer: Collective, keep: Collection[str], steps: int | None, say: Say) -> None:
        self._diloco, self._reducer, self._keep, self._steps, self._say = diloco, reducer, set(keep), steps, say
        self._replicas = reducer.replicas
        self._model = model_of(diloco.model, trainable(diloco.model))
        self._at = max(min(FIRST_STEPS, diloco.schedule.sync_every - 1), 1)
        self.facts: Facts | None = None
        """The measurements."""
        self.choice: Choice | None = None
        """The chosen settings, with reasons and the expected utilization."""

    def after_step(self) -> None:
        """Measure and choose once. A resumed run keeps its settings."""
        step = self._diloco.step_count
        if step >= self._at:
            self._diloco.after_step = None
            if step == self._at and not any(self._diloco.indices):
                self.facts = self._measure()
                self._begin(self.facts)

    def _measure(self) -> Facts:
        """Called on all replicas after the same step. With shards or DDP inside a replica, each of its ranks sends its
        part at the same time; with DDP each rank takes and writes the whole model."""
        diloco, machine = self._diloco, speed.measured()
        link = self._reducer.measure()
        ranks = len(self._reducer.gather(None)) // self._replicas
        shards = ranks // max(len(self._reducer.identity.ddp_ranks), 1)
        asynchronous = any(p.device.type != "cpu" for p in trainable(diloco.model).values())
        facts = Facts(
            step_seconds=diloco.step_seconds,
            rate=link.rate * ranks,
            round_trip=link.round_trip,
            codec_ns={name: machine.codec_ns(name, self._replicas) / shards for name in machine.encode},
            hook_ns=0.0 if asynchronous else machine.hook / shards,
        )
        return worst(self._reducer.gather(asdict(facts)))

    def _begin(self, facts: Facts) -> None:
        """Choose, and adopt the choice of the first replica: another processor may round differently."""
        own = choose(self._model, partial(facts.group, replicas=self._replicas), facts.rate, self._limits())
        agreed = self._reducer.gather(asdict(own))[0]
        settings, diloco = Settings(**agreed["settings"]), self._diloco
        codec = diloco.codec if "codec" in self._keep else codec_named(settings.codec)
        cut = diloco.fragmenter if "fragments" in self._keep else fragmenter(settings.fragments)
        diloco.restart(sync_every=settings.sync_every, fragments=cut, overlap=settings.overlap, codec=codec)
        if diloco.overlap != settings.overlap:
            agreed["reasons"]["overlap"] = f"auto goes no lower; {settings.overlap} would be enough on this link"
            settings = replace(settings, overlap=diloco.overlap)
        self.choice = choice = Choice(**{**agreed, "settings": settings})
        measured = {"step_seconds": facts.step_seconds, "rate": facts.rate, "round_trip": facts.round_trip}
        details = {**asdict(settings), "expected_utilization": choice.utilization, **measured}
        self._say("\n".join(lines(choice, facts)), details)

    def _limits(self) -> Limits:
        """The settings in `keep` are fixed."""
        diloco = self._diloco
        codec = name_of(diloco.codec) or "float32"  # an unknown codec sends at most this much
        current: dict[str, Any] = {"sync_every": diloco.schedule.sync_every, "fragments": self._text(),
                                   "overlap": diloco.overlap, "codec": codec}  # fmt: skip
        steps = None if self._steps is None else max(self._steps, SHORTEST)
        return Limits(steps=steps, **{name: current[name] for name in self._keep})

    def _text(self) -> str:
        """The fragments in the planner's terms; a custom fragmenter counts as equal parts."""
        cut = self._diloco.fragmenter
        if isinstance(cut, (Strided, Sequential)) and len(self._model.layers) > 1:
            return f"{type(cut).__name__.lower()}:{min(cut.layers, len(self._model.layers))}"
        return f"balanced:{cut.fragments if isinstance(cut, Balanced) else len(self._diloco.fragments)}"


def model_of(model: nn.Module, parameters: Mapping[str, Tensor], name: str = "") -> Model:
    """The model as the planner sees it: the sizes of its layers, and the tensors outside them."""
    layers = find_layers(model, parameters)
    inside = {key for layer in layers for key in layer}
    total = sum(p.numel() for p in parameters.values())
    if not layers:  # a single one, for which the planner chooses fragments of equal size
        return Model(name, (float(total),))
    rest = [parameters[key] for key in parameters if key not in inside]
    rows = tuple((p.shape[0], p.numel() // max(p.shape[0], 1)) if p.dim() else (1, 1) for p in rest)
    return Model(name, tuple(float(sum(parameters[key].numel() for key in layer)) for layer in layers), rows)


def worst(measured: Sequence[Mapping[str, Any]]) -> Facts:
    """The facts to plan for: the slowest replica sets the pace."""
    facts = [Facts(**values) for values in measured]
    return Facts(
        step_seconds=max(f.step_seconds for f in facts),
        rate=min(f.rate for f in facts),
        round_trip=max(f.round_trip for f in facts),
        codec_ns={name: max(f.codec_ns[name] for f in facts) for name in facts[0].codec_ns},
        hook_ns=max(f.hook_ns for f in facts),
    )


def lines(choice: Choice, facts: Facts) -> list[str]:
    """The choice and its reasons as text."""
    settings = asdict(choice.settings)
    reasons = [f"  {name} = {value}: {choice.reasons[name]}" for name, value in settings.items()]
    return [f"autopilot: {facts}", *reasons, f"  expected: {units.percent(choice.utilization, digits=1)} utilization"]
