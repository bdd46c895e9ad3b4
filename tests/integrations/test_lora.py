"""LoRA with the real peft: examples/lora with three members, and the loop of docs/fine-tuning.md."""

import re
import runpy
import shlex

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from diloco import Balanced, DiLoCo
from tests.support.commands import Command, ended
from tests.support.pages import ROOT, blocks
from tests.support.processes import run

COMMANDS = [shlex.split(line) for block in blocks("examples/lora/README.md") if block.kind for line in block.commands]
FEWER = ["--rounds", "3", "--sync-every", "5", "--context", "32", "--lr", "1e-2", "--quorum", "3"]
pytestmark = pytest.mark.timeout(900)


def script(path, words):
    runpy.run_path(path)["main"](words)


def test_three_laptops_end_with_one_adapter_that_has_learned(tmp_path):
    (_, make, flag, folder), *members = COMMANDS
    runpy.run_path(str(ROOT / make))["main"]([flag, str(tmp_path / folder)])
    offline = {"HF_HUB_OFFLINE": "1"}
    processes = [
        Command(tmp_path, script, str(ROOT / path), [*words, *FEWER], env=offline) for _, path, *words in members
    ]
    results = [ended(process) for process in processes]
    assert [code for code, *_ in results] == [0, 0, 0], results
    out = "".join(printed for _, printed, _ in results)
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


def _own_loop(rank, code, folder):
    """The page's lines with the tiny model in place of the hub's, and steps after them."""
    torch.manual_seed(rank)  # other adapters on each replica: joining makes them equal
    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "LoraConfig": LoraConfig, "get_peft_model": get_peft_model,
             "Balanced": Balanced, "DiLoCo": DiLoCo, "torch": torch}  # fmt: skip
    exec(compile(code.replace("Qwen/Qwen2.5-0.5B", folder), "fine-tuning.md", "exec"), names)
    model, optimizer, diloco = names["model"], names["optimizer"], names["diloco"]
    frozen = torch.cat([p.detach().flatten() for p in model.parameters() if not p.requires_grad])
    with diloco:
        for _ in range(20):
            tokens = torch.randint(0, 256, (2, 16))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(frozen, torch.cat([p.detach().flatten() for p in model.parameters() if not p.requires_grad]))
    adapters = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
    return adapters, len(frozen), diloco.stats.bytes_sent, diloco.stats.rounds


def test_a_loop_syncs_only_the_adapters(tmp_path):
    runpy.run_path(str(ROOT / "examples/lora/tiny.py"))["main"](["--to", str(tmp_path)])
    (code,) = (block.text for block in blocks("docs/fine-tuning.md") if "get_peft_model" in block.text)
    (one, frozen, sent, rounds), (two, *_) = run(2, _own_loop, code, str(tmp_path / "model"))
    assert torch.equal(one, two) and rounds >= 4
    assert frozen > 4 * len(one)
    assert sent < rounds * len(one) / 4, "a round is a fourth of the adapters, at less than a byte for each value"
