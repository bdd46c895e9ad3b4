"""The autopilot's part of docs/benchmarks.md."""

from benchmarks.record import Record, fill, table


def section(record: Record) -> str:
    settings, values = record["settings"], record["values"]
    head = fill(f"""`make autopilot`, as root: two replicas in network namespaces whose links a token bucket holds at a
    rate; a step is a pause of {1000 * settings["step_seconds"]:.0f} ms, as if an accelerator trained, with
    {settings["parameters"]:,} parameters. Nobody gives a setting: after ten steps `diloco.pilot.autopilot` measures and
    chooses. Beside it the best of {_count(values)} fixed settings that were tried one by one on the same link.""")
    parts = [head]
    if "link" in values:
        parts += [_rates(values["link"]["rates"]), _changes(values["link"]["changes"], settings["within"])]
    if "loss" in values:
        parts.append(_loss(values["loss"]))
    return "\n\n".join(parts)


def _count(values: Record) -> int:
    return max((len(found["fixed"]) for found in values.get("link", {}).get("rates", {}).values()), default=0)


def _settings(found: Record) -> str:
    names = ("sync_every", "fragments", "overlap", "codec")
    return ", ".join(
        f"{found[name]}" if name != "overlap" else f"overlap {found[name]}" for name in names if name in found
    )


def _rates(rates: Record) -> str:
    rows = [
        (f"{mbit} Mbit/s", f"{100 * found['auto']['measured']:.1f} %", f"{100 * found['auto']['expected']:.1f} %",
         _settings(found["auto"]["settings"]), f"{100 * found['best']['measured']:.1f} %",
         _settings(found["best"]["settings"]))
        for mbit, found in rates.items()
    ]  # fmt: skip
    columns = ("link", "autopilot", "it expected", "its settings", "best fixed", "their settings")
    return f"Utilisation, with sync_every first among the settings:\n\n{table(columns, rows)}"


def _changes(changes: list[Record], within: int) -> str:
    rows = [
        (f"{found['auto']['mbit']:g} → {found['auto']['then']:g} Mbit/s", f"{100 * found['auto']['measured']:.1f} %",
         f"{100 * found['auto']['during']:.1f} %", f"{100 * found['auto']['measured_then']:.1f} %",
         _settings(found["auto"]["settings_then"]), f"{100 * found['best']['measured']:.1f} %")
        for found in changes
    ]  # fmt: skip
    columns = (
        "the link",
        "before",
        f"in the next {within} sync periods",
        "from then on",
        "its settings then",
        "best fixed",
    )
    return f"The link changes in the middle of a sync period:\n\n{table(columns, rows)}"


def _loss(loss: Record) -> str:
    rows = [
        (name, f"{found['loss']:.4f}", " and ".join(f"{each:.4f}" for each in found["fixed"]))
        for name, found in loss.items()
    ]
    first = next(iter(loss.values()))
    text = fill(f"""The loss of real training whose settings change at half of it, beside runs with the first and with
    the second settings throughout (0.09M parameters, {first["steps"]} steps, means of {first["seeds"]} seeds):""")
    return f"{text}\n\n{table(('', 'loss', 'fixed'), rows)}"
