"""Checkpoints are whole or not there."""

import os
import sys
from pathlib import Path

import pytest
import torch

from diloco.train.checkpoint import Checkpoints
from tests.support.processes import run

pytestmark = pytest.mark.slow  # processes


def _save(rank, folder):
    folder = Path(folder)
    (folder / "step-00000005").mkdir(parents=True)  # as a kill inside a copy would leave it
    (folder / "writing-00000006").mkdir()
    for name in ("step-x", "step-00000009.old"):
        (folder / name).mkdir()
        (folder / name / ".metadata").touch()
    checkpoints = Checkpoints(folder)
    seen = [checkpoints.steps(), checkpoints.newest_common()]
    for step in (6, 7, 8):
        checkpoints.save(step, {"x": torch.full((3,), float(step))})
    state = {"x": torch.zeros(3)}
    checkpoints.load(8, state)
    return *seen, checkpoints.steps(), state["x"].tolist(), sorted(p.name for p in folder.iterdir())


def test_only_whole_checkpoints_are_found_and_the_last_few_are_kept(tmp_path):
    ((before, common, after, loaded, names),) = run(1, _save, str(tmp_path))
    assert before == [] and common is None
    assert after == [7, 8]
    assert loaded == [8.0] * 3
    assert not any(name.startswith("writing") for name in names)


def _killed_while_saving(rank, folder, k):
    """Save steps 7 and 8, then 8 again, and die before the k-th change of a name in that."""
    checkpoints, left = Checkpoints(folder), [k]
    for step, value in ((7, 1.0), (8, 2.0)):
        checkpoints.save(step, {"x": torch.full((3,), value)})

    def die(event, args):
        if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            left[0] -= 1
            if not left[0]:
                os._exit(9)

    sys.addaudithook(die)
    checkpoints.save(8, {"x": torch.full((3,), 3.0)})


def _newest(rank, folder):
    checkpoints, state = Checkpoints(folder), {"x": torch.zeros(3)}
    newest = checkpoints.newest_common()
    checkpoints.load(newest, state)
    return newest, state["x"].tolist()[0]


def test_a_kill_at_any_change_of_a_save_leaves_a_whole_checkpoint(tmp_path):
    left = []
    for k in range(1, 20):
        (died,) = run(1, _killed_while_saving, tmp_path / str(k), k, may_die=True)
        left += run(1, _newest, tmp_path / str(k))
        if died is None:
            break
        assert died.exitcode == 9
    assert left[0] == (8, 2.0) and left[-1] == (8, 3.0)
    assert set(left) == {(8, 2.0), (7, 1.0), (8, 3.0)}  # for a moment the one before it is the newest


def _synced(rank, folder):
    synced, fsync = [], os.fsync

    def note(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    os.fsync = note
    Checkpoints(Path(folder)).save(8, {"x": torch.ones(3)})
    return synced


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_folders_of_a_checkpoint_are_synced_before_and_after_it_gets_its_name(tmp_path):
    ((*_, before, after),) = run(1, _synced, str(tmp_path))
    assert before == str(tmp_path / "writing-00000008") and after == str(tmp_path)
