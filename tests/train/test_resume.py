"""`diloco train` killed, stopped, out of space, and resumed."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

import diloco.train.run
from diloco.cli import main
from diloco.cli.train import complete
from diloco.errors import ConfigError
from diloco.runs.folder import locked
from tests.support.commands import (
    Command,
    check_anchors,
    check_same,
    children,
    ended,
    lines,
    losses,
    run,
    run_here,
    start,
    train,
    training,
    wait_for,
    wait_for_lines,
    weights,
)
from tests.support.members import until
from tests.support.s3 import free_port

pytestmark = pytest.mark.slow  # processes


def test_a_run_killed_at_any_moment_resumes_to_the_same_trajectory(place, whole):
    """With a checkpoint after every step the kill falls into a save more often than not."""
    name = "killed"
    process = start(place, *training(name, "--steps", "40", "--save-every", "1", "--inner", "muon"))
    for replica in (0, 1):  # one may be steps ahead of another that has saved nothing yet
        wait_for_lines(place / f"runs/{name}/replica-{replica}/metrics.jsonl", 7, process)
    for child in children(process):
        os.kill(child, signal.SIGKILL)
    code, _, err = ended(process)
    assert code == 1
    assert "was killed by signal 9" in err.splitlines()[-1] and "Traceback" not in err
    code, _, err = train(place, name, "--steps", "40", "--save-every", "20", "--resume", "--inner", "muon")
    assert code == 0, err
    check_same(place, name)
    assert any(e["event"] == "resume" for e in lines(place, name, kind="events"))


def test_ctrl_c_leaves_a_checkpoint_of_one_step_and_a_report_and_resumes(place):
    process = start(place, *training("stopped", "--steps", "2000", "--save-every", "5000"))
    for replica in (0, 1):  # one may be steps ahead of another that cannot be stopped yet
        wait_for_lines(place / f"runs/stopped/replica-{replica}/metrics.jsonl", 6, process)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert code == 130, err
    assert "Traceback" not in err
    stops = [e["step"] for m in (0, 1) for e in lines(place, "stopped", m, "events") if e["event"] == "stop"]
    assert len(stops) == 2 and len(set(stops)) == 1 and stops[0] < 2000
    assert (place / "runs/stopped/report.html").exists()
    assert "saving a checkpoint and stopping" in err
    command = "continue with: diloco train --resume --name stopped"
    assert err.splitlines()[-1] == f"diloco: stopped at step {stops[0]} of 2000, which is saved; {command}"
    assert out == ""
    # Only what is words changes; all else is as the run had it.
    before = (place / "runs/stopped/config.toml").read_text()
    code, out, err = run(place, "train", "--resume", "--name", "stopped", "--steps", str(stops[0] + 5), "--json")
    assert code == 0, err
    assert f"changed: steps 2000 → {stops[0] + 5}\n" in err
    assert json.loads(out)["steps"] == stops[0] + 5
    assert (place / "runs/stopped/config.toml").read_text() == before.replace("= 2000", f"= {stops[0] + 5}")


def _wait_before_the_first_step(words):
    diloco.train.run.fit = lambda run: signal.pause()
    return main(words)


@pytest.mark.parametrize("existing", [False, True])
def test_a_closed_terminal_during_the_start_stops_all_and_deletes_only_what_is_its_own(place, existing):
    folder = place / "runs/early"
    mine = folder / "notes.txt" if existing else None
    if mine:
        mine.parent.mkdir(parents=True)
        mine.write_text("notes")
    process = Command(place, _wait_before_the_first_step, training("early", "--steps", "2000"))
    wait_for(lambda: (place / "runs/early/replica-1/log.txt").exists(), process)
    replicas = children(process)
    process.send_signal(signal.SIGHUP)
    code, _, err = ended(process)
    assert code == 130
    assert err.splitlines()[-1] == "diloco: stopped before the first step; there is nothing to resume"
    assert all(not Path(f"/proc/{replica}").exists() for replica in replicas)
    assert mine is None or mine.read_text() == "notes"
    assert existing or (folder / "config.toml").exists() or not folder.exists()
    shutil.rmtree(folder, ignore_errors=True)


def _is_free(folder):
    try:
        with locked(folder):
            return True
    except ConfigError:
        return False


def test_replicas_whose_launcher_was_killed_stop_with_a_checkpoint_and_the_run_is_in_use_until_then(place):
    process = start(place, *training("orphans", "--steps", "100000", "--save-every", "100000"))
    wait_for_lines(place / "runs/orphans/replica-0/metrics.jsonl", 6, process)
    replicas = children(process)
    for replica in replicas:
        os.kill(replica, signal.SIGSTOP)
    process.kill()
    process.wait()
    with pytest.raises(ConfigError, match=f"in use by process {process.pid}: "), locked(place / "runs/orphans"):
        pass
    for replica in replicas:
        os.kill(replica, signal.SIGCONT)
    try:
        until(lambda: _is_free(place / "runs/orphans"))
    except AssertionError:
        for replica in replicas:
            os.kill(replica, signal.SIGKILL)
        raise
    stops = [e["step"] for m in (0, 1) for e in lines(place, "orphans", m, "events") if e["event"] == "stop"]
    assert len(stops) == 2 and len(set(stops)) == 1
    for m in (0, 1):
        assert (place / f"runs/orphans/replica-{m}/checkpoints/step-{stops[0]:08d}/.metadata").exists()


@pytest.mark.parametrize("spelled", [["--name", "first"], ["--name=first"]])
def test_resume_takes_the_settings_of_the_run_that_is_named_not_of_the_newest(tmp_path, spelled):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f'name = "{name}"\ninner = "muon"\nsteps = 7\n')
        os.utime(tmp_path / name / "config.toml", (len(name), len(name)))
    words = ["--resume", *spelled, f"--out={tmp_path}"]
    assert complete(words) == [str(tmp_path / "first/config.toml"), *words]
    assert complete(["--resume", "--out", str(tmp_path)])[0] == str(tmp_path / "second/config.toml")
    (tmp_path / "recipe.toml").write_text("steps = 9\n")
    with pytest.raises(ConfigError, match=r"which run\? Add --name"):
        complete([str(tmp_path / "recipe.toml"), "--resume"])


def test_sharded_replicas_with_accumulation_save_export_and_resume(place):
    words = ["--shards", "2", "--batch", "8", "--accumulate", "2", "--save-every", "3",
             "--sync-every", "3", "--overlap", "1"]  # fmt: skip
    code, out, err = train(place, "sharded", "--steps", "4", *words, "--json")
    assert code == 0, err
    fragment = json.loads(out)["parameters"] / 3
    assert 0.5 * fragment < json.loads(out)["largest_burst"] < 0.6 * fragment  # of all ranks of a replica together
    assert (
        max(e["bytes_sent"] for e in lines(place, "sharded", kind="events") if e["event"] == "round") > 0.5 * fragment
    )
    code, out, err = run_here(place, "export", "runs/sharded", "--to", "from-shards", "--step", "3")
    assert (code, out) == (0, "from-shards\n"), err
    check_anchors(place, "from-shards", weights(place, "sharded", 3), shards=2)
    code, out, err = train(place, "sharded", "--steps", "5", *words, "--resume", "--json")
    assert code == 0, err
    assert json.loads(out)["steps"] == 5
    assert list(losses(place, "sharded")) == list(range(1, 6))


def test_two_machines_resume_each_with_the_settings_that_it_has_stored(tmp_path, place):
    sites = [tmp_path / "one", tmp_path / "two"]
    for site in sites:
        site.mkdir()
        shutil.copy(place / "corpus.txt", site)

    def both(*words, second=(), codes=(0, 0)):
        machine = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        more = [words, [*words, *second]]
        started = [Command(site, main, more[m], env=machine | {"RANK": str(m)}) for m, site in enumerate(sites)]
        results = [ended(process) for process in started]
        assert tuple(code for code, _, _ in results) == codes, results
        return (
            [err for _, _, err in results]
            if any(codes)
            else [(site / "runs/apart/config.toml").read_text() for site in sites]
        )

    one, two = both(*training("apart", "--steps", "10", "--lr", "0.003"))
    assert one == two and "lr = 0.003\n" in one
    again = both("train", "--resume", "--name", "apart", "--steps", "12")
    assert again == [one.replace("steps = 10", "steps = 12")] * 2

    for err in both(*training("other", "--steps", "10"), second=["--lr", "0.01"], codes=(2, 2)):
        assert "lr is 0.008 on process 0, 0.01 on process 1" in err.splitlines()[-1]
    for err in both(*training("third", "--steps", "10"), second=["--method", "dp"], codes=(2, 2)):
        assert "method is streaming on process 0, dp on process 1" in err.splitlines()[-1]
    shutil.rmtree(sites[0] / "runs/apart")
    for err in both(*training("apart", "--steps", "10"), codes=(2, 2)):
        assert "runs/apart already holds a run on" in err.splitlines()[-1]
    assert (sites[1] / "runs/apart/config.toml").read_text() == again[1]


def test_a_dry_run_of_processes_that_torchrun_has_started_trains_nothing(tmp_path, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for rank in ("0", "1"):
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        assert main([str(word) for word in training("dry", "--steps", "10", "--dry-run")]) == 0
        assert ("10 steps" in capsys.readouterr().out) is (rank == "0")
    assert not (place / "runs/dry").exists()


def test_a_full_disk_ends_the_run_with_the_remedy_and_the_old_checkpoint_survives(place, whole):
    shutil.copytree(place / "runs/whole", place / "runs/full")
    code, _, err = train(place, "full", "--steps", "45", "--resume", "--inner", "muon", file_limit=1_000_000)
    assert code == 2, err
    assert "no space left to save" in err.splitlines()[-1] and "step 40 is complete" in err.splitlines()[-1]
    assert weights(place, "full", 40).keys() == weights(place, "whole", 40).keys()


def test_a_run_is_not_overwritten(place, whole):
    code, _, err = run_here(place, *training("whole", "--steps", "5"))
    assert code == 2 and "already holds a run: add --resume" in err
