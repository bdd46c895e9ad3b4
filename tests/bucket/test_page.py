"""The first commands and snippets of docs/bucket.md, as they stand there, with a folder instead of the store.

What it shows about keys and encryption is run by tests/train/test_trust_page.py.
"""

import re
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from diloco import DiLoCo
from tests.support.models import Tiny, adamw, flat, steps
from tests.support.processes import run
from tests.train.test_trust_page import PAGE, run_block

START = PAGE[: PAGE.index("## What happens")]
(COMMANDS,) = re.findall(r"^```console\n(.*?)^```", START, re.MULTILINE | re.DOTALL)
OWN_LOOP, WITH_DDP = re.findall(r"^```python\n(.*?)^```", START, re.MULTILINE | re.DOTALL)


def test_the_first_commands_create_a_run_join_it_and_watch_it(place: Path) -> None:
    install, *commands = COMMANDS.splitlines()
    assert install == "$ pip install '.[bucket]'"
    created, joined, watched = run_block(place, commands)
    assert re.search(r"created run \w+, as lab", created) and re.search(r"joined run \w+ at round \d+", joined)
    assert "lab" in watched and "office" in watched


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
