"""Replicas that are asked to stop do so after the same step, wherever they are; and what is said of a stopped run."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.cli.train import stop_report
from diloco.train.stop import Stop
from tests.support.run_directory import make_run

seconds = st.floats(0.01, 0.3)
phase = st.floats(0.0, Stop.POLL)


@settings(max_examples=40)
@given(asked=st.integers(0, 1), slow=seconds, fast=seconds, phases=st.tuples(phase, phase), at=st.floats(1.0, 4.0))
def test_the_slow_and_the_fast_stop_after_the_same_step_though_nothing_keeps_them_together(
    asked, slow, fast, phases, at
):
    """On a clock of the test: each replica ends a step and looks into the store at moments of its own."""
    store = dist.HashStore()
    stops = [Stop(store, rank, 2) for rank in (0, 1)]
    every = (slow, fast)
    next_step, next_look, done, ended = list(every), list(phases), [0, 0], [0, 0]
    while not all(ended):
        rank = min((0, 1), key=lambda r: min(next_step[r], next_look[r]))
        now = min(next_step[rank], next_look[rank])
        if now >= at:
            stops[asked].ask()
            at = float("inf")
        if next_look[rank] <= next_step[rank]:
            stops[rank].look()
            next_look[rank] += Stop.POLL
            continue
        next_step[rank] += every[rank]
        done[rank] += 1
        if stops[rank].after(done[rank], every[rank]):
            ended[rank], next_step[rank], next_look[rank] = done[rank], float("inf"), float("inf")
    assert ended[0] == ended[1]


def test_one_that_hears_late_of_the_step_to_stop_at_takes_the_others_along():
    store = dist.HashStore()
    slow, fast = (Stop(store, rank, 2) for rank in (0, 1))
    slow.ask()
    assert not slow.after(1, 0.1)
    assert not fast.after(50, 0.001)
    fast.look()
    assert not slow.after(50, 0.1) and slow.after(51, 0.1) and fast.after(51, 0.001)


def test_one_process_alone_stops_at_once():
    stop = Stop(dist.HashStore())
    assert not stop.after(1, 0.1)
    stop.ask()
    assert stop.after(2, 0.1)


def test_a_signal_while_the_run_is_finished_is_heeded_only_if_it_is_repeated(capfd):
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    try:
        with Stop(dist.HashStore()) as stop:
            stop.ask()  # as a notice of the cloud does
            assert stop.after(1, 0.1)
            stop.end()
            os.kill(os.getpid(), signal.SIGTERM)
            assert not came
            os.kill(os.getpid(), signal.SIGTERM)
            assert came
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_asks_and_outside_the_context_it_does_what_it_did_before(capfd, number):
    came = []
    before = signal.signal(number, lambda *_: came.append(number))
    try:
        with Stop(dist.HashStore()) as stop:
            os.kill(os.getpid(), number)
            assert stop.after(1, 0.1) and not came
            os.kill(os.getpid(), number)
            assert came == [number]  # asked again: as without this
        os.kill(os.getpid(), number)
        assert came == [number, number]
    finally:
        signal.signal(number, before)
    assert capfd.readouterr().err.count("saving a checkpoint and stopping") == 1


def test_a_signal_that_is_ignored_as_under_nohup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop(dist.HashStore()) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.after(1, 0.1)
    finally:
        signal.signal(signal.SIGHUP, before)


def _checkpoint(replica: Path, step: int) -> None:
    path = replica / f"checkpoints/step-{step:08d}"
    path.mkdir(parents=True)
    (path / ".metadata").touch()


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        ([20, 60], "stopped at step 60 of 60, which is saved; continue with: diloco train --resume --name 'my run'"),
        ([20], "stopped at step 60 of 60, the newest checkpoint is from step 20; continue with: diloco train --resume"),
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
    assert stop_report(run).startswith(says)
    assert stop_report(run).endswith("my run'") or not saved


def test_a_run_outside_the_usual_folder_is_found_again(tmp_path):
    run = make_run(tmp_path / "elsewhere/one", steps=60)
    for replica in ("replica-0", "replica-1"):
        _checkpoint(run / replica, 60)
    assert stop_report(run).endswith(f"--resume --name one --out {tmp_path / 'elsewhere'}")


def test_a_run_without_a_step_has_nothing_to_resume(tmp_path):
    assert stop_report(tmp_path) == "stopped before the first step; there is nothing to resume"
