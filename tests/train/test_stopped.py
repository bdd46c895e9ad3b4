"""What is said of a run that was stopped."""

import json
from pathlib import Path

import pytest

from diloco.cli.stopped import sentence
from tests.support.run_directory import make_run


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        ([20, 60], "stopped at step 60 of 60, which is saved; go on with: diloco train --resume --name 'my run'"),
        ([20], "stopped at step 60 of 60, the newest checkpoint is of step 20; go on with: diloco train --resume"),
        ([], "stopped at step 60 of 60; none was saved, so there is nothing to resume"),
    ],
)
def test_a_stopped_run_says_what_is_saved_and_how_to_go_on(tmp_path, monkeypatch, saved, says):
    monkeypatch.chdir(tmp_path)
    run = make_run(Path("runs/my run"), steps=60)
    (run / "summary.json").write_text(json.dumps({"stopped": True, "steps": 15}))  # of an earlier stop
    for step in saved:
        for replica in ("replica-0", "replica-1"):
            (run / replica / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    (run / "replica-0/checkpoints/step-00000050").mkdir(parents=True)  # the other replica was killed before it
    assert sentence(run).startswith(says)
    assert sentence(run).endswith("my run'") or not saved


def test_a_run_outside_the_usual_folder_is_found_again(tmp_path):
    run = make_run(tmp_path / "elsewhere/one", steps=60)
    for replica in ("replica-0", "replica-1"):
        (run / replica / "checkpoints/step-00000060").mkdir(parents=True)
    assert sentence(run).endswith(f"--resume --name one --out {tmp_path / 'elsewhere'}")


def test_a_run_without_a_step_has_nothing_to_resume(tmp_path):
    assert sentence(tmp_path) == "stopped; no step was done, there is nothing to resume"
