"""The lab's tables in docs/benchmarks.md."""

import statistics
from collections.abc import Sequence

from benchmarks.record import Record, table
from studies.netlab.methods import METHODS
from studies.netlab.summary import LEVELS, OURS, of


def tables(record: Record) -> dict[str, str]:
    values = record["values"]
    return {
        "netlab-shares": _shares(values["cells"]),
        "netlab-methods": _methods(values),
        "netlab-exchange": _swap(values["swap"]),
        "netlab-four": _wan(values["wan"]),
    }


def _shares(cells: Sequence[Record]) -> str:
    multiples = sorted({c["multiple"] for c in cells if c["multiple"] in _GRID}, reverse=True)
    columns = ("method", "unlimited", *(f"{multiple:g} ×" for multiple in multiples))
    rows = []
    for name, setup in METHODS.items():
        found = {cell["multiple"]: cell for cell in of(cells, name)}
        if found:
            rows.append((setup.title, *(_share(found.get(multiple)) for multiple in (None, *multiples))))
    return table(columns, rows)


_GRID = (3000, 1000, 300, 100, 30, 10, 3, 1.5, 1, 0.5, 0.3)


def _share(cell: Record | None) -> str:
    if cell is None:
        return ""
    shown = " / ".join(_percent(cell[key]) for key in ("computing", "utilisation"))
    return shown if cell["mbit"] is None else f"{shown} ({_percent(cell['predicted'])})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}" if share < 0.1 else f"{100 * share:.0f}"


def _methods(values: Record) -> str:
    columns = ("method", "steps/s, unlimited", "kB a step", "largest second, kB", "50 %", "90 % of its best",
               "times ours", "CPU, ns a value", "largest error, points")  # fmt: skip
    rows = []
    for name, setup in METHODS.items():
        found = of(values["cells"], name)
        if not found:
            continue
        limited = [cell for cell in found if cell["mbit"] is not None]
        rates = [values["crossings"][name][level] for level in LEVELS]
        ours = [values["crossings"].get(OURS, {}).get(level) for level in LEVELS]
        ratios = [f"{rate / mine:.3g}" if rate and mine else "–" for rate, mine in zip(rates, ours, strict=True)]
        rows.append(
            (
                setup.title,
                f"{found[0]['steps_per_second']:.2f}",
                f"{statistics.median(cell['bytes_step'] for cell in limited) / 1000:,.0f}",
                f"{found[0]['burst'] / 1000:,.0f}",
                *(f"{rate:.3g} ×" if rate else "–" for rate in rates),
                " and ".join(ratios),
                f"{found[0]['busy_ns']:.0f}",
                f"{100 * max(abs(c['predicted'] - c['computing']) for c in limited):.0f}",
            )
        )
    return table(columns, rows)


def _swap(found: Record) -> str:
    names = {"all_gather": "gloo's `all_gather`", "swap_1": "ours", "swap_4": "ours, 4 streams"}
    rows = []
    for kind, title in names.items():
        cells = []
        for place in ("near", "far"):
            ratios = [seconds / found["ideal"] for seconds in found[place][kind]]
            cells.append(f"{statistics.median(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f})")
        rows.append((title, *cells))
    columns = ("exchange", "no latency", f"{1000 * found['latency']:.0f} ms each way")
    return table(columns, rows)


def _wan(found: Record) -> str:
    rows = [
        (title, f"{100 * one['utilisation']:.0f} %", f"{100 * one['predicted']:.0f} %", f"{100 * one['waited']:.1f} %",
         f"{one['bytes_step'] / 1000:,.0f}")
        for name, title in ((OURS, "one stream"), ("e3m0-4", "four streams"))
        for one in [found[name]]
    ]  # fmt: skip
    columns = ("", "utilisation", "predicted", "waited", "kB a step")
    return table(columns, rows)
