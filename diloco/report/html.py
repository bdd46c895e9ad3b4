"""One run, or a comparison of several, as one HTML file that opens offline; and the same pages for a server."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from diloco import __version__
from diloco.errors import ConfigError
from diloco.report import terminal, units
from diloco.report.comparison import compare, differences, in_bits
from diloco.report.curves import PER_STEP, charts, compared, timeline, tuned
from diloco.runs.follow import Followed
from diloco.runs.reader import RecordedRun

GLOSSARY = {
    "anchors": "the weights that all replicas agree on; what is exported",
    "replica": "one copy of the model, which trains on its own data; between syncs the copies differ",
    "fragment": "a part of the model; parts are synced in turn",
    "round": "one exchange of one fragment between the replicas",
    "sent": "bytes that one replica sends to the others",
    "burst": "bytes that are sent at once, in one round",
    "hidden": "time of communication while training continued",
    "exposed": "time that training lost to communication: waiting, and taking and applying deltas",
    "utilization": "the share of the time that was not lost to communication",
    "unigram model": "one that knows only how frequent each token is: what a model must beat",
}


def write(runs: Sequence[Path], out: Path) -> None:
    """Write the report of one run directory, or the comparison of several, to the file `out`."""
    if not runs:
        raise ConfigError("there is no run to report on: give at least one folder that `diloco train` wrote")
    found = [Followed(folder).look() for folder in runs]
    if len(found) == 1:
        text = page("run", one(found[0]), {"charts": charts(found[0]), "timeline": timeline(found[0])})
    else:
        pages = [(run.name, run.folder / "report.html") for run in found]
        links = [(name, os.path.relpath(path, out.parent)) for name, path in pages if path.is_file()]
        text = page("comparison", several(found, links), compared_runs(found))
    out.parent.mkdir(parents=True, exist_ok=True)
    # A browser that reads it while the run continues must never find half a file.
    part = out.with_name(f".{out.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(out)


def page(kind: str, values: Mapping[str, Any], data: Mapping[str, Any], **more: Any) -> str:
    """A complete page: `values` for its template, `data` for its scripts. `more` values are of a page that lives."""
    text = json.dumps({"kind": kind, **data}, separators=(",", ":"), allow_nan=False)
    # The HTML parser looks for `</script` even inside a JSON string.
    return _template(kind).render(**values, **more, data=text.replace("<", "\\u003c"))


def parts(kind: str, values: Mapping[str, Any], **more: Any) -> dict[str, str]:
    """The parts of a page that may change while the run goes on, by the ids of their elements."""
    template = _template(kind)
    context = template.new_context({**values, **more})
    return {name: "".join(template.blocks[name](context)) for name in template.blocks if name != "body"}


def one(run: RecordedRun, progress: Any = None) -> dict[str, Any]:
    """What the page of one run shows besides curves. `progress`: of a run that goes on, its share and text."""
    return {
        "title": run.name,
        "about": terminal.about(run, running=progress is not None),
        "run": run,
        "figures": _figures(run),
        "glossary": GLOSSARY,
        "origin": _origin(run),
        "per_step": PER_STEP,
        "settings": _settings(run.config),
        "autopilot": _autopilot(run),
        "corpus": _corpus(run),
        "progress": progress,
    }


def _figures(run: RecordedRun) -> list[terminal.Figure]:
    """The story first: how much less was sent, and how busy training was. The time stands under the title."""
    rows = {row.name: row for row in terminal.rows(run)}
    sent = rows.pop("sent per replica")
    if run.factor is not None and run.method != "dp":
        note = f"{sent.value} per replica; {sent.note.rpartition(', ')[0] or sent.note}"
        sent = terminal.Figure("less traffic", units.factor(run.factor), note)
    busy = rows.pop("utilization")
    found = [sent, busy, *(row for row in rows.values() if row.name != "time")]
    return [row for row in found if row.value != "–"]  # what is known at the end only


def _origin(run: RecordedRun) -> list[tuple[str, str]]:
    """When, where and with what it was begun, and how to do it again."""
    events = run.replicas[0].events if run.replicas else ()
    begun = next((event.details for event in events if event.event in ("start", "resume")), {})
    facts = [(name, str(begun[name])) for name in ("host", "device", "torch", "diloco") if name in begun]
    if isinstance(began := begun.get("time"), (int, float)) and 0 <= began < 1e11:
        facts.insert(0, ("begun", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began))))
    return [*facts, ("again", f"diloco train {run.folder}/config.toml --name another")]


def _autopilot(run: RecordedRun) -> list[tuple[int, str]]:
    """What it chose and what all changed to, each with its step."""
    events = run.replicas[0].events if run.replicas else ()
    return [(e.step, tuned(e)) for e in events if e.event == "autopilot"]


def several(runs: Sequence[RecordedRun], pages: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """What the comparison shows besides curves. `pages`: names and addresses of the runs' own pages."""
    rows = compare(runs)
    seeds = max(len(row.runs) for row in rows)
    return {
        "title": " · ".join(dict.fromkeys(row.runs[0].method for row in rows)) + " compared",
        "about": f"{len(runs)} runs, {len(rows)} settings" + (f", up to {seeds} seeds" if seeds > 1 else ""),
        "rows": rows,
        "bits": in_bits(runs),
        "differences": differences(rows),
        "pages": pages,
        "paired": max((row.gap.seeds for row in rows if row.gap), default=0),
        "common": _settings(_common(runs)),
    }


def compared_runs(runs: Sequence[RecordedRun], since: Mapping[Path, int] | None = None) -> dict[str, Any]:
    """The curves of the comparison; of each run those after a step, if `since` has one for its folder."""
    rows, bits, known = compare(runs), in_bits(runs), since or {}
    curves = [compared(run, k, bits, known.get(run.folder, 0)) for k, row in enumerate(rows) for run in row.runs]
    return {"settings": [row.label for row in rows], "runs": curves}


@cache
def _template(kind: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_text),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals.update(units=units, gap=terminal.gap, version=__version__, asset=_text, live=False, up="")
    return environment.get_template(f"{kind}.html.jinja")


@cache
def _text(name: str) -> str:
    return resources.files("diloco.report").joinpath("assets", name).read_text(encoding="utf-8")


def _settings(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)) for key, value in config.items()
    ]


def _common(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    first = runs[0].config
    return {key: value for key, value in first.items() if all(run.config.get(key) == value for run in runs)}


def _corpus(run: RecordedRun) -> str:
    corpus = run.summary.corpus if run.summary else None
    if corpus is None:
        return ""
    parts = [str(corpus.get("name", "")), units.size(corpus["bytes"]) if isinstance(corpus.get("bytes"), int) else ""]
    digest = str(corpus.get("sha256", ""))
    return ", ".join(filter(None, [*parts, f"sha256 {digest[:12]}…" if digest else ""]))
