"""examples/lora as its page shows it, with the real peft: three members, each a process, and a folder as bucket."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support.commands import Command, ended

EXAMPLE = Path(__file__).parents[2] / "examples/lora"
COMMANDS = [shlex.split(line) for line in re.findall(r"^\$ (.*)$", (EXAMPLE / "README.md").read_text(), re.MULTILINE)]
FEWER = ["--rounds", "3", "--sync-every", "5", "--context", "32", "--lr", "1e-2", "--quorum", "3"]
pytestmark = pytest.mark.timeout(900)


def script(path, words):
    runpy.run_path(path)["main"](words)


def test_three_laptops_end_with_one_adapter_that_has_learned(tmp_path):
    (_, make, *made), *members = COMMANDS
    runpy.run_path(str(EXAMPLE.parents[1] / make))["main"]([made[0], str(tmp_path / made[1])])
    offline = {"HF_HUB_OFFLINE": "1"}
    started = [
        Command(tmp_path, script, str(EXAMPLE.parents[1] / path), [*words, *FEWER], env=offline)
        for _, path, *words in members
    ]
    results = [ended(process) for process in started]
    assert [code for code, *_ in results] == [0, 0, 0], results
    out = "".join(said for _, said, _ in results)
    before, after = (re.findall(rf"(\w+): loss ([\d.]+) {word}", out) for word in ("before", "after"))
    assert dict(before).keys() == {"anna", "ben", "cara"}
    assert all(float(dict(after)[name]) < float(loss) for name, loss in before)
    trained, whole = map(int, re.search(r"sent ([\d,]+) of ([\d,]+)", out).expand(r"\1 \2").replace(",", "").split())
    assert trained < 0.2 * whole
    adapters = [(tmp_path / f"try/of-{name}/adapter_model.safetensors").read_bytes() for name, _ in sorted(before)]
    assert adapters[0] == adapters[1] == adapters[2]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "try/model")
    tokens = torch.arange(8)[None]
    plain = base(tokens).logits
    assert not torch.equal(PeftModel.from_pretrained(base, tmp_path / "try/of-ben")(tokens).logits, plain)
