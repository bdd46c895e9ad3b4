"""One thread, as in the processes that the tests start: sums of floats depend on how they are split."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.support.commands import run
from tests.support.run_directory import make_run

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


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with a small corpus, and a cache of its own."""
    folder = tmp_path_factory.mktemp("train")
    text = Path(os.__file__).read_text() + Path(subprocess.__file__).read_text()
    (folder / "corpus.txt").write_text("\n\n".join(text.split("\n\n")))
    return folder


@pytest.fixture(scope="session")
def whole(place):
    """An uninterrupted run of 60 steps, to compare with, from a recipe that the command line overrides."""
    (place / "recipe.toml").write_text(
        'data = ["corpus.txt"]\nsteps = 7\nbatch = 4\ncontext = 32\nsync_every = 10\nfragments = "balanced:3"\n'
        "overlap = 2\neval_every = 1000\neval_tokens = 2048\ncompile = false\n"
    )
    words = ["--name", "whole", "--steps", "60", "--save-every", "20", "--json"]
    code, out, err = run(place, "train", "recipe.toml", *words)
    assert code == 0, err
    assert "lr = 0.008: scaling law" in err and "outer_lr = 0.7: best with outer momentum 0.5" in err
    return json.loads(out)
