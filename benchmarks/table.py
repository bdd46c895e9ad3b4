"""Write the tables of docs/benchmarks.md. Run: python -m benchmarks.table

The page itself is written by hand. A function here turns a record into tables, by the names of their markers; each
record also has a table of its targets.
"""

from collections.abc import Callable
from pathlib import Path

from benchmarks.record import RESULTS, Record, Target, insert, read, table
from studies.bucket.tables import chaos
from studies.bucket.tables import tables as bucket
from studies.netlab.plot import draw
from studies.netlab.tables import tables as netlab

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
STUDIES = ROOT / "studies"


def main() -> None:
    page = PAGE.read_text()
    for name, (path, tables) in RECORDS.items():
        if (record := read(path)) is not None:
            page = insert(page, {**tables(record), f"{name}-targets": targets(record)})
            if name == "netlab":
                draw(record, PAGE.parent / "netlab.svg")
    PAGE.write_text(page)
    print(f"wrote the tables of {PAGE.name}")


def none(record: Record) -> dict[str, str]:
    """Only targets."""
    return {}


def codec(record: Record) -> dict[str, str]:
    columns = ("codec", "bits a value", "encode", "decode", "decode to new memory", "next state", "error", "cosine")
    rows = [
        (
            name,
            f"{found['bits']:.2f}",
            *(f"{found[f'{way}_ratio']:.2f} × ({found[f'{way}_gbyte_s']:.1f} GB/s)" for way in ("encode", "decode")),
            f"{found['fresh_ratio']:.2f} × ({found['fresh_gbyte_s']:.1f} GB/s)",
            f"{1 / found['next_ratio']:.1f} times a copy",
            f"{found['relative_error']:.2g}",
            f"{found['cosine']:.5f}",
        )
        for name, found in record["values"].items()
    ]
    return {"codec": table(columns, rows)}


def reduce(record: Record) -> dict[str, str]:
    values = record["values"]
    times = [
        (
            f"{rate} Mbit/s" if rate.isdigit() else rate,
            f"{found['e3m0_seconds']:.3f} s",
            f"{found['e3m0_seconds'] / found['bound']:.2f} ×" if "bound" in found else "",
            f"{found['fp32_seconds']:.3f} s",
            f"{found['ratio']:.1f}",
        )
        for rate, found in values["seconds"].items()
    ]
    columns = ("replicas", "bound, bytes a parameter", "payload", "sent, with TCP", "received, with TCP", "sent again")
    rows = [
        (
            str(m),
            f"{found['bound_bytes_per_parameter']:g}",
            *(f"{found[key]:.3f} ×" for key in ("payload", "tx", "rx")),
            f"{found['retransmitted_segments']} segments",
        )
        for m, found in ((m, values[f"bytes_{m}"]) for m in (2, 4))
    ]
    return {
        "reduce-bytes": table(columns, rows),
        "reduce-seconds": table(("link", "4-bit mean", "times the bound", "fp32 all_reduce", "times as long"), times),
    }


def overhead(record: Record) -> dict[str, str]:
    memory = record["values"]["memory"]
    peaks = [
        ("joining, where the weights differ", f"{memory['join_mb']:.0f} MB", ""),
        ("during rounds", f"{memory['rounds_mb']:.0f} MB", f"{memory['rounds_allowed_mb']:.0f} MB"),
        ("in `finish()`", f"{memory['finish_mb']:.0f} MB", f"{memory['finish_allowed_mb']:.0f} MB"),
    ]
    return {"overhead-memory": table(("peak", "measured", "allowed"), peaks)}


def accelerator(record: Record) -> dict[str, str]:
    columns = ("link", "settings", "planned", "measured", "waiting", "hook a step", "longest", "hook, times its bound")
    rows = [
        (
            f"{name.split()[0]} Gbit/s",
            f"{name.split()[1]}: sync_every {found['sync_every']}, {found['fragments']}, overlap {found['overlap']}",
            f"{found['planned']:.1%}",
            f"{found['measured']:.1%}",
            f"{found['waited']:.1%}",
            f"{1000 * found['hook_seconds']:.1f} ms",
            f"{1000 * found['longest_hook_seconds']:.0f} ms",
            f"{found['hook_over_passes']:.2f}",
        )
        for name, found in record["values"].items()
    ]
    return {"accelerator": table(columns, rows)}


def start(record: Record) -> dict[str, str]:
    named = {
        "python": "`python -c pass`, to compare",
        "import": "`python -c 'import diloco'`",
        "help": "`diloco --help`",
    }
    rows = [
        (text, *(f"{record['values'][name][key]:.3f} s" for key in ("median", "least"))) for name, text in named.items()
    ]
    return {"start": table(("what", "median", "least"), rows)}


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


def targets(record: Record) -> str:
    rows = [
        (target.what, target.bound, f"{target.measured:.4g}", "yes" if target.met else "**no**")
        for target in (Target(**saved) for saved in record["targets"])
    ]
    return table(("target", "bound", "measured", "met"), rows)


RECORDS: dict[str, tuple[Path, Callable[[Record], dict[str, str]]]] = {
    "codec": (RESULTS / "codec.json", codec),
    "reduce": (RESULTS / "reduce.json", reduce),
    "overhead": (RESULTS / "overhead.json", overhead),
    "accelerator": (RESULTS / "accelerator.json", accelerator),
    "trainer": (RESULTS / "trainer.json", none),
    "start": (RESULTS / "start.json", start),
    "netlab": (STUDIES / "netlab/results.json", netlab),
    "autopilot": (STUDIES / "autopilot/results.json", autopilot),
    "bucket": (STUDIES / "bucket/results.json", bucket),
    "restarts": (STUDIES / "bucket/restarts.json", none),
    "chaos": (STUDIES / "bucket/chaos.json", chaos),
}


if __name__ == "__main__":
    main()
