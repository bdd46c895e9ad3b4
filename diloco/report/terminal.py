"""A run, or several, as tables in the terminal. Every number is one of the run directory's."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diloco.report import units
from diloco.report.comparison import Gap, compare
from diloco.runs.reader import Run


def table(run: Run, report: Path | None = None) -> RenderableType:
    """The figures of one run, a line each (what, how much, against what), and the path of its report."""
    lines = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    lines.add_column("what", no_wrap=True)
    lines.add_column("how much", justify="right", style="bold", no_wrap=True)
    lines.add_column("against", style="dim")
    for what, much, against in rows(run):
        lines.add_row(what, much, against)
    report = report or run.folder / "report.html"
    end = [Text(f"report: {report}", overflow="fold")] if report.is_file() else []
    return Group(Text.assemble((run.name, "bold"), "  ", (about(run), "dim")), lines, *end)


def rows(run: Run) -> list[tuple[str, str, str]]:
    """What `table` shows, as text."""
    return [
        ("loss of the anchors", units.loss(run.loss), _bits(run)),
        ("loss of one replica", units.loss(run.replica_loss), _over(run.replica_loss, run.loss, "the anchors")),
        ("loss of the unigram model", units.loss(run.unigram_loss), _over(run.unigram_loss, run.loss, "the anchors")),
        ("sent per replica", units.size(run.bytes_sent), data_parallel(run)),
        ("largest burst", units.size(run.largest_burst), "sent at once, in one round" if run.largest_burst else ""),
        ("communication hidden", units.duration(run.seconds_hidden), "while training went on"),
        ("communication exposed", units.duration(run.seconds_exposed), _waited(run)),
        ("utilisation", units.percent(run.utilization), _lowest(run)),
        ("time", units.duration(run.seconds), f"{run.steps} steps, {units.amount(run.tokens)} tokens"),
    ]


def comparison(runs: Sequence[Run]) -> Table:
    """One line per setting: loss, gap to data-parallel, bytes, seconds."""
    lines = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows = compare(runs)
    lines.add_column("setting", no_wrap=True, min_width=max(len(row.label) for row in rows))
    for name in ("seeds", "loss", "gap to dp", "sent", "less", "burst", "time", "exposed"):
        lines.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        lines.add_row(
            Text(row.label),
            str(len(row.runs)),
            units.loss(row.loss),
            gap(row.gap),
            units.size(row.bytes_sent),
            units.factor(row.factor),
            units.size(row.largest_burst),
            units.duration(row.seconds),
            units.duration(row.seconds_exposed),
        )
    return lines


def gap(value: Gap | None) -> str:
    """Mean and half-width of the 95 % interval, in percent.

    >>> gap(Gap(0.0123, 0.004, 3)), gap(Gap(0.0123, None, 1)), gap(None)
    ('+1.23 ± 0.40 %', '+1.23 %', '–')
    """
    if value is None:
        return "–"
    spread = "" if value.half_width is None else f" ± {value.half_width * 100:.2f}"
    return f"{value.mean * 100:+.2f}{spread} %"


def about(run: Run) -> str:
    """Method, replicas, parameters, and how far it came if it did not finish."""
    parts = [run.method, f"{len(run.replicas)} replica" + "s" * (len(run.replicas) != 1)]
    if run.parameters:
        parts.append(f"{units.amount(run.parameters)} parameters")
    if run.state != "finished":
        planned = f" of {run.steps_planned}" if run.steps_planned else ""
        parts.append(f"{run.state}: step {run.steps}{planned}")
    return ", ".join(parts)


def data_parallel(run: Run) -> str:
    """The bytes of data-parallel in as many steps, and how many times fewer were sent."""
    if run.bytes_data_parallel is None:
        return ""
    against = f"data-parallel in bf16: {units.size(run.bytes_data_parallel)}"
    return against if run.factor is None or run.method == "dp" else f"{against}, {units.factor(run.factor)} as much"


def _bits(run: Run) -> str:
    return "" if run.bits_per_byte is None else f"nats per token; {run.bits_per_byte:.4f} bits per byte"


def _over(value: float | None, base: float | None, of: str) -> str:
    return f"{units.percent(value / base - 1, signed=True)} against {of}" if value is not None and base else ""


def _waited(run: Run) -> str:
    """Names the replica that waited much longer than the first, whose figure is shown."""
    if run.waited_most and run.waited_most[1] > 1.2 * (run.seconds_exposed or 0.0) + 0.1:
        replica, seconds = run.waited_most
        return f"training waited; replica {replica.number}: {units.duration(seconds)}"
    return "training waited"


def _lowest(run: Run) -> str:
    """Utilisation is training / (training + exposed); beside it the planner's for the same steps and rounds."""
    planned = run.summary.get("predicted_utilization")
    return (
        "of the time in training"
        + (", lowest replica" if len(run.replicas) > 1 else "")
        + (f"; planned {units.percent(planned, digits=1)}" if isinstance(planned, float) else "")
    )
