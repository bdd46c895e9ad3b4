"""The bucket's tables in docs/benchmarks.md, and those of the chaos."""

from benchmarks.record import Record, table


def tables(record: Record) -> dict[str, str]:
    makers = {"kill": _kill, "link": _link, "carrying": _carrying}
    values = record["values"]
    return {f"bucket-{name}": make(values[name]) for name, make in makers.items() if name in values}


def _kill(found: Record) -> str:
    rows = [
        (name, *(f"{each['stall']:.2f} s" for each in found[kind]), f"{1000 * found[kind][0]['usual']:.0f} ms")
        for kind, name in (("bucket", "the bucket"), ("torchft", "torchft 0.2.0"))
        if kind in found
    ]
    columns = ("", *(f"kill {i + 1}" for i in range(len(found["bucket"]))), "usual step")
    return table(columns, rows)


def _link(found: Record) -> str:
    rows = [
        (f"{r['multiple']:g} × ({r['mbit']:g} Mbit/s)", f"{100 * r['collective']:.1f} %", f"{100 * r['bucket']:.1f} %",
         f"{r['steps_a_round']:.1f}", f"{100 * r['rounds_with_all']:.0f} %", f"{1000 * r['server_cpu_round']:.0f} ms")
        for r in found["rates"]
    ]  # fmt: skip
    columns = ("link", "collective", "bucket", "steps a round", "rounds with both", "server's CPU a round")
    return table(columns, rows)


def _carrying(found: Record) -> str:
    arms = {"alone": "two fast members alone", "carried": "with the slow one, carrying",
            "given up": "with the slow one, late work given up"}  # fmt: skip
    rows = [
        (title, ", ".join(f"{x:.3f}" for x in each["losses"]), f"{each['ratio']:.4f}", f"{100 * each['share']:.1f} %",
         "–" if arm == "alone" else "{} of {}".format(*each["counted"]))
        for arm, title in arms.items()
        for each in [found[arm]]
    ]  # fmt: skip
    columns = ("", "loss, by seed", "÷ alone", "the slow one's weight", "rounds that count it")
    return table(columns, rows)


def chaos(record: Record) -> dict[str, str]:
    """What happened over each medium, and how often each event."""
    media = record["values"]
    figures = {
        "minutes": lambda run: f"{run['seconds'] / 60:.0f}",
        "starts of members, with a clock that is off by an hour": lambda run: (
            f"{run['starts']}, {run['of these']['clock off by an hour']}"
        ),
        "rounds closed, members in each": lambda run: f"{run['records']:,}, {run['members a record']:.2f}",
        "states compared": lambda run: f"{run['states compared']:,}",
        "joins while nothing else was wrong: median, 90 %": lambda run: _quantiles(
            run["joins while nothing else was wrong"]
        ),
        "the longest join": lambda run: f"{run['joins']['most']:.1f} s",
        "all killed at once, until the first has joined: median": lambda run: (
            f"{run['restarts of all']['median']:.1f} s"
        ),
        "longest hook after the optimizer's own step": lambda run: f"{1000 * run['longest hook']:.0f} ms",
        "the same in the first step of a member that returns": lambda run: f"{run['longest first hook']:.1f} s",
        "loss at first, at last": lambda run: f"{run['loss at first']:.3f}, {run['loss at last']:.3f}",
        "until all had left at the end": lambda run: f"{run['seconds to the end']:.0f} s",
    }
    rows = [(name, *(figure(run) for run in media.values())) for name, figure in figures.items()]
    kinds = sorted({kind for run in media.values() for kind in run["events"]})
    events = [(kind, *(str(run["events"].get(kind, "")) for run in media.values())) for kind in kinds]
    return {"chaos": table(("", *media), rows), "chaos-events": table(("event", *media), events)}


def _quantiles(seconds: Record) -> str:
    return f"{seconds['median']:.1f} s, {seconds['90 %']:.1f} s"
