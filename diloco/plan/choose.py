"""Choose settings for a link: of those within 1 % of the best utilization, the ones that cost the least loss.

In published runs the loss rises with `sync_every` first and then with `overlap`, so small values of both are preferred,
and then the paper's three layers per fragment. Only published values are chosen: overlap up to 5, sync_every up to 300.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from diloco.codecs.formats import FORMATS, format_named
from diloco.core.overlap import SAFE_OVERLAP
from diloco.core.schedule import Schedule, check_overlap
from diloco.plan import laws, methods
from diloco.plan.methods import Model
from diloco.plan.simulate import Group, Method, utilization
from diloco.plan.traffic import CODECS, Reduce
from diloco.runs.units import percent

SYNC_EVERY = (30, 50, 75, 100, 150, 200, laws.LARGEST_SYNC_EVERY)
"""Below 30, deltas are small and noisy, and the loss does not fall."""
FRAGMENTS = ("strided:3", "strided:2", "strided:1", "strided:4", "strided:6",
             "balanced:10", "balanced:20", "balanced:40")  # fmt: skip
"""The paper's choice first."""
LEAST_ROUNDS = 50
"""Fewest rounds of a fragment in a run: the outer momentum needs some to settle."""
TOLERANCE = 0.01
ENOUGH = 0.9
"""Below this utilization a smaller codec is worth its loss."""
CODEC_LADDER = ("e3m0", "twobit")
EXPLICIT = "set explicitly"


@dataclass(frozen=True)
class Settings:
    sync_every: int
    fragments: str
    overlap: int
    codec: str


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Settings that are fixed, and limits for the others."""

    sync_every: int | None = None
    fragments: str | None = None
    overlap: int | None = None
    codec: str | None = None
    steps: int | None = None
    """Length of the run, if known."""

    def __post_init__(self) -> None:
        if self.codec is not None:
            format_named(self.codec)
        if self.sync_every is not None:
            Schedule(self.sync_every, fragments=1)
        if self.overlap is not None:
            check_overlap(self.overlap, self.sync_every or laws.LARGEST_SYNC_EVERY)


@dataclass(frozen=True)
class Choice:
    settings: Settings
    utilization: float
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


def allowed(model: Model, limits: Limits, codec: str) -> Iterator[Settings]:
    """All settings within the limits, those with the least loss first."""
    for sync_every in _sync_everys(limits):
        for overlap in _overlaps(limits, sync_every):
            for fragments in _fragments(model, limits):
                yield Settings(sync_every, fragments, overlap, codec)


def choose(
    model: Model,
    group_of: Callable[[str], Group],
    rate: float,
    limits: Limits,
    *,
    reduce: Reduce = "collective",
    codecs: Sequence[str] = CODEC_LADDER,
) -> Choice:
    """The settings with the least loss within 1 % of the best utilization, with the first codec that is fast enough.

    `group_of`: what a codec costs the replicas. `codecs`: the one with the least loss first.
    """
    choices: list[Choice] = []
    for codec in [limits.codec] if limits.codec else codecs:
        choices.append(_choose(model, group_of(codec), rate, limits, codec, reduce))
        if choices[-1].utilization >= ENOUGH:
            break
    choice = choices[-1]
    reason = f"{8 * FORMATS[choice.settings.codec].nbytes(1 << 20) / (1 << 20):.3g} bits per value"
    if len(choices) == 1:
        reason += f", with no visible loss in {laws.STREAMING}"
    else:
        best = percent(choices[0].utilization, digits=1)
        reason += f", with no loss visible in 3 seeds; {codecs[0]} reaches at most {best} utilization"
    explicit = {name: EXPLICIT for name in asdict(choice.settings) if getattr(limits, name) is not None}
    return replace(choice, reasons=choice.reasons | {"codec": reason} | explicit)


def _choose(model: Model, group: Group, rate: float, limits: Limits, codec: str, reduce: Reduce) -> Choice:
    shares: dict[Settings, float] = {}

    def share(settings: Settings) -> float:
        if settings not in shares:
            shares[settings] = float(utilization(method_of(settings, model, reduce), group, rate)[0])
        return shares[settings]

    grid = list(allowed(model, limits, codec))
    # More overlap never lowers utilization, so the best settings are among those with the most.
    widest = {
        h: [s for s in grid if s.sync_every == h and s.overlap == _overlaps(limits, h)[-1]]
        for h in _sync_everys(limits)
    }
    best = max(share(s) for settings in widest.values() for s in settings)
    enough = best * (1 - TOLERANCE)
    sync_every = next(h for h, settings in widest.items() if max(map(share, settings)) >= enough)
    chosen = next(s for s in grid if s.sync_every == sync_every and share(s) >= enough)
    reasons = {
        "sync_every": f"{_why_sync_every(share(chosen))} ({percent(share(chosen), digits=1)} utilization; the best "
        f"allowed settings reach {percent(best, digits=1)}); larger values raise the loss slowly",
        "fragments": f"{len(model.fragments(chosen.fragments))} fragments{_why_fragments(chosen.fragments)}",
        "overlap": _why_overlap(chosen.overlap, share(chosen)),
    }
    return Choice(chosen, share(chosen), reasons)


def _sync_everys(limits: Limits) -> list[int]:
    if limits.sync_every is not None:
        return [limits.sync_every]
    most = SYNC_EVERY[-1] if limits.steps is None else min(SYNC_EVERY[-1], limits.steps // LEAST_ROUNDS)
    least = (limits.overlap or 0) + 1
    return [h for h in SYNC_EVERY if least <= h <= most] or [max(most, least)]


def _overlaps(limits: Limits, sync_every: int) -> list[int]:
    if limits.overlap is not None:
        return [limits.overlap]
    return list(range(min(SAFE_OVERLAP, sync_every - 1) + 1))


def _fragments(model: Model, limits: Limits) -> list[str]:
    if limits.fragments is not None:
        return [limits.fragments]
    most = len(model.layers) if len(model.layers) > 1 else 0
    return [text for text in FRAGMENTS if text.startswith("balanced") or int(text[8:]) <= most]


def _why_sync_every(share: float) -> str:
    return "the smallest value that is enough" if share >= 0.5 else "the best value, but this link is too slow"


def _why_fragments(fragments: str) -> str:
    if fragments == "strided:3":
        return ", the paper's choice"
    return " of equal size, for small bursts" if fragments.startswith("balanced") else ", which suit this link better"


def _why_overlap(overlap: int, share: float) -> str:
    if overlap:
        return f"the fewest steps that hide a round; {laws.STREAMING} saw no loss up to {SAFE_OVERLAP}"
    return "blocking is fast enough on this link" if share >= ENOUGH else "no overlap hides a round on this link"
