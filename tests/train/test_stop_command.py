"""`diloco stop`, and what is said of a run that was stopped."""

import json
from pathlib import Path

import pytest

from diloco.cli.stop import sentence
from diloco.errors import ConfigError
from diloco.runs.folder import locked
from tests.support.commands import ended, run_here, start, training, wait_for_lines
from tests.support.run_directory import make_run


def _checkpoint(replica: Path, step: int) -> None:
    path = replica / f"checkpoints/step-{step:08d}"
    path.mkdir(parents=True)
    (path / ".metadata").touch()


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        ([20, 60], "stopped at step 60 of 60, which is saved; continue with: diloco train --resume --name 'my run'"),
        ([20], "stopped at step 60 of 60, the newest checkpoint is of step 20; continue with: diloco train --resume"),
        ([], "stopped at step 60 of 60; no checkpoint was saved, so there is nothing to resume"),
    ],
)
def test_a_stopped_run_says_what_is_saved_and_how_to_go_on(tmp_path, monkeypatch, saved, says):
    monkeypatch.chdir(tmp_path)
    run = make_run(Path("runs/my run"), steps=60)
    (run / "summary.json").write_text(json.dumps({"stopped": True, "steps": 15}))  # of an earlier stop
    for step in saved:
        for replica in ("replica-0", "replica-1"):
            _checkpoint(run / replica, step)
    _checkpoint(run / "replica-0", 50)  # the other replica was killed before it
    assert sentence(run).startswith(says)
    assert sentence(run).endswith("my run'") or not saved


def test_a_run_outside_the_usual_folder_is_found_again(tmp_path):
    run = make_run(tmp_path / "elsewhere/one", steps=60)
    for replica in ("replica-0", "replica-1"):
        _checkpoint(run / replica, 60)
    assert sentence(run).endswith(f"--resume --name one --out {tmp_path / 'elsewhere'}")


def test_a_run_without_a_step_has_nothing_to_resume(tmp_path):
    assert sentence(tmp_path) == "stopped; no step was done, there is nothing to resume"


@pytest.mark.slow
def test_a_run_is_stopped_from_another_terminal_with_a_checkpoint(place):
    process = start(place, *training("far", "--steps", "100_000"))
    wait_for_lines(place / "runs/far/replica-1/metrics.jsonl", 3, process)
    with pytest.raises(ConfigError, match=rf"in use by another process \(process {process.pid}\): stop it with"), \
            locked(place / "runs/far"):  # fmt: skip
        pass
    code, out, err = run_here(place, "stop", "runs/far")
    assert code == 0 and f"process {process.pid}" in err and "which is saved; continue with: diloco train" in out, err
    assert ended(process)[0] == 130
    code, _, err = run_here(place, "stop", "runs/far")
    assert code == 2 and "no process on this machine runs runs/far" in err
