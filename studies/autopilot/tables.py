"""The autopilot's tables in docs/benchmarks.md."""

from benchmarks.record import Record, table


def tables(record: Record) -> dict[str, str]:
    return {"autopilot-rates": _rates(record["values"])}


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
