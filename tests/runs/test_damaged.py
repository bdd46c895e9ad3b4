"""Damaged run folders: every reader shows what it can, and no run takes others down.

DILOCO_DAMAGED=1000 damages that many folders.
"""

import io
import json
import os
import random
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from diloco.errors import DiLoCoError
from diloco.report import html, terminal
from diloco.report.dashboard import Site
from diloco.runs.reader import read
from diloco.runs.schema import from_summary
from tests.support.commands import run_here
from tests.support.dashboard import serving
from tests.support.run_directory import make_run, steer

MANY = int(os.environ.get("DILOCO_DAMAGED", "40"))
ODD = ['"x"', '""', "[]", "{}", "[1, 2]", "null", "true", "false", "-1", "0", "Infinity", "-Infinity", "NaN", "1e308",
       "1e999", "9" * 400, "9" * 5000, "1.5", '"2026-01-01"', "[" * 900 + "]" * 900, "[" * 200_000, '"\\ud800"',
       '{"a": {"b": [null]}}', str(1 << 62), str(1 << 70), "2026-01-01", "inf", "nan"]  # fmt: skip
FILES = ("config.toml", "summary.json", "replica-0/metrics.jsonl", "replica-0/events.jsonl", "replica-1/metrics.jsonl",
         "replica-1/events.jsonl", "replica-0/error-0.json", "phase", "lock", "replica-0", "report.html")  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("good") / "run", steps=60)
    steer(folder / "replica-0", [1, 2, 3, 2])
    (folder / "phase").write_text("training, 40%")
    (folder / "lock").touch()
    for number, kind in enumerate(("PeerLost", "RuntimeError")):
        error = {"type": kind, "message": "why", "code": 1, "time": 17.0 + number}
        (folder / f"replica-0/error-{number}.json").write_text(json.dumps(error))
    start = {"event": "start", "seconds": 0.0, "step": 0, "time": 1.7e9, "host": "a", "parameters": 690_000}
    events = folder / "replica-0/events.jsonl"
    events.write_text(json.dumps(start) + "\n" + events.read_text())
    return folder


def damage(folder: Path, chance: random.Random) -> str:
    """Damage one file and return how."""
    path = folder / chance.choice([name for name in FILES if (folder / name).parent.is_dir()])
    kind = chance.choice(["value"] * 8 + ["bytes"] * 3 + ["line", "gone", "folder", "fifo", "dangling", "loop"])
    if kind in ("value", "bytes", "line") and not path.is_file():
        kind = "folder"
    if kind == "value":
        lines = path.read_text(errors="surrogateescape").splitlines() or [""]
        number = chance.choice([0, -1, chance.randrange(len(lines))])
        lines[number] = with_odd_value(lines[number], chance)
        path.write_text("\n".join(lines) + "\n", errors="surrogateescape")
    elif kind == "bytes":
        data = bytearray(path.read_bytes() or b"\n")
        for _ in range(chance.randrange(1, 9)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data[: chance.randrange(len(data))] if chance.random() < 0.3 else data)
    elif kind == "line":
        path.write_text(path.read_text(errors="surrogateescape") + chance.choice(ODD) + "\n", errors="surrogateescape")
    else:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        if kind == "folder":
            path.mkdir(parents=True, exist_ok=True)
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind in ("dangling", "loop"):
            path.symlink_to(path if kind == "loop" else folder / "nowhere")
    return f"{kind} of {path.name}"


def with_odd_value(line: str, chance: random.Random) -> str:
    """Replace one value of a JSON object or of a line of TOML."""
    key, equals, _ = line.partition(" = ")
    if equals:
        return f"{key} = {chance.choice(ODD)}"
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return chance.choice(ODD)
    if not isinstance(values, dict) or not values:
        return chance.choice(ODD)
    values[chance.choice(list(values))] = "HERE"
    return json.dumps(values).replace('"HERE"', chance.choice(ODD))


def show(folder: Path, other: Path) -> None:
    """Report on the run and serve it."""
    Console(file=io.StringIO()).print(terminal.table(read(folder)))
    Console(file=io.StringIO()).print(terminal.comparison([read(folder), read(other)]))
    html.write([folder], folder.parent / "report.html")
    html.write([folder, other], folder.parent / "comparison.html")
    page = Site(folder).page([])
    assert page and page.html() and page.json()


def test_damaged_runs_are_shown_as_far_as_they_can_be_read(good: Path, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    failed = []
    for number in range(seed, seed + MANY):
        chance = random.Random(number)
        folder = tmp_path / str(number) / "bad"
        shutil.copytree(good, folder)
        how = [damage(folder, chance) for _ in range(chance.choice([1, 1, 1, 3]))]
        try:
            show(folder, good)
        except DiLoCoError:
            pass  # a message for the user
        except Exception as error:
            failed.append((number, how, repr(error)[:300]))
        shutil.copytree(good, folder.parent / "good")
        page = Site(folder.parent).page([])
        assert page and "good" in page.html(), (number, how)
        shutil.rmtree(folder.parent)
    assert failed == []


def test_half_a_surrogate_pair_is_replaced_so_that_it_can_be_printed() -> None:
    summary = from_summary(b'{"method": "a\\ud800b", "samples": ["\\u00fc"]}')
    assert summary and summary.method == "a?b" and summary.samples == ["ü"]


def test_an_unreadable_run_does_not_hide_the_others_and_its_page_says_why(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken reader stands for every exception that nobody foresaw."""
    for name in ("one", "two"):
        shutil.copytree(good, tmp_path / "runs" / name)

    def broken(folder: Path) -> dict[str, object]:
        if folder.name == "two":
            raise ZeroDivisionError("never foreseen")
        return {"method": "diloco"}

    monkeypatch.setattr("diloco.runs.reader.read_config", broken)
    code, out, _ = run_here(tmp_path, "report")
    assert code == 0 and "cannot be read: ZeroDivisionError: never foreseen" in " ".join(out.split())
    with serving(tmp_path / "runs") as dashboard:
        page = urllib.request.urlopen(dashboard.address, timeout=60).read().decode()
        assert "one" in page and "cannot be read: ZeroDivisionError" in page
        with pytest.raises(urllib.error.HTTPError) as answer:
            urllib.request.urlopen(f"{dashboard.address}run/two/", timeout=60)
        assert answer.value.code == 500 and "cannot be read" in answer.value.read().decode()
