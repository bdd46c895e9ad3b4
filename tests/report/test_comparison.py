"""Several runs: comparisons, lists, and `diloco report`."""

import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from diloco.cli import main
from diloco.report import html, terminal
from diloco.report.comparison import compare, differences, interval, student
from diloco.runs import folder as folders
from diloco.runs.reader import read
from tests.support.run_directory import make_run


def printed(renderable, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


@pytest.fixture
def unlike(tmp_path):
    """Two runs that differ in many settings."""
    one = {"lr": 0.006, "warmup": 70, "weight_decay": 0.00143, "data": [], "tokenizer": "bytes"}
    two = {"lr": 0.008, "warmup": 12, "weight_decay": 0.00833, "data": ["corpus"], "tokenizer": "train:4096"}
    two |= {"batch": 8, "fragments": "balanced:4"}
    return [make_run(tmp_path / "runs/first-of-all", steps=60, final=1.5, **one),
            make_run(tmp_path / "runs/live120", steps=120, final=3.0, **two)]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_runs_that_differ_in_many_settings_are_called_by_name_and_no_number_is_cut(unlike, width):
    text = printed(terminal.comparison([read(run) for run in unlike]), width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    for part in ("first-of-all", "live120", "1.5000", "3.0000", " ×"):
        assert part in text, part
    assert re.search(r"warmup +70 +12", text) and re.search(r"data +default +corpus", text)


def test_the_page_has_the_names_and_the_differing_settings_and_links_the_reports(unlike, tmp_path):
    html.write(unlike[:1], unlike[0] / "report.html")
    html.write(unlike, tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert '<tr><th scope="row">warmup</th><td>70</td><td>12</td></tr>' in page
    assert '<a href="runs/first-of-all/report.html">first-of-all</a>' in page and "live120/report.html" not in page
    assert "bits per byte" in page and "2 runs, 2 settings<" in page


def test_data_parallel_has_neither_a_factor_nor_exposed_time(tmp_path):
    runs = [read(make_run(tmp_path / name, method=name, steps=60)) for name in ("dp", "streaming")]
    first, second = compare(runs)
    assert (first.factor, first.seconds_exposed) == (None, None)
    assert second.factor and second.seconds_exposed is not None
    assert differences([first, second]) == {"method": ["dp", "streaming"]}


def test_the_gap_is_paired_by_seed_with_students_interval(tmp_path):
    # Gaps of 1, 2 and 3 %: mean 2, deviation 1, half-width 4.30265 / √3 = 2.48414. Unpaired, seeds would drown them.
    losses = {"dp": (2.0, 2.5, 4.0), "streaming": (2.02, 2.55, 4.12)}
    runs = [
        read(make_run(tmp_path / f"{method}-{seed}", method=method, seed=seed, steps=60, final=losses[method][seed]))
        for method, seed in [("streaming", 2), ("dp", 0), ("streaming", 0), ("dp", 2), ("streaming", 1), ("dp", 1)]
    ]
    first, second = compare(runs)
    assert (first.label, first.gap, second.label, second.gap.seeds) == ("dp", None, "streaming", 3)
    assert second.gap.mean == pytest.approx(0.02) and second.gap.half_width == pytest.approx(0.0248414, abs=1e-5)
    assert terminal.gap(second.gap) == "+2.00 ± 2.48 %"
    assert interval([5.0]) == (5.0, None)


def test_students_t_matches_the_tables():
    tables = {1: 12.7062, 2: 4.3027, 4: 2.7764, 9: 2.2622, 15: 2.1314, 29: 2.0452, 31: 2.0395, 40: 2.0211, 100: 1.984}
    assert [student(freedom) for freedom in tables] == pytest.approx(list(tables.values()), abs=5e-4)


def test_settings_are_named_by_what_varies_and_what_the_method_reads(tmp_path):
    runs = [
        read(make_run(tmp_path / f"{method}-{overlap}", method=method, steps=60, overlap=overlap))
        for method, overlap in [("streaming", 0), ("streaming", 5), ("dp", 0), ("dp", 5)]
    ]
    rows = compare(runs)
    assert [row.label for row in rows] == ["dp", "streaming, overlap 0", "streaming, overlap 5"]
    assert [row.gap and row.gap.seeds for row in rows] == [None, 1, 1]
    assert compare(runs[:2])[0].gap is None, "without data-parallel there is no gap to it"


def test_report_takes_a_folder_of_runs_and_the_paths_of_a_shell_glob(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("cmp/dp-seed0", "cmp/streaming-seed0"):
        make_run(Path("runs") / name, method=name[4:].partition("-")[0], steps=60)
    assert main(["report", "runs/cmp"]) == 0
    assert "report: runs/cmp/comparison.html" in capsys.readouterr().out
    main(["report", "runs/cmp/dp-seed0"])
    before = Path("runs/cmp/dp-seed0/report.html").read_text()
    assert main(["report", *map(str, sorted(Path("runs/cmp").iterdir()))]) == 0  # with report.html among them
    assert Path("runs/cmp/dp-seed0/report.html").read_text() == before and Path("runs/cmp/comparison.html").is_file()
    assert "report: runs/cmp/comparison.html" in capsys.readouterr().out


def test_without_a_folder_report_lists_all_runs_with_their_state(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2 and "there is no run in runs" in capsys.readouterr().err
    for name in ("done", "stopped", "killed", "active"):
        make_run(Path("runs") / name, steps=60)
    Path("runs/killed/summary.json").unlink()
    Path("runs/active/summary.json").unlink()
    summary = Path("runs/stopped/summary.json")
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"stopped": True}))
    with folders.locked(Path("runs/active")):
        assert main(["report", "--json"]) == 0
    runs = {run["folder"]: run for run in json.loads(capsys.readouterr().out)}
    states = {name.removeprefix("runs/"): run["state"] for name, run in runs.items()}
    assert states == {"done": "finished", "stopped": "stopped", "killed": "ended", "active": "running"}
    assert runs["runs/stopped"]["steps"] == 60 and runs["runs/killed"]["step"] == 60
    shutil.rmtree("runs/killed/replica-0")  # as on the second machine
    assert main(["report", "--json"]) == 0
    assert {run["folder"]: run for run in json.loads(capsys.readouterr().out)}["runs/killed"]["step"] == 60
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["report"]) == 0
    text = capsys.readouterr().out
    assert "…" not in text and "60/60" in text and max(map(len, text.splitlines())) <= 60
    assert main(["report", "--out", "x.html"]) == 2 and "pass the run" in capsys.readouterr().err


def test_the_list_is_newest_first_and_counts_rounds_of_a_bucket_member(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for age, (name, config) in enumerate([("new", {}), ("member", {"bucket": "b"}), ("late", {"bucket": "b"})]):
        run = make_run(Path("runs") / name, steps=300, **config)
        os.utime(run / "config.toml", (1e9 - age, 1e9 - age))
    Path("runs/member/summary.json").unlink()  # still training: 300 steps, each fragment synced every 50
    for path in Path("runs/late").glob("replica-*/*.jsonl"):
        path.write_text("")  # joined after the end and took the result
    assert main(["report"]) == 0
    lines = [
        line.split()[:1] + re.findall(r"\d+/\d+(?: rounds)?", line) for line in capsys.readouterr().out.splitlines()
    ]
    assert lines[-3:] == [["runs/new", "300/300"], ["runs/member", "4/6 rounds"], ["runs/late", "6/6 rounds"]]


def test_the_report_of_a_failed_run_says_why(tmp_path):
    run = make_run(tmp_path / "run", steps=60)
    (run / "summary.json").unlink()
    for number, kind, text in ((0, "PeerLost", "peer lost"), (1, "ValueError", "replica 1: ValueError: no luck")):
        error = {"type": kind, "message": text, "code": 1, "time": number}
        (run / f"replica-{number}/error-0.json").write_text(json.dumps(error))
    assert "failed: replica 1: ValueError: no luck" in printed(terminal.table(read(run)), 100)
    html.write([run], run / "report.html")
    assert "This run failed: replica 1: ValueError: no luck" in (run / "report.html").read_text()


def test_the_page_begins_with_traffic_explains_its_words_and_ends_with_its_origin(tmp_path):
    run = make_run(tmp_path / "run", steps=60)
    events = run / "replica-0/events.jsonl"
    facts = {"event": "start", "seconds": 0, "step": 0, "time": 1794000000, "host": "lab-7", "device": "cpu"}
    events.write_text("\n".join([json.dumps(facts), *events.read_text().splitlines()[1:]]) + "\n")
    html.write([run], run / "report.html")
    page = (run / "report.html").read_text()
    assert re.findall(r"<dt>([^<]+)</dt><dd>", page)[:3] == ["less traffic", "utilization", "loss of the anchors"]
    assert "the weights that all replicas agree on" in page
    for part in (
        "lab-7",
        "2026-11-06 21:20 UTC",
        "Python standard library, sha256 abababababab",
        f"diloco train {run}/config.toml --name another",
    ):
        assert part in page, part
