"""Write the tables and plots of docs/parity.md. Run: python -m studies.parity.page"""

from math import inf
from pathlib import Path
from statistics import fmean

from benchmarks.record import insert, table
from diloco.plan import laws
from studies.parity import plots, today
from studies.parity.__main__ import PATH
from studies.parity.paired import compared, judged
from studies.parity.results import Results, load
from studies.parity.rows import (
    DILOCO,
    DP,
    NAMED,
    NARROW,
    ROWS,
    STREAMING,
    WIDE,
    WIDTH,
    WIDTHS,
    Row,
    at_width,
    data_parallel_of,
)
from studies.parity.spread import Bar, Spread, percent, signed
from studies.parity.tuning import tuned

DOCS = Path(__file__).parent.parent.parent / "docs"
SCALED = (*(at_width(width, STREAMING) for width in WIDTHS), "M = 1", "M = 4", "M = 8", "sync_every 100")
EVALUATIONS = (STREAMING, DILOCO, at_width(WIDE, STREAMING), "M = 4", "M = 8",
               "sync_every 100")  # fmt: skip


def main() -> None:
    results = load(PATH)
    plots.draw(results, DOCS)
    page = DOCS / "parity.md"
    page.write_text(insert(page.read_text(), tables(results, load(today.PATH))))
    print("wrote the tables of docs/parity.md")


def tables(results: Results, newer: Results) -> dict[str, str]:
    """By the name of its marker in docs/parity.md."""
    return {
        "today-bars": today.bars(newer),
        "today-rows": today.rows(newer),
        "today-curve": today.early(newer),
        "bars": table(("what", "measured", "seeds", "bar", ""), [bar.cells() for bar in bars(results)]),
        "rows": rows(results),
        "evaluated": evaluated(results),
        "laws": scaling(results),
    }


def bars(results: Results) -> list[Bar]:
    def gap(row: str, against: str, what: str = "final") -> Spread | None:
        return compared(NAMED[row], NAMED[against], results, what)

    return [
        *(Bar(f"{at_width(width, STREAMING)}, against data-parallel",
              gap(at_width(width, STREAMING), at_width(width, DP)), high=1.0)
          for width in (WIDE, WIDTH, NARROW)),
        Bar("streaming, overlap 1, E3M0, against DiLoCo", gap(STREAMING, DILOCO), -0.5, 0.5),
        Bar("fp32 on the wire, against E3M0", gap("fp32 on the wire", STREAMING), -0.2, 0.2),
        Bar("random zeroing, against E3M0", gap("random zeroing", STREAMING), low=0.5),
        Bar("overlap 5, against 1", gap("overlap 5", STREAMING), -0.3, 0.3),
        Bar("one replica, against the model that is exported", gap(STREAMING, STREAMING, "replica"), low=0.0),
        Bar("M = 4, against M = 2", gap("M = 4", STREAMING), low=0.0),
        Bar("M = 8, against M = 4", gap("M = 8", "M = 4"), low=0.0),
    ]  # fmt: skip


def rows(results: Results) -> str:
    lines = []
    for row in ROWS:
        cell, values = tuned(row, results)[0], [result["final"] for result in judged(row, results)]
        if cell is None or not values:
            lines.append((row.name, "", "", "0", "not run", "", ""))
            continue
        against = [_gap(row, data_parallel_of(row), results), ""]
        if row.cell.width == WIDTH:
            against[1] = _gap(row, NAMED[STREAMING], results)
        lines.append((row.name, f"{cell.lr:g}", f"{cell.outer_lr:g}" if cell.replicas else "", str(len(values)),
                      f"{fmean(values):.4f}", *against))  # fmt: skip
    head = ("row", "lr", "outer lr", "seeds", "loss", "gap to data-parallel, %", "gap to streaming, %")
    return table(head, lines)


def _gap(row: Row, against: Row, results: Results) -> str:
    found = None if row is against else compared(row, against, results)
    return "" if found is None else signed(found)


def scaling(results: Results) -> str:
    found = {r["cell"]["width"]: r["parameters"] for r in results.values()}
    lines = []
    for name in SCALED:
        row = NAMED[name]
        cell = row.cell
        law = laws.loss_gap(found.get(cell.width, inf), cell.replicas, cell.sync_every, cell.overlap).gap
        measured = percent(compared(row, data_parallel_of(row), results))
        lines.append((f"{found.get(cell.width, 0):,}", str(cell.replicas), str(cell.sync_every), f"{100 * law:+.1f} %",
                      measured))  # fmt: skip
    return table(("parameters", "M", "sync_every", "the laws", "measured"), lines)


def evaluated(results: Results) -> str:
    """One replica, mean of replicas, anchors, after finish(): against the latter."""
    lines = []
    for name in EVALUATIONS:
        row = NAMED[name]
        each = [compared(row, row, results, what) for what in ("replica", "mean", "anchors")]
        if all(each):
            lines.append((name, *(signed(one) for one in each if one)))
    head = ("row", "first replica, %", "mean of replicas, %", "anchors before the last sync, %")
    return table(head, lines)


if __name__ == "__main__":
    main()
