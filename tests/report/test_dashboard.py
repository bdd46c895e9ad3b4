"""The dashboard over real sockets and in a real browser; the commands of docs/dashboard.md."""

import http.client
import json
import re
import shlex
import shutil
import signal
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from diloco.report.dashboard import Dashboard
from diloco.runs import folder as folders
from tests.support.browser import CHROMIUM, Browser, browsing
from tests.support.commands import HANG, run_here, start, wait_for
from tests.support.dashboard import serving
from tests.support.run_directory import STEPS, copy_until, make_run

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH"
)
COMMANDS = [
    shlex.split(line)
    for line in re.findall(
        r"^\$ diloco (.*)", (Path(__file__).parents[2] / "docs/dashboard.md").read_text(), re.MULTILINE
    )
]
HEAD = "document.getElementById('head').textContent"


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: str


def get(server: Dashboard, path: str = "/", **headers: str) -> Answer:
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read().decode())


def data(server: Dashboard, path: str = "/data") -> dict[str, Any]:
    return json.loads(get(server, path).body)


def test_a_page_is_the_report_and_contacts_only_its_server(finished: Path) -> None:
    with serving(finished) as server:
        page = get(server).body
        assert "<title>demo – diloco</title>" in page and "connect-src 'self'" in page
        assert "http://" not in page.replace("http://www.w3.org", "")
        assert [get(server, path).status for path in ("/run/demo/", "/x", "/compare/", "/../etc/passwd")] == [404] * 4


def test_data_is_sent_only_if_it_has_changed(finished: Path, tmp_path: Path) -> None:
    copy_until(100, finished, tmp_path)
    with serving(tmp_path) as server, folders.locked(tmp_path):
        first = get(server, "/data")
        values = json.loads(first.body)
        assert values["data"]["charts"]["loss"]["steps"][-1] == 100 and "step 100 of 300" in values["parts"]["head"]
        assert get(server, "/data", **{"If-None-Match": first.headers["ETag"]}).status == 304
        copy_until(110, finished, tmp_path)
        second = get(server, "/data", **{"If-None-Match": first.headers["ETag"]})
        assert second.status == 200 and json.loads(second.body)["data"]["charts"]["loss"]["steps"][-1] == 110
    with serving(tmp_path) as server:
        assert "it ended without one" in data(server)["parts"]["head"], "no process holds the lock of the run"


def test_a_running_member_shows_what_its_fragments_wait_for(finished: Path, tmp_path: Path) -> None:
    copy_until(100, finished, tmp_path)
    (tmp_path / "fragments").write_text("idle\t0, 2\tsteps\ndelivered\t1\tthe others' deltas\nhalf a li")
    with serving(tmp_path) as server:
        with folders.locked(tmp_path):
            head = data(server)["parts"]["head"]
        assert "<td>delivered</td><td>1</td><td>the others&#39; deltas</td>" in head and "half" not in head
        assert "delivered" not in data(server)["parts"]["head"], "it has ended"


def test_a_host_name_of_another_machine_is_refused_and_a_malformed_one_is_a_bad_request(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(finished) as server:
        for hosts, status in [
            (("evil.example", "evil.example:80", "10.0.0.7"), 403),
            (("localhost:99", "127.0.0.1", "[::1]:8265"), 200),
            (("[::1", "[", "a]b"), 400),
        ]:
            assert [get(server, Host=host).status for host in hosts] == [status] * 3
        assert get(server, "http://[::1/", Host="localhost").status == 400
    assert capfd.readouterr().err == ""


def test_a_missing_folder_and_a_used_port_are_refused(finished: Path) -> None:
    assert "there is no folder nowhere" in run_here(finished, "dashboard", "nowhere")[2]
    with serving(finished) as server:
        port = server.server_address[1]
        code, _, err = run_here(finished, "dashboard", finished, "--port", port)
    assert code == 2 and f"port {port}: " in err and "Address already in use" in err
    assert "port 65536: " in run_here(finished, "dashboard", finished, "--port", "65536")[2]


def test_runs_in_a_folder_are_listed_opened_and_compared_and_new_ones_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "runs") as server:
        assert "No runs yet" in get(server).body, "the folder `runs` may not exist yet"
        make_run(tmp_path / "runs/one", steps=60)
        make_run(tmp_path / "runs/cmp/two & more", method="dp", steps=60)
        page = get(server).body
        assert 'href="run/cmp~two%20%26%20more/"' in page and "2 runs, 0 running" in page
        assert "<title>one – diloco" in get(server, "/run/one/").body and "all runs" in get(server, "/run/one/").body
        both = "?run=one&run=cmp~two+%26+more&run=missing"
        page = get(server, f"/compare/{both}").body
        assert "2 runs, 2 settings" in page and 'href="../run/one/"' in page
        assert [run["name"] for run in data(server, f"/compare/data{both}")["data"]["runs"]] == ["two & more", "one"]
        make_run(tmp_path / "runs/three", steps=60)
        assert "run/three/" in data(server)["parts"]["runs"]


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_commands_of_the_docs_serve_their_runs_until_interrupted(tmp_path: Path, words: list[str]) -> None:
    make_run(tmp_path / "runs/first", steps=60)
    server = start(tmp_path, *words, "--port", "0")
    wait_for(lambda: "\n" in server.said()[0], server)
    address = re.search(r"http://\S*", server.said()[0])
    assert address
    with urllib.request.urlopen(address[0], timeout=HANG) as answer:
        assert "first" in answer.read().decode()
    server.send_signal(signal.SIGINT)
    out, err = server.communicate()
    assert (server.returncode, out.count("\n"), err) == (130, 1, "")


