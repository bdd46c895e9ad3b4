"""wandb (offline), trackio and tensorboard, the real packages: a run of two replicas logs to all, and is read back."""

import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from tests.support.commands import SMALL, lines, run_program

STEPS = 6
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def tracked(place: Path) -> Path:
    """The folder of a run that was tracked by all three."""
    variables = {"WANDB_MODE": "offline", "WANDB_DIR": str(place), "TRACKIO_DIR": str(place / "trackio")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        words = ["--data", "corpus.txt", "--name", "tracked", "--steps", STEPS, "--eval-every", 3]
        words += ["--track", "wandb", "trackio", "tensorboard"]
        code, _, err = run_program(place, "train", *SMALL, *words)
    assert code == 0, err
    return place


def wanted(place: Path, replica: int) -> dict[int, dict[str, float]]:
    """By step: what the run directory has."""
    logged: dict[int, dict[str, float]] = {}
    for line in lines(place, "tracked", replica):
        group = {"step": "train", "evaluation": "eval"}[line.pop("event")]
        values = {f"{group}/{name}": value for name, value in line.items() if name not in ("step", "seconds")}
        logged.setdefault(line["step"], {}).update(values)
    assert list(logged) == list(range(STEPS + 1)) and "eval/loss" in logged[3]
    return logged


def test_tensorboard_reads_every_value_of_every_replica(tracked: Path) -> None:
    for replica in (0, 1):
        events = EventAccumulator(str(tracked / f"runs/tracked/replica-{replica}/tensorboard")).Reload()
        for step, values in wanted(tracked, replica).items():
            for name, value in values.items():
                at = {event.step: event.value for event in events.Scalars(name)}
                assert at[step] == pytest.approx(value, rel=1e-5), name


def test_trackio_has_a_run_for_each_replica_with_every_value(tracked: Path) -> None:
    database = sqlite3.connect(tracked / "trackio/diloco.db")
    for replica in (0, 1):
        rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = ?", [f"tracked-{replica}"])
        logged: dict[int, dict[str, float]] = {}
        for step, metrics in rows:
            logged.setdefault(step, {}).update(json.loads(metrics))
        assert logged == wanted(tracked, replica)
    (config,) = database.execute("SELECT config FROM configs WHERE run_name = 'tracked-0'").fetchone()
    assert json.loads(config)["sync_every"] == 10
    database.close()


def test_wandb_has_a_run_for_each_replica_with_every_value(tracked: Path) -> None:
    names = {}
    for path in tracked.glob("wandb/offline-run-*/run-*.wandb"):
        name, history = "", {}
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                name = record.run.display_name
                config = {update.key: json.loads(update.value_json) for update in record.run.config.update}
                assert record.run.project == "diloco" and config["sync_every"] == 10
            elif record.WhichOneof("record_type") == "history":
                values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                history[values["_step"]] = {key: value for key, value in values.items() if not key.startswith("_")}
        names[name] = history
    assert names == {f"tracked-{replica}": wanted(tracked, replica) for replica in (0, 1)}


def records(file: bytes, block: int = 32_768) -> Iterator[bytes]:
    """The records of wandb's file, which is a LevelDB log behind a header of seven bytes: parts with checksum, length
    and kind (whole, first, middle, last), none of which crosses a block."""
    at, whole = 7, b""
    while at + 7 <= len(file):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", file, at)
        whole = (b"" if kind in (1, 2) else whole) + file[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
