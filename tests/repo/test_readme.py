"""Everything the README shows is run as it stands there, with fewer steps and a smaller model where it trains."""

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun

import diloco
from diloco.cli.compare import CompareConfig
from diloco.flags import parse
from diloco.runs.config import TrainConfig
from diloco.train import preflight
from tests.support import commands
from tests.support.clean import FENCE
from tests.support.commands import Command, ended, run_program
from tests.support.processes import run
from tests.support.s3 import free_port

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [line.removeprefix("$ ") for kind, block in BLOCKS if kind == "console" for line in block.splitlines()]
FEWER = ["--model", "nano", "--steps", "2", "--batch", "4", "--context", "32", "--eval-tokens", "512"]


class Summed(nn.Module):
    """A model whose output is its loss, as in the README."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def snippet(rank, code):
    """What a page leaves out: a model, an optimizer, data, an evaluation."""
    torch.manual_seed(rank)
    model = Summed()
    evaluated = []
    names = {
        "model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "evaluate": evaluated.append,
        "data": [torch.randn(4, 8) for _ in range(120)], "print": lambda *_: None, "torch": torch,
        "init_device_mesh": init_device_mesh, "fully_shard": fully_shard,
        **{name: getattr(diloco, name) for name in diloco.__all__},
    }  # fmt: skip
    exec(compile(code, "page", "exec"), names)
    return [p.detach() for p in model.parameters()], len(evaluated), names


def weights(rank, code):
    trained, evaluated, names = snippet(rank, code)
    return torch.cat([w.flatten() for w in trained]), evaluated, sorted(names.get("checkpoint", {}))


@pytest.mark.slow
def test_the_three_line_diff_runs_and_makes_replicas_equal():
    (diff,) = [block for kind, block in BLOCKS if kind == "diff"]
    added = [line for line in diff.splitlines() if line.startswith("+")]
    assert len(added) <= 3
    code = "\n".join(line[1:] for line in diff.splitlines() if "= ..." not in line)
    one, two = run(2, weights, code)
    assert torch.equal(one[0], two[0])


def _installed(program):
    return [str(Path(sys.executable).with_name(program))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("readme")


@pytest.mark.slow
def test_the_commands_run_in_their_order(folder):
    """Those that need no torch by the program that is installed, the others forked."""
    shown = [shlex.split(command) for command in COMMANDS if command.startswith("diloco")]
    assert shown[0] == ["diloco", "train", "demo"]
    more = {"train": FEWER, "compare": [*FEWER, "--seeds", "1", "--methods", "streaming"]}  # the rest is test_compare's
    for program, verb, *words in shown:
        words = [verb, *words, *more.get(verb, [])]
        if verb in ("report", "ls", "plan"):
            code, out, err = run_program(folder, *words, tool=_installed(program))
        else:
            code, out, err = commands.run(folder, *words)
        assert code == 0, err
        assert out.strip(), verb
    assert (folder / "first-hf/model.safetensors").exists()


def test_the_first_commands_show_what_it_is_for():
    """Enough rounds, and no more processes than the demo: nothing is noted about them."""
    for command in COMMANDS:
        program, verb, *words = shlex.split(command)
        if (program, verb) in (("diloco", "train"), ("diloco", "compare")):
            kind = TrainConfig if verb == "train" else CompareConfig
            config = replace(parse(kind, words), device="cuda")
            assert list(preflight.warnings(config, 2)) == [], command


@pytest.mark.slow
def test_the_two_machine_commands_make_one_run(folder):
    pair = [shlex.split(command) for command in COMMANDS if command.startswith("torchrun")]
    assert len(pair) == 2
    here = {"FIRST": "127.0.0.1", "29500": str(free_port())}
    processes = [Command(folder, torchrun, [*(here.get(word, word) for word in words), *FEWER]) for _, *words in pair]
    said = [ended(process) for process in processes]
    for code, out, err in said:
        assert code == 0, out + err
    assert "step 2/2  loss" in said[0][2] and "step 2/2" not in said[1][2], "the first process shows the run"
    assert (folder / "runs/pair/replica-1/metrics.jsonl").exists()


@pytest.mark.slow
def test_make_runs_the_demo_recipe(folder):
    plan = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True).stdout
    assert "diloco train demo" in plan
    code, out, err = commands.run(folder, "train", "demo", "--steps", "4", "--eval-tokens", "512")
    assert code == 0, err
    assert "loss of the anchors" in out and "report.html" in out


def test_the_answer_of_the_plan_is_the_one_that_is_printed(tmp_path):
    """The command says how quick the machines are, so that this one does not matter."""
    _, shown = [block for kind, block in BLOCKS if kind == "text"]
    (command,) = [command for command in COMMANDS if command.startswith("diloco plan")]
    code, out, err = commands.run_here(tmp_path, *shlex.split(command)[1:])
    assert code == 0, err
    assert " ".join(out.partition("\n\n")[0].split()) == " ".join(shown.split())


def test_a_command_is_run_here_or_says_what_it_needs():
    """`.ci/wheel` runs pip's line in the sources, with what they need beside it and no network."""
    needs = {line.removeprefix("$ "): text for text, kind, block in FENCE.findall(TEXT) if kind == "console"
             for line in block.splitlines()}  # fmt: skip
    assert list(needs) == COMMANDS
    assert {command.split()[0] for command, text in needs.items() if not text} == {"diloco", "torchrun"}


def test_the_links_name_files_that_exist():
    for name in re.findall(r"\]\(([\w./-]+)\)", TEXT):
        assert (ROOT / name).exists(), name
