"""`diloco train` killed, stopped, out of space, and resumed."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from diloco.cli.train import complete
from diloco.errors import ConfigError
from tests.support.commands import SMALL, check_anchors, check_same, lines, losses, run, start, train, wait_for, weights


def test_a_run_killed_at_any_moment_resumes_to_the_same_trajectory(place, whole):
    """With a checkpoint after every step the kill falls into a save more often than not."""
    name = "killed"
    process = start(
        place, "train", *SMALL, "--data", "corpus.txt", "--name", name, "--steps", "60", "--save-every", "1"
    )
    metrics = place / f"runs/{name}/replica-0/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 12, process)
    children = [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    for child in children:
        os.kill(child, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "was killed by signal 9" in err.splitlines()[-1]
    code, _, err = train(place, name, "--steps", "60", "--save-every", "20", "--resume")
    assert code == 0, err
    check_same(place, name)
    assert any(e["event"] == "resume" for e in lines(place, name, kind="events"))


def test_ctrl_c_leaves_a_checkpoint_of_one_step_and_a_report_and_resumes(place):
    process = start(place, "train", *SMALL, "--data", "corpus.txt", "--name", "stopped", "--steps", "2000",
                    "--save-every", "5000")  # fmt: skip
    metrics = place / "runs/stopped/replica-0/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "loss of the anchors" in out
    stops = [e["step"] for m in (0, 1) for e in lines(place, "stopped", m, "events") if e["event"] == "stop"]
    assert len(stops) == 2 and len(set(stops)) == 1 and stops[0] < 2000
    assert (place / "runs/stopped/report.html").exists()
    assert "stopping after a few steps, with a checkpoint" in err
    # Only what is given changes; all else is as the run had it.
    before = (place / "runs/stopped/config.toml").read_text()
    code, out, err = run(place, "train", "--resume", "--name", "stopped", "--steps", str(stops[0] + 5), "--json")
    assert code == 0, err
    assert f"changed: steps 2000 → {stops[0] + 5}\n" in err
    assert json.loads(out)["steps"] == stops[0] + 5
    assert (place / "runs/stopped/config.toml").read_text() == before.replace("= 2000", f"= {stops[0] + 5}")


def test_a_closed_terminal_during_the_start_stops_all_and_promises_no_checkpoint(place):
    process = start(place, "train", *SMALL, "--data", "corpus.txt", "--name", "early", "--steps", "2000")
    wait_for(lambda: (place / "runs/early/replica-1/log.txt").exists(), process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "diloco: stopped; no step was done, there is nothing to resume"
    assert all(not Path(f"/proc/{child}").exists() for child in children)


def test_a_run_whose_starter_was_killed_is_in_use_until_its_replicas_end(place):
    process = start(place, "train", *SMALL, "--data", "corpus.txt", "--name", "orphans", "--steps", "5000")
    wait_for(lambda: (place / "runs/orphans/replica-1/log.txt").exists(), process)
    children = [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.kill()
    process.communicate(timeout=60)
    code, _, err = train(place, "orphans", "--steps", "5")
    for child in children:
        os.kill(child, signal.SIGKILL)
    assert len(children) == 2 and code == 2 and "is in use by another process" in err


@pytest.mark.parametrize("spelled", [["--name", "first"], ["--name=first"]])
def test_resume_takes_the_settings_of_the_run_that_is_named_not_of_the_newest(tmp_path, spelled):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f'name = "{name}"\nsteps = 7\n')
        os.utime(tmp_path / name / "config.toml", (len(name), len(name)))
    given = ["--resume", *spelled, f"--out={tmp_path}"]
    assert complete(given) == ["--name", "first", "--steps", "7", *given]
    assert complete([*given, "--tokens", "99"]) == ["--name", "first", *given, "--tokens", "99"]
    assert complete(["--resume", "--out", str(tmp_path)])[1] == "second"
    (tmp_path / "recipe.toml").write_text("steps = 9\n")
    with pytest.raises(ConfigError, match=r"which run\? Add --name"):
        complete([str(tmp_path / "recipe.toml"), "--resume"])


def test_one_dead_process_stops_all_with_its_reason_on_the_last_line(place):
    process = start(place, "train", *SMALL, "--data", "corpus.txt", "--name", "dead", "--steps", "5000")
    metrics = place / "runs/dead/replica-1/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5, process)
    child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[1]
    os.kill(int(child), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "process 1 was killed by signal 9" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_sharded_replicas_with_accumulation_save_export_and_resume(place):
    words = ["--shards", "2", "--batch", "8", "--accumulate", "2", "--save-every", "7"]
    code, out, err = train(place, "sharded", "--steps", "10", *words, "--json")
    assert code == 0, err
    code, out, err = run(place, "export", "runs/sharded", "--to", "from-shards", "--step", "7")
    assert (code, out) == (0, "from-shards\n"), err
    check_anchors(place, "from-shards", weights(place, "sharded", 7), shards=2)
    code, out, err = train(place, "sharded", "--steps", "14", *words, "--resume", "--json")
    assert code == 0, err
    assert json.loads(out)["steps"] == 14
    assert list(losses(place, "sharded")) == list(range(1, 15))


def test_a_full_disk_ends_the_run_with_the_remedy_and_the_old_checkpoint_survives(place, whole):
    shutil.copytree(place / "runs/whole", place / "runs/full")
    # A limit on the size of files makes writing fail as a full disk does.
    limited = ("-c", "import resource, sys, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000));"
               "sys.argv = sys.argv[1:]; runpy.run_module('diloco', run_name='__main__')", "diloco")  # fmt: skip
    code, _, err = train(place, "full", "--steps", "65", "--resume", tool=limited)
    assert code == 2, err
    assert "no space left to save" in err.splitlines()[-1] and "step 60 is whole" in err.splitlines()[-1]
    assert weights(place, "full", 60).keys() == weights(place, "whole", 60).keys()


def test_a_run_is_not_overwritten_and_not_shared(place, whole):
    code, _, err = train(place, "whole", "--steps", "5")
    assert code == 2 and "already holds a run: add --resume" in err
    process = start(place, "train", *SMALL, "--data", "corpus.txt", "--name", "busy", "--steps", "3000")
    wait_for(lambda: (place / "runs/busy/lock").exists(), process)
    code, _, err = train(place, "busy", "--steps", "5")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert code == 2 and "is in use by another process" in err
