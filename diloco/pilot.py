"""Autopilot: measure the first steps and the link, and let the planner choose the settings.

Nothing is sent in the first `sync_every` steps, so settings that are chosen after a few of them hold as if the run had
begun with them. From then on only the overlap follows the link, with `overlap="auto"` (pace.py).
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

from diloco import speed
from diloco.codec import codec_named, name_of
from diloco.diloco import DiLoCo
from diloco.errors import ConfigError
from diloco.fragment import WITHOUT_LAYERS, Balanced, Sequential, Strided, fragmenter
from diloco.module import find_layers, trainable
from diloco.plan.auto import Facts, lines, pick_first, worst
from diloco.plan.choose import Choice, Limits, Settings
from diloco.plan.model import Model
from diloco.runs.config import TUNED

FIRST_STEPS = 10
"""Steps whose median is the time of a step. The first ones compile and fill caches."""
FEWEST = 500
"""Steps: a shorter run is planned like this one, which limits sync_every to 10."""
Say = Callable[[str, Mapping[str, Any]], None]
log = logging.getLogger("diloco")


def autopilot(
    diloco: DiLoCo,
    *,
    keep: Collection[str] = (),
    steps: int | None = None,
    say: Say = lambda text, values: log.info(text),
) -> "Autopilot | None":
    """Let the settings of a DiLoCo follow from what is measured. Call it on all replicas, before the first step.

    After the tenth step the replicas measure their steps and the link between them, and take the settings that the
    planner chooses for both. Give `overlap="auto"` to DiLoCo if its overlap is to follow the link from then on.

    Args:
        keep: settings that stay as DiLoCo was given them: any of sync_every, fragments, overlap, codec.
        steps: how many the run has, if that is known: a short run needs a smaller sync_every.
        say: called with a text, and with what it says as values.

    Returns what will hold the choice, or None where there is nothing to choose: with a bucket, whose members change
    only their own overlap, and for a replica alone.
    """
    if unknown := set(keep) - set(TUNED):
        raise ConfigError(f"keep={sorted(unknown)}: give any of {', '.join(TUNED)}")
    if not hasattr(diloco.reduce, "measure"):
        kind = type(diloco.reduce).__name__
        say(f"autopilot: with a {kind}, sync_every, fragments and codec stay as given; overlap={diloco.overlap}", {})
        return None
    if getattr(diloco.reduce, "replicas", 1) == 1:
        say("autopilot: one replica has no link to measure; the settings stay as given", {})
        return None
    pilot = Autopilot(diloco, keep, steps, say)
    diloco.watch = pilot.after_step
    return pilot


class Autopilot:
    """Made by `autopilot`."""

    def __init__(self, diloco: DiLoCo, keep: Collection[str], steps: int | None, say: Say) -> None:
        self._diloco, self._keep, self._steps, self._say = diloco, set(keep), steps, say
        self._replicas: int = diloco.reduce.replicas  # pyright: ignore[reportAttributeAccessIssue]
        self._model = model_of(diloco)
        self._at = max(min(FIRST_STEPS, diloco.schedule.sync_every - 1), 1)
        self.facts: Facts | None = None
        """What was measured."""
        self.choice: Choice | None = None
        """What was chosen, with reasons and the expected utilization."""

    def after_step(self) -> None:
        """Measure and choose once. A run that is resumed keeps its settings."""
        step = self._diloco.step_count
        if step >= self._at:
            self._diloco.watch = None
            if step == self._at and not any(self._diloco.indices):
                self.facts = self._measure()
                self._begin(self.facts)

    def _measure(self) -> Facts:
        """On all replicas after the same step. With shards or DDP inside a replica its ranks send at once, each its
        part; with DDP each takes and writes the complete model."""
        diloco, machine = self._diloco, speed.known()
        link = diloco.reduce.measure()  # pyright: ignore[reportAttributeAccessIssue]
        ranks = len(self._tell(None)) // self._replicas
        shards = ranks // getattr(diloco.reduce, "ddp_size", 1)
        copied_beside = any(p.device.type != "cpu" for p in trainable(diloco.model).values())
        facts = Facts(
            step_seconds=diloco.pace.clock.seconds,
            rate=link.rate * ranks,
            round_trip=link.round_trip,
            codec_ns={name: machine.codec_ns(name, self._replicas) / shards for name in machine.encode},
            hook_ns=0.0 if copied_beside else machine.hook / shards,
        )
        return worst(self._tell(asdict(facts)))

    def _tell(self, value: object) -> list[Any]:
        return self._diloco.reduce.tell(value)  # pyright: ignore[reportAttributeAccessIssue]

    def _begin(self, facts: Facts) -> None:
        """Choose, and take what the first replica has chosen: another processor may round otherwise."""
        said = self._tell(asdict(pick_first(self._model, facts, self._replicas, self._limits())))[0]
        settings, diloco = self._as_cut(Settings(**said["settings"])), self._diloco
        self.choice = choice = Choice(**{**said, "settings": settings})
        codec = diloco.codec if "codec" in self._keep else codec_named(settings.codec)
        cut = diloco.fragmenter if "fragments" in self._keep else fragmenter(settings.fragments)
        diloco.settle_on(settings.sync_every, cut, settings.overlap, codec)
        measured = {"step_seconds": facts.step_seconds, "rate": facts.rate, "round_trip": facts.round_trip}
        details = {**asdict(settings), "expected_utilization": choice.utilization, **measured}
        self._say("\n".join(lines(choice, facts)), details)

    def _limits(self) -> Limits:
        """What may be chosen: not what was given."""
        diloco = self._diloco
        codec = name_of(diloco.codec) or "float32"  # one that the planner does not know costs at most as much
        given: dict[str, Any] = {"sync_every": diloco.schedule.sync_every, "fragments": self._text(),
                                 "overlap": diloco.overlap, "codec": codec}  # fmt: skip
        steps = None if self._steps is None else max(self._steps, FEWEST)
        return Limits(steps=steps, **{name: given[name] for name in self._keep})

    def _as_cut(self, settings: Settings) -> Settings:
        """Without layers the planner's are parts of equal size, which only `Balanced` cuts."""
        if self._has_layers or "fragments" in self._keep:
            return settings
        return replace(settings, fragments=f"balanced:{len(self._model.fragments(settings.fragments))}")

    @property
    def _has_layers(self) -> bool:
        return bool(find_layers(self._diloco.model, dict(trainable(self._diloco.model))))

    def _text(self) -> str:
        """The fragments as the planner knows them: of a fragmenter that it does not know, as many of equal size."""
        cut = self._diloco.fragmenter
        if isinstance(cut, (Strided, Sequential)) and self._has_layers:
            return f"{type(cut).__name__.lower()}:{min(cut.layers, len(self._model.layers))}"
        return f"balanced:{cut.fragments if isinstance(cut, Balanced) else len(self._diloco.fragments)}"


def model_of(diloco: DiLoCo) -> Model:
    """The model as the planner sees it: what its layers hold, and the tensors outside of them."""
    parameters = trainable(diloco.model)
    layers = find_layers(diloco.model, dict(parameters))
    inside = {name for layer in layers for name in layer}
    total = sum(p.numel() for p in parameters.values())
    if not layers:  # the library makes fragments of equal size then
        return Model("", (total / WITHOUT_LAYERS,) * WITHOUT_LAYERS)
    rest = [p for name, p in parameters.items() if name not in inside]
    rows = tuple((p.shape[0], p.numel() // max(p.shape[0], 1)) if p.dim() else (1, 1) for p in rest)
    return Model("", tuple(float(sum(parameters[name].numel() for name in layer)) for layer in layers), rows)
