"""Write the tables and plots of docs/parity.md and of README.md here. Run: python -m studies.parity.page"""

from pathlib import Path

from benchmarks.record import insert, table
from studies.parity import paper, plots, today
from studies.parity.spread import Bar

DOCS = Path(__file__).parent.parent.parent / "docs"


def main() -> None:
    plots.draw(DOCS)
    pages = {
        DOCS / "parity.md": {"bars": bar_table(today.bars()), "tried": today.tried(),
                             "paper-bars": bar_table(paper.bars())},
        Path(__file__).with_name("README.md"): {"today": today.rows(), "rows": paper.rows()},
    }  # fmt: skip
    for page, tables in pages.items():
        page.write_text(insert(page.read_text(), tables))
        print(f"wrote the tables of {page.name}")


def bar_table(bars: list[Bar]) -> str:
    return table(("what", "measured", "seeds", "bar", ""), [bar.cells() for bar in bars])


if __name__ == "__main__":
    main()
