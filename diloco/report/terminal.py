"""A run, or several, as tables in the terminal. Every number comes from the run directory."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diloco.report import units
from diloco.report.comparison import Gap, compare, differences, in_bits
from diloco.report.fitted import Column, Fitted
from diloco.runs.reader import RecordedRun

LESS = "less: how many times fewer bytes than data-parallel in bf16 would send (dp itself sends fp32)"
BITS = "bits/byte: the runs have different tokenizers, so nats per token cannot be compared"


class Figure(NamedTuple):
    """A line of the table of one run."""

    name: str
    value: str
    note: str


def table(run: RecordedRun, report: Path | None = None) -> RenderableType:
    """The figures of one run, a line each, and the path of its report."""
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
    """What `table` shows, as text."""
    f = run.figures
    figures = [
        Figure("loss of the anchors", units.loss(f.loss), _bits(run)),
        Figure("loss of one replica", units.loss(f.replica_loss), _than_anchors(f.replica_loss, f.loss)),
        Figure("loss of the unigram model", units.loss(f.unigram_loss), _than_anchors(f.unigram_loss, f.loss)),
        Figure("sent per replica", units.size(f.bytes_sent), data_parallel(run)),
        Figure("largest burst", units.size(f.largest_burst), "sent at once, in one round" if f.largest_burst else ""),
        Figure("communication hidden", units.duration(f.seconds_hidden), "while training continued"),
        Figure("communication exposed", units.duration(f.seconds_exposed), _waited(run)),
        Figure("utilization", units.percent(run.utilization), _lowest(run)),
        Figure("time", units.duration(f.seconds), f"{f.steps} steps, {units.amount(f.tokens)} tokens"),
    ]
    if run.carried[0]:
        much = "{} of {}".format(*run.carried)
        figures.insert(-1, Figure("rounds carried", much, "without this delta; a later one has its work"))
    return figures


def comparison(runs: Sequence[RecordedRun]) -> RenderableType:
    """One line per setting: loss, gap to data-parallel, bytes, seconds; below it the settings that differ."""
    rows = compare(runs)
    bits = in_bits(runs)
    columns = [
        Column("setting", [row.label for row in rows], left=True),
        Column("seeds", [str(len(row.runs)) for row in rows], spare=5),
        Column("bits/byte" if bits else "loss", [units.loss(row.loss) for row in rows]),
        Column("gap to dp", [gap(row.gap) for row in rows], spare=1),
        Column("sent", [units.size(row.bytes_sent) for row in rows], spare=2),
        Column("less", [units.factor(row.factor) for row in rows]),
        Column("burst", [units.size(row.largest_burst) for row in rows], spare=6),
        Column("time", [units.duration(row.seconds) for row in rows], spare=3),
        Column("exposed", [units.duration(row.seconds_exposed) for row in rows], spare=4),
    ]
    notes = [LESS, *([BITS] if bits else [])]
    parts: list[RenderableType] = [Fitted(columns), Text("\n".join(notes), "dim")]
    varied = differences(rows)
    if varied and any(row.label == row.runs[0].name for row in rows):
        names = [Column("differs in", list(varied), left=True)]
        values = [Column(row.label, [cells[k] for cells in varied.values()], left=True) for k, row in enumerate(rows)]
        parts += [Text(""), Fitted(names + values)]
    return Group(*parts)


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
    """Method, replicas, parameters, and how far it came if it did not finish, unless it is known to go on."""
    parts = [run.method, _taking_part(run)]
    if run.figures.parameters:
        parts.append(f"{units.amount(run.figures.parameters)} parameters")
    if run.state != "finished" and not running:
        planned = f" of {run.steps_planned}" if run.steps_planned else ""
        parts.append(f"{run.state}: step {run.figures.steps}{planned}")
    return ", ".join(parts)


def _taking_part(run: RecordedRun) -> str:
    if not run.config.get("bucket"):
        return f"{len(run.replicas)} replica" + "s" * (len(run.replicas) != 1)
    members = max((round.members for round in run.rounds), default=0)
    return f"one member of up to {members} in a bucket" if members > 1 else "one member of a bucket"


def data_parallel(run: RecordedRun) -> str:
    """The bytes of data-parallel in as many steps, and how many times fewer were sent."""
    if run.figures.bytes_data_parallel is None:
        return ""
    text = f"data-parallel: {units.size(run.figures.bytes_data_parallel)}"
    return text if run.factor is None or run.method == "dp" else f"{text}, {units.factor(run.factor)} as much"


def _bits(run: RecordedRun) -> str:
    bits = run.figures.bits_per_byte
    if bits is None:
        return ""
    if run.method in ("streaming", "diloco") and run.state != "finished" and not run.rounds:
        return "of the initial weights: no round yet"
    return f"nats per token; {bits:.4f} bits per byte"


def _than_anchors(value: float | None, anchors: float | None) -> str:
    return (
        f"{units.percent(value / anchors - 1, signed=True)} relative to the anchors"
        if value is not None and anchors
        else ""
    )


def _waited(run: RecordedRun) -> str:
    """Names the replica that waited longest, if it waited much longer than the first, which the figure is of."""
    if run.waited_most and run.waited_most[1] > 1.2 * (run.figures.seconds_exposed or 0.0) + 0.1:
        replica, seconds = run.waited_most
        return f"lost to training; replica {replica.number}: {units.duration(seconds)}"
    return "lost to training"


def _lowest(run: RecordedRun) -> str:
    """Utilization is training / (training + exposed); beside it the planner's for the same steps and rounds."""
    planned = run.summary.predicted_utilization if run.summary else None
    lowest = "of the lowest replica" if len(run.replicas) > 1 else "of the time"
    return lowest + (f"; planned {units.percent(planned, digits=1)}" if planned is not None else "")
