"""The chaos in docs/benchmarks.md."""

from benchmarks.record import Record, table


def chaos(record: Record) -> dict[str, str]:
    """What happened over each medium."""
    media = record["values"]
    figures = {
        "starts of members": lambda run: str(run["starts"]),
        "rounds closed, members in each": lambda run: f"{run['records']:,}, {run['members a record']:.2f}",
        "states compared": lambda run: f"{run['states compared']:,}",
        "joins while nothing else was wrong: median, 90 %": lambda run: _quantiles(
            run["joins while nothing else was wrong"]
        ),
        "the longest join": lambda run: f"{run['joins']['most']:.1f} s",
        "all killed at once, until the first has joined: median": lambda run: (
            f"{run['restarts of all']['median']:.1f} s"
        ),
        "longest hook": lambda run: f"{1000 * run['longest hook']:.0f} ms",
        "the same in the first step of a member that returns": lambda run: f"{run['longest first hook']:.1f} s",
    }
    return {"chaos": table(("", *media), [(name, *map(figure, media.values())) for name, figure in figures.items()])}


def _quantiles(seconds: Record) -> str:
    return f"{seconds['median']:.1f} s, {seconds['90 %']:.1f} s"
