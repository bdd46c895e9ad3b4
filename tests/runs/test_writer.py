"""Writing to a run directory and to trackers, and reading it back."""

import fcntl
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco.core.stats import RoundStats
from diloco.runs import folder as folders
from diloco.runs import writer as writers
from diloco.runs.reader import read
from diloco.runs.schema import (
    Evaluation,
    Event,
    Step,
    Summary,
    from_summary,
    to_summary,
)
from diloco.runs.writer import Writer, open_sinks

STEP = Step(3, 1.5, 96, 2.5, 0.01, 0.8, 0.25, 128.0, 1000, 900, 0.5, 0.125, 2)
EVALUATION = Evaluation(3, 1.75, 96, 2.25, 3.25, 2.375)
EVENT = Event("save", 2.0, 6, {"reason": "asked", "rounds": 8})
ROUND = RoundStats(fragment=1, index=2, sent_step=10, applied_step=12, sent_at=1003.0, bytes_sent=500,
                   bytes_received=400, seconds=0.75, seconds_exposed=0.25, seconds_waited=0.125,
                   members=3, counted=True, seconds_apart=0.5, seconds_device=0.0,
                   overlap=2)  # fmt: skip


class Clock:
    """The writer's clock."""

    def __init__(self, now: float) -> None:
        self.now = now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(1000.0)
    monkeypatch.setattr(writers, "time", clock)
    return clock


def written(folder, kind):
    return [json.loads(line) for line in (folder / f"{kind}.jsonl").read_text().splitlines()]


def test_a_resume_drops_what_came_after_the_checkpoint_and_continues_the_clock(tmp_path, clock):
    writer = Writer(tmp_path)
    writer.write(replace(STEP, step=1))
    writer.write(Event("start", 0.0, 0))
    clock.now += 7.0
    state = writer.state_dict()
    assert state["seconds"] == 7.0
    writer.write(replace(STEP, step=2))
    writer.write(Event("save", 1.0, 2))
    writer.close()
    clock.now += 500.0
    again = Writer(tmp_path)
    again.load_state_dict(state)
    clock.now += 1.0
    again.write(replace(STEP, step=2, seconds=again.seconds(), loss=1.5))
    again.close()
    lines = written(tmp_path, "metrics")
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 2.5), (2, 1.5)]
    assert lines[1]["seconds"] == 8.0
    assert len(written(tmp_path, "events")) == 1
    fresh = Writer(tmp_path)
    fresh.clear()
    fresh.close()
    assert written(tmp_path, "metrics") == [], "a member that starts again without a checkpoint"


def test_every_record_is_read_as_it_was_written(tmp_path, clock):
    writer = Writer(tmp_path / "replica-0")
    clock.now += 4.0
    for record in (STEP, EVALUATION, EVENT):
        writer.write(record)
    writer.round(ROUND)
    writer.round(replace(ROUND, sent_step=None, counted=False), ranks=2)
    writer.close()
    replica = read(tmp_path).replicas[0]
    assert (replica.steps, replica.evaluations, replica.events) == ((STEP,), (EVALUATION,), (EVENT,))
    counted = replace(ROUND, sent_at=3.0)  # on the clock of the run
    carried = replace(counted, sent_step=None, counted=False, bytes_sent=1000, bytes_received=800)
    assert replica.rounds == (counted, carried)


SUMMARY = Summary(
    steps=40, tokens=5120, seconds=9.5, parameters=700, loss=2.5, bits_per_byte=3.5, replica_loss=2.75,
    unigram_loss=3.25, bytes_sent=1000, bytes_data_parallel=56_000, largest_burst=250, seconds_hidden=1.5,
    seconds_exposed=0.25, method="streaming", replicas=2, stopped=True, corpus={"name": "text", "bytes": 9},
    samples=["def f"],
)  # fmt: skip


def test_a_summary_is_read_as_it_was_written_and_a_truncated_one_is_none():
    for summary in (SUMMARY, replace(SUMMARY, stopped=False, unigram_loss=None)):
        assert from_summary(json.dumps(to_summary(summary)).encode()) == summary
    assert from_summary(b"") is from_summary(b'{"steps": 4') is from_summary(b"[]") is None


def test_tensorboard_gets_every_value(tmp_path):
    reader = pytest.importorskip("tensorboardX.proto.event_pb2")
    writer = Writer(tmp_path, open_sinks(["tensorboard"], "run", {}, tmp_path))
    writer.write(STEP)
    writer.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert reader and b"train/loss" in file.read_bytes()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_get_the_metrics_under_the_same_names(tmp_path, monkeypatch, name):
    calls = []
    module = SimpleNamespace(
        init=lambda **arguments: calls.append(("init", arguments)),
        log=lambda values, step: calls.append((step, values)),
        finish=lambda: calls.append("finish"),
    )
    monkeypatch.setitem(sys.modules, name, module)
    writer = Writer(tmp_path, open_sinks([name], "run-0", {"seed": 3}, tmp_path))
    for record in (STEP, EVALUATION, EVENT, ROUND):
        writer.write(record)
    writer.close()
    begin = ("init", {"project": "diloco", "name": "run-0", "config": {"seed": 3}})
    train = {"train/loss": 2.5, "train/lr": 0.01, "train/bytes_sent": 1000}
    assert calls[0] == begin and calls[1][0] == 3 and train.items() <= calls[1][1].items()
    evaluation = {"eval/tokens": 96, "eval/loss": 2.25, "eval/bits_per_byte": 3.25, "eval/replica_loss": 2.375}
    assert calls[2:] == [(3, evaluation), "finish"]


def test_checking_the_lock_of_a_run_does_not_keep_it_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "lock").open("w") as looker:
        fcntl.flock(looker, fcntl.LOCK_SH)
        monkeypatch.setattr(folders.time, "sleep", lambda _: fcntl.flock(looker, fcntl.LOCK_UN))
        with folders.locked(tmp_path):
            assert folders.in_use(tmp_path)
