"""docs/dashboard.md: its commands are valid, and the server that they start answers until it is interrupted."""

import re
import shlex
import signal
import urllib.request
from importlib import import_module
from pathlib import Path

from diloco.cli.train import _dashboard
from diloco.flags import parse
from diloco.runs.config import TrainConfig
from tests.support.commands import HANG, start, wait_for

TEXT = (Path(__file__).parents[2] / "docs/dashboard.md").read_text()
COMMANDS = [shlex.split(line) for line in re.findall(r"^\$ (diloco .*)", TEXT, re.MULTILINE)]


def test_the_commands_are_valid_and_the_pictures_are_there() -> None:
    assert [words[1] for words in COMMANDS] == ["dashboard"] * 4 + ["train", "dashboard"]
    for _, verb, *words in COMMANDS:
        kind = import_module(f"diloco.cli.{verb}").CONFIG
        assert isinstance(parse(kind, words), kind)
    for name in re.findall(r"[(\"]([\w-]+\.png)", TEXT):
        assert (Path(__file__).parents[2] / "docs" / name).read_bytes().startswith(b"\x89PNG"), name


def test_the_command_serves_until_it_is_interrupted(finished: Path) -> None:
    server = start(finished.parent, *COMMANDS[0][1:2], finished, "--port", "0")
    wait_for(lambda: "\n" in server.said()[0], server)
    address = re.search(r"http://127\.0\.0\.1:\d+/", server.said()[0])
    assert address
    with urllib.request.urlopen(address[0], timeout=HANG) as answer:
        assert "<title>demo – diloco</title>" in answer.read().decode()
    server.send_signal(signal.SIGINT)
    out, err = server.communicate()
    assert (server.returncode, out.count("\n"), err) == (130, 1, "")


def test_training_serves_its_own_run_if_it_is_asked_to(tmp_path: Path, capsys) -> None:
    with _dashboard(TrainConfig(), tmp_path / "quiet"):
        assert capsys.readouterr().err == ""
    with _dashboard(TrainConfig(dashboard=True), tmp_path / "run"):
        address = re.search(r"dashboard at (\S+)", capsys.readouterr().err)
        assert address
        with urllib.request.urlopen(address[1], timeout=HANG) as answer:
            assert "<title>run – diloco</title>" in answer.read().decode(), "also before anything is written"