def table(browser: Browser) -> list[str]:
    """The curves on the page, as CSV."""
    capture = """URL.createObjectURL = blob => { window.table = blob.text(); return "data:,"; };
                 document.getElementById("table").click(); window.table"""
    return browser.get(capture).splitlines()


@needs_browser
@pytest.mark.slow
def test_a_page_follows_a_run_across_a_server_restart_until_the_run_ends(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    copy_until(40, finished, run)
    with browsing() as browser:
        with folders.locked(run):
            (run / "phase").write_text("evaluating")
            with serving(run) as server:
                port = server.server_address[1]
                browser.open(server.address)
                browser.wait(f"{HEAD}.includes('evaluating · step 40 of 300')")
                copy_until(90, finished, run)
                browser.wait(f"{HEAD}.includes('step 90 of 300')")
                browser.wait("document.querySelector('#loss .u-value').textContent === '90'")
                assert browser.said == [] and all(address.startswith(server.address) for address in browser.asked)
            browser.wait("document.getElementById('live').textContent.includes('does not respond')")
            copy_until(130, finished, run)
            with serving(run, port) as server:
                browser.wait(f"{HEAD}.includes('step 130 of 300')")
                browser.wait("document.getElementById('live').textContent === 'live'")
                shutil.copytree(finished, run, dirs_exist_ok=True)
                browser.wait("document.getElementById('samples').textContent.includes('def read')")
        with serving(run, port) as server:
            followed = table(browser)
            bars = browser.get("document.querySelector('#timeline canvas').dataset.bars")
            browser.open(server.address)
            assert table(browser) == followed and len(followed) == STEPS + 1, "same as a page opened now"
            assert browser.get("document.querySelector('#timeline canvas').dataset.bars") == bars
            assert "loss: anchors, held-out" in followed[0] and followed[-1].startswith("300,")


@needs_browser
@pytest.mark.slow
def test_an_update_keeps_zoom_and_hidden_curves(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    copy_until(100, finished, run)
    make_run(tmp_path / "other", steps=60)
    with browsing() as browser, serving(tmp_path) as both, serving(run) as server:
        browser.open(server.address)
        browser.get("document.querySelectorAll('#windows button')[1].click()")
        browser.get("""document.querySelector('#loss tr.u-series:nth-child(3) th').click()""")
        bars = browser.get("document.querySelector('#timeline canvas').dataset.bars")
        copy_until(110, finished, run)
        browser.wait("document.querySelector('#loss .u-value').textContent === '110'")
        assert browser.get("document.querySelectorAll('#loss .u-legend .u-off').length") == 1
        assert browser.get("document.querySelector('#timeline canvas').dataset.bars") == bars, "the window stays"
        browser.open(f"{both.address}compare/?run=demo&run=other")
        copy_until(150, finished, run)
        browser.wait("+document.querySelector('#training .u-value').textContent === 150")
        assert browser.get("document.querySelectorAll('.uplot').length") == 2 and browser.said == []


def test_an_unreadable_run_does_not_hide_the_others_and_its_page_says_why(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken reader stands for every exception that nobody foresaw."""
    for name in ("one", "two"):
        shutil.copytree(finished, tmp_path / "runs" / name)

    def broken(folder: Path) -> dict[str, object]:
        if folder.name == "two":
            raise ZeroDivisionError("never foreseen")
        return {"method": "diloco"}

    monkeypatch.setattr("diloco.runs.reader.read_config", broken)
    code, out, _ = run_here(tmp_path, "report")
    assert code == 0 and "cannot be read: ZeroDivisionError: never foreseen" in " ".join(out.split())
    with serving(tmp_path / "runs") as server:
        page = get(server).body
        assert "one" in page and "cannot be read: ZeroDivisionError" in page
        answer = get(server, "/run/two/")
        assert answer.status == 500 and "cannot be read" in answer.body
