"""The lab's part of docs/benchmarks.md."""

import statistics
from collections.abc import Sequence

from benchmarks.record import Record, fill, table
from diloco.plan.traffic import FILLED, TCP
from studies.netlab.methods import METHODS
from studies.netlab.summary import CLOSE, LEVELS, OURS, at, of


def section(record: Record) -> str:
    settings, values = record["settings"], record["values"]
    how = HOW.format(**settings, step_ms=1000 * settings["step_seconds"]).strip()
    how = "\n\n".join(fill(paragraph) for paragraph in how.split("\n\n"))
    head = (how, PICTURE, TABLE, _shares(values["cells"]))
    tail = (METHODS_TABLE, _methods(values), _reading(values), _stall(values), _swap(values), _wan(values))
    return "\n\n".join(text.strip() for text in (*head, *tail))


HOW = """
`make netlab`, as root (or `python -m studies.netlab`, then `python -m benchmarks.table`): two replicas, each a
process on a core of its own and in a network namespace of its own, joined by gloo and TCP ({congestion_control},
Linux {kernel}) over virtual Ethernet (MTU {mtu}) whose rate `tc tbf` sets each way ({tbf}). They train a decoder of
{parameters:,} parameters, {batch} sequences of 64 tokens and {step_ms:.0f} ms a step, with sync_every {sync_every};
streaming has {fragments} equal fragments, its overlap is {overlap} steps; torchft (0.2.0) has the longest delay
that it allows, an outer optimizer for each fragment, its own process group and lighthouse. Training, communication
and the kernel's TCP all run on these two cores. The bound is the least rate that 4 bits a parameter need: 2(M−1)/M
· 4 · parameters ÷ (sync_every · step time).

A cell is two sync_every or more (data-parallel: at most 90 s, at least 3 steps), cut into parts. Before and after
each part both replicas train an equal model with no sync at all. This gives two figures: by the clock, the time of
these steps over the time with sync, of the slower replica; and by the cores, the share of the time in which the
training thread has its core, over the same share without sync. This machine's speed changes by 10 % within seconds,
which makes the first uncertain by 5 points and more in a cell of two parts, and not the second. The second does not
see steps that become slower because communication uses memory and cache, and counts what DDP and torchft do on the
training thread as training. Rates, crossings and predictions go by the cores.
"""

PICTURE = "![Utilisation against the rate of the link, measured and predicted](netlab.svg)"

TABLE = """
Utilisation in per cent by the cores / by the clock (predicted), at multiples of the bound. Where the cores' speed
changed between calibration and cell, the rate was another multiple than intended; the prediction is for what it
was.
"""

METHODS_TABLE = """
The rates at which a method makes half of its steps, and 90 % of what it makes on an unlimited link, in multiples of
the bound and of ours. Bytes are those that the interface counted, headers included, on limited links; the largest
second is that on the unlimited one.
"""


def _shares(cells: Sequence[Record]) -> str:
    multiples = sorted({c["multiple"] for c in cells if c["multiple"] in _GRID}, reverse=True)
    columns = ("method", "unlimited", *(f"{multiple:g} ×" for multiple in multiples))
    rows = []
    for name, setup in METHODS.items():
        found = {cell["multiple"]: cell for cell in of(cells, name)}
        if found:
            rows.append((setup.title, *(_share(found.get(multiple)) for multiple in (None, *multiples))))
    return table(columns, rows)


_GRID = (3000, 1000, 300, 100, 30, 10, 3, 1.5, 1, 0.5, 0.3)


def _share(cell: Record | None) -> str:
    if cell is None:
        return ""
    shown = " / ".join(_percent(cell[key]) for key in ("computing", "utilisation"))
    return shown if cell["mbit"] is None else f"{shown} ({_percent(cell['predicted'])})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}" if share < 0.1 else f"{100 * share:.0f}"


def _methods(values: Record) -> str:
    columns = ("method", "steps/s, unlimited", "kB a step", "largest second, kB", "50 %", "90 % of its best",
               "times ours", "CPU, ns a value", "largest error, points")  # fmt: skip
    rows = []
    for name, setup in METHODS.items():
        found = of(values["cells"], name)
        if not found:
            continue
        limited = [cell for cell in found if cell["mbit"] is not None]
        rates = [values["crossings"][name][level] for level in LEVELS]
        ours = [values["crossings"].get(OURS, {}).get(level) for level in LEVELS]
        ratios = [f"{rate / mine:.3g}" if rate and mine else "–" for rate, mine in zip(rates, ours, strict=True)]
        rows.append(
            (
                setup.title,
                f"{found[0]['steps_per_second']:.2f}",
                f"{statistics.median(cell['bytes_step'] for cell in limited) / 1000:,.0f}",
                f"{found[0]['burst'] / 1000:,.0f}",
                *(f"{rate:.3g} ×" if rate else "–" for rate in rates),
                " and ".join(ratios),
                f"{found[0]['busy_ns']:.0f}",
                f"{100 * max(abs(c['predicted'] - c['computing']) for c in limited):.0f}",
            )
        )
    return table(columns, rows)


