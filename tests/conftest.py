"""One thread, as in the processes that the tests start: sums of floats depend on how they are split."""

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.run_directory import make_run

torch.set_num_threads(1)
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory to read."""
    return make_run(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A run directory to spoil."""
    return Path(shutil.copytree(finished, tmp_path / "demo"))
