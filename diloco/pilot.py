"""Autopilot: measure the first steps and the link, let the planner choose the settings, and follow the link in mid-run.

Nothing is sent in the first `sync_every` steps, so settings that are chosen after a few of them hold as if the run had
begun with them. Later this replica moves its own overlap (pace.py), and wishes another sync_every or codec when the
link has become another one; if all replicas wish it, all change (terms.py).
"""

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from diloco import speed
from diloco.codec import codec_named
from diloco.diloco import DiLoCo
from diloco.errors import ConfigError
from diloco.fragment import WITHOUT_LAYERS, Balanced, Sequential, Strided, fragmenter
from diloco.module import find_layers, trainable
from diloco.plan.auto import Facts, better, lines, pick_first, worst
from diloco.plan.choose import Choice, Limits, Settings
from diloco.plan.model import Model
from diloco.plan.rate import LinkRate
from diloco.report import units
from diloco.runs.config import TUNED
from diloco.terms import Terms

FIRST_STEPS = 10
"""Steps whose median is the time of a step. The first ones compile and fill caches."""
ASK_AGAIN = 1.1
"""The planner is asked again when the link is faster or slower by this factor."""
EARLY = 8
"""The planner is asked once in a sync period, this part of it before the send that carries the wish."""
FEWEST = 500
"""Steps: a shorter run is planned like this one, which limits sync_every to 10."""
Say = Callable[[str, Mapping[str, Any]], None]
log = logging.getLogger("diloco")


