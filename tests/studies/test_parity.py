"""The parity study goes on where it was interrupted."""

import os
import signal
import subprocess
import sys
import time

import pytest

from studies.parity.cell import Cell
from studies.parity.study import Study

ROWS = {f"M = {replicas}": Cell(width=16, replicas=replicas, lr=0.01, steps=8, sync_every=4, fragments="balanced:1",
                                outer_lr=0.7, evaluated=4096) for replicas in (1, 2)}  # fmt: skip
PROGRAM = """
import sys
from pathlib import Path
from studies.parity.study import Study
from tests.studies.test_parity import ROWS

if __name__ == "__main__":
    study = Study(Path(sys.argv[1]), ROWS)
    study.run(study.wanted(seeds=[1]), 1)
"""


@pytest.mark.slow
def test_a_killed_study_keeps_its_results_and_runs_the_rest(tmp_path):
    path, program = tmp_path / "results.jsonl", tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(path)]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        while not (path.exists() and path.read_text()) and process.poll() is None:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    done = path.read_text().splitlines()
    rest = Study(path, ROWS).wanted(seeds=[1])
    assert done and len(done) + len(rest) == len(ROWS)

    subprocess.run(command, env=environment, check=True)
    lines = path.read_text().splitlines()
    assert lines[: len(done)] == done and len(lines) == len(ROWS)
    assert not Study(path, ROWS).wanted(seeds=[1])
    runs = [Study(path, ROWS).runs(row)[1] for row in ROWS]
    assert [run["cell"]["replicas"] for run in runs] == [1, 2]


def test_a_codec_that_was_cut_is_not_run_again(tmp_path):
    rows = {codec: Cell(lr=0.01, codec=codec) for codec in ("e3m0", "int8", "zeroing")}
    assert [name for name, _ in Study(tmp_path / "none.jsonl", rows).wanted(seeds=[1])] == ["e3m0", "zeroing"]
