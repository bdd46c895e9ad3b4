"""The dashboard's server, over real sockets: who is answered, with what, and what is sent while a run goes on."""

import fcntl
import http.client
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from diloco.dashboard import access
from diloco.dashboard.pages import RunPage, position
from diloco.dashboard.server import open_dashboard, serving
from diloco.dashboard.site import Site
from diloco.report.curves import charts, timeline
from diloco.runs import folder as folders
from diloco.runs import follow
from diloco.runs.follow import Followed
from diloco.runs.replica import POINTS, Growing
from diloco.runs.schema import Round
from tests.support.commands import run_here
from tests.support.run_directory import copy_until, make_run


@pytest.fixture(autouse=True)
def look_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "EVERY", 0.0)


@contextmanager
def served(*given: Path) -> Iterator[int]:
    with serving(open_dashboard(Site([str(path) for path in given]), "127.0.0.1", 0)) as dashboard:
        yield dashboard.server_address[1]


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: str


def ask(port: int, path: str = "/", **headers: str) -> Answer:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read().decode())


def text(port: int, path: str = "/", **headers: str) -> str:
    answer = ask(port, path, **headers)
    assert answer.status == 200, answer.body
    return answer.body


@contextmanager
def stream(port: int, path: str = "/events", **headers: str) -> Iterator[Callable[[], tuple[str, dict[str, Any]]]]:
    """The events of a page: a function that waits for the next one, and returns its id and data."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path, headers=headers)
        with connection.getresponse() as answer:
            assert answer.getheader("Content-Type") == "text/event-stream"

            def next_one() -> tuple[str, dict[str, Any]]:
                at = ""
                while True:
                    key, _, value = answer.readline().decode().rstrip("\n").partition(": ")
                    if key == "data":
                        return at, json.loads(value)
                    at = value if key == "id" else at

            yield next_one


def test_a_page_is_the_report_and_listens_to_nobody_else(finished: Path) -> None:
    with served(finished) as port:
        page = text(port)
        assert "<title>demo – diloco</title>" in page and "connect-src 'self'" in page and "79" in page
        assert "http://" not in page.replace("http://www.w3.org", "")
        assert [ask(port, path).status for path in ("/run/demo/", "/other", "/compare/", "/../etc/passwd")] == [404] * 4


def test_a_name_that_leads_here_from_elsewhere_is_refused(finished: Path) -> None:
    with served(finished) as port:
        assert [ask(port, Host=host).status for host in ("evil.example", "evil.example:80", "10.0.0.7")] == [403] * 3
        assert [ask(port, Host=host).status for host in ("localhost:99", "127.0.0.1", "[::1]:8265")] == [200] * 3


def test_a_shared_address_needs_its_token_once_and_then_a_cookie(finished: Path) -> None:
    with serving(open_dashboard(Site([str(finished)]), "0.0.0.0", 0)) as dashboard:
        port, token = dashboard.server_address[1], dashboard.token
        assert token and len(token) >= 32 and dashboard.address.endswith(f"/?token={token}")
        for path in ("/", "/events", "/?token=another-token-of-some-length"):
            answer = ask(port, path)
            assert answer.status == 403 and "needs its token" in answer.body
        first = ask(port, f"/?token={token}&run=x", Host="anything.example")
        cookie = first.headers["Set-Cookie"]
        assert (first.status, first.headers["Location"]) == (303, "/?run=x")
        assert "HttpOnly" in cookie and "SameSite=Lax" in cookie
        assert str(port) in cookie.partition("=")[0], "another dashboard on this host has another cookie"
        assert "demo" in text(port, Cookie=cookie.partition(";")[0])
        assert ask(port, Cookie=f"{access.cookie_name(port)}=wrong").status == 403
        for path in ("/\\evil.example/", "//evil.example/", "/\\/evil.example/"):
            assert ask(port, f"{path}?token={token}").headers["Location"] == "/evil.example/", path


def test_a_malformed_host_or_address_is_a_bad_request(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with served(finished) as port:
        assert [ask(port, Host=host).status for host in ("[::1", "[", "a]b")] == [400] * 3
        assert ask(port, "http://[::1/", Host="localhost").status == 400
        assert text(port)
    assert capfd.readouterr().err == ""


def test_what_is_not_there_and_a_port_that_is_taken_are_said(finished: Path) -> None:
    assert "there is no folder nowhere" in run_here(finished, "dashboard", "nowhere")[2]
    with served(finished) as port:
        code, _, said = run_here(finished, "dashboard", finished, "--port", port)
    assert code == 2 and f"port {port}: Address already in use; give another --port" in said


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What live.js makes of a chart and what was added to it."""
    if not new["since"]:
        return new
    kept = sum(step < new["since"] for step in old["steps"])
    curves = [
        before | {"values": before["values"][:kept] + after["values"]}
        for before, after in zip(old["curves"], new["curves"], strict=True)
    ]
    return new | {"since": 0, "steps": old["steps"][:kept] + new["steps"], "curves": curves}


