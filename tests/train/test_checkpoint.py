"""Checkpoints are whole or not there."""

from pathlib import Path

import torch

from diloco.train.checkpoint import Checkpoints
from tests.support.processes import run


def _save(rank, folder):
    folder = Path(folder)
    (folder / "step-00000005").mkdir(parents=True)  # as a kill inside a copy would leave it
    (folder / "writing-00000006").mkdir()
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
