"""What all tests share: threads, fixtures, and what the run says at its end."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.once import once
from tests.support.run_directory import make_run

settings.register_profile("shared machine", deadline=None, max_examples=40)
settings.load_profile("shared machine")


def pytest_collection_finish() -> None:
    """Torch is imported only where tests are run: the process that shares them out does without."""
    import torch

    torch.set_num_threads(1)  # as in the processes that the tests start: sums of floats depend on how they are split


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    """After pytest's own list of what was skipped and why: what to do about it, and how to repeat the order."""
    yield
    if seed := getattr(config.option, "randomly_seed", None):
        terminalreporter.write_line(f"random order; to repeat it: --randomly-seed={seed}")
    if any("chromium" in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line("`make browser` installs Chromium, so that the browser tests are not skipped")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory to read."""
    return make_run(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A run directory to spoil."""
    return Path(shutil.copytree(finished, tmp_path / "demo"))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of a session have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def place(shared):
    """A folder with a small corpus, what is none, and a cache of its own, the same for all workers of a session."""
    folder = shared / "train"
    folder.mkdir(exist_ok=True)
    with once(folder / "corpus.txt") as missing:
        if missing:
            (folder / "empty").mkdir()
            (folder / "picture.png").write_bytes(b"\0")
            (folder / "content.jsonl").write_text('{"content": "text"}\n')
            text = Path(os.__file__).read_text() + Path(subprocess.__file__).read_text()
            (folder / "corpus.txt").write_text("\n\n".join(text.split("\n\n")))
    return folder


@pytest.fixture(scope="session")
def whole(place):
    """The summary of an uninterrupted run of 40 steps, made from a recipe that the command line overrides."""
    from tests.support.commands import run

    with once(place / "whole.json") as missing:
        if missing:
            (place / "recipe.toml").write_text(
                'model = "nano"\ndata = ["corpus.txt"]\nsteps = 7\nbatch = 4\ncontext = 32\nsync_every = 10\n'
                'fragments = "balanced:3"\noverlap = 2\neval_every = 1000\ncompile = false\n'
            )
            words = ["--name", "whole", "--steps", "40", "--save-every", "20", "--json"]
            code, out, err = run(place, "train", "recipe.toml", *words)
            assert code == 0, err
            assert "lr = 0.008: scaling law" in err and "inner = muon: lower loss than AdamW" in err
            (place / "whole.json").write_text(out)
    return json.loads((place / "whole.json").read_text())
