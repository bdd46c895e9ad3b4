"""Write docs/parity.md and its plots from results.jsonl. Run: python -m studies.parity.page"""

import textwrap
from math import inf
from pathlib import Path
from statistics import fmean

from benchmarks.record import table
from diloco import laws
from studies.parity import claims, endings, plots, prose, today, wire
from studies.parity.__main__ import PATH
from studies.parity.cell import BATCH, CONTEXT, EVALUATED, SHAPES, STEPS
from studies.parity.paired import compared, judged, noise
from studies.parity.results import Results, load
from studies.parity.rows import (
    BASE,
    DILOCO,
    NAMED,
    ROWS,
    STREAMING,
    WIDE,
    WIDTH,
    WIDTHS,
    Row,
    at_width,
    data_parallel_of,
)
from studies.parity.tuning import NOISE, tuned

DOCS = Path(__file__).parent.parent.parent / "docs"
SCALED = (*(at_width(width, STREAMING) for width in WIDTHS), "M = 1", "M = 4", "M = 8", "sync_every 100")
EVALUATIONS = (STREAMING, DILOCO, at_width(WIDE, STREAMING), "M = 4", "M = 8",
               "sync_every 100")  # fmt: skip


def main() -> None:
    results = load(PATH)
    plots.draw(results, DOCS)
    (DOCS / "parity.md").write_text(wrapped(page(results, load(today.PATH))))
    print("wrote docs/parity.md")


def page(results: Results, newer: Results) -> str:
    hours = sum(result["cpu_seconds"] for result in results.values()) / 3600
    there = next(iter(results.values()))["on"]
    return f"""# Parity

Does it train as well as data-parallel? This page has two parts. The first is what the trainer does today. The second,
from "The paper's rule" on, is the paper's method with AdamW inside and a fixed outer rule, claim by claim.

## Today

{today.summary(newer, results).strip()}

{today.bars(newer)}

{today.section(newer)}

{today.settings(newer).strip()}

{today.early(newer).strip()}

{wire.section().strip()}

## How runs end

{endings.section(load(endings.PATH)).strip()}

## The paper's rule

This part is generated from `studies/parity/results.jsonl`, which `make parity` measures: {len(results)} runs,
{hours:.1f} hours of one core ({there["cpu"]}, Python {there["python"]}, torch {there["torch"]}). `make parity-quick`
repeats its core in a few minutes. Its runs ended with an outer step on the last delta, where `finish()` takes the mean
of the replicas today: a difference of about 0.06 % of the loss here.

{prose.summary(results).strip()}

## What was run

A byte-level decoder of {SHAPES[WIDTH].layers} layers on the sources of Python's standard library, {STEPS} steps
of {BATCH} sequences of {CONTEXT} bytes ({STEPS * BATCH * CONTEXT / 1e6:.2g}M bytes): {sizes(results)}. AdamW, warm-up
over a tenth of the steps, cosine to 5 %, clipping at 1, weight decay 1/steps: the trainer's own rules. All methods see
the same windows in the same steps at the same global batch, and start from the same weights. The replicas are those of
`diloco.reduce.local`: the production code with the bits of the collective reducer. Where nothing else is said: width
{WIDTH}, M = 2, sync_every {BASE.sync_every} ({prose.ROUNDS} rounds of every fragment), three fragments (two of three
layers each, strided; the embedding and the last norm), keep_local 0, outer momentum {BASE.momentum:g}.

Learning rates were tuned on seed 0, by walking a grid of factor √2 until no neighbour was better by more than
{NOISE:g} %: the inner lr for data-parallel at each width; at width {WIDTH} also the outer lr of streaming, of DiLoCo,
of outer momentum 0.9 and of random zeroing. All other rows, and streaming at the other widths, take these over: only
"inner lr tuned too" has an inner lr of its own. Rows are judged on the seeds from 1 on, which tuning has not seen.

Losses are in nats a byte on {EVALUATED:,} held-out bytes, of the model that `finish()` leaves. Gaps are in percent of
the loss, paired by seed, with the 95 % interval of their mean. Data-parallel and the rows that differ from streaming
only in what is sent and when it is merged share one estimate of noise (two-way: a level for each row and for each
seed; {noise(WIDTH, results).freedom} degrees of freedom at width {WIDTH}); every other row has the Student interval of
its own differences, and none with one seed. A bar is met or missed when the complete interval is on one side of it,
and unresolved otherwise.

## The bars

{table(("what", "measured", "seeds", "bar", ""), [bar.cells() for bar in claims.bars(results)])}

![gaps to data-parallel](parity-gaps.svg)

## All rows

{rows(results)}

![gap of the anchors over the run](parity-curves.svg)

## The paper's claims

{table(("claim", "paper", "here", "holds"), claims.of_the_paper(results))}

## What is evaluated

{evaluated(results)}

![cosine between the replicas' deltas](parity-cosines.svg)

## What does not hold, and why

{prose.negative(results).strip()}

## Against the scaling laws

The gap to data-parallel as the fits of arXiv 2503.09799 give it (with the streaming paper's Tables 5 and 6 for
sync_every), extrapolated from 35M parameters by a factor of a hundred to a thousand:

{scaling(results)}

## What it changed

{prose.changed(results).strip()}
"""


def wrapped(text: str) -> str:
    """Figures change the length of lines: fill paragraphs and list items anew, leave tables and headings."""
    out: list[str] = []
    for line in text.splitlines():
        if not line and out and not out[-1]:
            continue  # a part that is not measured yet leaves nothing
        loose = bool(line) and line[0] not in "#|!"
        begins = line.startswith("- ") or not (out and out[-1] and out[-1][0] not in "#|!")
        if loose and not begins:
            out[-1] += f" {line.strip()}"
        else:
            out.append(line)
    return "\n".join(line if not line or line[0] in "#|!" else _filled(line) for line in out) + "\n"


def _filled(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def sizes(results: Results) -> str:
    found = {r["cell"]["width"]: r["parameters"] for r in results.values()}
    each = [f"{n:,} parameters at width {width} ({STEPS * BATCH * CONTEXT / n:.0f} bytes for each)"
            for width, n in sorted(found.items())]  # fmt: skip
    return ", ".join(each)


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
    return "" if found is None else claims.signed(found)


def scaling(results: Results) -> str:
    found = {r["cell"]["width"]: r["parameters"] for r in results.values()}
    lines = []
    for name in SCALED:
        row = NAMED[name]
        cell = row.cell
        law = laws.loss_gap(found.get(cell.width, inf), cell.replicas, cell.sync_every, cell.overlap).gap
        measured = claims.percent(compared(row, data_parallel_of(row), results))
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
            lines.append((name, *(claims.signed(one) for one in each if one)))
    head = ("row", "first replica, %", "mean of replicas, %", "anchors before the last sync, %")
    return f"Loss against that of the model after `finish()`, in percent:\n\n{table(head, lines)}"


if __name__ == "__main__":
    main()
