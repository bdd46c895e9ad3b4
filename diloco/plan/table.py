"""What `diloco plan` prints and writes, as text."""

import io
import shutil
import textwrap
from dataclasses import asdict

from diloco import laws
from diloco.plan.choose import Choice
from diloco.plan.costs import Conditions, Row
from diloco.plan.plot import rate_text
from diloco.presets import PRESETS
from diloco.report.units import percent, size

TRAINING_BYTES = 16
"""Bytes of a parameter in training: weight, gradient and two moments, in fp32."""


def plan_tables(conditions: Conditions, rows: list[Row], choice: Choice, notes: list[str]) -> str:
    group, model = conditions.group, conditions.model
    link = conditions.link
    rates = f"{_rate(float(link.up))} up, {_rate(float(link.down))} down"
    title = (
        f"{model.name}: {model.parameters:,.0f} parameters, {len(model.layers)} layers; "
        f"{group.step_seconds:g} s a step; {group.replicas} replicas, {rates}, "
        f"round trip {group.round_trip * 1000:g} ms"
    )
    ways = "each way" if link.up == link.down else "of the slower direction, the other in proportion"
    busy = [[row.name, percent(row.utilization, digits=1), *map(_rate, row.needed.values())] for row in rows]
    head = ["method", "busy", *(f"for {target[:-1]} %" for target in rows[0].needed)]
    failing = conditions.mtbf != float("inf")
    priced = any(row.price_per_day is not None for row in rows)
    costs = [
        [
            row.name,
            size(row.bytes_per_day),
            size(row.largest_burst),
            f"{row.hours:,.1f}",
            *([percent(row.goodput, digits=1)] if failing else []),
            *(["–" if row.price_per_day is None else f"{row.price_per_day:,.2f}"] if priced else []),
            size(row.device_bytes),
            size(row.host_bytes),
            percent(row.loss_gap, signed=True, digits=1),
        ]
        for row in rows
    ]
    costs_head = ["method", "sent a day", "burst", "hours", *(["goodput"] if failing else []),
                  *(["price a day"] if priced else []), "more on device", "on host", "loss (estimate)"]  # fmt: skip
    settings = asdict(choice.settings) | {"outer_lr": choice.outer_lr}
    chosen = [[name, str(value), choice.reasons[name]] for name, value in settings.items()]
    return (
        title
        + "\n\n"
        + text_table(f"Utilisation on this link, and the rate for a utilisation, {ways}", head, busy)
        + text_table("What it costs", costs_head, costs)
        + text_table("Recommended", ["setting", "value", "why"], chosen, left=3)
        + "".join(f"{textwrap.fill(note, 110)}\n" for note in notes)
    )


def notes(conditions: Conditions, choice: Choice, memory: float | None) -> list[str]:
    """What the reader of the tables should know."""
    settings, group, parameters = choice.settings, conditions.group, conditions.model.parameters
    estimate = laws.loss_gap(parameters, group.replicas, settings.sync_every, settings.overlap)
    caution = f" Caution: {estimate.caution}." if estimate.caution else ""
    out = [
        f"Hours are for {conditions.steps:,} steps. Bytes and bursts are what one replica sends.",
        f"Loss against data-parallel is an estimate from {estimate.source}.{caution}",
        "Real links give 50 to 90 % of their nominal rate; give the rate that you measured.",
    ]
    if choice.utilization < 0.5:
        out.append("This link keeps the accelerators idle most of the time, whatever the settings.")
    if memory is not None:
        asked = TRAINING_BYTES * parameters
        verdict = "fit" if asked <= memory else "do not fit"
        out.append(
            f"Weights, gradients and optimizer ({size(asked)}, activations not counted) {verdict} in {size(memory)}."
        )
    return out


def recipe(choice: Choice, replicas: int, model: str | None = None, extra: dict[str, int] | None = None) -> str:
    """The recommendation as a recipe for `diloco train`, each setting with its reason. `extra`: values as given."""
    settings, reasons = choice.settings, choice.reasons
    entries: list[tuple[str, object, str]] = [
        ("replicas", replicas, "given"),
        ("method", "streaming", f"{percent(choice.utilization, digits=1)} busy on this link, says `diloco plan`"),
        ("sync_every", settings.sync_every, reasons["sync_every"]),
        ("fragments", settings.fragments, reasons["fragments"]),
        ("overlap", settings.overlap, reasons["overlap"]),
        ("keep_local", 0.0, "the default: the agreed value replaces the local one"),
        ("codec", settings.codec, reasons["codec"]),
    ]
    if model not in PRESETS or PRESETS[model].parameters >= laws.FITTED[0]:  # otherwise the trainer knows better
        entries.append(("outer_lr", choice.outer_lr, reasons["outer_lr"]))
    if model is not None:
        entries.insert(0, ("model", model, "given"))
    entries += [(name, value, "given") for name, value in (extra or {}).items()]
    return "\n".join(f"# {reason}\n{name} = {_toml(value)}" for name, value, reason in entries) + "\n"


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def text_table(title: str, head: list[str], lines: list[list[str]], left: int = 1) -> str:
    """As wide as the terminal, but never so narrow that figures break."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=left == 1 or i + 1 < len(head))
    for line in lines:
        table.add_row(*line)
    text = io.StringIO()
    width = max(shutil.get_terminal_size((120, 24)).columns, 110)
    Console(file=text, width=width, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n\n"


def _rate(rate: float) -> str:
    return "never" if rate == float("inf") else rate_text(rate)
