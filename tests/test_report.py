"""The report: what it reads of a run directory, what it computes, what it shows in a terminal and in a real browser."""

import contextlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from diloco.errors import ConfigError
from diloco.report import html, terminal
from diloco.report.comparison import compare, interval, student
from diloco.report.curves import POINTS, loss, timeline
from diloco.report.live import Live, sparkline
from diloco.report.run import read
from diloco.schedule import Schedule

STEPS, SYNC_EVERY, FRAGMENTS, OVERLAP = 300, 50, 5, 2
PARAMETERS, ROUND_BYTES, STEP_SECONDS, TOKENS = 1_200_000, 121_000, 0.2, 2048
DATA_PARALLEL = 2 * PARAMETERS * STEPS


def make_run(
    folder: Path, *, method: str = "streaming", seed: int = 0, steps: int = STEPS, final: float = 1.45, **config: Any
) -> Path:
    """A run directory as the trainer would leave it; every number follows from the arguments."""
    chosen: dict[str, Any] = {
        "model": "tiny", "method": method, "replicas": 2, "steps": steps, "batch": 16, "sync_every": SYNC_EVERY,
        "fragments": "strided:3", "overlap": OVERLAP, "codec": "e3m0", "outer_lr": 0.4, "seed": seed, **config,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in chosen.items()))
    ends = [_replica(folder / f"replica-{number}", number, method, seed, steps, final) for number in range(2)]
    summary = ends[0] | {
        "method": method, "replicas": 2, "parameters": PARAMETERS, "steps": steps, "tokens": 2 * TOKENS * steps,
        "eval/loss": final, "eval/bits_per_byte": final / math.log(2), "eval/replica_loss": final + 0.04,
        "unigram_loss": 3.31, "bytes_data_parallel": 2 * PARAMETERS * steps,
        "corpus": {"name": "Python standard library", "sha256": "ab" * 32, "bytes": 11_800_000},
        "samples": ["def read(self, n=-1):\n    if n < 0 & True:\n        return '</script><b>'", "class A: pass"],
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _replica(folder: Path, number: int, method: str, seed: int, steps: int, final: float) -> dict[str, Any]:
    folder.mkdir()
    schedule = Schedule(SYNC_EVERY, FRAGMENTS)
    now = hidden = exposed = 0.0
    sent = largest = 0
    flying: list[dict[str, Any]] = []
    metrics, events = [], [{"event": "start", "seconds": 0.0, "step": 0}]
    for step in range(1, steps + 1):
        waited = 0.0
        length = STEP_SECONDS * (1 + 0.1 * math.sin(step * 1.7 + number))
        now += length
        for round in [round for round in flying if round["sent_step"] + OVERLAP == step]:
            flying.remove(round)
            waited += max(0.0, round["sent_seconds"] + round["flight_seconds"] - now - waited)
            late = {"event": "round", "seconds": now + waited, "step": step, "exposed_seconds": waited}
            events.append(late | round)
            sent += round["bytes_sent"]
            hidden += round["flight_seconds"] - waited
        if method == "dp":
            sent += 2 * PARAMETERS
            largest = 2 * PARAMETERS
        now += waited
        exposed += waited
        for fragment in schedule.sends(step) if method == "streaming" else []:
            slow = 0.25 if step in (160, 210) else 0.0
            size = ROUND_BYTES + 1000 * fragment
            largest = max(largest, size)
            flying.append({
                "fragment": fragment, "index": step // SYNC_EVERY - 1, "sent_step": step, "sent_seconds": now,
                "flight_seconds": 0.24 + 0.02 * fragment + slow, "members": 2,
                "bytes_sent": size, "bytes_received": size,
            })  # fmt: skip
        at = final + 1.9 * (math.exp(-5 * step / steps) - math.exp(-5))
        value = at + 0.06 * math.sin(step * 12.9 + 7 * number + 3 * seed) * math.cos(step * 3.3 + number)
        metrics.append({
            "step": step, "tokens": TOKENS * step, "seconds": now, "train/loss": value, "train/lr": 0.003,
            "train/grad_norm": 0.8, "train/step_seconds": length + waited,
            "train/tokens_per_second": TOKENS / (length + waited), "sync/bytes_sent": sent, "sync/bytes_received": sent,
            "sync/seconds_hidden": hidden, "sync/seconds_exposed": exposed, "sync/in_flight": len(flying),
        })  # fmt: skip
        if step % max(1, steps // 12) == 0 and number == 0:
            metrics.append({"step": step, "tokens": TOKENS * step, "seconds": now, "eval/loss": at,
                            "eval/bits_per_byte": at / math.log(2), "eval/replica_loss": at + 0.04})  # fmt: skip
            now += 0.3
        if step % 100 == 0:
            events.append({"event": "save", "seconds": now, "step": step})
    events.append({"event": "finish", "seconds": now, "step": steps})
    for name, lines in (("metrics", metrics), ("events", events)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "seconds": now,
        "bytes_sent": sent,
        "largest_burst": largest,
        "seconds_hidden": hidden,
        "seconds_exposed": exposed,
    }


def replace_line(path: Path, number: int, text: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    lines[number] = text + "\n"
    path.write_text("".join(lines))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(finished, tmp_path / "demo"))


def test_a_finished_run_has_the_figures_of_its_summary(finished: Path) -> None:
    run, summary = read(finished), json.loads((finished / "summary.json").read_text())
    assert (run.name, run.method, run.state, len(run.replicas)) == ("demo", "streaming", "finished", 2)
    assert (run.loss, run.replica_loss, run.unigram_loss) == (1.45, 1.49, 3.31)
    assert run.bytes_sent == summary["bytes_sent"] and run.bytes_data_parallel == DATA_PARALLEL
    assert run.factor == DATA_PARALLEL / summary["bytes_sent"]
    assert run.seconds_exposed == summary["seconds_exposed"] > 0
    spent = [sum(step.step_seconds for step in replica.steps) for replica in run.replicas]
    waited = [replica.steps[-1].seconds_exposed for replica in run.replicas]
    assert run.utilization == pytest.approx(min(1 - w / s for w, s in zip(waited, spent, strict=True)))


def test_without_a_summary_the_last_lines_count(run: Path) -> None:
    whole = read(run)
    (run / "summary.json").unlink()
    going_on = read(run)
    assert going_on.state == "unfinished"
    assert going_on.loss == pytest.approx(whole.loss) and going_on.bits_per_byte == pytest.approx(whole.bits_per_byte)
    for figure in (
        "bytes_sent",
        "largest_burst",
        "seconds_hidden",
        "seconds_exposed",
        "utilization",
        "steps",
        "tokens",
    ):
        assert getattr(going_on, figure) == getattr(whole, figure), figure
    assert going_on.unigram_loss is going_on.bytes_data_parallel is going_on.factor is None


def test_utilization_is_of_the_replica_that_waited_most_and_counts_the_end(run: Path) -> None:
    first, second = read(run).replicas
    waited = second.steps[-1].seconds_exposed
    trained = sum(step.step_seconds for step in second.steps) - waited
    end = {
        "event": "round", "seconds": 61.0, "step": 300, "fragment": 0, "index": 5, "sent_step": 300, "members": 2,
        "sent_seconds": 51.0, "flight_seconds": 10.0, "exposed_seconds": 10.0, "bytes_sent": 0,
    }  # fmt: skip
    with (run / "replica-1/events.jsonl").open("a") as file:
        file.write(json.dumps(end) + "\n")
    assert read(run).utilization == pytest.approx(trained / (trained + waited + 10))
    assert "replica 1: 10.2 s" in printed(terminal.table(read(run)))
    assert read(run).seconds_exposed == first.steps[-1].seconds_exposed


def test_a_stopped_run_says_so(run: Path) -> None:
    (run / "summary.json").unlink()
    replace_line(run / "replica-1/events.jsonl", -1, '{"event": "stop", "seconds": 60.0, "step": 300}')
    assert read(run).state == "stopped"
    (run / "summary.json").write_text('{"stopped": true}')
    assert read(run).state == "stopped"


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


def test_unknown_keys_are_ignored_and_unreadable_lines_left_out(run: Path) -> None:
    before = read(run).replicas[0]
    metrics = run / "replica-0/metrics.jsonl"
    replace_line(metrics, 0, json.dumps(json.loads(metrics.read_text().splitlines()[0]) | {"train/mood": "good"}))
    for line in ("", "[1, 2]", '{"step": 9', '{"step": "nine", "train/loss": 1.0}', "\udcff"):
        with metrics.open("a", errors="surrogateescape") as file:
            file.write(line + "\n")
    assert read(run).replicas[0] == before


def test_steps_done_again_after_a_resume_count_once_and_as_done_last(run: Path) -> None:
    metrics, events = run / "replica-0/metrics.jsonl", run / "replica-0/events.jsonl"
    last = json.loads(metrics.read_text().splitlines()[-2])
    rounds = read(run).replicas[0].rounds
    with metrics.open("a") as file:
        for step in (201, 202):
            file.write(json.dumps(last | {"step": step, "train/loss": 9.0}) + "\n")
    with events.open("a") as file:
        file.write('{"event": "resume", "seconds": 1.0, "step": 200}\n')
    replica = read(run).replicas[0]
    assert [step.step for step in replica.steps] == list(range(1, 203))
    assert [step.loss for step in replica.steps[-2:]] == [9.0, 9.0]
    assert max(evaluation.step for evaluation in replica.evaluations) == 200
    assert replica.rounds == tuple(round for round in rounds if round.step <= 200)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.toml.*diloco train"):
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
    run = read(make_run(tmp_path / "long", steps=2 * POINTS + 1))
    curves = loss(run)
    assert len(curves["steps"]) <= POINTS and curves["width"] == 3 and curves["steps"][-1] == 2 * POINTS + 1
    steps = run.replicas[0].steps
    assert curves["columns"][0][0] == pytest.approx(sum(step.loss for step in steps[:3]) / 3, rel=1e-6)


def test_the_slowest_sync_periods_are_those_in_which_training_waited(finished: Path) -> None:
    windows = timeline(read(finished))["windows"]
    assert len(windows) == 3
    # The rounds that were sent after steps 160 and 210 took longer than `overlap` steps.
    assert sorted(window["steps"][0] // SYNC_EVERY for window in windows[:2]) == [3, 4]
    assert windows[0]["exposed"] >= windows[1]["exposed"] > windows[2]["exposed"] == 0


def printed(what: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_names_every_figure_and_the_report(run: Path) -> None:
    html.write([run], run / "report.html")
    text = printed(terminal.table(read(run)), width=200)
    for part in ("1.4500", "1.4900", "3.3100", "3.08 MB", "720 MB", "234 ×", "125 kB", "7.28 s", "219 ms", "99.63 %"):
        assert part in text, part
    assert str(run / "report.html") in text and "\x1b" not in text


def test_the_comparison_table_has_a_line_per_setting(tmp_path: Path) -> None:
    runs = [
        read(make_run(tmp_path / name, method=name, steps=60, final=2.0 + k)) for k, name in enumerate(("dp", "local"))
    ]
    lines = [line.split() for line in printed(terminal.comparison(runs)).splitlines()]
    assert ["local", "1", "3.0000", "+50.00", "%", "0", "B", "∞"] in [line[:8] for line in lines]


def copy_until(step: int, source: Path, target: Path, rest: str = "") -> None:
    """The run as it was when all replicas had done this step."""
    shutil.copy(source / "config.toml", target)
    for path in source.glob("replica-*/*.jsonl"):
        lines = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= step]
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text("".join(lines) + rest)


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


def test_the_report_needs_no_torch() -> None:
    code = (
        "import sys, diloco.report.html, diloco.report.live, diloco.report.terminal; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")


def chromium(page: Path, profile: Path, *flags: str) -> str:
    """The page as Chromium has drawn it, scripts apart; it must leave no line in the console."""
    quiet = "headless no-sandbox disable-gpu disable-quic no-first-run disable-sync disable-background-networking"
    always = [f"--{flag}" for flag in (quiet + " disable-component-update enable-logging=stderr v=0").split()]
    command = [str(CHROMIUM), *always, f"--user-data-dir={profile}", *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)


def assert_offline(page: Path) -> None:
    text = page.read_text()
    fetched = r"""(?:src|href|action)\s*=\s*(?!["']?data:)|@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\("""
    assert re.findall(fetched, text) == []
    assert "default-src 'none'" in text


@browser
def test_the_report_renders_offline_without_a_console_error(run: Path, tmp_path: Path) -> None:
    html.write([run], run / "report.html")
    assert_offline(run / "report.html")
    page = chromium(run / "report.html", tmp_path / "profile", "--dump-dom")
    assert 'data-drawn="yes"' in page and "<title>demo – diloco</title>" in page
    assert page.count('class="uplot') == 3 and page.count("</button>") == 4
    bars = re.search(r'data-bars="(\d+)"', page)
    events = 2 * 3
    assert bars and int(bars[1]) == 2 * (STEPS + len(read(run).replicas[0].rounds)) + events
    for label in ("replica 0, training", "replica 1, training", "anchors, held-out", "unigram model", "data-parallel"):
        assert re.search(rf'u-label">{label}', page), label
    assert "return '&lt;/script&gt;&lt;b&gt;'" in page, "samples are text, not markup"
    chromium(
        run / "report.html", tmp_path / "profile", "--window-size=500,900", f"--screenshot={tmp_path / 'page.png'}"
    )
    assert (tmp_path / "page.png").read_bytes()[16:24] == (500).to_bytes(4, "big") + (900).to_bytes(4, "big")


@browser
def test_the_timeline_goes_to_the_slowest_sync_period_and_tells_what_is_under_the_pointer(
    run: Path, tmp_path: Path
) -> None:
    html.write([run], tmp_path / "report.html")
    touch = """<script>{
        const canvas = document.querySelector("#timeline canvas");
        document.querySelectorAll("#windows button")[1].click();
        const { left, top, width } = canvas.getBoundingClientRect();
        for (let x = left; x < left + width; x++) {  // along the lane of fragment 1, until there is a round
            canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: top + 78 }));
            if (!document.querySelector(".tip").hidden) break;
        }
    }</script></body>"""
    page = tmp_path / "touched.html"
    page.write_text((tmp_path / "report.html").read_text().replace("</body>", touch))
    drawn = chromium(page, tmp_path / "profile", "--dump-dom", "--window-size=1280,900")
    bars = re.search(r'data-bars="(\d+)"', drawn)
    assert bars and 0 < int(bars[1]) < 2 * STEPS, "only what is in the window is drawn"
    tip = re.search(r'class="tip"[^>]*>([^<]*)', drawn)
    assert tip and tip[1].startswith("fragment 1, round 2\nsent after step 160, applied after 162\nin flight 510 ms")
    assert re.search(r'<button type="button" title="steps 150 to 192[^>]*aria-pressed="true"', drawn)


@browser
def test_the_report_of_a_run_that_has_barely_begun_or_went_wrong_renders(run: Path, tmp_path: Path) -> None:
    (run / "summary.json").unlink()
    replace_line(run / "replica-0/metrics.jsonl", 5, '{"step": 6, "train/loss": NaN}')
    (run / "replica-1/metrics.jsonl").write_text('{"st')
    html.write([run], tmp_path / "wrong.html")
    empty = tmp_path / "empty"
    (empty / "replica-0").mkdir(parents=True)
    html.write([empty], tmp_path / "empty.html")
    for name in ("wrong", "empty"):
        page = chromium(tmp_path / f"{name}.html", tmp_path / "profile", "--dump-dom")
        assert 'data-drawn="yes"' in page and "written no summary" in page
        assert ("Nothing written yet" in page) == (name == "empty")


@browser
def test_the_comparison_renders_offline_without_a_console_error(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{name}-{seed}", method=name, seed=seed, steps=60)
        for name in ("dp", "streaming")
        for seed in (0, 1)
    ]
    runs.append(make_run(tmp_path / "odd", steps=60, codec="</script><i>"))
    html.write(runs, tmp_path / "compare.html")
    assert_offline(tmp_path / "compare.html")
    page = chromium(tmp_path / "compare.html", tmp_path / "profile", "--dump-dom")
    assert 'data-drawn="yes"' in page and page.count('class="uplot') == 2
    assert page.count('u-label">streaming, codec e3m0, seed 1') == 2 and "± 0.00 %" in page
