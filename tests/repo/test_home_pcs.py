"""The commands of docs/home-pcs.md: three processes that share nothing but an S3 server."""

import shlex

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import SMALL, run, start, wait_for
from tests.support.pages import ROOT, blocks
from tests.support.s3 import Proxy, Server

TINY = {
    "hf:gpt2": "bytes",
    "100m": "nano",
    "1024": "32",
    "texts/": str(ROOT / "docs"),
    "s3://my-bucket/home": "s3://bucket/home",
}
COMMANDS = [
    [TINY.get(word, word) for word in shlex.split(line)[1:]]
    for block in blocks("docs/home-pcs.md")
    if block.kind == "console" and "test_home_pcs" in block.mark
    for line in block.commands
]


@pytest.fixture
def store():
    pytest.importorskip("obstore")
    server = Server()
    server.make("bucket")
    proxy = Proxy(server.port)
    yield dict(proxy.environment)
    proxy.end()
    server.end()


@pytest.mark.slow
def test_three_members_train_one_model_through_a_store(store, tmp_path):
    doctor, anna, ben, carla, watch, export, sample = COMMANDS
    assert run(tmp_path, *doctor, env=store)[0] == 0
    together = ["--quorum", 3]  # no round without all three, however slow this machine is
    members = [start(tmp_path, *anna, *SMALL, "--batch", 12, "--steps", 20, *together, env=store)]
    wait_for(lambda: "created run" in "".join(members[0].said()), members[0])
    members += [start(tmp_path, *words, *together, env=store) for words in (ben, carla)]
    for member in members:
        assert member.wait() == 0, member.said()

    code, out, err = run(tmp_path, *watch, "--once", env=store)
    assert code == 0 and all(name in out for name in ("anna", "ben", "carla")) and "round 2 of 2" in out, out + err
    for name in ("anna", "ben", "carla"):
        code, out, err = run(tmp_path, "export", f"runs/home-{name}", "--to", name)
        assert code == 0, err
    first, *others = (load_file(tmp_path / name / "model.safetensors") for name in ("anna", "ben", "carla"))
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)
    for words in (export, [*sample, "--tokens", 2]):
        assert run(tmp_path, *words)[0] == 0
