"""Numbers on disk and in the sinks."""

import json

import pytest

from diloco.errors import ConfigError
from diloco.runs.writer import Metrics, open_sinks


def test_after_a_resume_what_came_later_is_gone_and_time_goes_on(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.log(1, {"train/loss": 2.0})
    metrics.event("start", 0)
    state = metrics.state_dict()
    metrics.log(2, {"train/loss": 1.0})
    metrics.event("save", 2)
    metrics.close()
    again = Metrics(tmp_path)
    again.load_state_dict(state | {"seconds": 100.0})
    again.log(2, {"train/loss": 1.5})
    again.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["train/loss"]) for line in lines] == [(1, 2.0), (2, 1.5)]
    assert lines[1]["seconds"] >= 100
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 1


def test_tensorboard_gets_every_value(tmp_path):
    reader = pytest.importorskip("tensorboardX.proto.event_pb2")
    metrics = Metrics(tmp_path, open_sinks(["tensorboard"], "run", {}, tmp_path))
    metrics.log(3, {"train/loss": 2.5})
    metrics.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert reader and b"train/loss" in file.read_bytes()


def test_a_sink_that_is_not_installed_names_the_extra(tmp_path):
    try:
        import wandb  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"pip install 'diloco\[wandb\]'"):
            open_sinks(["wandb"], "run", {}, tmp_path)
    else:
        pytest.skip("wandb is installed")