def autopilot(
    diloco: DiLoCo,
    *,
    keep: Collection[str] = (),
    steps: int | None = None,
    retune: bool = True,
    say: Say = lambda text, values: log.info(text),
) -> "Autopilot | None":
    """Let the settings of a DiLoCo follow from what is measured. Call it on all replicas, before the first step.

    After the tenth step the replicas measure their steps and the link between them, and take the settings that the
    planner chooses for both. Give `overlap="auto"` to DiLoCo if its overlap is to follow the link from then on.

    Args:
        keep: settings that stay as DiLoCo was given them: any of sync_every, fragments, overlap, codec.
        steps: how many the run has, if that is known: a short run needs a smaller sync_every.
        retune: whether all may agree on another sync_every and codec in mid-run, when the link has changed.
        say: called with a text, and with what it says as values, at the choice and at each change.

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
    pilot = Autopilot(diloco, keep, steps, retune, say)
    diloco.watch = pilot.after_step
    return pilot


class Autopilot:
    """Made by `autopilot`."""

    def __init__(self, diloco: DiLoCo, keep: Collection[str], steps: int | None, retune: bool, say: Say) -> None:
        self._diloco, self._keep, self._steps, self._retune, self._say = diloco, set(keep), steps, retune, say
        self._replicas: int = diloco.reduce.replicas  # pyright: ignore[reportAttributeAccessIssue]
        self._model, self._ranks = model_of(diloco), 1
        self._at = max(min(FIRST_STEPS, diloco.schedule.sync_every - 1), 1)
        self._facts: Facts | None = None  # for which the terms that are held were chosen
        self._link: LinkRate | None = None
        self._asked = 0.0  # the rate for which the planner was asked last
        self._planner = ThreadPoolExecutor(1, "diloco planner")  # an answer takes 25 ms or more: training goes on
        self._answer: Future[Settings | None] | None = None
        self._rounds, self._held = diloco.stats.rounds, diloco.tuning.held
        self.choice: Choice | None = None
        """What was chosen at the start, with reasons and the expected utilisation."""

    def after_step(self) -> None:
        step = self._diloco.step_count
        if self._facts is None and step >= self._at:
            self._facts = self._measure()
            self._asked = self._facts.rate if step == self._at else 0.0
            if step == self._at and not any(self._diloco.indices):  # otherwise the run was resumed
                self._begin(self._facts)
        elif self._facts is not None and self._diloco.stats.rounds > self._rounds:
            self._follow(self._facts)
        schedule = self._diloco.schedule
        if self._retune and self._link and schedule.sends_at(0, step + max(schedule.sync_every // EARLY, 1)):
            self._ask(self._link.now)
        if self._answer is not None and schedule.sends_at(0, step + 1):
            self._take_answer()

    def _measure(self) -> Facts:
        """On all replicas after the same step. With shards or DDP inside a replica its ranks send at once, each its
        part; with DDP each takes and writes the complete model."""
        diloco, machine = self._diloco, speed.known()
        link = diloco.reduce.measure()  # pyright: ignore[reportAttributeAccessIssue]
        self._ranks = ranks = len(self._tell(None)) // self._replicas
        shards = ranks // getattr(diloco.reduce, "ddp_size", 1)
        copied_beside = any(p.device.type != "cpu" for p in trainable(diloco.model).values())
        facts = Facts(
            step_seconds=diloco.tuning.clock.seconds,
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
        settings, diloco, tuning = self._as_cut(Settings(**said["settings"])), self._diloco, self._diloco.tuning
        self.choice = choice = Choice(**{**said, "settings": settings})
        codec = tuning.codec if "codec" in self._keep else codec_named(settings.codec)
        cut = diloco.fragmenter if "fragments" in self._keep else fragmenter(settings.fragments)
        diloco.settle_on(settings.sync_every, cut, "auto" if tuning.auto else settings.overlap, codec)
        diloco.tuning.begin_with(settings.overlap)
        self._held = diloco.tuning.held
        measured = {"step_seconds": facts.step_seconds, "rate": facts.rate, "round_trip": facts.round_trip}
        details = {**asdict(settings), "expected_utilization": choice.utilization, **measured}
        self._say("\n".join(lines(choice, facts)), details)

    def _limits(self) -> Limits:
        """What may be chosen: not what was given."""
        held = self._diloco.tuning.held
        given: dict[str, Any] = {"sync_every": held.sync_every, "fragments": self._text(),
                                 "overlap": self._diloco.overlap, "codec": _planned(held.codec)}  # fmt: skip
        steps = None if self._steps is None else max(self._steps, FEWEST)
        return Limits(steps=steps, **{name: given[name] for name in self._keep})

    def _follow(self, facts: Facts) -> None:
        """Rounds were applied: wish other terms if the link has become another one."""
        tuning = self._diloco.tuning
        self._link = self._link or self._new_link(facts)
        for round in self._diloco.stats.since(self._rounds):
            if round.bytes_sent and round.seconds_transfer:
                queued = round.seconds - round.seconds_apart - round.seconds_transfer
                self._link.add(self._ranks * round.bytes_sent, round.seconds_transfer, queued)
        self._rounds, rate = self._diloco.stats.rounds, self._link.now
        if tuning.held != self._held:
            self._say_change(rate)
            recoded, self._held, self._facts = tuning.held.codec != self._held.codec, tuning.held, self._now(rate)
            self._asked = 0.0  # what was wished since the change was agreed on is void
            self._link = self._new_link(self._facts) if recoded else self._link  # rounds of another size

    def _new_link(self, facts: Facts) -> LinkRate:
        """Bases itself on the first sync period from now on."""
        return LinkRate(facts, _planned(self._diloco.tuning.held.codec), self._replicas, len(self._diloco.fragments))

    def _now(self, rate: float) -> Facts:
        assert self._facts is not None
        return replace(self._facts, rate=rate, step_seconds=self._diloco.tuning.clock.seconds)

    def _ask(self, rate: float) -> None:
        """Ask what the planner takes for the link as it is, with the fragments that there are."""
        if self._asked / ASK_AGAIN < rate < self._asked * ASK_AGAIN:
            return
        tuning, limits = self._diloco.tuning, replace(self._limits(), fragments=self._text())
        if not tuning.auto:
            limits = replace(limits, overlap=tuning.overlap)
        if not tuning.held.codec:
            limits = replace(limits, codec=_planned(""))
        most = min(limits.most_overlap, tuning.held.sync_every - 1) if tuning.auto else tuning.overlap
        held = Settings(tuning.held.sync_every, self._text(), most, _planned(tuning.held.codec))
        assert self._facts is not None
        then, self._asked = self._facts.rate, rate
        self._answer = self._planner.submit(better, self._model, self._now(rate), then, self._replicas, held, limits)

    def _take_answer(self) -> None:
        """Before fragment 0 is sent, with which a wish travels."""
        assert self._answer is not None
        chosen, self._answer, tuning = self._answer.result(), None, self._diloco.tuning
        tuning.wish = Terms(chosen.sync_every, chosen.codec if tuning.held.codec else "") if chosen else None

    def _say_change(self, rate: float) -> None:
        was, held = self._held, self._diloco.tuning.held
        pairs = ("sync_every", was.sync_every, held.sync_every), ("codec", was.codec, held.codec)
        changes = ", ".join(f"{name} {old} → {new}" for name, old, new in pairs if old != new)
        text = f"autopilot: at step {self._diloco.step_count} {changes}, because the link gives {units.rate(rate)}"
        self._say(text, {**asdict(held), "rate": rate})

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


def _planned(codec: str) -> str:
    """A codec that the planner does not know costs at most what the values themselves do."""
    return codec or "float32"
