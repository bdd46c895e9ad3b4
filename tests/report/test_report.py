"""The report: what it reads from a run directory and computes, for one run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.cli import report
from diloco.core.stats import RoundStats
from diloco.errors import ConfigError
from diloco.report import terminal
from diloco.report.curves import charts, timeline
from diloco.runs.reader import POINTS, Follower, read
from tests.support.run_directory import (
    DATA_PARALLEL,
    SYNC_EVERY,
    carry,
    copy_until,
    make_run,
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
    exposed = [replica.seconds_exposed for replica in run.replicas]
    assert run.utilization == pytest.approx(min(1 - e / s for e, s in zip(exposed, spent, strict=True)))


def test_without_a_summary_the_last_lines_count(copied: Path) -> None:
    complete = read(copied)
    (copied / "summary.json").unlink()
    unfinished = read(copied)
    assert unfinished.state == "unfinished" and unfinished.utilization == complete.utilization
    for name in ("loss", "replica_loss", "bits_per_byte", "bytes_sent", "largest_burst", "seconds_hidden",
                 "seconds_exposed", "steps", "tokens"):  # fmt: skip
        assert getattr(unfinished.figures, name) == pytest.approx(getattr(complete.figures, name)), name
    assert unfinished.figures.unigram_loss is unfinished.figures.bytes_data_parallel is unfinished.factor is None


def test_utilization_is_of_the_most_exposed_replica_and_includes_the_final_rounds(copied: Path) -> None:
    first, second = read(copied).replicas
    exposed = second.steps[-1].seconds_exposed
    trained = sum(step.step_seconds for step in second.steps) - exposed
    wait_at_end(copied / "replica-1", seconds=10)
    run = read(copied)
    assert run.utilization == pytest.approx(trained / (trained + exposed + 10))
    assert run.figures.seconds_exposed == first.steps[-1].seconds_exposed
    assert run.most_exposed == run.replicas[1]


def test_unreadable_lines_are_skipped(copied: Path) -> None:
    before = read(copied).replicas[0]
    metrics = copied / "replica-0/metrics.jsonl"
    for line in ("", "[1, 2]", '{"event": "step", "step": 9', '{"event": "step", "mood": 1.0}', "\udcff"):
        with metrics.open("a", errors="surrogateescape") as file:
            file.write(line + "\n")
    assert read(copied).replicas[0] == before


def test_a_follower_reads_a_resumed_run_again(finished: Path, tmp_path: Path) -> None:
    copy_until(60, finished, tmp_path)
    follower = Follower(tmp_path)
    assert follower.read() is follower.read(), "nothing has changed"
    copy_until(40, finished, tmp_path)  # cut at a checkpoint, and longer than before at the next read
    for metrics in tmp_path.glob("replica-*/metrics.jsonl"):
        line = json.loads(metrics.read_text().splitlines()[-1])
        with metrics.open("a") as file:
            file.writelines(json.dumps(line | {"step": step, "loss": 9.0}) + "\n" for step in range(41, 71))
    with (tmp_path / "replica-0/events.jsonl").open("a") as events:
        events.write('{"event": "resume", "seconds": 8.0, "step": 40, "time": 1794000000}\n')
    run = follower.read()
    assert [step.loss for step in run.replicas[0].steps[40:]] == [9.0] * 30, "including steps read before"
    assert run.state == "unfinished" and run.figures.loss != 9
    assert [(e["event"], e["step"]) for e in timeline(run)["replicas"][0]["events"]] == [("resume", 40)]


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.toml"):
        read(tmp_path)


def test_files_alone_are_no_runs_to_compare(tmp_path: Path) -> None:
    files = tmp_path / "a.html", tmp_path / "b.html"
    for file in files:
        file.touch()
    with pytest.raises(ConfigError, match="no run to report on"):
        report.main(report.ReportConfig(runs=files))


def test_long_curves_are_thinned_and_keep_their_ends(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "long", steps=2 * POINTS + 1)
    run, whole = Follower(folder).read(), read(folder)
    loss = charts(run)["loss"]
    assert len(loss["steps"]) <= POINTS and "one step in 4" in loss["note"] and loss["steps"][-1] == 2 * POINTS + 1
    steps = whole.replicas[0].steps
    assert loss["curves"][0]["values"][0] == pytest.approx(steps[3].loss, rel=1e-6)
    assert loss["curves"][0]["values"][-1] == pytest.approx(steps[-1].loss, rel=1e-6)
    assert sum(timeline(run)["replicas"][0]["steps"]["count"]) == len(steps)
    assert run.utilization == pytest.approx(whole.utilization) and run.figures == whole.figures


def test_the_slowest_sync_periods_are_the_most_exposed_ones(finished: Path) -> None:
    windows = timeline(read(finished))["windows"]
    assert len(windows) == 3
    # The rounds sent after steps 160 and 210 took longer than `overlap` steps.
    assert sorted(window["first_step"] // SYNC_EVERY for window in windows[:2]) == [3, 4]
    exposed = [window["seconds_exposed"] for window in windows]
    assert exposed[0] >= exposed[1] > exposed[2] == 0


def test_carried_rounds_are_drawn_and_counted_in_the_table(copied: Path) -> None:
    before = read(copied)
    carry(copied / "replica-1", unsent=[3, 7], uncounted=[9])
    run = read(copied)
    drawn = timeline(run)["replicas"][1]["rounds"]
    assert [(k, drawn["sent_step"][k] is None) for k, counted in enumerate(drawn["counted"]) if not counted] == [
        (3, True), (7, True), (9, False),
    ]  # fmt: skip
    (row,) = [row for row in terminal.rows(run) if row.name == "rounds carried"]
    assert row.value == f"3 of {len(before.rounds)}"
    assert "rounds carried" not in [row.name for row in terminal.rows(before)]
    carry(copied / "replica-0", unsent=range(len(run.replicas[0].rounds)))
    assert len(timeline(read(copied))["windows"]) == 3, "also if a replica never sent"


def test_the_choices_of_the_autopilot_are_shown(copied: Path) -> None:
    steer(copied / "replica-0")
    events = {event["event"]: event["settings"] for event in timeline(read(copied))["replicas"][0]["events"]}
    assert events["autopilot"] == "sync_every 50, fragments strided:3, overlap 2, codec e3m0; link speed 94 Mbit/s"
    assert events["save"] == ""


def test_the_page_gets_every_field_of_a_round_by_its_name(finished: Path) -> None:
    replica = read(finished).replicas[0]
    drawn = timeline(read(finished))["replicas"][0]
    rounds = drawn["rounds"]
    assert rounds.keys() == {*RoundStats.__dataclass_fields__, "applied_at"}
    for name in RoundStats.__dataclass_fields__:
        assert rounds[name] == pytest.approx([getattr(round, name) for round in replica.rounds], rel=1e-6), name
    ends = {step.step: step.seconds for step in replica.steps}
    assert rounds["applied_at"] == pytest.approx([ends[round.applied_step] for round in replica.rounds], rel=1e-6)
    assert drawn["steps"]["step"] == [step.step for step in replica.steps]
    assert sum(drawn["steps"]["exposed"]) == pytest.approx(replica.steps[-1].seconds_exposed)
    assert [(event["event"], event["step"]) for event in drawn["events"]] == [("save", s) for s in (100, 200, 300)]


@pytest.mark.slow
def test_the_report_needs_no_torch() -> None:
    modules = "diloco.report.dashboard, diloco.report.html, diloco.report.live, diloco.report.terminal"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
