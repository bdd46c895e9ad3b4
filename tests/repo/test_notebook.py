"""The cells of the notebook run, one after another, with a tiny model on the CPU."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from tests.repo.test_pages import run_commands
from tests.support.pages import ROOT

CELLS = json.loads((ROOT / "examples/two_t4.ipynb").read_text())["cells"]


@pytest.mark.slow
def test_the_cells_run(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    out = io.StringIO()
    for cell in CELLS:
        if cell["cell_type"] != "code" or cell["metadata"].get("tags") == ["needs: two GPUs"]:
            continue
        lines = "".join(cell["source"]).splitlines()
        with contextlib.chdir(tmp_path), contextlib.redirect_stdout(out):
            exec("\n".join(line for line in lines if not line.startswith("!")), names)
        commands = [line[1:].format(**names).replace(" --device", "") for line in lines if line.startswith("!")]
        run_commands(tmp_path, commands)
    assert out.getvalue().startswith("steps            6\n")
