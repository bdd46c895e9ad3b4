"""A share against something on a logarithmic axis, one curve a method, the user's own marked: HTML, SVG or PNG."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from diloco.errors import ConfigError, install_command
from diloco.plan.sheet import Sheet

Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""By method: where, and the share there."""

COLORS = ("#7f7f7f", "#d1751c", "#1f6fb4", "#1d8a4b", "#8a4fbf", "#b5459a", "#3f8c8c")
WIDTH, LEFT, TOP, RIGHT, INNER, LEGEND, LINE = 840, 64, 30, 40, 354, 64, 19
"""Pixels. INNER: the height inside the axes. LEGEND: from there to the first line of the legend."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    title: str
    share: str
    """What the curves show."""
    axis: str
    """What it is shown against."""
    tick: Callable[[float], str]
    """A value of that as text."""
    unit: str
    """What that is counted in."""
    curves: Curves
    mark: tuple[float, str]
    """The user's own value, and what it is."""
    points: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Single values to show in the color of a curve."""
    caption: str = ""
    """What the reader of the curves should know."""


@dataclass(frozen=True)
class Beside:
    """What a page says beside the curves."""

    answer: str
    sheets: Sequence[Sheet]
    notes: Sequence[str]


def check(path: Path) -> None:
    """Raise if there is no way to write it."""
    if path.suffix not in (".html", ".svg", ".png"):
        raise ConfigError(f"plot={str(path)!r}: the name must end in .html, .svg or .png")


def write(path: Path, plot: Plot, beside: Beside) -> None:
    """Choose by the ending; only a page has room for what is beside the curves."""
    check(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".html":
        path.write_text(_html(plot, beside), encoding="utf-8")
    elif path.suffix == ".svg":
        path.write_text(svg(plot), encoding="utf-8")
    else:
        _png(path, plot)


def _html(plot: Plot, beside: Beside) -> str:
    """The report's page, so that both look and work alike."""
    from diloco.report import html

    curves = [
        {"label": name, "at": list(at), "shares": list(shares), "points": plot.points.get(name, ())}
        for name, (at, shares) in plot.curves.items()
    ]
    drawn = {"share": plot.share, "axis": plot.axis, "unit": plot.unit, "curves": curves, "mark": plot.mark}
    values = {"title": plot.title, "plot": plot, "beside": beside, "source": "what it was asked"}
    return html.page("plan", values, {"plot": drawn})


def svg(plot: Plot) -> str:
    places = [place for xs, _ in plot.curves.values() for place in xs]
    low, high = math.log10(min(places)), math.log10(max(places))
    bottom, height = TOP + INNER, TOP + INNER + LEGEND + LINE * len(plot.curves)

    def x(place: float) -> float:
        return LEFT + (math.log10(place) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return TOP + (1 - share) * INNER

    out = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" font-size="13" fill="#222" '
           'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif">',
           f'<path d="M0 0H{WIDTH}V{height}H0Z" fill="#fff"/>']  # white also before a dark page  # fmt: skip
    for decade in range(math.ceil(low), math.floor(high) + 1):
        at = x(10.0**decade)
        out.append(f'<path d="M{at:.1f} {TOP}V{bottom}" stroke="#e4e4e4"/>')
        out.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{plot.tick(10.0**decade)}</text>')
    for percent in range(0, 101, 20):
        at = y(percent / 100)
        out.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        out.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{percent} %</text>')
    for i, (name, (xs, ys)) in enumerate(plot.curves.items()):
        color, points = COLORS[i % len(COLORS)], " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, ys, strict=True))
        out.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.2"/>')
        out.append(f'<text x="{LEFT}" y="{bottom + LEGEND + LINE * i}" fill="{color}">{escape(name)}</text>')
        for a, b in plot.points.get(name, ()):
            out.append(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="4.5" fill="{color}" stroke="#fff"/>')
    value, text = plot.mark
    if min(places) <= value <= max(places):
        out.append(f'<path d="M{x(value):.1f} {TOP}V{bottom}" stroke="#c0392b" stroke-dasharray="5 4"/>')
        left = x(value) < WIDTH * 0.7
        side = f'x="{x(value) + 6:.1f}"' if left else f'x="{x(value) - 6:.1f}" text-anchor="end"'
        out.append(f'<text {side} y="{bottom - 8}" fill="#c0392b">{escape(text)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text x="{LEFT}" y="{TOP - 12}">{escape(plot.share)}</text>')
    out.append(f'<text x="{middle}" y="{bottom + 40}" text-anchor="middle">{escape(plot.axis)}</text></svg>\n')
    return "".join(out)


def _png(path: Path, plot: Plot) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            f"a PNG needs matplotlib: {install_command('plots')}; or give a name that ends in .html"
        ) from None
    figure = Figure(figsize=(8.4, 5.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    for i, (name, (xs, ys)) in enumerate(plot.curves.items()):
        color, points = COLORS[i % len(COLORS)], plot.points.get(name, ())
        axes.semilogx(xs, [100 * share for share in ys], color=color, label=name)
        axes.plot([a for a, _ in points], [100 * b for _, b in points], "o", color=color)
    axes.axvline(plot.mark[0], color="#c0392b", linestyle="--", label=plot.mark[1])
    axes.set(title=plot.title, xlabel=plot.axis, ylabel=f"{plot.share} (%)", ylim=(0, 102))
    axes.xaxis.set_major_formatter(lambda value, _: plot.tick(value))
    axes.grid(color="#e4e4e4")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)
    figure.savefig(path)
