"""Choose the settings for a link: the gentlest ones that are within 1 % of the best utilization.

The gentlest settings are those that cost least loss in the published runs: first a small `sync_every`, then a small
`overlap`, then the paper's three layers in a fragment. Only values that were tried there are chosen: overlap up to 5,
sync_every up to 300.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from diloco import laws
from diloco.errors import ConfigError
from diloco.formats import format_named
from diloco.plan import methods
from diloco.plan.model import Model
from diloco.plan.simulate import Group, Method, utilization
from diloco.plan.traffic import CODECS, Link, Reduce
from diloco.report.units import percent
from diloco.schedule import check_overlap

SYNC_EVERY = (30, 50, 75, 100, 150, 200, laws.LARGEST_SYNC_EVERY)
"""Below 30, deltas are small and noisy, and loss does not fall."""
FRAGMENTS = ("strided:3", "strided:2", "strided:1", "strided:4", "strided:6",
             "balanced:10", "balanced:20", "balanced:40")  # fmt: skip
"""The paper's choice first."""
LEAST_ROUNDS = 50
"""The fewest rounds of a fragment in a run: the outer momentum needs some to settle."""
TOLERANCE = 0.01
SUFFICES = 0.9
"""Below this utilization, say what the smallest codec would give. It was not tried with streaming in published runs."""


@dataclass(frozen=True)
class Settings:
    sync_every: int
    fragments: str
    overlap: int
    codec: str


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What may be chosen. A setting that is given stays as it is."""

    sync_every: int | None = None
    fragments: str | None = None
    overlap: int | None = None
    codec: str | None = None
    most_overlap: int = laws.SAFE_OVERLAP
    most_sync_every: int = laws.LARGEST_SYNC_EVERY
    steps: int | None = None
    """Steps of the run, if they are known."""
    target: float | None = None
    """Utilization that is enough."""

    def __post_init__(self) -> None:
        if self.codec is not None:
            format_named(self.codec)
        if self.target is not None and not 0 < self.target <= 1:
            raise ConfigError(f"target={self.target}: give a utilization above 0 and up to 1, such as 0.95")
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
    """The largest utilization of all settings that may be chosen."""
    reasons: dict[str, str]


def method_of(settings: Settings, model: Model, reduce: Reduce = "collective") -> Method:
    """Streaming with these settings, in rounds as this library makes them."""
    return methods.streaming(
        model.fragments(settings.fragments),
        len(model.layers),
        settings.sync_every,
        settings.overlap,
        CODECS[settings.codec],
        by_fragment=True,
        reduce=reduce,
    )


def allowed(model: Model, limits: Limits) -> Iterator[Settings]:
    """All settings that may be chosen, the gentlest first."""
    codec = limits.codec or "e3m0"
    for sync_every in _sync_everys(limits):
        for overlap in _overlaps(limits, sync_every):
            for fragments in _fragments(model, limits):
                yield Settings(sync_every, fragments, overlap, codec)


def choose(model: Model, group: Group, link: Link, limits: Limits, *, reduce: Reduce = "collective") -> Choice:
    """The gentlest settings within 1 % of the best utilization, or, if a target is given, that reach it."""
    known: dict[Settings, float] = {}

    def share(settings: Settings) -> float:
        if settings not in known:
            known[settings] = float(utilization(method_of(settings, model, reduce), group, link)[0])
        return known[settings]

    grid = list(allowed(model, limits))
    # More overlap never hurts utilization, so the best is among those with the most.
    widest = {
        h: [s for s in grid if s.sync_every == h and s.overlap == _overlaps(limits, h)[-1]]
        for h in _sync_everys(limits)
    }
    best = max(share(s) for settings in widest.values() for s in settings)
    enough = best * (1 - TOLERANCE) if limits.target is None else min(limits.target, best)
    sync_every = next(h for h, settings in widest.items() if max(map(share, settings)) >= enough)
    chosen = next(s for s in grid if s.sync_every == sync_every and share(s) >= enough)
    reasons = {
        "sync_every": f"{_why_sync_every(share(chosen))} ({percent(share(chosen), digits=1)} busy; "
        f"the most within the limits is {percent(best, digits=1)}); loss rises slowly with it",
        "fragments": f"{len(model.fragments(chosen.fragments))} fragments, {_why_fragments(chosen.fragments)}",
        "overlap": _why_overlap(chosen.overlap, share(chosen)),
        "codec": f"4 bits a value, a quarter of bfloat16, without visible loss in {laws.STREAMING}",
    }
    if limits.codec is None and share(chosen) < SUFFICES:
        sparse = share(replace(chosen, codec="topk"))
        reasons["codec"] += f"; --codec topk (0.23 bits) would be {percent(sparse, digits=1)} busy, {laws.TOPK_LOSS}"
    given = {name: "given" for name in asdict(chosen) if getattr(limits, name) is not None}
    return Choice(chosen, share(chosen), best, reasons | given)


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


def _why_sync_every(share: float) -> str:
    return "the smallest that is enough" if share >= 0.5 else "no value makes this link fast enough; the best"


def _why_fragments(fragments: str) -> str:
    if fragments == "strided:3":
        return "the paper's choice"
    return "of equal size, for the smallest burst" if fragments.startswith("balanced") else "which fit this link better"


def _why_overlap(overlap: int, share: float) -> str:
    if overlap:
        return f"the fewest steps that hide a round; {laws.STREAMING} saw no loss up to {laws.SAFE_OVERLAP}"
    return "blocking is enough on this link" if share >= 0.9 else "no overlap hides a round on this link"
