"""The autopilot's tables in docs/benchmarks.md."""

from benchmarks.record import Record, table


def tables(record: Record) -> dict[str, str]:
    settings, values = record["settings"], record["values"]
    return {
        "autopilot-rates": _rates(values["link"]["rates"]),
        "autopilot-changes": _changes(values["link"]["changes"], settings["within"]),
        "autopilot-loss": _loss(values["loss"]),
    }


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
    return table(columns, rows)


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
    return table(columns, rows)


def _loss(loss: Record) -> str:
    rows = [
        (name, f"{found['loss']:.4f}", " and ".join(f"{each:.4f}" for each in found["fixed"]))
        for name, found in loss.items()
    ]
    return table(("", "loss", "fixed"), rows)
