"""docs/dashboard.md: its commands are run as they stand there, and what they serve answers until it is interrupted."""

import re
import shlex
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from diloco.bucket import Bucket
from diloco.cli.train import _dashboard
from diloco.runs.config import TrainConfig
from tests.support.commands import HANG, run, start, wait_for
from tests.support.run_directory import make_run

TEXT = (Path(__file__).parents[2] / "docs/dashboard.md").read_text()
COMMANDS = [shlex.split(line) for line in re.findall(r"^\$ (diloco .*)", TEXT, re.MULTILINE)]

SERVED = [
    (["runs"], ["<title>runs – diloco</title>", "first", "second"]),
    (["runs/first"], ["<title>first – diloco</title>"]),
    (["runs/first", "runs/second"], ["first", "second"]),
    (["s3://my-bucket/run-1"], ["lab"]),
    (["runs", "--host", "0.0.0.0"], ["first", "second"]),
]
"""What each command is given, and what its page has."""


def test_every_command_is_run_below_and_the_pictures_are_there() -> None:
    assert [words[1] for words in COMMANDS] == ["dashboard"] * 4 + ["train", "dashboard"]
    assert [words[2:] for words in COMMANDS if words[1] == "dashboard"] == [given for given, _ in SERVED]
    for name in re.findall(r"[(\"]([\w-]+\.png)", TEXT):
        assert (Path(__file__).parents[2] / "docs" / name).read_bytes().startswith(b"\x89PNG"), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page names: two runs, and a bucket in a folder instead of the store."""
    place = tmp_path_factory.mktemp("dashboard")
    for name in ("first", "second"):
        make_run(place / "runs" / name)
    bucket = Bucket(str(place / "my-bucket/run-1"), "lab", note={"steps": 1000, "sync_every": 100})
    bucket.join({"sync_every": 100}, [], [])
    bucket.leave()
    return place


@pytest.mark.slow
@pytest.mark.parametrize(("given", "shows"), SERVED)
def test_a_command_serves_what_it_names_until_it_is_interrupted(
    folder: Path, given: list[str], shows: list[str]
) -> None:
    words = [word.replace("s3://", "") for word in given]
    server = start(folder, "dashboard", *words, "--port", "0")
    wait_for(lambda: "\n" in server.said()[0], server)
    host = socket.gethostname() if "0.0.0.0" in given else "127.0.0.1"
    address = re.search(rf"http://{re.escape(host)}(:\d+/\S*)", server.said()[0])
    assert address and ("token=" in address[1]) is ("--host" in given)
    keeps_cookies = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with keeps_cookies.open(f"http://127.0.0.1{address[1]}", timeout=HANG) as answer:
        page = answer.read().decode()
    assert [text for text in shows if text not in page] == []
    server.send_signal(signal.SIGINT)
    out, err = server.communicate()
    assert (server.returncode, out.count("\n"), err) == (130, 1, "")


@pytest.mark.slow
def test_the_command_that_trains_says_where_its_page_is(tmp_path: Path) -> None:
    ((_, *words),) = (words for words in COMMANDS if words[1] == "train")
    few = ["--steps", "2", "--batch", "4", "--context", "32", "--eval-tokens", "512"]
    code, _, err = run(tmp_path, *words, *few)
    assert code == 0, err
    assert re.search(r"dashboard at http://127\.0\.0\.1:\d+/", err) and (tmp_path / "runs/first/report.html").exists()


def test_training_serves_its_own_run_if_it_is_asked_to(tmp_path: Path, capsys) -> None:
    with _dashboard(TrainConfig(), tmp_path / "quiet"):
        assert capsys.readouterr().err == ""
    with _dashboard(TrainConfig(dashboard=True), tmp_path / "run"):
        address = re.search(r"dashboard at (\S+)", capsys.readouterr().err)
        assert address
        with urllib.request.urlopen(address[1], timeout=HANG) as answer:
            assert "<title>run – diloco</title>" in answer.read().decode(), "also before anything is written"
