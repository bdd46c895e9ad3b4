"""What the report and a run under way show in a terminal."""

import contextlib
import io
import json
import os
import re
import shutil
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from diloco.report import html, terminal
from diloco.report.live import Live, _Watched, beside, sparkline
from diloco.runs.phase import Phase
from diloco.runs.reader import read
from tests.support.run_directory import ROUND_BYTES, STEPS, copy_until, make_run, wait_at_end


def printed(what: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_names_every_figure_and_the_report(copied: Path) -> None:
    html.write([copied], copied / "report.html")
    text = printed(terminal.table(read(copied)), width=200)
    for part in ("1.4500", "1.4900", "3.3100", "3.08 MB", "720 MB", "234 ×", "125 kB", "7.28 s", "219 ms", "99.63 %"):
        assert part in text, part
    assert str(copied / "report.html") in text and "\x1b" not in text


def test_no_line_of_the_table_wraps_at_80_columns(copied: Path) -> None:
    summary = json.loads((copied / "summary.json").read_text())
    (copied / "summary.json").write_text(json.dumps(summary | {"predicted_utilization": 0.992}))
    wait_at_end(copied / "replica-1", seconds=10)
    lines = [line.rstrip() for line in printed(terminal.table(read(copied)), width=80).splitlines()]
    figures = [line for line in lines[1:] if line and not line.startswith("report:")]
    assert len(figures) == len(terminal.rows(read(copied))), figures


def test_the_table_names_the_replica_that_waited_most(copied: Path) -> None:
    wait_at_end(copied / "replica-1", seconds=10)
    assert "replica 1: 10.2 s" in printed(terminal.table(read(copied)))


def test_the_comparison_table_has_a_line_per_setting(tmp_path: Path) -> None:
    runs = [
        read(make_run(tmp_path / name, method=name, steps=60, final=2.0 + k)) for k, name in enumerate(("dp", "local"))
    ]
    lines = [line.split() for line in printed(terminal.comparison(runs)).splitlines()]
    assert ["local", "1", "3.0000", "+50.00", "%", "0", "B", "∞"] in [line[:8] for line in lines]


def test_plain_lines_follow_a_run_as_it_is_written(finished: Path, tmp_path: Path) -> None:
    stream = io.StringIO()
    with Live(tmp_path, replicas=2, steps=STEPS, stream=stream, every=0) as live:
        live.refresh()
        assert stream.getvalue() == "", "nothing was written yet"
        copy_until(20, finished, tmp_path, rest='{"step": 21, "train/l')
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
    assert "step 21/300" in second, "the line that was half there is read whole"
    assert f"loss {values[0]:.3f} {values[1]:.3f}  " in first
    assert "step 100/300" in last and f"sent {(5 * ROUND_BYTES + 10_000) // 1000} kB" in last, (
        "one round of each fragment"
    )


def test_in_a_pipe_what_was_derived_is_printed_in_lines_as_they_are(tmp_path: Path) -> None:
    stream, text = io.StringIO(), f"  lr = 0.008: {'a reason of many words ' * 9}"
    (tmp_path / "derived.txt").write_text(text)
    with Live(tmp_path, replicas=2, steps=STEPS, stream=stream, every=0) as live:
        live.refresh()
    assert stream.getvalue() == text.rstrip() + "\n"


def in_terminal(folder: Path) -> str:
    """What the live view writes to a real terminal of 80 columns."""
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream, Live(folder, replicas=2, steps=STEPS, stream=stream):
        pass
    text = b""
    with contextlib.suppress(OSError):  # how a terminal says that its other end is closed
        while part := os.read(master, 4096):
            text += part
    os.close(master)
    return text.decode()


def test_in_a_terminal_the_panel_shows_every_replica_and_no_colour_if_unwanted(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    colorful = in_terminal(finished)
    for part in ("replica", "tokens/s", "in flight", "3.08 MB", "7.28 s", "219 ms", "step 300/300", "100%", "▁"):
        assert part in colorful, part
    assert "…" not in colorful, "nothing is cut off at 80 columns"
    color = re.compile(r"\x1b\[[\d;]*3\d[\d;]*m")
    assert color.search(colorful)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not color.search(in_terminal(finished))


def test_the_panel_is_as_wide_after_two_steps_as_at_the_end(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    places = []
    for step in (2, 300):
        copy_until(step, finished, tmp_path)
        head = next(line for line in in_terminal(tmp_path).splitlines() if "tokens/s" in line)
        places.append(head.index("tokens/s") - head.index("loss"))
    assert places[0] == places[1]


def test_an_interrupt_leaves_the_panel_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that prints ^C moves the cursor, and the next panel leaves a line of the last one behind."""
    monkeypatch.setenv("TERM", "xterm-256color")
    master, slave = os.openpty()

    def echoes() -> bool:
        return bool(termios.tcgetattr(slave)[3] & termios.ECHOCTL)

    with os.fdopen(os.dup(slave), "w") as stream, os.fdopen(os.dup(slave)) as keyboard:
        monkeypatch.setattr("sys.stdin", keyboard)
        assert echoes()
        with Live(tmp_path, replicas=1, steps=STEPS, stream=stream):
            assert not echoes()
        assert echoes()
    os.close(slave)
    os.close(master)


def test_a_run_that_was_stopped_before_its_first_round_says_whose_loss_it_shows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "early", steps=20)  # the first fragment is sent after step 50
    assert "nats per token" in printed(terminal.table(read(run)))
    summary = json.loads((run / "summary.json").read_text()) | {"stopped": True}
    (run / "summary.json").write_text(json.dumps(summary))
    assert "of the initial weights: no round yet" in " ".join(printed(terminal.table(read(run))).split())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_panel_fits_the_terminal_and_shows_held_out_loss_and_what_was_saved(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    copy_until(200, finished, tmp_path)
    with (tmp_path / "replica-0/events.jsonl").open("a") as events:
        events.write('{"event": "start", "seconds": 0, "step": 0, "parameters": 1200000}\n')
    (tmp_path / "phase").write_text("evaluating")
    text = in_terminal(tmp_path)
    held_out = read(tmp_path).evaluations[-1].loss
    for part in ("replica", "step 200/300", "evaluating · held-out", f"{held_out:.4f}", "× less than data-parallel"):
        assert part in text.replace("\r\n", " "), part
    lines = [re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", line) for line in text.splitlines()]
    assert "…" not in text and max(map(len, lines)) <= width
    assert ("hidden" in text) == (width > 60)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_member_of_a_bucket_shows_rounds_of_the_run_instead_of_its_own_steps(
    copied: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    with (copied / "config.toml").open("a") as config:
        config.write('bucket = "shared"\n')
    shutil.rmtree(copied / "replica-1")
    text = in_terminal(copied)
    last = [round.index for round in read(copied).rounds if round.fragment == 0][-1]
    assert f"round {last}/6" in text and "2 members in the last round" in text.replace("\r\n", " ")
    lines = [re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", line) for line in text.splitlines()]
    assert "…" not in text and max(map(len, lines)) <= width
    assert "one member of up to 2 in a bucket" in printed(terminal.table(read(copied)))


def test_replicas_on_other_machines_do_not_hold_up_the_view(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    copy_until(200, finished, tmp_path)
    shutil.rmtree(tmp_path / "replica-0")
    text = in_terminal(tmp_path)
    assert "step 200/300" in text and re.search(r"\n *1 +200 ", text.replace("\x1b[36m", ""))


def test_a_run_is_shown_from_a_thread_of_its_own_process(finished: Path, tmp_path: Path) -> None:
    stream = io.StringIO()
    with beside(Live(tmp_path, replicas=2, steps=STEPS, stream=stream, every=0, told=True)):
        copy_until(20, finished, tmp_path)
        (tmp_path / "derived.txt").write_text("lr = 1")
        until = time.monotonic() + 100
        while "step 20/300" not in stream.getvalue():
            assert time.monotonic() < until, stream.getvalue()
            time.sleep(0.01)
    assert "lr = 1" not in stream.getvalue(), "the process has printed them itself"


def test_before_the_first_step_the_panel_says_what_the_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "starting Python and torch" in in_terminal(tmp_path)
    Phase(tmp_path / "phase").progress("tokenising", 34, 100)
    assert "tokenising, 34%" in in_terminal(tmp_path)


def test_a_resumed_run_draws_its_losses_once(finished: Path, tmp_path: Path) -> None:
    watched = _Watched(tmp_path / "replica-0")
    copy_until(60, finished, tmp_path)
    watched.read()
    whole = list(watched.losses)
    assert len(whole) == 60
    copy_until(40, finished, tmp_path)  # as the trainer cuts the file at its checkpoint
    copy_until(60, finished, tmp_path)  # and is quick to write as much again, before the next look
    for lines, steps in ((50, 50), (61, 61)):
        copy_until(lines, finished, tmp_path)
        watched.read()
        watched.read()
        assert len(watched.losses) == steps and watched.losses[:50] == whole[:50]


def test_the_panel_names_the_fragments_in_flight(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for step, shown in ((181, "f3"), (161, "f1"), (165, "–")):  # fragment 3 is sent after steps 80, 130, 180, …
        copy_until(step, finished, tmp_path)
        assert f" {shown} " in in_terminal(tmp_path)


@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=80))
def test_a_sparkline_has_at_most_its_width_for_any_numbers(values: list[float]) -> None:
    assert len(sparkline(values)) == min(20, len(values))
