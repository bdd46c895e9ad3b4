"""What `diloco plan` prints and writes, as text."""

import textwrap
from dataclasses import asdict

from diloco import laws
from diloco.formats import FORMATS, Sparse
from diloco.plan.choose import Choice
from diloco.plan.costs import Conditions, Row
from diloco.plan.sheet import Sheet, width
from diloco.plan.traffic import break_even
from diloco.report.units import duration, percent, rate, size

TRAINING_BYTES = 16
"""Bytes of a parameter in training: weight, gradient and two moments, in fp32."""


ENOUGH = 0.95
"""Utilization from which on the answer is yes, unless a target is given."""


def verdict(conditions: Conditions, rows: list[Row], target: float | None, memory: float | None) -> str:
    """Whether the link is fast enough, in one sentence; what would be needed if not."""
    row, wanted = rows[-1], target or ENOUGH
    own, busy = rate(conditions.link.rate), percent(row.utilization, digits=1)
    whole = duration(row.hours * 3600)
    parallel = f"data-parallel: {percent(rows[0].utilization, digits=1)}"
    if row.utilization >= wanted:
        text = f"Yes: {own} is enough. {busy} busy with the settings below ({parallel}); the run takes {whole}."
    else:
        near = min(row.needed, key=lambda target: abs(float(target[:-1]) / 100 - wanted))
        needed = row.needed[near]
        more = "no rate gives" if needed == float("inf") else f"{rate(needed)} would give"
        text = (f"No: {own} is too slow. {busy} busy with the settings below ({parallel}); the run takes {whole}, "
                f"and {more} {near[:-1]} %.")  # fmt: skip
    asked = TRAINING_BYTES * conditions.model.parameters
    if memory is not None and asked > memory:
        text += (f" But it does not fit: weights, gradients and optimizer take {size(asked)}, a replica has "
                 f"{size(memory)}; spread a replica over more devices (--shards).")  # fmt: skip
    return text


def title(conditions: Conditions) -> str:
    group, model, link = conditions.group, conditions.model, conditions.link
    rates = f"{_rate(float(link.up))} up, {_rate(float(link.down))} down"
    return (
        f"{model.name}: {model.parameters:,.0f} parameters, {len(model.layers)} layers; "
        f"{group.step_seconds:g} s a step; {group.replicas} replicas, {rates}, "
        f"round trip {group.round_trip * 1000:g} ms"
    )


def sheets(conditions: Conditions, rows: list[Row], choice: Choice) -> list[Sheet]:
    """Utilization and the rates that are needed; what it costs; what to take."""
    link = conditions.link
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
            duration(row.hours * 3600),
            *([percent(row.goodput, digits=1)] if failing else []),
            *(["–" if row.price_per_day is None else f"{row.price_per_day:,.2f}"] if priced else []),
            size(row.device_bytes),
            size(row.host_bytes),
            percent(row.loss_gap, signed=True, digits=1),
        ]
        for row in rows
    ]
    costs_head = ["method", "sent a day", "burst", "time", *(["goodput"] if failing else []),
                  *(["price a day"] if priced else []), "more on device", "on host", "loss (estimate)"]  # fmt: skip
    chosen = [[name, str(value), choice.reasons[name]] for name, value in asdict(choice.settings).items()]
    rates = f"Utilization on this link, and the rate for a utilization, {ways}"
    return [
        Sheet(rates, head, busy, spare=(0, 0, 5, 3, 2, 1, 4)),
        Sheet("What it costs", costs_head, costs, spare=(0, 1, 2, 0, *[0] * (failing + priced), 5, 4, 3)),
        Sheet("Recommended", ["setting", "value", "why"], chosen, left=3),
    ]


def plan_tables(conditions: Conditions, sheets: list[Sheet], notes: list[str], answer: str) -> str:
    columns = width()
    head = f"{textwrap.fill(answer, columns)}\n\n{textwrap.fill(title(conditions), columns)}\n\n"
    return head + "".join(map(str, sheets)) + "".join(f"{textwrap.fill(note, columns)}\n" for note in notes)


def notes(conditions: Conditions, choice: Choice, memory: float | None) -> list[str]:
    """What the reader of the tables should know."""
    settings, group, parameters = choice.settings, conditions.group, conditions.model.parameters
    estimate = laws.loss_gap(parameters, group.replicas, settings.sync_every, settings.overlap)
    caution = f" Caution: {estimate.caution}." if estimate.caution else ""
    out = [
        f"Times are for {conditions.steps:,} steps. Bytes and bursts are what one replica sends.",
        f"Loss against data-parallel is an estimate from {estimate.source}.{caution}",
        "Real links reach 50 to 90 % of their nominal rate: use the rate you measured.",
    ]
    if group.replicas > 1:
        source = "as given."
        if conditions.measured_here:
            source = ("as measured on this machine. Give those of the machines that will train, and --hook-ns 0 for "
                      "accelerators, where copies overlap with training.")  # fmt: skip
        out.append(
            f"A value takes {group.codec_ns:.1f} ns of the communication thread in a round (--codec-ns) and "
            f"{group.hook_ns:.1f} ns of the training thread (--hook-ns), {source}"
            f" A round takes {1000 * group.round_seconds:g} ms of the training thread whatever its size."
        )
    if isinstance(FORMATS[settings.codec], Sparse):
        out.append(f"The estimate of the loss is for e3m0; {settings.codec} comes {laws.TOPK_LOSS}.")
    if isinstance(FORMATS[settings.codec], Sparse) and conditions.reduce == "collective":
        most = break_even(settings.codec)
        if group.replicas > most:
            out.append(f"With {group.replicas} replicas e3m0 sends fewer bytes than {settings.codec}: every replica "
                       f"gathers all sparse deltas, which pays with up to {most}.")  # fmt: skip
    asked = TRAINING_BYTES * parameters
    if memory is not None and asked <= memory:  # if they do not fit, the verdict says so
        out.append(f"Weights, gradients and optimizer ({size(asked)}, activations not counted) fit in {size(memory)}.")
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
    if isinstance(FORMATS[settings.codec], Sparse):
        entries.append(("outer", "sgd", "what a sparse codec sends late acts like momentum already"))
    if model is not None:
        entries.insert(0, ("model", model, "given"))
    entries += [(name, value, "given") for name, value in (extra or {}).items()]
    return "\n".join(f"# {reason}\n{name} = {_toml(value)}" for name, value, reason in entries) + "\n"


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _rate(needed: float) -> str:
    return "never" if needed == float("inf") else rate(needed)
