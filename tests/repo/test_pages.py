"""Every block of the pages runs, or a comment above it says what it needs.

The blocks of a page share a folder and run in order. Commands that train get flags that shorten them.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun

import diloco
from tests.support.commands import Command, ended, start, start_ranks
from tests.support.pages import ROOT, Block, blocks
from tests.support.s3 import free_port

PAGES = [*("README.md", "CONTRIBUTING.md", "SECURITY.md"),
         *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]  # fmt: skip
RUNNABLE = ("console", "bash", "python", "diff")
SHORT = ["--steps", "6", "--batch", "4", "--context", "32", "--sync-every", "6"]
SHORTER = {
    "train": SHORT,
    "compare": [*SHORT, "--model", "nano", "--replicas", "2", "--seeds", "1", "--methods", "streaming"],
    "sample": ["--tokens", "2"],
}


def is_skipped(block: Block) -> bool:
    return block.kind == "text" or block.mark == "output" or block.mark.startswith("needs: ")


@pytest.mark.parametrize("page", PAGES)
def test_blocks_can_run_or_say_what_they_need(page: str) -> None:
    for block in blocks(page):
        assert is_skipped(block) or block.kind in RUNNABLE, f"{page}: mark this block\n{block.text}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if not all(map(is_skipped, blocks(page)))])
def test_blocks_run(page: str, tmp_path: Path) -> None:
    for name in ("notes.txt", "north.txt", "south.txt"):
        (tmp_path / name).write_text("\n\n".join(Path(module.__file__).read_text() for module in (shlex, re)))
    for name in ("examples", "studies"):
        (tmp_path / name).symlink_to(ROOT / name)
    for number, block in enumerate(blocks(page)):
        if is_skipped(block):
            continue
        if block.kind in ("console", "bash"):
            run_commands(tmp_path, block.commands)
        elif block.mark.startswith("file: "):
            (tmp_path / block.mark.removeprefix("file: ")).write_text(block.text)
        else:
            code = block.after.replace("model, optimizer = ...", "") if block.kind == "diff" else block.text
            code = re.sub(r"(TrainConfig\(.*?)steps=\d+", r"\1steps=4, context=32", code)
            code = code.replace("s3://my-bucket", f"store-{number}")
            run_python(tmp_path, code, int(block.mark.removeprefix("processes: ") or 2))


def run_commands(folder: Path, lines: list[str]) -> None:
    port = str(free_port())
    nodes = []
    for line in lines:
        line = line.replace("s3://my-bucket", "stores").replace("FIRST", "127.0.0.1").replace("29500", port)
        program, *words = shlex.split(line, comments=True)
        if program == "torchrun" and {"--nnodes", "--standalone"} & {*words}:  # nodes wait for each other
            nodes.append(Command(folder, torchrun, [*words, "--model", "nano", *SHORT]))
        elif program == "torchrun":
            flag, count, script, *arguments = words
            assert flag == "--nproc_per_node"
            check(line, *start_ranks(folder, int(count), run_script, script, arguments))
        elif program == "diloco":
            if "--dry-run" not in words:
                words += SHORTER.get(words[0], [])
            if words[0] == "train" and "hf:" not in line:
                words += ["--model", "nano"]
            check(line, start(folder, *words))
        elif program == "make":
            subprocess.run(["make", "--dry-run", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        else:
            subprocess.run(line, shell=True, cwd=folder, check=True)
    check("\n".join(lines), *nodes)


def run_script(script: str, arguments: list[str]) -> None:
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def run_python(folder: Path, code: str, processes: int) -> None:
    if processes == 1:
        check(code, Command(folder, run_snippet, code))
    else:
        check(code, *start_ranks(folder, processes, run_snippet, code))


def check(code: str, *commands: Any) -> None:
    for exit_code, out, err in map(ended, commands):
        assert exit_code == 0, f"{code}\n{out}{err}"


class Residual(nn.Module):
    """A model whose output is its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def run_snippet(code: str) -> None:
    """Supply what a page leaves out: model, optimizer, data, and, unless the snippet trains, the loop."""
    rank = int(os.environ.get("RANK", 0))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)  # frozen layers must be equal
    model = Residual()
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [torch.randn(4, 8) for _ in range(60)]

    def train_step(batch: torch.Tensor) -> None:
        forward(batch).backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()

    names = {
        **{name: getattr(diloco, name) for name in diloco.__all__},
        "model": model, "optimizer": optimizer, "data": data, "train_step": train_step, "evaluate": lambda model: None,
        "torch": torch, "init_device_mesh": init_device_mesh, "fully_shard": fully_shard,
    }  # fmt: skip
    forward = nn.parallel.DistributedDataParallel(model) if "ddp_ranks" in code else model
    if "DiLoCo(" not in code and re.search(r"with diloco:|diloco\.stats", code):
        names["diloco"] = diloco.DiLoCo(model, optimizer, sync_every=10)
    exec(compile(code, "page", "exec"), names)
    if "reduce" in names and "diloco" not in names:
        names["diloco"] = diloco.DiLoCo(model, optimizer, sync_every=10, reducer=names["reduce"])
    if "diloco" in names:
        if not names["diloco"].stats.rounds:
            with names["diloco"]:
                for batch in data:
                    train_step(batch)
        assert names["diloco"].stats.rounds
    if "RANK" in os.environ:
        for parameter in model.parameters():
            weight = getattr(parameter, "full_tensor", parameter.detach)().detach()
            dist.broadcast(first := weight.clone(), 0)
            assert torch.equal(weight, first)
        dist.destroy_process_group()


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"
