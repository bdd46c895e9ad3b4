"""The HTML report in a real browser, without a network."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco.report import html
from diloco.runs.reader import read
from tests.support.browser import CHROMIUM, Browser, browsing
from tests.support.run_directory import STEPS, carry, make_run, replace_line, steer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH"),
]
Draw = Callable[..., str]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        browser.look_like(1280, 900)
        yield browser


@pytest.fixture
def draw(browser: Browser) -> Draw:
    """Open a page in Chromium and return it as drawn, without scripts. It must fetch nothing and log nothing."""

    def drawn(page: Path, script: str = "") -> str:
        assert "default-src 'none'" in page.read_text()
        browser.said.clear()
        browser.asked.clear()
        browser.open(page.as_uri())
        browser.get(f"(() => {{{script}}})()")
        text = browser.get("document.documentElement.outerHTML")
        assert browser.said == []
        assert [url for url in browser.asked if not url.startswith("data:")] == [page.as_uri()]
        return re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)

    return drawn


def tips(height: int) -> str:
    """A script that moves the pointer along the timeline at this height and lists the tips that appear."""
    return f"""
        const canvas = document.querySelector("#timeline canvas"), tip = document.querySelector(".tip");
        const tips = new Set(), item = text => Object.assign(document.createElement("li"), {{ textContent: text }});
        const {{ left, top, width }} = canvas.getBoundingClientRect();
        for (let x = left; x < left + width; x++) {{
            canvas.dispatchEvent(new PointerEvent("pointermove", {{ clientX: x, clientY: top + {height} }}));
            if (!tip.hidden) tips.add(tip.textContent);
        }}
        for (const text of tips) document.body.append(item(text));
    """


def test_the_report_has_all_curves_and_bars(copied: Path, draw: Draw) -> None:
    html.write([copied], copied / "report.html")
    page = draw(copied / "report.html")
    assert "<title>demo – diloco</title>" in page
    assert page.count('class="uplot') == 5 and page.count("</button>") == 5
    bars = re.search(r'data-bars="(\d+)"', page)
    events = 2 * 3
    assert bars and int(bars[1]) == 2 * (STEPS + len(read(copied).replicas[0].rounds)) + events
    for label in ("replica 0, training", "replica 1, training", "anchors, held-out", "unigram model", "data-parallel"):
        assert re.search(rf'u-label">{label}', page), label
    assert "return '&lt;/script&gt;&lt;b&gt;'" in page, "samples are text, not markup"


def test_the_timeline_zooms_to_the_slowest_sync_period_and_describes_rounds(copied: Path, draw: Draw) -> None:
    html.write([copied], copied / "report.html")
    page = draw(copied / "report.html", "document.querySelectorAll('#windows button')[1].click();" + tips(78))
    bars = re.search(r'data-bars="(\d+)"', page)
    assert bars and 0 < int(bars[1]) < 2 * STEPS, "only the window is drawn"
    first = re.findall("<li>(fragment[^<]*)", page)[0].splitlines()
    assert first[:2] == ["fragment 1, round 2", "sent after step 160, applied after 162"]
    assert first[2].startswith("in flight 510 ms, exposed") and "waited" in first[2]
    assert re.search(r'<button type="button" title="steps 150 to 192[^>]*aria-pressed="true"', page)


def test_a_carried_round_says_why_and_the_autopilot_has_a_mark(copied: Path, draw: Draw) -> None:
    steer(copied / "replica-0")
    carry(copied / "replica-0", unsent=[4], uncounted=[9])
    html.write([copied], copied / "report.html")
    page = draw(copied / "report.html", tips(123))  # the lane of fragment 4
    texts = re.findall("<li>(fragment[^<]*)", page)
    rounds = [round for round in read(copied).replicas[0].rounds if round.fragment == 4]
    assert [text.splitlines()[0] for text in texts] == [f"fragment 4, round {round.index}" for round in rounds]
    first, second, *others = [text.splitlines()[1] for text in texts]
    assert first == "carried: this replica did not send in this round"
    assert second == "carried: its delta was not counted"
    assert all(text.startswith("sent after step") for text in others)
    assert 'class="swatch carried"' in page and "rounds carried" in page
    page = draw(copied / "report.html", tips(37))  # the marks above the lane of training
    assert "autopilot after step 10\nat 2 s\nsync_every 50" in page


@pytest.mark.parametrize("empty", [False, True])
def test_a_run_that_just_started_or_diverged_renders(copied: Path, tmp_path: Path, draw: Draw, empty: bool) -> None:
    if empty:
        copied = tmp_path / "empty"
        (copied / "replica-0").mkdir(parents=True)
    else:
        (copied / "summary.json").unlink()
        metrics = copied / "replica-0/metrics.jsonl"
        replace_line(metrics, 5, re.sub(r'"loss": [^,]+', '"loss": NaN', metrics.read_text().splitlines()[5]))
        (copied / "replica-1/metrics.jsonl").write_text('{"st')
    html.write([copied], tmp_path / "report.html")
    page = draw(tmp_path / "report.html")
    assert "has no summary" in page and ("Nothing written yet" in page) == empty


def test_the_comparison_renders(tmp_path: Path, draw: Draw) -> None:
    runs = [
        make_run(tmp_path / f"{name}-{seed}", method=name, seed=seed, steps=60)
        for name in ("dp", "streaming")
        for seed in (0, 1)
    ]
    runs.append(make_run(tmp_path / "odd", steps=60, codec="</script><i>"))
    html.write(runs, tmp_path / "compare.html")
    page = draw(tmp_path / "compare.html")
    assert page.count('class="uplot') == 2
    assert page.count('u-label">streaming, codec e3m0, seed 1') == 2 and "± 0.00 %" in page
