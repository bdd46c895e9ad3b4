"""The page that lives, in a real browser: it follows a run and its server's restart; sixty-four members of a bucket."""

import shutil
from pathlib import Path

import pytest

from diloco.bucket import Bucket, find_run
from diloco.bucket.members import Member
from diloco.bucket.store.envelope import Envelope
from diloco.dashboard.server import Dashboard, open_dashboard, serving
from diloco.dashboard.site import Site
from diloco.runs import folder as folders
from tests.support.browser import CHROMIUM, Browser, browsing
from tests.support.run_directory import STEPS, copy_until, make_run

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH"),
    pytest.mark.slow,
]
HEAD = "document.getElementById('head').textContent"
CAPTURE = """URL.createObjectURL = blob => { window.table = blob.text(); return "data:,"; };
             document.getElementById("table").click(); window.table"""


def dashboard(*given: Path, port: int = 0) -> Dashboard:
    return open_dashboard(Site([str(path) for path in given]), "127.0.0.1", port)


def table(browser: Browser) -> list[str]:
    """The curves that the page has, as it offers them for download."""
    return browser.get(CAPTURE).splitlines()


def test_a_page_follows_a_run_and_the_restart_of_its_server_until_the_run_has_ended(
    finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    copy_until(40, finished, run)
    with browsing() as browser:
        with folders.locked(run):
            (run / "phase").write_text("evaluating")
            with serving(dashboard(run)) as server:
                port = server.server_address[1]
                browser.open(server.address)
                browser.wait(f"{HEAD}.includes('evaluating · step 40 of 300')")
                browser.get("document.querySelector('#loss .u-over').dispatchEvent(new MouseEvent('dblclick'))")
                copy_until(90, finished, run)
                browser.wait(f"{HEAD}.includes('step 90 of 300')")
                browser.wait("document.querySelector('#loss .u-value').textContent === '90'")
                assert browser.said == [] and all(address.startswith(server.address) for address in browser.asked)
            browser.wait("document.getElementById('live').textContent.includes('does not answer')")
            copy_until(130, finished, run)
            with serving(dashboard(run, port=port)) as server:
                browser.wait(f"{HEAD}.includes('step 130 of 300')")
                browser.wait("document.getElementById('live').textContent === 'live'")
                shutil.copytree(finished, run, dirs_exist_ok=True)
                browser.wait("document.getElementById('samples').textContent.includes('def read')")
        with serving(dashboard(run, port=port)) as server:
            followed = table(browser)
            bars = browser.get("document.querySelector('#timeline canvas').dataset.bars")
            browser.open(server.address)
            assert table(browser) == followed and len(followed) == STEPS + 1, "as if it had been opened now"
            assert browser.get("document.querySelector('#timeline canvas').dataset.bars") == bars
            assert "loss: anchors, held-out" in followed[0] and followed[-1].startswith("300,")


def test_a_page_that_follows_keeps_what_its_reader_has_chosen(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    copy_until(100, finished, run)
    other = make_run(tmp_path / "other", steps=60)
    with browsing() as browser, serving(dashboard(run, other)) as both, serving(dashboard(run)) as server:
        browser.open(server.address)
        browser.get("document.querySelectorAll('#windows button')[1].click()")
        browser.get("""document.querySelector('#loss tr.u-series:nth-child(3) th').click()""")
        bars = browser.get("document.querySelector('#timeline canvas').dataset.bars")
        copy_until(110, finished, run)
        browser.wait("document.querySelector('#loss .u-value').textContent === '110'")
        assert browser.get("document.querySelectorAll('#loss .u-legend .u-off').length") == 1
        assert browser.get("document.querySelector('#timeline canvas').dataset.bars") == bars, "the window stays"
        browser.open(both.address)
        copy_until(150, finished, run)
        browser.wait("+document.querySelector('#training .u-value').textContent === 150")
        assert browser.get("document.querySelectorAll('.uplot').length") == 2 and browser.said == []


def test_sixty_four_members_are_shown_with_their_state(tmp_path: Path) -> None:
    bucket = Bucket(str(tmp_path), "m-0", note={"steps": 1000, "sync_every": 100})
    bucket.join({"sync_every": 100}, [], [])
    bucket.leave()
    envelope = Envelope(find_run(str(tmp_path)).id)
    for number in range(1, 64):
        state = {"joining": number == 1, "left": number == 2, "counter": number}
        published = {"loss": 2.0 + number / 100, "step": 10.0, "tokens_per_second": 1500.0}
        member = Member(f"m-{number}", 0, held=(), step_seconds=0.25, published=published, **state)
        (tmp_path / member.object_name).parent.mkdir(parents=True)
        (tmp_path / member.object_name).write_bytes(member.sealed(envelope))
    with browsing() as browser, serving(dashboard(tmp_path)) as server:
        browser.open(server.address)
        states = browser.get("[...document.querySelectorAll('#members tbody tr')].map(r => r.children[1].textContent)")
        assert len(states) == 64 and states.count("left") == 2 and states.count("unknown") > 50
        assert "round 0 of 10" in browser.get(HEAD)
        (tmp_path / "members/m-9/000000").unlink()
        browser.wait("document.querySelectorAll('#members tbody tr').length === 63")
        assert browser.said == [] and all(address.startswith(server.address) for address in browser.asked)
