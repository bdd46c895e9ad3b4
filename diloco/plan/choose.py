"""Choose the settings for a link: the gentlest ones that are within 1 % of the best utilisation.

Gentle is what costs least loss in the published runs: first a small `sync_every`, then a small `overlap`, then the
paper's three layers a fragment. Nothing is taken that was not tried there: overlap up to 5, sync_every up to 300.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from diloco import laws
from diloco.errors import ConfigError
from diloco.plan import methods as method
from diloco.plan.model import Model
from diloco.plan.simulate import Group, Method, utilization
from diloco.plan.traffic import CODECS, Link, Reduce
from diloco.report.units import percent
from diloco.schedule import check_overlap

SYNC_EVERY = (30, 50, 75, 100, 150, 200, laws.LARGEST_SYNC_EVERY)
"""Below 30 deltas are small and noisy, and loss does not fall."""
FRAGMENTS = (
    "strided:3",
    "strided:2",
    "strided:1",
    "strided:4",
    "strided:6",
    "balanced:10",
    "balanced:20",
    "balanced:40",
)
"""The paper's choice first."""
LEAST_ROUNDS = 50
"""Of each fragment in a run: fewer say little to the outer momentum."""
TOLERANCE = 0.01


@dataclass(frozen=True)
class Settings:
    sync_every: int
    fragments: str
    overlap: int
    codec: str


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What may be chosen. What is given is not chosen."""

    sync_every: int | None = None
    fragments: str | None = None
    overlap: int | None = None
    codec: str | None = None
    most_overlap: int = laws.SAFE_OVERLAP
    most_sync_every: int = laws.LARGEST_SYNC_EVERY
    steps: int | None = None
    """Of the run."""
    target: float | None = None
    """Utilisation that is enough."""

    def __post_init__(self) -> None:
        if self.codec is not None and self.codec not in CODECS:
            raise ConfigError(f"codec={self.codec!r}: known are {', '.join(CODECS)}")
        if self.target is not None and not 0 < self.target <= 1:
            raise ConfigError(f"target={self.target}: give a utilisation above 0 and up to 1, such as 0.95")
        if self.sync_every is not None and self.sync_every < 1:
            raise ConfigError(f"sync_every={self.sync_every}: give a whole number of at least 1")
        if self.overlap is not None:
            check_overlap(self.overlap, self.sync_every or self.most_sync_every)
        if self.most_overlap < 0:
            raise ConfigError(f"most_overlap={self.most_overlap}: give a whole number of at least 0")


@dataclass(frozen=True)
class Choice:
    settings: Settings
    utilization: float
    best: float
    """Of all settings that may be chosen."""
    outer_lr: float
    reasons: dict[str, str]


def built(settings: Settings, model: Model, reduce: Reduce = "collective", *, in_turn: bool = True) -> Method:
    """Streaming with these settings; by default with rounds as this library makes them."""
    return method.streaming(
        model.fragments(settings.fragments),
        len(model.layers),
        settings.sync_every,
        settings.overlap,
        CODECS[settings.codec],
        in_turn=in_turn,
        reduce=reduce,
    )


def allowed(model: Model, limits: Limits) -> Iterator[Settings]:
    """All settings that may be chosen, the gentlest first."""
    codec = limits.codec or "e3m0"
    for sync_every in _sync_everys(limits):
        for overlap in _overlaps(limits, sync_every):
            for fragments in _fragments(model, limits):
                yield Settings(sync_every, fragments, overlap, codec)


def choose(
    model: Model, group: Group, link: Link, limits: Limits, *, reduce: Reduce = "collective", in_turn: bool = True
) -> Choice:
    """The gentlest settings within 1 % of the best utilisation, or, if a target is given, that reach it."""
    known: dict[Settings, float] = {}

    def share(settings: Settings) -> float:
        if settings not in known:
            each = built(settings, model, reduce, in_turn=in_turn)
            known[settings] = float(utilization(each, group, link)[0])
        return known[settings]

    grid = list(allowed(model, limits))
    # More overlap never hurts utilisation, so the best is among those with the most.
    widest = {
        h: [s for s in grid if s.sync_every == h and s.overlap == _overlaps(limits, h)[-1]]
        for h in _sync_everys(limits)
    }
    best = max(share(s) for settings in widest.values() for s in settings)
    enough = best * (1 - TOLERANCE) if limits.target is None else min(limits.target, best)
    sync_every = next(h for h, settings in widest.items() if max(map(share, settings)) >= enough)
    chosen = next(s for s in grid if s.sync_every == sync_every and share(s) >= enough)
    lr, nearest = laws.outer_lr(group.replicas)
    reasons = _reasons(chosen, share(chosen), best, limits, model) | {
        "outer_lr": f"best for {nearest} replicas in {laws.SCALING_LAWS}; it depends on replicas, not on model size"
    }
    return Choice(chosen, share(chosen), best, lr, reasons)


def _sync_everys(limits: Limits) -> list[int]:
    if limits.sync_every is not None:
        return [limits.sync_every]
    most = limits.most_sync_every if limits.steps is None else min(limits.most_sync_every, limits.steps // LEAST_ROUNDS)
    least = (limits.overlap or 0) + 1
    return [h for h in SYNC_EVERY if least <= h <= most] or [max(most, least)]


def _overlaps(limits: Limits, sync_every: int) -> list[int]:
    if limits.overlap is not None:
        return [limits.overlap]
    return list(range(min(limits.most_overlap, sync_every - 1) + 1))


def _fragments(model: Model, limits: Limits) -> list[str]:
    if limits.fragments is not None:
        return [limits.fragments]
    return [text for text in FRAGMENTS if text.startswith("balanced") or int(text[8:]) <= len(model.layers)]


def _reasons(chosen: Settings, share: float, best: float, limits: Limits, model: Model) -> dict[str, str]:
    count = len(model.fragments(chosen.fragments))
    enough = f"{percent(share, digits=1)} busy; the most within the limits is {percent(best, digits=1)}"
    given = "given"
    return {
        "sync_every": given
        if limits.sync_every is not None
        else f"the smallest that is enough ({enough}); loss rises slowly with it",
        "fragments": given
        if limits.fragments is not None
        else f"{count} fragments, "
        + ("the paper's choice" if chosen.fragments == "strided:3" else _why(chosen.fragments)),
        "overlap": given
        if limits.overlap is not None
        else (
            ("blocking is enough on this link" if share >= 0.9 else "nothing hides a round on this link")
            if chosen.overlap == 0
            else f"the fewest steps that hide a round; {laws.STREAMING} saw no loss up to {laws.SAFE_OVERLAP}"
        ),
        "codec": given
        if limits.codec is not None
        else f"4 bits a value, a quarter of bfloat16, without visible loss in {laws.STREAMING}",
    }


def _why(fragments: str) -> str:
    return (
        "of equal size, for the smallest burst" if fragments.startswith("balanced") else "for a better fit to the link"
    )