def _reading(values: Record) -> str:
    cells = values["cells"]
    key = next((cell for cell in of(cells, OURS) if cell["multiple"] == CLOSE), None)
    out = []
    if key:
        clock, cores, waited = (100 * x for x in (key["utilisation"], key["computing"], key["shares"]["waited"]))
        out += [
            f"At {key['bounds']:.2f} × the bound ours makes {clock:.1f} % of the steps by the clock and {cores:.1f} % "
            f"by the cores ({len(key['parts'])} parts); it waited for {waited:.1f} % of the time."
        ]
    if (ddp := at(cells, "ddp", CLOSE)) is not None:
        out += [f"DDP makes {100 * ddp:.1f} % there."]
    errors = [100 * (c["predicted"] - c["computing"]) for c in cells if c["mbit"] is not None]
    out += [
        "The prediction is the planner's, with the step time at the speed that the cores had, the link's rate, "
        f"of which TCP fills {100 * FILLED:.0f} % where it is the limit (fitted to these cells), {TCP} bytes on the "
        "wire for each of payload, and one number for each method from the unlimited link: what a value costs the "
        "cores in each round. "
        f"Over {len(errors)} cells on limited links it is "
        f"{statistics.mean(errors):.1f} points too high on average, {max(map(abs, errors)):.1f} at most."
    ]
    return fill(" ".join(out)) + "\n\n" + MISFIT.strip()


MISFIT = """
What does not fit, and why. The prediction is too high where a round needs most of its overlap, up to the largest error
above: it knows one speed for both replicas, but here each core's speed changes by 10 % within seconds, a round begins
when the slower replica has sent, and the faster one waits. On a limited link the kernel cuts and paces packets in
software: at 10 to 30 times the bound fp32 rounds take 3 % more of the cores than on the unlimited link, which the one
number for each method does not know. At the lowest rates the queue of 50 ms holds a dozen packets, TCP loses some of
them, and a loss at the end of a payload costs a timeout of 200 ms: single exchanges take a third longer.
"""


def _stall(values: Record) -> str:
    if "stall" not in values:
        return "Stalls: not measured."
    found = values["stall"]
    words = {"hook": "the hook on the training thread", "thread": "the communication thread",
             "gloo": "gloo's threads with the kernel's TCP"}  # fmt: skip
    of_it = ", ".join(
        f"{100 * found['shares'][name]:.2f} % {text} ({found['ns_value'][name]:.1f} ns a parameter and round)"
        for name, text in words.items()
    )
    low, high = found["interval"]
    return fill(
        f"**Stalls outside the waiting for the link.** On an unlimited link, blocks with ours and without alternate "
        f"(ABBA, {found['pairs']} pairs, steps of {1000 * found['step_seconds']:.0f} ms). All that communication takes "
        f"from the cores that train is {100 * found['share']:.2f} % of a step: {of_it}. By the clock, steps with it "
        f"over steps without are {found['ratio']:.3f} (median over pairs, 95 % interval {low:.3f} to {high:.3f})."
    )


def _swap(values: Record) -> str:
    if "swap" not in values:
        return "A lone exchange: not measured."
    found = values["swap"]
    names = {"all_gather": "gloo's `all_gather`", "swap_1": "ours", "swap_4": "ours, 4 streams"}
    rows = []
    for kind, title in names.items():
        cells = []
        for place in ("near", "far"):
            ratios = [seconds / found["ideal"] for seconds in found[place][kind]]
            cells.append(f"{statistics.median(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f})")
        rows.append((title, *cells))
    columns = ("exchange", "no latency", f"{1000 * found['latency']:.0f} ms each way")
    text = fill(
        f"**A lone exchange** of {found['nbytes'] / 1e6:g} MB each way at {found['mbit']:g} Mbit/s, in units of the "
        f"{found['ideal']:.2f} s that the bytes take (median, shortest and longest of {len(found['near']['swap_1'])}). "
        "gloo announces a receive on the connection that carries the data: where the announcement stands behind "
        "megabytes that go the other way, the link works in one direction at a time. Ours posts all receives before "
        "any send. Latency is made by a process that holds every packet; nothing trains meanwhile."
    )
    return f"{text}\n\n{table(columns, rows)}"


def _wan(values: Record) -> str:
    if "wan" not in values:
        return "Four replicas: not measured."
    found = values["wan"]
    links = ", ".join(f"{each:g}" for each in found["links"])
    rows = [
        (title, f"{100 * one['utilisation']:.0f} %", f"{100 * one['predicted']:.0f} %", f"{100 * one['waited']:.1f} %",
         f"{one['bytes_step'] / 1000:,.0f}")
        for name, title in ((OURS, "one stream"), ("e3m0-4", "four streams"))
        for one in [found[name]]
    ]  # fmt: skip
    columns = ("", "utilisation", "predicted", "waited", "kB a step")
    text = fill(
        f"**Four replicas** in four namespaces, two to a core, behind links of {links} × the bound for four "
        f"({found[OURS]['bound_mbit']:.3g} Mbit/s); streaming, overlap and E3M0. The slowest link decides."
    )
    return f"{text}\n\n{table(columns, rows)}"
