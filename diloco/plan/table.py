"""The text of `diloco plan`: an answer, tables that fit the terminal, and notes."""

import io
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from diloco.plan import laws
from diloco.plan.choose import Choice, Settings
from diloco.plan.costs import Conditions, Row, storage_day
from diloco.plan.methods import count_values
from diloco.runs.flags import spelled
from diloco.runs.units import amount, duration, percent, rate, size

WIDEST = 110
ENOUGH = 0.95
"""Utilization at which the answer is yes."""


@dataclass(frozen=True)
class Sheet:
    """A table; `str` renders it for the terminal."""

    title: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    left: int = 1
    """Number of leading columns that hold words."""
    spare: tuple[int, ...] = ()
    """Order in which columns are dropped if the terminal is narrow, see `report.terminal.Column`. Empty: none is."""

    def __str__(self) -> str:
        from rich.console import Console

        from diloco.report.terminal import Column, Fitted

        spare = self.spare or (0,) * len(self.head)
        cells = zip(self.head, zip(*self.lines, strict=True), strict=True)
        columns = [Column(name, column, i < self.left, spare[i]) for i, (name, column) in enumerate(cells)]
        text = io.StringIO()
        console = Console(file=text, width=width(), color_system=None)
        console.print(Fitted(columns))
        missing = len(columns) - len(Fitted(columns).kept(console.width))
        hint = f" ({missing} more columns in a wider terminal)" if missing else ""
        title = textwrap.fill(self.title + hint, console.width)
        return "\n".join([title, *(line.rstrip() for line in text.getvalue().splitlines())]) + "\n\n"


def width() -> int:
    return min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)


def wrapped(paragraph: str) -> str:
    """Wrapped to the terminal, without a percent sign at the start of a line."""
    lines = textwrap.fill(paragraph.replace(" %", "\N{NO-BREAK SPACE}%"), width())
    return lines.replace("\N{NO-BREAK SPACE}", " ") + "\n"


def verdict(conditions: Conditions, rows: list[Row]) -> str:
    """Whether the link is fast enough; if not, the rate that would be."""
    row = rows[-1]
    link, parallel = rate(conditions.rate), percent(rows[0].utilization, digits=1)
    result = (f"The recommended settings reach {percent(row.utilization, digits=1)} utilization (data-parallel: "
              f"{parallel}); the run takes {duration(row.hours * 3600)}.")  # fmt: skip
    if row.utilization >= ENOUGH:
        return f"Yes: {link} is enough. {result}"
    share, needed = percent(ENOUGH, digits=0), row.needed[f"{ENOUGH:.0%}"]
    remedy = f"No rate reaches {share}." if needed == float("inf") else f"{share} would take {rate(needed)}."
    return f"No: {link} is too slow. {result} {remedy}"


def sheets(conditions: Conditions, rows: list[Row], choice: Choice) -> list[Sheet]:
    """Utilization and required rates; costs; recommended settings."""
    title = "Utilization on this link, and the rate needed for a given utilization"
    head = ["method", "this link", *(f"for {target[:-1]} %" for target in rows[0].needed)]
    shares = [[row.name, percent(row.utilization, digits=1), *map(_rate, row.needed.values())] for row in rows]
    costs = [
        [
            row.name,
            size(row.bytes_per_day),
            size(row.largest_burst),
            duration(row.hours * 3600),
            size(row.device_bytes),
            size(row.host_bytes),
            percent(row.loss_gap, signed=True, digits=1),
        ]
        for row in rows
    ]
    each = f"; memory is that of one of {conditions.shards} ranks" if conditions.shards > 1 else ""
    costs_head = ["method", "sent/day", "burst", "time", "extra on device", "on host", "loss (estimate)"]
    settings = [[f"{spelled(name)} {value}", choice.reasons[name]] for name, value in asdict(choice.settings).items()]
    return [
        Sheet(title, head, shares, spare=(0, 0, 5, 3, 2, 1, 4)),
        Sheet(f"Costs{each}", costs_head, costs, spare=(0, 1, 2, 0, 5, 4, 3)),
        Sheet("Recommended settings", ["flag", "why"], settings, left=2),
    ]


