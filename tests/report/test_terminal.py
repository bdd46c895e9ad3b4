"""The report and the live view in a terminal."""

import contextlib
import io
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from diloco.report import html, terminal
from diloco.report.live import Live, shown_in_background, sparkline
from diloco.runs.reader import read
from diloco.runs.writer import Phase
from tests.support.run_directory import ROUND_BYTES, STEPS, copy_until, make_run, wait_at_end


@pytest.fixture(autouse=True)
def colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")


def printed(renderable: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_names_every_figure_and_the_report(copied: Path) -> None:
    html.write([copied], copied / "report.html")
    text = printed(terminal.table(read(copied)), width=200)
    for part in ("1.4500", "1.4900", "3.3100", "3.08 MB", "720 MB", "234 ×", "125 kB", "7.28 s", "219 ms", "99.63 %"):
        assert part in text, part
    assert str(copied / "report.html") in text and "\x1b" not in text


def test_replicas_on_other_machines_are_counted_although_they_write_elsewhere(copied: Path) -> None:
    path = copied / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"replicas": 2}))
    shutil.rmtree(copied / "replica-1")
    assert "2 replicas" in printed(terminal.table(read(copied)))
    path.unlink()
    assert "1 replica," in printed(terminal.table(read(copied)))


def test_no_line_of_the_table_wraps_at_80_columns_and_it_names_the_most_exposed_replica(copied: Path) -> None:
    wait_at_end(copied / "replica-1", seconds=10)
    lines = [line.rstrip() for line in printed(terminal.table(read(copied)), width=80).splitlines()]
    figures = [line for line in lines[1:] if line and not line.startswith("report:")]
    assert len(figures) == len(terminal.rows(read(copied))), figures
    assert any("replica 1: 10.2 s" in line for line in figures)


def test_plain_lines_follow_a_run_as_it_is_written(finished: Path, tmp_path: Path) -> None:
    stream = io.StringIO()
    with Live(tmp_path, STEPS, stream, interval=0) as live:
        live.refresh()
        assert stream.getvalue() == "", "nothing was written yet"
        copy_until(20, finished, tmp_path, rest='{"event": "step", "step": 21, "lo')
        live.refresh()
        live.refresh()
        copy_until(21, finished, tmp_path)
        live.refresh()
        copy_until(100, finished, tmp_path)
        live.refresh()
    first, second, last = stream.getvalue().splitlines()
    values = [read(finished).replicas[number].steps[19].loss for number in (0, 1)]
    assert re.match(
        r"0:00:00  step 20/300  loss ([\d.]+) ([\d.]+)  [\d.]+ k tokens/s  sent 0 B  left \d+(\.\d+)? s$", first
    )
    assert "step 21/300" in second, "a truncated line is read once it is complete"
    assert f"loss {values[0]:.3f} {values[1]:.3f}  " in first
    assert "step 100/300" in last and f"sent {(5 * ROUND_BYTES + 10_000) // 1000} kB" in last, (
        "one round of each fragment"
    )


def test_in_a_pipe_the_derived_settings_are_printed_without_wrapping(tmp_path: Path) -> None:
    stream, text = io.StringIO(), f"  lr = 0.008: {'a reason of many words ' * 9}"
    (tmp_path / "derived.txt").write_text(text)
    with Live(tmp_path, STEPS, stream, interval=0) as live:
        live.refresh()
    assert stream.getvalue() == text.rstrip() + "\n"


def in_terminal(folder: Path) -> str:
    """Run the live view in a real terminal."""
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream, Live(folder, STEPS, stream):
        pass
    text = b""
    with contextlib.suppress(OSError):  # raised by a terminal whose other end is closed
        while part := os.read(master, 4096):
            text += part
    os.close(master)
    return text.decode()


def test_before_the_first_round_the_loss_is_that_of_the_initial_weights(tmp_path: Path) -> None:
    run = make_run(tmp_path / "early", steps=20)  # the first fragment is sent after step 50
    assert "nats per token" in printed(terminal.table(read(run)))
    summary = json.loads((run / "summary.json").read_text()) | {"stopped": True}
    (run / "summary.json").write_text(json.dumps(summary))
    text = " ".join(printed(terminal.table(read(run))).split())
    assert "of the initial weights: no round yet" in text and "stopped: step 20 of 20" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_panel_fits_the_terminal_and_shows_held_out_loss_and_traffic(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    copy_until(200, finished, tmp_path)
    with (tmp_path / "replica-0/events.jsonl").open("a") as events:
        events.write('{"event": "start", "seconds": 0, "step": 0, "parameters": 1200000}\n')
    (tmp_path / "phase").write_text("evaluating")
    text = in_terminal(tmp_path)
    held_out = read(tmp_path).evaluations[-1].loss
    for part in ("replica", "step 200/300", "evaluating · held-out", f"{held_out:.4f}", "× less than data-parallel"):
        assert part in " ".join(text.split()), part
    lines = [re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", line) for line in text.splitlines()]
    assert "…" not in text and max(map(len, lines)) <= width
    assert ("hidden" in text) == (width > 60)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bucket_member_shows_rounds_instead_of_steps(
    copied: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    with (copied / "config.toml").open("a") as config:
        config.write('bucket = "shared"\n')
    shutil.rmtree(copied / "replica-1")
    text = in_terminal(copied)
    last = [round.index for round in read(copied).rounds if round.fragment == 0][-1]
    assert f"round {last}/6" in text and "2 members in the last round" in " ".join(text.split())
    lines = [re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", line) for line in text.splitlines()]
    assert "…" not in text and max(map(len, lines)) <= width
    assert "one member of up to 2 in a bucket" in printed(terminal.table(read(copied)))


def test_replicas_on_other_machines_do_not_block_the_view(finished: Path, tmp_path: Path) -> None:
    copy_until(200, finished, tmp_path)
    shutil.rmtree(tmp_path / "replica-0")
    text = in_terminal(tmp_path)
    assert "step 200/300" in text and re.search(r"\n *1 +200 ", text.replace("\x1b[36m", ""))


def test_a_run_is_shown_from_a_thread_of_its_process(finished: Path, tmp_path: Path) -> None:
    stream = io.StringIO()
    with shown_in_background(Live(tmp_path, STEPS, stream, interval=0, show_derived=False)):
        copy_until(20, finished, tmp_path)
        (tmp_path / "derived.txt").write_text("lr = 1")
        until = time.monotonic() + 100
        while "step 20/300" not in stream.getvalue():
            assert time.monotonic() < until, stream.getvalue()
            time.sleep(0.01)
    assert "lr = 1" not in stream.getvalue(), "the caller prints them"


def test_before_the_first_step_the_panel_shows_the_phase(tmp_path: Path) -> None:
    assert "starting Python and torch" in in_terminal(tmp_path)
    Phase(tmp_path / "phase").progress("tokenizing", 34, 100)
    assert "tokenizing, 34%" in in_terminal(tmp_path)


@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=80))
def test_a_sparkline_has_at_most_its_width_for_any_numbers(values: list[float]) -> None:
    assert len(sparkline(values)) == min(20, len(values))
