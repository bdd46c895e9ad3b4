"""Utilisation against the rate of the link, all methods, the user's link marked: one HTML file, or a PNG."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from diloco.errors import ConfigError

Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""By method: rates in bits a second, utilisations."""

AXIS = "rate of the link (of its slower direction)"
COLORS = ("#7f7f7f", "#d1751c", "#1f6fb4", "#1d8a4b")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 840, 520, 64, 24, 40, 136


def write(path: Path, curves: Curves, link: float, title: str) -> None:
    """Choose by the ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".html":
        path.write_text(_html(curves, link, title), encoding="utf-8")
    elif path.suffix == ".png":
        _png(path, curves, link, title)
    else:
        raise ConfigError(f"plot={str(path)!r}: the name must end in .html or .png")


def _html(curves: Curves, link: float, title: str) -> str:
    style = "body{font:15px system-ui,sans-serif;margin:2em auto;max-width:880px;color:#222;background:#fff}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
        f"<h1>{escape(title)}</h1>{_svg(curves, link)}</html>\n"
    )


def _svg(curves: Curves, link: float) -> str:
    rates = [rate for xs, _ in curves.values() for rate in xs]
    low, high = math.log10(min(rates)), math.log10(max(rates))

    def x(rate: float) -> float:
        return LEFT + (math.log10(rate) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)

    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="13" fill="#222">']
    for decade in range(math.ceil(low), math.floor(high) + 1):
        at = x(10.0**decade)
        out.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>')
        out.append(
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{rate_text(10.0**decade)}</text>'
        )
    for percent in range(0, 101, 20):
        at = y(percent / 100)
        out.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        out.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{percent} %</text>')
    for i, (name, (xs, ys)) in enumerate(curves.items()):
        color, points = COLORS[i % len(COLORS)], " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, ys, strict=True))
        out.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.2"/>')
        out.append(f'<text x="{LEFT}" y="{HEIGHT - 72 + 19 * i}" fill="{color}">{escape(name)}</text>')
    if min(rates) <= link <= max(rates):
        out.append(f'<path d="M{x(link):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#c0392b" stroke-dasharray="5 4"/>')
        out.append(
            f'<text x="{x(link) + 6:.1f}" y="{HEIGHT - BOTTOM - 8}" fill="#c0392b">your link, {rate_text(link)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text x="{middle}" y="{HEIGHT - BOTTOM + 40}" text-anchor="middle">{AXIS}</text></svg>')
    return "".join(out)


def _png(path: Path, curves: Curves, link: float, title: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "a PNG needs matplotlib: pip install 'diloco[plots]', or take a name ending in .html"
        ) from None
    figure = Figure(figsize=(8.4, 5.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    for i, (name, (xs, ys)) in enumerate(curves.items()):
        axes.semilogx(
            [rate / 1e9 for rate in xs], [100 * share for share in ys], color=COLORS[i % len(COLORS)], label=name
        )
    axes.axvline(link / 1e9, color="#c0392b", linestyle="--", label=f"your link, {rate_text(link)}")
    axes.set(title=title, xlabel=f"{AXIS} (Gbit/s)", ylabel="utilisation (%)", ylim=(0, 102))
    axes.grid(color="#e4e4e4")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)
    figure.savefig(path)


def rate_text(rate: float) -> str:
    """
    >>> rate_text(1e9), rate_text(5e7)
    ('1 Gbit/s', '50 Mbit/s')
    """
    for unit, scale in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= scale * 0.9995:
            return f"{rate / scale:.3g} {unit}"
    return f"{rate:.3g} bit/s"
