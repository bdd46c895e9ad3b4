"""The lab's tables: one in docs/benchmarks.md, one in the README beside this file."""

import statistics
from collections.abc import Sequence

from benchmarks.record import Record, table
from studies.netlab.methods import METHODS
from studies.netlab.summary import LEVELS, OURS, of


def tables(record: Record) -> dict[str, str]:
    values = record["values"]
    return {"netlab-shares": _shares(values["cells"]), "netlab-methods": _methods(values)}


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
    columns = ("method", "steps/s, unlimited", "kB a step", "50 % of the steps", "90 % of its best", "times ours")
    rows = []
    for name, setup in METHODS.items():
        found = of(values["cells"], name)
        if not found:
            continue
        limited = [cell for cell in found if cell["mbit"] is not None]
        rates = [values["crossings"][name][level] for level in LEVELS]
        ours = [values["crossings"].get(OURS, {}).get(level) for level in LEVELS]
        ratios = [_multiple(rate / mine) if rate and mine else "–" for rate, mine in zip(rates, ours, strict=True)]
        rows.append(
            (
                setup.title,
                f"{found[0]['steps_per_second']:.2f}",
                f"{statistics.median(cell['bytes_step'] for cell in limited) / 1000:,.0f}",
                *(f"{_multiple(rate)} ×" if rate else "–" for rate in rates),
                " and ".join(ratios),
            )
        )
    return table(columns, rows)


def _multiple(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 1000 else f"{ratio:.3g}"