def rehearsed(conditions: Conditions, row: Row, settings: Settings, rehearsal: Mapping[str, float]) -> Sheet:
    """What the real model takes of a rank, beside what the plan says."""
    fragments = conditions.model.fragments(settings.fragments)
    largest = max(map(count_values, fragments)) / conditions.shards
    burst, bus = row.largest_burst / conditions.shards, conditions.bus_bytes(settings.codec) * largest
    planned = {
        "fragments": (f"{len(fragments)}", "fragments", str),
        "values of the largest": (amount(largest), "largest_fragment", amount),
        "sent in the largest round": (size(burst), "largest_burst", size),
        "between host and accelerator in it": (size(bus), "bus_bytes", size),
        "memory of the accelerator": (size(row.device_bytes), "device_bytes", size),
        "memory of the host": (size(row.host_bytes), "host_bytes", size),
        "of it pinned": ("", "pinned_bytes", size),
        "memory of the host, last sync": ("", "last_bytes", size),
    }
    lines = [[name, shown(rehearsal[key]), text] for name, (text, key, shown) in planned.items()]
    title = f"Rehearsal: one of {conditions.shards} ranks, with the real model but without its values"
    return Sheet(title, ["of a rank", "rehearsal", "plan"], lines)


def notes(conditions: Conditions, choice: Choice) -> list[str]:
    """The assumptions behind the tables."""
    settings, group = choice.settings, conditions.group
    estimate = laws.loss_gap(conditions.model.parameters, group.replicas, settings.sync_every, settings.overlap)
    caution = f" Caution: {estimate.caution}." if estimate.caution else ""
    notes = [
        f"Times are for {conditions.steps:,} steps. Bytes and bursts are what one replica sends.",
        f"The loss relative to data-parallel is an estimate from {laws.SCALING_LAWS} (fits by replicas) and "
        f"{laws.STREAMING} (Tables 5 and 6, for sync_every).{caution}",
        "Real links reach 50 to 90 % of their nominal rate: use the rate you measured.",
    ]
    if group.replicas > 1:
        notes.append(
            f"Each value of a round takes {conditions.shards * group.codec_ns:.1f} ns of the communication thread "
            f"(--codec-ns) and {conditions.shards * group.hook_ns:.1f} ns of the training thread (--hook-ns). Every "
            f"round also takes {1000 * group.round_seconds:g} ms of the training thread."
        )
        if conditions.bus:
            notes.append(
                f"With the state on the {conditions.state}, each value of a round takes "
                f"{conditions.bus_bytes(settings.codec):.3g} bytes of the bus. Training does not wait for these "
                "copies, but the round does. The time that the accelerator spends on encoding and merging is not "
                "counted (--hook-ns). No GPU has run this yet."
            )
        if conditions.reduce == "bucket":
            requests, egress = storage_day(conditions, settings, direct=False)
            direct = sum(storage_day(conditions, settings, direct=True))
            notes.append(
                f"The store costs each member about ${requests + egress:.2f} a day: ${requests:.2f} for requests, and "
                f"${egress:.2f} for what it reads (--prices). If all members reach each other (--announce): "
                f"${direct:.2f}."
            )
        if conditions.assumed:
            notes.append(
                f"Assumed, not measured: {', '.join(conditions.assumed)}. `diloco doctor` prints yours, and with "
                "--device that of the bus."
            )
    return notes


def text(conditions: Conditions, answer: str, sheets: list[Sheet], notes: list[str]) -> str:
    group, model = conditions.group, conditions.model
    inputs = (
        f"{model.name}: {model.parameters:,.0f} parameters, {len(model.layers)} layers; {group.step_seconds:g} s per "
        f"step; {group.replicas} replicas, {rate(conditions.rate)} each way, round trip "
        f"{group.round_trip * 1000:g} ms"
    )
    return f"{wrapped(answer)}\n{wrapped(inputs)}\n{''.join(map(str, sheets))}{''.join(map(wrapped, notes))}"


def _rate(needed: float) -> str:
    return "never" if needed == float("inf") else rate(needed)
