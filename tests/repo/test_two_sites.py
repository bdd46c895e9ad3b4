"""The commands of docs/two-sites.md: two machines, each one replica sharded over its processes."""

import json
import shlex

import pytest
from torch.distributed.run import main as torchrun

from tests.support.commands import SMALL, Command, ended, run
from tests.support.pages import ROOT, blocks
from tests.support.s3 import free_port

MACHINES = [
    shlex.split(line)[1:]
    for block in blocks("docs/two-sites.md")
    if "test_two_sites" in block.mark
    for line in block.commands
]


@pytest.mark.slow
def test_two_sharded_replicas_train_one_model(tmp_path):
    tiny = {"FIRST": "127.0.0.1", "29500": str(free_port()), "8": "2", "/data/text": str(ROOT / "docs")}
    fewer = ["--shards", "2", *SMALL, "--tokenizer", "bytes", "--accumulate", "1", "--steps", "20"]
    sites = []
    for number, words in enumerate(MACHINES):
        place = tmp_path / f"site-{number}"
        place.mkdir()
        sites.append(Command(place, torchrun, [tiny.get(word, word) for word in words] + fewer))
    for code, out, err in map(ended, sites):
        assert code == 0, out + err
    assert len(sites) == 2 and not (tmp_path / "site-1/runs/two-sites/replica-0").exists()
    code, out, err = run(tmp_path / "site-0", "report", "runs/two-sites", "--json")
    assert code == 0, err
    (summary,) = json.loads(out)
    assert (summary["replicas"], summary["steps"]) == (2, 20)
    code, out, err = run(tmp_path / "site-0", "export", "runs/two-sites", "--to", "model")
    assert (code, out) == (0, "model\n"), err
