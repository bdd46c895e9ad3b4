"""Write the tables of docs/benchmarks.md and of the pages beside the results. Run: python -m benchmarks.table

The pages themselves are written by hand. A function here turns a record into tables, by the names of their markers. The
targets of all records are one table.
"""

from collections.abc import Callable
from pathlib import Path

from benchmarks.record import RESULTS, Record, Target, insert, read, table
from studies.bucket.tables import chaos
from studies.netlab.plot import draw
from studies.netlab.tables import tables as netlab

ROOT = Path(__file__).parent.parent
STUDIES = ROOT / "studies"
PAGES = (ROOT / "docs/benchmarks.md", RESULTS / "README.md", STUDIES / "netlab/README.md")


def main() -> None:
    records = {name: record for name, (path, _) in RECORDS.items() if (record := read(path)) is not None}
    tables = {"targets": targets(records)}
    for name, record in records.items():
        tables |= RECORDS[name][1](record)
    for path in PAGES:
        page = path.read_text()
        path.write_text(insert(page, {name: text for name, text in tables.items() if f"<!-- {name} -->\n" in page}))
        print(f"wrote the tables of {path.relative_to(ROOT)}")
    if "netlab" in records:
        draw(records["netlab"], ROOT / "docs/netlab.svg")


def none(record: Record) -> dict[str, str]:
    """Only targets."""
    return {}


def codec(record: Record) -> dict[str, str]:
    columns = ("codec", "bits a value", "encode", "decode", "next state", "relative error")
    rows = [
        (
            name,
            f"{found['bits']:.2f}",
            *(f"{found[f'{way}_ratio']:.2f} × ({found[f'{way}_gbyte_s']:.1f} GB/s)" for way in ("encode", "decode")),
            f"{1 / found['next_ratio']:.1f} times a copy",
            f"{found['relative_error']:.2g}",
        )
        for name, found in record["values"].items()
    ]
    return {"codec": table(columns, rows)}


def reduce(record: Record) -> dict[str, str]:
    rows = [
        (
            f"{rate} Mbit/s" if rate.isdigit() else rate,
            f"{found['e3m0_seconds']:.3f} s",
            f"{found['e3m0_seconds'] / found['bound']:.2f} ×" if "bound" in found else "",
            f"{found['fp32_seconds']:.3f} s",
            f"{found['ratio']:.1f}",
        )
        for rate, found in record["values"]["seconds"].items()
    ]
    columns = ("link", "4-bit mean", "times its bytes", "fp32 `all_reduce`", "times as long")
    return {"reduce-seconds": table(columns, rows)}


def accelerator(record: Record) -> dict[str, str]:
    columns = ("link", "settings", "planned", "measured", "waiting")
    rows = [
        (
            f"{name.split()[0]} Gbit/s",
            f"{name.split()[1]}: sync_every {found['sync_every']}, {found['fragments']}",
            *(f"{found[share]:.1%}" for share in ("planned", "measured", "waited")),
        )
        for name, found in record["values"].items()
    ]
    return {"accelerator": table(columns, rows)}


def autopilot(record: Record) -> dict[str, str]:
    rows = [
        (f"{mbit} Mbit/s", f"{100 * rate['auto']['measured']:.1f} %", f"{100 * rate['auto']['expected']:.1f} %",
         _settings(rate["auto"]["settings"]), f"{100 * rate['best']['measured']:.1f} %",
         _settings(rate["best"]["settings"]))
        for mbit, rate in record["values"].items()
    ]  # fmt: skip
    columns = ("link", "autopilot", "it expected", "its settings", "best fixed", "their settings")
    return {"autopilot-rates": table(columns, rows)}


def _settings(settings: Record) -> str:
    return "{sync_every}, {fragments}, overlap {overlap}, {codec}".format_map(settings)


def targets(records: dict[str, Record]) -> str:
    rows = [
        (name, target.what, target.bound, f"{target.measured:.4g}", "yes" if target.met else "**no**")
        for name, record in records.items()
        for target in (Target(**saved) for saved in record["targets"])
    ]
    return table(("benchmark", "target", "bound", "measured", "met"), rows)


RECORDS: dict[str, tuple[Path, Callable[[Record], dict[str, str]]]] = {
    "codec": (RESULTS / "codec.json", codec),
    "reduce": (RESULTS / "reduce.json", reduce),
    "overhead": (RESULTS / "overhead.json", none),
    "accelerator": (RESULTS / "accelerator.json", accelerator),
    "trainer": (RESULTS / "trainer.json", none),
    "start": (RESULTS / "start.json", none),
    "netlab": (STUDIES / "netlab/results.json", netlab),
    "autopilot": (STUDIES / "autopilot/results.json", autopilot),
    "bucket": (STUDIES / "bucket/results.json", none),
    "chaos": (STUDIES / "bucket/chaos.json", chaos),
}


if __name__ == "__main__":
    main()
