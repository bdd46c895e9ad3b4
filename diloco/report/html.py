"""The report of one run, or a comparison of several, as one HTML file that opens offline."""

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from diloco import __version__
from diloco.report import terminal
from diloco.report.comparison import compare, differences
from diloco.report.curves import PER_STEP, charts, compared, timeline
from diloco.runs import units
from diloco.runs.reader import Follower, RecordedRun

GLOSSARY = {
    "anchors": "the weights that all replicas agree on, which are exported",
    "replica": "one copy of the model, training on its own data; copies differ between syncs",
    "fragment": "a part of the model; fragments are synced in turn",
    "round": "one exchange of one fragment between the replicas",
    "sent": "bytes that one replica sends to the others",
    "burst": "bytes sent at once, in one round",
    "hidden": "communication time during which training continued",
    "exposed": "time in which the training thread waited for a round, took a delta or applied a result",
    "utilization": "training time as a share of training plus exposed time",
    "unigram model": "predicts every token by its frequency alone: a baseline to beat",
}


def write(folders: Sequence[Path], out: Path) -> None:
    """Write the report of one run directory, or the comparison of several, to the file `out`."""
    runs = [Follower(folder).read() for folder in folders]
    if len(runs) == 1:
        text = page("run", run_values(runs[0]), run_data(runs[0]))
    else:
        reports = [(run.name, run.folder / "report.html") for run in runs]
        links = [(name, os.path.relpath(path, out.parent)) for name, path in reports if path.is_file()]
        text = page("comparison", comparison_values(runs, links), comparison_data(runs))
    out.parent.mkdir(parents=True, exist_ok=True)
    # Replace the file at once, so that a browser never reads half of it.
    part = out.with_name(f".{out.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(out)


def page(kind: str, values: Mapping[str, Any], data: Mapping[str, Any], **more: Any) -> str:
    """A complete page: `values` (and `more`, for live pages) for its template, `data` for its scripts."""
    text = json.dumps({"kind": kind, **data}, separators=(",", ":"), allow_nan=False)
    # The HTML parser looks for `</script` even inside a JSON string.
    return _template(kind).render(**values, **more, data=text.replace("<", "\\u003c"))


def parts(kind: str, values: Mapping[str, Any]) -> dict[str, str]:
    """The parts of a live page that may change while the run continues, by element id."""
    template = _template(kind)
    context = template.new_context({**values, "live": True})
    return {name: "".join(template.blocks[name](context)) for name in template.blocks if name != "body"}


def run_values(run: RecordedRun, progress: Any = None) -> dict[str, Any]:
    """Everything on the page of one run but curves. `progress`: share and text, if it is still running."""
    return {
        "title": run.name,
        "about": terminal.about(run, running=progress is not None),
        "run": run,
        # The header has the time; some figures are known only at the end.
        "figures": [row for row in terminal.rows(run) if row.name != "time" and row.value != "–"],
        "glossary": GLOSSARY,
        "origin": _origin(run),
        "per_step": PER_STEP,
        "settings": _settings(run.config),
        "progress": progress,
    }


def run_data(run: RecordedRun) -> dict[str, Any]:
    """The curves and the timeline of one run."""
    return {"charts": charts(run), "timeline": timeline(run)}


def comparison_values(runs: Sequence[RecordedRun], links: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Everything on the comparison page but curves. `links`: names and addresses of the runs' pages."""
    rows = compare(runs)
    seeds = max(len(row.runs) for row in rows)
    return {
        "title": " · ".join(dict.fromkeys(row.runs[0].method for row in rows)) + " compared",
        "about": f"{len(runs)} runs, {len(rows)} settings" + (f", up to {seeds} seeds" if seeds > 1 else ""),
        "rows": rows,
        "differences": differences(rows),
        "pages": links,
        "paired": max((row.gap.seeds for row in rows if row.gap), default=0),
        "common": _settings(_common(runs)),
    }


def comparison_data(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """The curves of the comparison."""
    rows = compare(runs)
    curves = [compared(run, k) for k, row in enumerate(rows) for run in row.runs]
    return {"settings": [row.label for row in rows], "runs": curves}


def _origin(run: RecordedRun) -> list[tuple[str, str]]:
    """When, where and with which versions the run started, and how to repeat it."""
    events = run.replicas[0].events if run.replicas else ()
    start = next((event.details for event in events if event.event in ("start", "resume")), {})
    facts = [(name, str(start[name])) for name in ("host", "device", "torch", "diloco") if name in start]
    if "time" in start:
        facts.insert(0, ("started", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(start["time"]))))
    if run.summary and run.summary.corpus:
        facts.append(("corpus", f"{run.summary.corpus['name']}, sha256 {run.summary.corpus['sha256'][:12]}"))
    repeat = f"diloco train {shlex.quote(str(run.folder / 'config.toml'))} --name another"
    return [*facts, ("repeat", repeat + (" --bucket NEW" if run.config.get("bucket") else ""))]


@cache
def _template(kind: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals.update(units=units, gap=terminal.gap, version=__version__, asset=_asset, live=False, up="")
    return environment.get_template(f"{kind}.html.jinja")


@cache
def _asset(name: str) -> str:
    return resources.files("diloco.report").joinpath("assets", name).read_text(encoding="utf-8")


def _settings(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)) for key, value in config.items()
    ]


def _common(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    first = runs[0].config
    return {key: value for key, value in first.items() if all(run.config.get(key) == value for run in runs)}
