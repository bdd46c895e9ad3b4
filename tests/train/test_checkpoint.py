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
    checkpoints = Checkpoints(folder, keep=2)
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


CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")


def _saved_again(folder, k):
    """Save step 8 in a child that dies before its k-th change of a name; returns whether it did not come so far."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    left = [k]

    def die(event, args):
        if event in CHANGES:
            left[0] -= 1
            if not left[0]:
                os._exit(9)

    sys.addaudithook(die)
    try:
        Checkpoints(folder, keep=2).save(8, {"x": torch.full((3,), 2.0)})
        os._exit(0)
    finally:
        os._exit(1)


def _killed_while_saving_again(rank, folder):
    folder, kills, values = Path(folder), 0, set()
    while True:
        Checkpoints(folder, keep=2).save(8, {"x": torch.ones(3)})
        whole = _saved_again(folder, kills + 1)
        checkpoints, state = Checkpoints(folder, keep=2), {"x": torch.zeros(3)}
        checkpoints.load(checkpoints.newest_common(), state)
        values.add(state["x"].tolist()[0])
        if whole:
            return kills, values
        kills += 1


def test_a_kill_while_a_step_is_saved_again_leaves_the_old_or_the_new_checkpoint(tmp_path):
    ((kills, values),) = run(1, _killed_while_saving_again, str(tmp_path))
    assert kills > 5 and values == {1.0, 2.0}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000008"]


def _synced(rank, folder):
    synced, fsync = [], os.fsync

    def note(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    os.fsync = note
    Checkpoints(Path(folder), keep=2).save(8, {"x": torch.ones(3)})
    return synced


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_folders_of_a_checkpoint_are_synced_before_and_after_it_gets_its_name(tmp_path):
    ((*_, before, after),) = run(1, _synced, str(tmp_path))
    assert before == str(tmp_path / "writing-00000008") and after == str(tmp_path)
