"""The report as a page, in a real browser and without a network."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from diloco.cli.plan import PlanConfig
from diloco.cli.plan import main as plan
from diloco.report import html
from diloco.runs.reader import read
from tests.support.run_directory import STEPS, carry, make_run, replace_line, steer

pytestmark = pytest.mark.slow  # processes

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
def test_the_report_renders_offline_without_a_console_error(copied: Path, tmp_path: Path) -> None:
    html.write([copied], copied / "report.html")
    assert_offline(copied / "report.html")
    page = chromium(copied / "report.html", tmp_path / "profile", "--dump-dom")
    assert 'data-drawn="yes"' in page and "<title>demo – diloco</title>" in page
    assert page.count('class="uplot') == 6 and page.count("</button>") == 5
    assert '<section id="overlap-section" hidden="">' in page, "it never changed"
    bars = re.search(r'data-bars="(\d+)"', page)
    events = 2 * 3
    assert bars and int(bars[1]) == 2 * (STEPS + len(read(copied).replicas[0].rounds)) + events
    for label in ("replica 0, training", "replica 1, training", "anchors, held-out", "unigram model", "data-parallel"):
        assert re.search(rf'u-label">{label}', page), label
    assert "return '&lt;/script&gt;&lt;b&gt;'" in page, "samples are text, not markup"
    chromium(
        copied / "report.html", tmp_path / "profile", "--window-size=500,900", f"--screenshot={tmp_path / 'page.png'}"
    )
    assert (tmp_path / "page.png").read_bytes()[16:24] == (500).to_bytes(4, "big") + (900).to_bytes(4, "big")


@browser
def test_the_timeline_goes_to_the_slowest_sync_period_and_tells_what_is_under_the_pointer(
    copied: Path, tmp_path: Path
) -> None:
    html.write([copied], tmp_path / "report.html")
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
def test_a_carried_round_is_drawn_as_an_outline_and_says_why(copied: Path, tmp_path: Path) -> None:
    carry(copied / "replica-0", unsent=[4], uncounted=[9])
    html.write([copied], tmp_path / "report.html")
    touch = """<script>{
        const canvas = document.querySelector("#timeline canvas"), told = new Set();
        const { left, top, width } = canvas.getBoundingClientRect();
        for (let x = left; x < left + width; x++) {  // along the lane of fragment 4, which has rounds 4 and 9
            canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: top + 123 }));
            if (!document.querySelector(".tip").hidden) told.add(document.querySelector(".tip").textContent);
        }
        const list = document.createElement("ul");
        list.id = "told";
        for (const text of told) list.append(Object.assign(document.createElement("li"), { textContent: text }));
        document.body.append(list);
    }</script></body>"""
    page = tmp_path / "touched.html"
    page.write_text((tmp_path / "report.html").read_text().replace("</body>", touch))
    drawn = chromium(page, tmp_path / "profile", "--dump-dom", "--window-size=1280,900")
    told = re.findall("<li>(fragment[^<]*)", drawn)
    rounds = [round for round in read(copied).replicas[0].rounds if round.fragment == 4]
    assert [text.splitlines()[0] for text in told] == [f"fragment 4, round {round.index}" for round in rounds]
    first, second, *others = [text.splitlines()[1] for text in told]
    assert first == "carried: this replica did not send in this round"
    assert second == "carried: its delta was not counted"
    assert all(text.startswith("sent after step") for text in others)
    assert 'class="swatch carried"' in drawn and "rounds carried" in drawn


@browser
def test_the_overlap_has_a_chart_if_it_changed_and_the_autopilot_a_mark(copied: Path, tmp_path: Path) -> None:
    for number in (0, 1):
        steer(copied / f"replica-{number}", [2] * 10 + [3] * 99)
    html.write([copied], tmp_path / "report.html")
    touch = """<script>{
        const canvas = document.querySelector("#timeline canvas"), told = [];
        const { left, top, width } = canvas.getBoundingClientRect();
        for (let x = left; x < left + width; x++) {  // along the marks above the lane of training
            canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: top + 37 }));
            const tip = document.querySelector(".tip");
            if (!tip.hidden && told.at(-1) !== tip.textContent) told.push(tip.textContent);
        }
        document.body.append(Object.assign(document.createElement("pre"), { id: "told", textContent: told.join("|") }));
    }</script></body>"""
    page = tmp_path / "touched.html"
    page.write_text((tmp_path / "report.html").read_text().replace("</body>", touch))
    drawn = chromium(page, tmp_path / "profile", "--dump-dom", "--window-size=1280,900")
    assert '<section id="overlap-section">' in drawn and drawn.count('class="uplot') == 7
    assert "autopilot after step 10\nat 2 s\nsync_every 50" in drawn


@browser
def test_the_report_of_a_run_that_has_barely_begun_or_went_wrong_renders(copied: Path, tmp_path: Path) -> None:
    (copied / "summary.json").unlink()
    replace_line(copied / "replica-0/metrics.jsonl", 5, '{"step": 6, "train/loss": NaN}')
    (copied / "replica-1/metrics.jsonl").write_text('{"st')
    html.write([copied], tmp_path / "wrong.html")
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


@browser
def test_a_plan_is_a_page_of_the_same_kind_with_its_answer_and_the_values_at_the_own_link(tmp_path: Path) -> None:
    given = {"codec_ns": 0.0, "hook_ns": 0.0, "json": True}
    assert plan(PlanConfig(model="1b", step_seconds="1", link=("100mbit",), plot=tmp_path / "plan.html", **given)) == 0
    assert_offline(tmp_path / "plan.html")
    page = chromium(tmp_path / "plan.html", tmp_path / "profile", "--dump-dom", "--window-size=1280,900")
    assert 'data-drawn="yes"' in page and page.count('class="uplot') == 1
    legend = dict(re.findall(r'u-label">([^<]+)</div></th><td class="u-value">([^<]+)<', page))
    assert legend["rate of the link"] == "100 Mbit/s"
    shown = {name.partition(" (")[0]: value for name, value in legend.items()}
    assert 95 < float(shown["streaming, recommended"].removesuffix(" %")) <= 100
    assert float(shown["data-parallel"].removesuffix(" %")) < 5