def test_what_is_sent_piece_by_piece_is_the_whole_run(finished: Path, tmp_path: Path) -> None:
    copy_until(7, finished, tmp_path)
    followed = Followed(tmp_path)
    page, run = RunPage(followed), followed.look()
    at, drawn = position(run), charts(run)
    sent = {}
    for step in (7, 8, 60, 61, 199, 300):
        copy_until(step, finished, tmp_path)
        at, _, data = page.news(at)
        assert bool(data) == (step != 7), "nothing is sent twice"
        sent[step] = data.get("charts", {}).get("loss", {}).get("steps")
        for name, chart in data.get("charts", {}).items():
            drawn[name] = merged(drawn[name], chart)
    whole = charts(Followed(tmp_path).look())
    assert {name: chart | {"since": 0} for name, chart in drawn.items()} == {
        n: c | {"since": 0} for n, c in whole.items()
    }
    assert (sent[8], sent[61]) == ([7, 8], [60, 61]), (
        "the last step may have been incomplete, others are not sent again"
    )


def test_a_long_run_is_widened_and_sent_anew_and_its_memory_stays_flat(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "long", steps=2 * POINTS + 20)
    (tmp_path / "now").mkdir()
    copy_until(2 * POINTS - 2, folder, tmp_path / "now")
    followed = Followed(tmp_path / "now")
    before = followed.look()
    assert before.width == 2 and len(before.replicas[0].steps) == POINTS - 1
    copy_until(2 * POINTS + 20, folder, tmp_path / "now")
    at, _, data = RunPage(followed).news(position(before))
    after = followed.look()
    assert after.width == 4 and len(after.replicas[0].steps) < POINTS and data["charts"]["loss"]["since"] == 0
    assert RunPage(followed).news(at).data == {}
    growing, round = Growing(thinned=True), before.rounds[0]
    for number in range(20_000):
        growing.add(Round(**{name: getattr(round, name) for name in Round.__slots__} | {
            "index": number // 5, "fragment": number % 5, "counted": number % 1000 > 0}))  # fmt: skip
    replica = growing.replica(0)
    assert len(replica.rounds) <= 6000 and len(replica.rounds) + replica.left_out == 20_000
    assert {kept.fragment for kept in replica.rounds} == set(range(5)), "every fragment is still drawn"
    assert sum(not kept.counted for kept in replica.rounds) + replica.carried_left_out == 20


def test_a_resumed_run_is_read_again_and_the_summary_of_its_stop_is_not_believed(
    finished: Path, tmp_path: Path
) -> None:
    copy_until(60, finished, tmp_path)
    followed = Followed(tmp_path)
    at = position(followed.look())
    copy_until(40, finished, tmp_path)  # cut at a checkpoint, and before the next look longer than it was
    for metrics in tmp_path.glob("replica-*/metrics.jsonl"):
        line = json.loads(metrics.read_text().splitlines()[-1])
        with metrics.open("a") as file:
            file.writelines(json.dumps(line | {"step": step, "train/loss": 9.0}) + "\n" for step in range(41, 71))
    (tmp_path / "summary.json").write_text('{"steps": 60, "stopped": true, "eval/loss": 9}')
    with (tmp_path / "replica-0/events.jsonl").open("a") as events:
        events.write('{"event": "resume", "seconds": 8.0, "step": 40, "time": 1794000000}\n')
    run = followed.look()
    assert [step.loss for step in run.replicas[0].steps[40:]] == [9.0] * 30, "also those that were read before"
    assert run.state == "unfinished" and run.figures.loss != 9
    _, _, data = RunPage(followed).news(at)
    assert data["timeline"]["since"] == 0
    (resume,) = [e for e in timeline(run)["replicas"][0]["events"] if e["event"] == "resume"]
    assert resume["step"] == 40


def test_a_stream_goes_on_where_a_browser_was_also_after_a_restart(finished: Path, tmp_path: Path) -> None:
    copy_until(100, finished, tmp_path)
    with served(tmp_path) as port, folders.locked(tmp_path), stream(port) as news:
        at, first = news()
        assert first["charts"]["loss"]["since"] == 0 and "step 100 of 300" in first["parts"]["head"]
        copy_until(110, finished, tmp_path)
        at, second = news()
        assert second["charts"]["loss"]["steps"][0] == 100 and "settings" not in second["parts"]
    copy_until(120, finished, tmp_path)
    with served(tmp_path) as port, stream(port, **{"Last-Event-ID": at}) as news:
        _, third = news()
        assert third["charts"]["loss"]["steps"] == list(range(110, 121))
        assert "it ended without one" in third["parts"]["head"], "nobody holds the run's lock"


def test_runs_in_a_folder_are_listed_opened_and_compared_and_new_ones_appear(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/one", steps=60)
    make_run(tmp_path / "runs/cmp/two & more", method="dp", steps=60)
    with served(tmp_path / "runs") as port:
        page = text(port)
        assert 'href="run/cmp~two%20%26%20more/"' in page and "2 runs, 0 of them running" in page
        assert "<title>one – diloco" in text(port, "/run/one/") and "all runs" in text(port, "/run/one/")
        both = text(port, "/compare/?run=one&run=cmp~two+%26+more&run=missing")
        assert "2 runs, 2 settings" in both and 'href="../run/one/"' in both
        with stream(port, "/compare/events?run=one&run=cmp~two+%26+more") as news:
            assert [run["name"] for run in news()[1]["runs"]] == ["two & more", "one"]
        with stream(port) as news:
            assert "run/one/" in news()[1]["parts"]["runs"]
            make_run(tmp_path / "runs/three", steps=60)
            while "run/three/" not in news()[1]["parts"].get("runs", ""):
                pass
    with served(tmp_path / "runs/one", tmp_path / "runs/three") as port:
        assert "2 runs" in text(port)


def test_whoever_looks_whether_a_run_goes_on_keeps_none_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "lock").open("w") as looker:
        fcntl.flock(looker, fcntl.LOCK_SH)
        monkeypatch.setattr(folders.time, "sleep", lambda _: fcntl.flock(looker, fcntl.LOCK_UN))
        with folders.locked(tmp_path):
            assert folders.in_use(tmp_path)


def test_a_folder_of_runs_may_come_later(tmp_path: Path) -> None:
    with serving(open_dashboard(Site.of_folder(tmp_path / "runs"), "127.0.0.1", 0)) as dashboard:
        port = dashboard.server_address[1]
        assert "No run yet" in text(port)
        make_run(tmp_path / "runs/one", steps=60)
        assert "run/one/" in text(port)
