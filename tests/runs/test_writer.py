"""Writing to a run directory and to trackers, and reading it back."""

import fcntl
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco.core.stats import RoundStats
from diloco.errors import ConfigError
from diloco.runs import folder as folders
from diloco.runs import writer as writers
from diloco.runs.reader import read
from diloco.runs.schema import (
    Evaluation,
    Event,
    Figures,
    Step,
    Summary,
    figures,
    from_line,
    from_summary,
    to_line,
    to_summary,
)
from diloco.runs.writer import Writer, open_sinks

STEP = Step(3, 1.5, 96, 2.5, 0.01, 0.8, 0.25, 128.0, 1000, 900, 0.5, 0.125, 2)
EVALUATION = Evaluation(3, 1.75, 96, 2.25, 3.25, 2.375)
EVENT = Event("save", 2.0, 6, {"reason": "asked", "rounds": 8})
ROUND = RoundStats(fragment=1, index=2, sent_step=10, applied_step=12, sent_at=1003.0, bytes_sent=500,
                   bytes_received=400, seconds=0.75, seconds_exposed=0.25, seconds_waited=0.125,
                   members=3, counted=True, seconds_apart=0.5, seconds_transfer=0.25, seconds_device=0.0,
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
    assert [(line["step"], line["train/loss"]) for line in lines] == [(1, 2.5), (2, 1.5)]
    assert lines[1]["seconds"] == 8.0
    assert len(written(tmp_path, "events")) == 1


def test_the_keys_on_disk_are_stable(tmp_path, clock):
    writer = Writer(tmp_path / "replica-0")
    clock.now += 4.0
    for record in (STEP, EVALUATION, EVENT):
        writer.write(record)
    writer.round(ROUND)
    writer.round(replace(ROUND, sent_step=None, counted=False), ranks=2)
    writer.close()
    step, evaluation = written(tmp_path / "replica-0", "metrics")
    event, counted, carried = written(tmp_path / "replica-0", "events")
    assert step == {
        "step": 3, "seconds": 1.5, "tokens": 96, "train/loss": 2.5, "train/lr": 0.01, "train/grad_norm": 0.8,
        "train/step_seconds": 0.25, "train/tokens_per_second": 128.0, "sync/bytes_sent": 1000,
        "sync/bytes_received": 900, "sync/seconds_hidden": 0.5, "sync/seconds_exposed": 0.125, "sync/in_flight": 2,
    }  # fmt: skip
    assert evaluation == {"step": 3, "seconds": 1.75, "tokens": 96, "eval/loss": 2.25, "eval/bits_per_byte": 3.25,
                          "eval/replica_loss": 2.375}  # fmt: skip
    assert event == {"event": "save", "seconds": 2.0, "step": 6, "reason": "asked", "rounds": 8}
    assert counted == {
        "event": "round", "fragment": 1, "index": 2, "sent_step": 10, "applied_step": 12, "sent_at": 3.0,
        "bytes_sent": 500, "bytes_received": 400, "seconds": 0.75, "seconds_exposed": 0.25, "seconds_waited": 0.125,
        "members": 3, "counted": True, "seconds_apart": 0.5, "seconds_transfer": 0.25, "seconds_device": 0.0,
        "overlap": 2,
    }  # fmt: skip
    assert (carried["sent_step"], carried["counted"], carried["bytes_sent"]) == (None, False, 1000)
    replica = read(tmp_path).replicas[0]
    assert (replica.steps, replica.evaluations, replica.events) == ((STEP,), (EVALUATION,), (EVENT,))
    assert replica.rounds[0] == replace(ROUND, sent_at=3.0) and not replica.rounds[1].counted


SUMMARY = Summary(
    steps=40, tokens=5120, seconds=9.5, parameters=700, loss=2.5, bits_per_byte=3.5, replica_loss=2.75,
    unigram_loss=3.25, bytes_sent=1000, bytes_data_parallel=56_000, largest_burst=250, seconds_hidden=1.5,
    seconds_exposed=0.25, method="streaming", replicas=2, stopped=True, corpus={"name": "text", "bytes": 9},
    samples=["def f"],
)  # fmt: skip


def test_a_summary_has_stable_keys_and_is_read_as_it_was_written():
    written = to_summary(SUMMARY)
    assert written == {
        "method": "streaming", "replicas": 2, "parameters": 700, "steps": 40, "stopped": True, "tokens": 5120,
        "seconds": 9.5, "eval/loss": 2.5, "eval/bits_per_byte": 3.5, "eval/replica_loss": 2.75, "unigram_loss": 3.25,
        "bytes_sent": 1000, "bytes_data_parallel": 56_000, "largest_burst": 250, "seconds_hidden": 1.5,
        "seconds_exposed": 0.25, "corpus": {"name": "text", "bytes": 9}, "samples": ["def f"],
    }  # fmt: skip
    for summary in (SUMMARY, replace(SUMMARY, stopped=False)):
        assert from_summary(json.dumps(to_summary(summary)).encode()) == summary


def test_a_summary_value_of_the_wrong_type_is_missing_and_a_truncated_summary_is_none():
    odd = {"steps": "forty", "eval/loss": None, "stopped": "yes", "corpus": "text", "samples": "def f", "tokens": 7}
    assert from_summary(json.dumps(odd).encode()) == Summary(tokens=7)
    assert from_summary(b"") is from_summary(b'{"steps": 4') is from_summary(b"[]") is None


def test_missing_figures_of_a_summary_are_those_counted_so_far():
    so_far = {"steps": 30, "tokens": 5, "loss": 3.0}
    assert figures(None, so_far) == Figures(30, 5, loss=3.0)
    assert figures(Summary(tokens=7, seconds=1.0), so_far) == Figures(30, 7, 1.0, loss=3.0)


def test_a_missing_number_is_zero_and_null_is_nan():
    step = from_line(b'{"step": 6, "train/loss": null}')
    assert isinstance(step, Step) and math.isnan(step.loss) and (step.step, step.tokens, step.lr) == (6, 0, 0.0)
    assert from_line(b'{"step": null, "train/loss": 1.0}') is None
    assert from_line(b'{"event": "round", "fragment": 0, "index": 1, "sent_at": 1.0}') is None
    assert from_line(b'{"train/loss": 1.0}') is from_line(b'{"step": 1}') is from_line(b'{"step": 1') is None


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
    measured = [{k: v for k, v in to_line(r).items() if k not in ("step", "seconds")} for r in (STEP, EVALUATION)]
    begin = ("init", {"project": "diloco", "name": "run-0", "config": {"seed": 3}})
    assert calls == [begin, (3, measured[0]), (3, measured[1]), "finish"]


def test_a_missing_tracker_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[wandb\]'"):
        open_sinks(["wandb"], "run", {}, tmp_path)


def test_the_files_are_closed_when_a_run_fails(tmp_path):
    writer = Writer(tmp_path / "replica-0")
    writer.write(STEP)
    with pytest.raises(ConfigError, match="refused"), writer.closed_on_error():
        raise ConfigError("refused")
    assert len(written(tmp_path / "replica-0", "metrics")) == 1
    with pytest.raises(ValueError, match="closed file"):
        writer.write(STEP)


def test_checking_the_lock_of_a_run_does_not_keep_it_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "lock").open("w") as looker:
        fcntl.flock(looker, fcntl.LOCK_SH)
        monkeypatch.setattr(folders.time, "sleep", lambda _: fcntl.flock(looker, fcntl.LOCK_UN))
        with folders.locked(tmp_path):
            assert folders.in_use(tmp_path)
