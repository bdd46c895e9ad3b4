"""The commands and snippets of docs/bucket.md, as they stand there, with a folder instead of the store."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from diloco import DiLoCo
from tests.support.commands import SMALL, ended, run_here, start
from tests.support.models import Tiny, adamw, flat, steps
from tests.support.processes import run

pytestmark = pytest.mark.slow  # processes

PAGE = (Path(__file__).parents[2] / "docs/bucket.md").read_text()
START = PAGE[: PAGE.index("## What happens")]
COMMANDS, SIGNED_AND_ENCRYPTED = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
OWN_LOOP, WITH_DDP = re.findall(r"^```python\n(.*?)^```", START, re.MULTILINE | re.DOTALL)

MORE = [*SMALL, "--data", "corpus.txt", "--steps", "20"]


def run_block(place: Path, lines: list[str]) -> list[str]:
    """Run the commands in their order; returns what each has printed."""
    printed = []
    for line in lines:
        words = [w.replace("s3://my-bucket", "stores") for w in shlex.split(line.removeprefix("$ "), comments=True)]
        if words[0] == "umask":
            continue
        if words[0] == "openssl":
            (place / words[-1]).write_text("0f" * 32)
            continue
        assert words.pop(0) == "diloco"
        if words[0] == "train":
            name = "-".join(words[words.index(flag) + 1].rpartition("/")[2] for flag in ("--bucket", "--member"))
            code, out, err = ended(start(place, *words, *MORE, "--name", name))
        else:
            code, out, err = run_here(place, *words)
        assert code == 0, (line, err)
        printed.append(out + err)
    return printed


def test_the_first_commands_create_a_run_join_it_and_watch_it(place: Path) -> None:
    install, *commands = COMMANDS.splitlines()
    assert install == "$ pip install '.[bucket]'"
    created, joined, watched = run_block(place, commands)
    assert re.search(r"created run \w+, as lab", created) and re.search(r"joined run \w+ at round \d+", joined)
    assert "lab" in watched and "office" in watched


def test_the_commands_about_secrets_train_and_watch(place: Path) -> None:
    created, watched = run_block(place, SIGNED_AND_ENCRYPTED.splitlines())
    assert "created run" in created and "lab" in watched
    assert not any(b"protocol" in path.read_bytes() for path in (place / "stores/run-3").rglob("*") if path.is_file())


def _snippet(rank: int, code: str, place: Path) -> torch.Tensor:
    """What the page leaves out: a model, an optimizer, steps."""
    model = Tiny()
    optimizer = adamw(model)
    names = {"model": model, "optimizer": optimizer, "DiLoCo": DiLoCo, "torch": torch}
    code = code if "import Bucket" in code else f"from diloco.bucket import Bucket\n{code}"
    exec(compile(code.replace("s3://my-bucket", str(place)), "bucket.md", "exec"), names)
    with names.get("diloco") or DiLoCo(model, optimizer, sync_every=5, reduce=names["reduce"]) as diloco:
        for _ in steps(DistributedDataParallel(model), optimizer, rank, 1, 10):
            pass
    assert diloco.stats.rounds > 0
    return flat(model)


def test_a_loop_of_ones_own_meets_in_the_store(tmp_path: Path) -> None:
    run(1, _snippet, OWN_LOOP, tmp_path)
    assert (tmp_path / "run-1/run.json").exists()


def test_with_ddp_inside_all_ranks_are_one_member(tmp_path: Path) -> None:
    one, two = run(2, _snippet, WITH_DDP, tmp_path)
    assert torch.equal(one, two) and [path.name for path in (tmp_path / "run-1/members").iterdir()] == ["lab"]
