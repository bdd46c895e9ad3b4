"""Write the tables and plots of docs/parity.md and of README.md here. Run: python -m studies.parity.page"""

from pathlib import Path
from statistics import fmean

from benchmarks.record import insert, table
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
    Row,
    at_width,
    data_parallel_of,
)
from studies.parity.spread import Bar, Spread, signed
from studies.parity.tuning import tuned

DOCS = Path(__file__).parent.parent.parent / "docs"


def main() -> None:
    results, newer = load(PATH), load(today.PATH)
    plots.draw(results, newer, DOCS)
    pages = {
        DOCS / "parity.md": {"bars": bar_table(today.bars(newer)), "paper-bars": bar_table(bars(results))},
        Path(__file__).with_name("README.md"): {"today": today.rows(newer), "rows": rows(results)},
    }
    for page, tables in pages.items():
        page.write_text(insert(page.read_text(), tables))
        print(f"wrote the tables of {page.name}")


def bar_table(found: list[Bar]) -> str:
    return table(("what", "measured", "seeds", "bar", ""), [bar.cells() for bar in found])


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


if __name__ == "__main__":
    main()
