"""The report: what it reads of a run directory, and what it computes."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.report import html, terminal
from diloco.report.comparison import compare, interval, student
from diloco.report.curves import PER_STEP, charts, timeline
from diloco.runs.follow import Followed
from diloco.runs.reader import read
from diloco.runs.replica import POINTS
from diloco.runs.schema import Round
from tests.support.run_directory import (
    DATA_PARALLEL,
    SYNC_EVERY,
    carry,
    make_run,
    replace_line,
    steer,
    wait_at_end,
)


def test_a_finished_run_has_the_figures_of_its_summary(finished: Path) -> None:
    run, summary = read(finished), json.loads((finished / "summary.json").read_text())
    assert (run.name, run.method, run.state, len(run.replicas)) == ("demo", "streaming", "finished", 2)
    figures = run.figures
    assert (figures.loss, figures.replica_loss, figures.unigram_loss) == (1.45, 1.49, 3.31)
    assert figures.bytes_sent == summary["bytes_sent"] and figures.bytes_data_parallel == DATA_PARALLEL
    assert run.factor == DATA_PARALLEL / summary["bytes_sent"]
    assert figures.seconds_exposed == summary["seconds_exposed"] > 0
    spent = [sum(step.step_seconds for step in replica.steps) for replica in run.replicas]
    waited = [replica.steps[-1].seconds_exposed for replica in run.replicas]
    assert run.utilization == pytest.approx(min(1 - w / s for w, s in zip(waited, spent, strict=True)))


def test_without_a_summary_the_last_lines_count(copied: Path) -> None:
    complete = read(copied)
    (copied / "summary.json").unlink()
    going_on = read(copied)
    assert going_on.state == "unfinished" and going_on.utilization == complete.utilization
    for figure in ("loss", "replica_loss", "bits_per_byte"):
        assert getattr(going_on.figures, figure) == pytest.approx(getattr(complete.figures, figure)), figure
    for figure in ("bytes_sent", "largest_burst", "seconds_hidden", "seconds_exposed", "steps", "tokens"):
        assert getattr(going_on.figures, figure) == getattr(complete.figures, figure), figure
    assert going_on.figures.unigram_loss is going_on.figures.bytes_data_parallel is going_on.factor is None


def test_utilization_is_of_the_replica_that_waited_most_and_counts_the_end(copied: Path) -> None:
    first, second = read(copied).replicas
    waited = second.steps[-1].seconds_exposed
    trained = sum(step.step_seconds for step in second.steps) - waited
    wait_at_end(copied / "replica-1", seconds=10)
    assert read(copied).utilization == pytest.approx(trained / (trained + waited + 10))
    assert read(copied).figures.seconds_exposed == first.steps[-1].seconds_exposed


def test_a_stopped_run_says_so(copied: Path) -> None:
    (copied / "summary.json").unlink()
    replace_line(copied / "replica-1/events.jsonl", -1, '{"event": "stop", "seconds": 60.0, "step": 300}')
    assert read(copied).state == "stopped"
    (copied / "summary.json").write_text('{"stopped": true}')
    assert read(copied).state == "stopped"


@settings(max_examples=25)
@given(share=st.floats(0, 1))
def test_a_file_cut_off_anywhere_gives_the_steps_before_the_cut(finished: Path, share: float) -> None:
    whole = (finished / "replica-0/metrics.jsonl").read_bytes()[:20_000]
    cut = whole[: int(share * len(whole))]
    with TemporaryDirectory() as folder:
        (Path(folder) / "replica-0").mkdir()
        (Path(folder) / "replica-0/metrics.jsonl").write_bytes(cut)
        steps = read(Path(folder)).replicas[0].steps
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert cut.count(b"sync/in_flight") - len(steps) in (0, 1), "only the line with the cut may be missing"


def test_unknown_keys_are_ignored_and_unreadable_lines_left_out(copied: Path) -> None:
    before = read(copied).replicas[0]
    metrics = copied / "replica-0/metrics.jsonl"
    replace_line(metrics, 0, json.dumps(json.loads(metrics.read_text().splitlines()[0]) | {"train/mood": "good"}))
    for line in ("", "[1, 2]", '{"step": 9', '{"step": "nine", "train/loss": 1.0}', "\udcff"):
        with metrics.open("a", errors="surrogateescape") as file:
            file.write(line + "\n")
    assert read(copied).replicas[0] == before


def test_steps_done_again_after_a_resume_count_once_and_as_done_last(copied: Path) -> None:
    metrics, events = copied / "replica-0/metrics.jsonl", copied / "replica-0/events.jsonl"
    last = json.loads(metrics.read_text().splitlines()[-2])
    rounds = read(copied).replicas[0].rounds
    with metrics.open("a") as file:
        for step in (201, 202):
            file.write(json.dumps(last | {"step": step, "train/loss": 9.0}) + "\n")
    with events.open("a") as file:
        file.write('{"event": "resume", "seconds": 1.0, "step": 200}\n')
    replica = read(copied).replicas[0]
    assert [step.step for step in replica.steps] == list(range(1, 203))
    assert [step.loss for step in replica.steps[-2:]] == [9.0, 9.0]
    assert max(evaluation.step for evaluation in replica.evaluations) == 200
    assert replica.rounds == tuple(round for round in rounds if round.step <= 200)


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.toml.*give a folder that `diloco train` wrote"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="no run"):
        html.write([], tmp_path / "report.html")


def test_students_t_is_that_of_the_tables() -> None:
    tables = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 29: 2.0452, 120: 1.9799}
    for freedom, value in tables.items():
        assert student(freedom) == pytest.approx(value, abs=5e-5)


def test_the_gap_is_paired_by_seed_with_students_interval(tmp_path: Path) -> None:
    # Gaps of 1, 2 and 3 %: mean 2, deviation 1, half-width 4.30265 / √3 = 2.48414. Unpaired, seeds would drown them.
    losses = {"dp": (2.0, 2.5, 4.0), "streaming": (2.02, 2.55, 4.12)}
    folders = [
        make_run(tmp_path / f"{method}-{seed}", method=method, seed=seed, steps=60, final=losses[method][seed])
        for method, seed in [("streaming", 2), ("dp", 0), ("streaming", 0), ("dp", 2), ("streaming", 1), ("dp", 1)]
    ]
    first, second = compare([read(folder) for folder in folders])
    assert (first.label, first.gap, second.label) == ("dp", None, "streaming")
    assert second.gap is not None and second.gap.half_width is not None and second.gap.seeds == 3
    assert second.gap.mean == pytest.approx(0.02) and second.gap.half_width == pytest.approx(0.0248414, abs=1e-6)
    assert terminal.gap(second.gap) == "+2.00 ± 2.48 %"
    assert interval([5.0]) == (5.0, None)


def test_settings_are_named_by_what_varies_and_what_the_method_reads(tmp_path: Path) -> None:
    runs = [
        read(make_run(tmp_path / f"{method}-{overlap}", method=method, steps=60, overlap=overlap))
        for method, overlap in [("streaming", 0), ("streaming", 5), ("dp", 0), ("dp", 5)]
    ]
    rows = compare(runs)
    assert [row.label for row in rows] == ["dp", "streaming, overlap 0", "streaming, overlap 5"]
    assert [row.gap and row.gap.seeds for row in rows] == [None, 1, 1]
    assert compare(runs[:2])[0].gap is None, "without data-parallel there is no gap to it"


def test_long_curves_are_thinned_to_means_and_keep_their_ends(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "long", steps=2 * POINTS + 1)
    run, whole = Followed(folder).look(), read(folder)
    loss = charts(run)["loss"]
    assert len(loss["steps"]) <= POINTS and "mean of 4 steps" in loss["note"] and loss["steps"][-1] == 2 * POINTS + 1
    steps = whole.replicas[0].steps
    assert loss["curves"][0]["values"][0] == pytest.approx(sum(step.loss for step in steps[:4]) / 4, rel=1e-6)
    assert loss["curves"][0]["values"][-1] == pytest.approx(steps[-1].loss, rel=1e-6)
    assert run.utilization == pytest.approx(whole.utilization) and run.figures == whole.figures


def test_the_slowest_sync_periods_are_those_in_which_training_waited(finished: Path) -> None:
    windows = timeline(read(finished))["windows"]
    assert len(windows) == 3
    # The rounds that were sent after steps 160 and 210 took longer than `overlap` steps.
    assert sorted(window["first_step"] // SYNC_EVERY for window in windows[:2]) == [3, 4]
    exposed = [window["exposed_seconds"] for window in windows]
    assert exposed[0] >= exposed[1] > exposed[2] == 0


def test_carried_rounds_are_read_drawn_and_counted_in_the_table(copied: Path) -> None:
    before = read(copied)
    carry(copied / "replica-1", unsent=[3, 7], uncounted=[9])
    run = read(copied)
    assert len(run.rounds) == len(before.rounds), "none is left out"
    assert [round.counted for round in run.replicas[1].rounds].count(False) == 3
    drawn = timeline(run)["replicas"][1]["rounds"]
    assert [(k, drawn["sent_step"][k] is None) for k, counted in enumerate(drawn["counted"]) if not counted] == [
        (3, True), (7, True), (9, False),
    ]  # fmt: skip
    (row,) = [row for row in terminal.rows(run) if row.name == "rounds carried"]
    assert row.value == f"3 of {len(run.rounds)}"
    assert "rounds carried" not in [row.name for row in terminal.rows(before)]


def test_the_overlap_is_drawn_where_it_changes_and_what_the_autopilot_did_is_told(copied: Path) -> None:
    assert charts(read(copied))["overlap"]["steps"] == [], "lines from before the key existed"
    for number, overlaps in ((0, [2] * 99), (1, [2] * 10 + [4] * 5 + [3] * 99)):
        steer(copied / f"replica-{number}", overlaps)
    run = read(copied)
    chart = charts(run)["overlap"]
    steps = [round.step for round in run.replicas[1].rounds]
    assert [curve["label"] for curve in chart["curves"]] == ["replica 0", "replica 1"]
    drawn = [dict(zip(chart["steps"], curve["values"], strict=True)) for curve in chart["curves"]]
    one, two = [{step: value for step, value in curve.items() if value is not None} for curve in drawn]
    assert one == {steps[0]: 2, steps[-1]: 2}
    assert two == {steps[0]: 2, steps[10]: 4, steps[15]: 3, steps[-1]: 3}
    told = {event["event"]: event["settings"] for event in timeline(run)["replicas"][0]["events"]}
    assert told["autopilot"] == "sync_every 50, fragments strided:3, overlap 2, codec e3m0; the link gives 94 Mbit/s"
    assert told["save"] == ""
    html.write([copied], copied / "report.html")
    page = (copied / "report.html").read_text()
    assert '<th scope="row">after step 10</th><td>sync_every 50, fragments strided:3' in page


def test_an_overlap_that_never_changed_is_not_drawn(copied: Path) -> None:
    for number in (0, 1):
        steer(copied / f"replica-{number}", [2] * 100)
    assert charts(read(copied))["overlap"]["curves"] == []


def test_a_run_whose_member_never_sent_has_a_timeline(copied: Path) -> None:
    carry(copied / "replica-0", unsent=range(len(read(copied).replicas[0].rounds)))
    run = read(copied)
    assert all(round.sent_step is None for round in run.replicas[0].rounds)
    assert len(timeline(run)["windows"]) == 3
    assert all(v is None for v in timeline(run)["replicas"][0]["rounds"]["sent_step"])


def test_the_page_gets_every_field_of_a_round_by_its_name(finished: Path) -> None:
    replica = read(finished).replicas[0]
    drawn = timeline(read(finished))["replicas"][0]
    assert drawn["rounds"].keys() == {field.name for field in fields(Round)}
    for name, column in drawn["rounds"].items():
        given = [getattr(round, name) for round in replica.rounds]
        assert column == (given if None in given else pytest.approx(given, rel=1e-6)), name
    assert drawn["steps"]["step"] == [step.step for step in replica.steps]
    assert drawn["steps"]["count"] == [1] * len(replica.steps)
    assert sum(drawn["steps"]["exposed"]) == pytest.approx(replica.steps[-1].seconds_exposed)
    assert [(event["event"], event["step"]) for event in drawn["events"]] == [("save", s) for s in (100, 200, 300)]


def test_every_field_of_a_step_that_is_listed_has_a_chart_with_a_curve_for_each_replica(finished: Path) -> None:
    run = read(finished)
    for name in PER_STEP:
        chart = charts(run)[name]
        assert [(curve["label"], curve["kind"]) for curve in chart["curves"]] == [
            ("replica 0", "replica"), ("replica 1", "replica"),
        ]  # fmt: skip
        wanted = [getattr(step, name) for step in run.replicas[1].steps]
        assert chart["curves"][1]["values"] == pytest.approx(wanted, rel=1e-6), name


@pytest.mark.slow
def test_the_report_needs_no_torch() -> None:
    code = (
        "import sys, diloco.report.html, diloco.report.live, diloco.report.terminal; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
