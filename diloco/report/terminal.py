"""Tables for the terminal: one run, a comparison of several, or a list of all."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from diloco.report.comparison import Gap, compare, differences, name_of
from diloco.runs import units
from diloco.runs.reader import RecordedRun, Status

GAP = 2
"""Spaces between two columns."""
LESS = "less: how many times fewer bytes than bf16 data-parallel training would send (dp itself sends fp32)"


@dataclass(frozen=True)
class Column:
    name: str
    cells: Sequence[str]
    left: bool = False
    """Align text left, numbers right."""
    spare: int = 0
    """In a narrow terminal, the column with the largest value is dropped first; 0 always stays."""
    style: str = ""

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.name, *self.cells)))


@dataclass(frozen=True)
class Fitted:
    """A table that drops whole columns to fit the terminal and never truncates a number."""

    columns: Sequence[Column]

    def kept(self, width: int) -> list[Column]:
        kept = list(self.columns)
        while sum(column.width + GAP for column in kept) - GAP > width:
            spare = max(kept, key=lambda column: column.spare)
            if not spare.spare:
                break
            kept.remove(spare)
        return kept

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, GAP - 1, 0, 0))
        kept = self.kept(options.max_width)
        for column in kept:  # text that still does not fit wraps
            table.add_column(
                column.name,
                justify="left" if column.left else "right",
                no_wrap=not column.left,
                overflow="fold",
                style=column.style,
            )
        for cells in zip(*(column.cells for column in kept), strict=True):
            table.add_row(*map(Text, cells))
        yield table


class Figure(NamedTuple):
    """A line in the table of one run."""

    name: str
    value: str
    note: str


def table(run: RecordedRun, report: Path | None = None) -> RenderableType:
    """The figures of one run, one per line, and the path of its report."""
    lines = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    lines.add_column(no_wrap=True)
    lines.add_column(justify="right", style="bold", no_wrap=True)
    lines.add_column(style="dim")
    for row in rows(run):
        lines.add_row(*row)
    report = report or run.folder / "report.html"
    end = [Text(f"report: {report}", overflow="fold")] if report.is_file() else []
    failed = [Text(f"failed: {run.error}", "red", overflow="fold")] if run.error else []
    return Group(Text.assemble((run.name, "bold"), "  ", (about(run), "dim")), *failed, lines, *end)


def rows(run: RecordedRun) -> list[Figure]:
    """The lines of `table`, as text."""
    f, lowest = run.figures, "of the lowest replica" if len(run.replicas) > 1 else "of the time"
    figures = [
        _traffic(run),
        Figure("utilization", units.percent(run.utilization), lowest),
        Figure("loss of the anchors", units.loss(f.loss), _bits(run)),
        Figure("loss of one replica", units.loss(f.replica_loss), _than_anchors(f.replica_loss, f.loss)),
        Figure("loss of the unigram model", units.loss(f.unigram_loss), _than_anchors(f.unigram_loss, f.loss)),
        Figure("largest burst", units.size(f.largest_burst), "sent at once, in one round" if f.largest_burst else ""),
        Figure("communication hidden", units.duration(f.seconds_hidden), "while training continued"),
        Figure("communication exposed", units.duration(f.seconds_exposed), _exposed(run)),
        Figure("time", units.duration(f.seconds), f"{f.steps} steps, {units.amount(f.tokens)} tokens"),
    ]
    if run.config.get("bucket") and run.rounds:
        share = sum(round.share for round in run.rounds) / len(run.rounds)
        note = f"mean weight of this member's deltas in {len(run.rounds)} rounds"
        figures.insert(-1, Figure("part in the rounds", units.percent(share), note))
    if carried := sum(not round.counted for round in run.rounds):
        note = "without this delta; a later one has its work"
        figures.insert(-1, Figure("rounds carried", f"{carried} of {len(run.rounds)}", note))
    if lost := [e.details["steps_lost"] for r in run.replicas for e in r.events if e.details.get("steps_lost")]:
        note = f"without a round, in {len(lost)} stops" if len(lost) > 1 else "without a round, at a stop"
        figures.insert(-1, Figure("steps lost", f"{sum(lost)}", note))
    return figures


def comparison(runs: Sequence[RecordedRun]) -> RenderableType:
    """One line per setting: loss, gap to data-parallel, bytes, seconds; then the settings that differ."""
    rows = compare(runs)
    columns = [
        Column("setting", [row.label for row in rows], left=True),
        Column("seeds", [str(len(row.runs)) for row in rows], spare=5),
        Column("loss", [units.loss(row.loss) for row in rows]),
        Column("bits/byte", [units.loss(row.bits_per_byte) for row in rows], spare=7),
        Column("gap to dp", [gap(row.gap) for row in rows], spare=1),
        Column("sent", [units.size(row.bytes_sent) for row in rows], spare=2),
        Column("less", [units.factor(row.factor) for row in rows]),
        Column("burst", [units.size(row.largest_burst) for row in rows], spare=6),
        Column("time", [units.duration(row.seconds) for row in rows], spare=3),
        Column("exposed", [units.duration(row.seconds_exposed) for row in rows], spare=4),
    ]
    parts: list[RenderableType] = [Fitted(columns), Text(LESS, "dim")]
    varied = differences(rows)
    if varied and any(row.label == name_of(row.runs) for row in rows):
        names = [Column("differs in", list(varied), left=True)]
        values = [Column(row.label, [cells[k] for cells in varied.values()], left=True) for k, row in enumerate(rows)]
        parts += [Text(""), Fitted(names + values)]
    return Group(*parts)


def listing(runs: Sequence[Status]) -> RenderableType:
    """One line per run: state, progress, loss."""
    return Fitted([
        Column("run", [str(run.folder) for run in runs], left=True),
        Column("state", [run.state for run in runs], left=True),
        Column("method", [run.method for run in runs], left=True, spare=2),
        Column("model", [run.model for run in runs], left=True, spare=3),
        Column("progress", [run.progress for run in runs]),
        Column("loss", [units.loss(run.loss) for run in runs]),
        Column("last write", [units.ago(run.age) for run in runs], spare=1),
    ])  # fmt: skip


def gap(value: Gap | None) -> str:
    """Mean and half-width of the 95 % interval, in percent.

    >>> gap(Gap(0.0123, 0.004, 3)), gap(Gap(0.0123, None, 1)), gap(None)
    ('+1.23 ± 0.40 %', '+1.23 %', '–')
    """
    if value is None:
        return "–"
    spread = "" if value.half_width is None else f" ± {value.half_width * 100:.2f}"
    return f"{value.mean * 100:+.2f}{spread} %"


def about(run: RecordedRun, *, running: bool = False) -> str:
    """Method, replicas, parameters, and the last step if the run neither finished nor is `running`."""
    parts = [run.method, _participants(run)]
    if run.figures.parameters:
        parts.append(f"{units.amount(run.figures.parameters)} parameters")
    if run.state != "finished" and not running:
        planned = f" of {run.steps_planned}" if run.steps_planned else ""
        parts.append(f"{run.state}: step {run.figures.steps}{planned}")
    return ", ".join(parts)


def _participants(run: RecordedRun) -> str:
    if not run.config.get("bucket"):
        written = run.summary and run.summary.replicas  # those on other machines have run directories of their own
        count = written or len(run.replicas)
        return f"{count} replica" + "s" * (count != 1)
    members = max((round.members for round in run.rounds), default=0)
    return f"one member of up to {members} in a bucket" if members > 1 else "one member of a bucket"


def _traffic(run: RecordedRun) -> Figure:
    sent, data_parallel = units.size(run.figures.bytes_sent), units.size(run.figures.bytes_data_parallel)
    if run.factor is None or run.method == "dp":
        return Figure("sent per replica", sent, f"data-parallel: {data_parallel}" if run.factor else "")
    return Figure("less traffic", units.factor(run.factor), f"{sent} sent; data-parallel: {data_parallel}")


def _bits(run: RecordedRun) -> str:
    bits = run.figures.bits_per_byte
    if bits is None:
        return ""
    if run.method in ("streaming", "diloco") and run.state != "finished" and not run.rounds:
        return "of the initial weights: no round yet"
    return f"nats per token; {bits:.4f} bits per byte"


def _than_anchors(value: float | None, anchors: float | None) -> str:
    if value is None or not anchors:
        return ""
    return f"{units.percent(value / anchors - 1, signed=True)} relative to the anchors"


def _exposed(run: RecordedRun) -> str:
    """Explain the figure, which is the first replica's; name another replica if it lost much more."""
    worst = run.most_exposed
    if worst and worst.seconds_exposed > 1.2 * (run.figures.seconds_exposed or 0.0) + 0.1:
        return f"in replica {run.replicas[0].number}; replica {worst.number}: {units.duration(worst.seconds_exposed)}"
    return "waiting, taking deltas, applying"
