"""Settings for what was measured: the planner's choice for this model, these machines and the link between them.

The codec is that of the paper unless no sync_every makes it suffice; then the next one that sends less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from diloco.formats import FORMATS
from diloco.plan.choose import SUFFICES, TOLERANCE, Choice, Limits, choose
from diloco.plan.model import Model
from diloco.plan.simulate import Group
from diloco.plan.traffic import ROUND_SECONDS, Link
from diloco.report import units

CODEC_LADDER = ("e3m0", "twobit")
"""The gentlest first. `topk` sends less and wants another outer optimizer."""
ROOM = 3
"""How much slower the link may become before other fragments would be better."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one replica has measured."""

    step_seconds: float
    rate: float
    """Bits of payload a second, each way, while all replicas send."""
    round_trip: float
    codec_ns: Mapping[str, float]
    """Nanoseconds of the communication thread for a value of a round, by codec."""
    hook_ns: float
    """Nanoseconds of the training thread for a value of a round."""

    def group(self, codec: str, replicas: int) -> Group:
        return Group(self.step_seconds, replicas, self.round_trip, self.codec_ns[codec], self.hook_ns,
                     round_seconds=ROUND_SECONDS)  # fmt: skip

    def __str__(self) -> str:
        link = f"{units.rate(self.rate)} each way, round trip {self.round_trip * 1e3:.3g} ms"
        return f"a step takes {self.step_seconds:.3g} s; the link gives {link}"


def worst(measured: Sequence[Mapping[str, Any]]) -> Facts:
    """What to plan for, by what all replicas have measured: the slowest sets the pace."""
    facts = [Facts(**each) for each in measured]
    return Facts(
        step_seconds=max(f.step_seconds for f in facts),
        rate=min(f.rate for f in facts),
        round_trip=max(f.round_trip for f in facts),
        codec_ns={name: max(f.codec_ns[name] for f in facts) for name in facts[0].codec_ns},
        hook_ns=max(f.hook_ns for f in facts),
    )


def pick(model: Model, facts: Facts, replicas: int, limits: Limits) -> Choice:
    """The planner's choice, each setting with its reason."""
    link, given = Link.same(facts.rate), limits.codec is not None
    ladder = (limits.codec,) if limits.codec else CODEC_LADDER
    choices = []
    for codec in ladder:
        choices.append(choose(model, facts.group(codec, replicas), link, replace(limits, codec=codec)))
        if choices[-1].utilization >= SUFFICES:
            break
    chosen = choices[-1]
    if not given:
        best = units.percent(choices[0].utilization, digits=1)
        first = f"{best} busy at best with {ladder[0]}" if len(choices) > 1 else ""
        bits = f"{8 * FORMATS[chosen.settings.codec].nbytes(1 << 20) / (1 << 20):.3g} bits a value"
        why = f"{bits}, with error feedback; {first}" if first else f"{bits}, without visible loss"
        chosen = replace(chosen, reasons=chosen.reasons | {"codec": why})
    return chosen


def pick_first(model: Model, facts: Facts, replicas: int, limits: Limits) -> Choice:
    """The choice at the start of a run. Fragments cannot change later, so they are small enough for a slower link, if
    that costs nothing on this one."""
    chosen = pick(model, facts, replicas, limits)
    if limits.fragments is not None:
        return chosen
    small = pick(model, replace(facts, rate=facts.rate / ROOM), replicas, limits).settings.fragments
    first = pick(model, facts, replicas, replace(limits, fragments=small))
    costs = first.utilization < chosen.utilization * (1 - TOLERANCE)
    if small == chosen.settings.fragments or costs or first.settings.sync_every > chosen.settings.sync_every:
        return chosen
    why = f"{len(model.fragments(small))} fragments, small enough for a link of a third of this rate too"
    return replace(first, reasons=first.reasons | {"fragments": why})


def lines(choice: Choice, facts: Facts) -> list[str]:
    """What was chosen, and why."""
    settings = asdict(choice.settings)
    chosen = [f"  {name} = {value}: {choice.reasons[name]}" for name, value in settings.items()]
    return [f"autopilot: {facts}", *chosen, f"  expected: {units.percent(choice.utilization, digits=1)} busy"]
