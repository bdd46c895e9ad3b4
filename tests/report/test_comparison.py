"""Several runs side by side, in the terminal and on the page; `diloco report`, `diloco ls`, and where they write."""

import io
import json
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from diloco.cli import main
from diloco.report import html, terminal
from diloco.report.comparison import compare, differences
from diloco.report.fitted import Column, Fitted
from diloco.runs import folder as folders
from diloco.runs.reader import read
from tests.support.run_directory import make_run


def shown(what, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    return console.file.getvalue()


@pytest.fixture
def unlike(tmp_path):
    """Two runs that differ in much more than a word."""
    one = {"lr": 0.006, "warmup": 70, "weight_decay": 0.00143, "data": [], "tokenizer": "bytes"}
    two = {"lr": 0.008, "warmup": 12, "weight_decay": 0.00833, "data": ["corpus"], "tokenizer": "train:4096"}
    two |= {"batch": 8, "fragments": "balanced:4"}
    return [make_run(tmp_path / "runs/first-of-all", steps=60, final=1.5, **one),
            make_run(tmp_path / "runs/live120", steps=120, final=3.0, **two)]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_runs_that_differ_in_much_are_called_by_name_and_no_number_is_cut(unlike, width):
    text = shown(terminal.comparison([read(run) for run in unlike]), width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    for part in ("first-of-all", "live120", "2.1640", "4.3281", "bits/byte", " ×"):
        assert part in text, part
    assert re.search(r"warmup +70 +12", text) and re.search(r"data +default +corpus", text)


def test_the_page_has_the_names_and_what_differs_and_links_the_pages_of_the_runs(unlike, tmp_path):
    html.write(unlike[:1], unlike[0] / "report.html")
    html.write(unlike, tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert '<tr><th scope="row">warmup</th><td>70</td><td>12</td></tr>' in page
    assert '<a href="runs/first-of-all/report.html">first-of-all</a>' in page and "live120/report.html" not in page
    assert "bits per byte" in page and "2 runs, 2 settings<" in page and "seeds at most" not in page


def test_data_parallel_has_neither_a_factor_nor_exposed_time(tmp_path):
    runs = [read(make_run(tmp_path / name, method=name, steps=60)) for name in ("dp", "streaming")]
    first, second = compare(runs)
    assert (first.factor, first.seconds_exposed) == (None, None)
    assert second.factor and second.seconds_exposed is not None
    assert differences([first, second]) == {"method": ["dp", "streaming"]}


def test_columns_are_left_out_whole():
    table = Fitted(
        [Column("a", ["x" * 10], left=True), Column("b", ["1,234"], spare=2), Column("c", ["5,678"], spare=1)]
    )
    assert [c.name for c in table.kept(40)] == ["a", "b", "c"]
    assert [c.name for c in table.kept(18)] == ["a", "c"]
    assert [c.name for c in table.kept(10)] == ["a"]


def test_report_takes_the_newest_run_a_folder_of_runs_and_what_a_star_gives(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["report"]) == 2 and "there is no run in runs" in capsys.readouterr().err
    for name in ("cmp/dp-seed0", "cmp/streaming-seed0"):
        make_run(Path("runs") / name, method=name[4:].partition("-")[0], steps=60)
    make_run(Path("runs/newest"), steps=60)
    assert main(["report"]) == 0 and capsys.readouterr().out.startswith("newest")
    assert main(["report", "runs/cmp"]) == 0
    assert "report: runs/cmp/report.html" in capsys.readouterr().out
    main(["report", "runs/cmp/dp-seed0"])
    own = Path("runs/cmp/dp-seed0/report.html").read_text()
    assert main(["report", *map(str, sorted(Path("runs/cmp").iterdir()))]) == 0  # with report.html among them
    assert Path("runs/cmp/dp-seed0/report.html").read_text() == own and Path("runs/cmp/comparison.html").is_file()
    assert "report: runs/cmp/comparison.html" in capsys.readouterr().out


def test_ls_says_of_each_run_what_became_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["ls"]) == 2 and "there is no run in runs" in capsys.readouterr().err
    for name in ("done", "stopped", "killed", "goes-on"):
        make_run(Path("runs") / name, steps=60)
    (tmp_path / "runs/killed/summary.json").unlink()
    (tmp_path / "runs/goes-on/summary.json").unlink()
    summary = tmp_path / "runs/stopped/summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"stopped": True}))
    with folders.locked(tmp_path / "runs/goes-on"):
        assert main(["ls", "--json"]) == 0
    found = {run["folder"]: run for run in json.loads(capsys.readouterr().out)}
    states = {name.removeprefix("runs/"): run["state"] for name, run in found.items()}
    assert states == {"done": "finished", "stopped": "stopped", "killed": "ended", "goes-on": "running"}
    assert found["runs/stopped"]["steps"] == 60 and found["runs/killed"]["step"] == 60
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["ls"]) == 0
    text = capsys.readouterr().out
    assert "…" not in text and "60/60" in text and max(map(len, text.splitlines())) <= 60


def test_ls_lists_the_newest_first_and_counts_rounds_of_a_member_of_a_bucket(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for age, (name, config) in enumerate([("new", {}), ("member", {"bucket": "b"}), ("late", {"bucket": "b"})]):
        run = make_run(Path("runs") / name, steps=300, **config)
        os.utime(run / "config.toml", (1e9 - age, 1e9 - age))
    Path("runs/member/summary.json").unlink()  # it trains on: 300 steps, of which each fragment was synced every 50
    for path in Path("runs/late").glob("replica-*/*.jsonl"):
        path.write_text("")  # it came after the end, and took the result
    assert main(["ls"]) == 0
    listed = [
        line.split()[:1] + re.findall(r"\d+/\d+(?: rounds)?", line) for line in capsys.readouterr().out.splitlines()
    ]
    assert listed[-3:] == [["runs/new", "300/300"], ["runs/member", "4/6 rounds"], ["runs/late", "6/6 rounds"]]


def test_the_report_of_a_run_that_failed_says_why(tmp_path):
    run = make_run(tmp_path / "run", steps=60)
    (run / "summary.json").unlink()
    for number, kind, text in ((0, "PeerLost", "peer lost"), (1, "ValueError", "replica 1: ValueError: no luck")):
        error = {"type": kind, "message": text, "code": 1, "time": number}
        (run / f"replica-{number}/error-0.json").write_text(json.dumps(error))
    assert "failed: replica 1: ValueError: no luck" in shown(terminal.table(read(run)), 100)
    html.write([run], run / "report.html")
    assert "This run failed: replica 1: ValueError: no luck" in (run / "report.html").read_text()


def test_the_page_tells_the_story_first_explains_its_words_and_says_where_it_comes_from(tmp_path):
    run = make_run(tmp_path / "run", steps=60)
    events = run / "replica-0/events.jsonl"
    facts = {"event": "start", "seconds": 0, "step": 0, "time": 1794000000, "host": "lab-7", "device": "cpu"}
    events.write_text("\n".join([json.dumps(facts), *events.read_text().splitlines()[1:]]) + "\n")
    html.write([run], run / "report.html")
    page = (run / "report.html").read_text()
    assert re.findall(r"<dt>([^<]+)</dt><dd>", page)[:3] == ["less traffic", "utilization", "loss of the anchors"]
    assert 'title="anchors: the weights that all replicas agree on' in page and "What the words mean" in page
    for part in ("lab-7", "2026-11-06 21:20 UTC", f"diloco train {run}/config.toml --name another"):
        assert part in page, part
