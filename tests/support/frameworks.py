"""The blocks of docs/frameworks.md, and processes that run them as torchrun would."""

import json
import os
import runpy
import subprocess
import sys

from tests.support.commands import ended, start_ranks
from tests.support.pages import ROOT, Block, blocks
from tests.support.s3 import free_port

COMMON = """
import hashlib, json, os, sys, torch
torch.set_num_threads(1)
torch.manual_seed(1)
def report(model, **more):
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    values = b"".join(p.detach().contiguous().numpy().tobytes() for p in whole)
    print("REPORT", json.dumps({"hash": hashlib.sha256(values).hexdigest(), **more}))
class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.h = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))
    def forward(self, x):
        for layer in self.h:
            x = x + layer(x).tanh()
        return (x - 1).square().mean()
"""
TINY = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from datasets import Dataset
def tiny():
    torch.manual_seed(int(os.environ.get("RANK", 0)))  # join() takes those of the first replica
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
                                        num_attention_heads=2, tie_word_embeddings=True))
model = tiny()
rows = torch.randint(0, 32, (200, 1), generator=torch.Generator().manual_seed(0))
rows = ((rows + torch.arange(12)) % 32).tolist()
dataset = Dataset.from_dict({"input_ids": rows[:160], "labels": rows[:160]})
held_out = Dataset.from_dict({"input_ids": rows[160:], "labels": rows[160:]})
small = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "report_to": [], "use_cpu": True, "logging_steps": 5,
         "disable_tqdm": True, "warmup_steps": 3}
"""


def shown(title, kind="diff") -> Block:
    """The only block of this kind in the section whose title begins so."""
    (block,) = (block for block in blocks("docs/frameworks.md", title) if block.kind == kind)
    return block


def launch(folder, code, replicas=2):
    """What each of the processes says, each started as torchrun would."""
    script = _script(folder, code)
    common = {**os.environ, "WORLD_SIZE": str(replicas), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
              "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": folder}
    ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(replicas)]
    processes = [subprocess.Popen([sys.executable, script], env=rank, **pipes) for rank in ranks]
    outs = [process.communicate(timeout=800)[0] for process in processes]
    for process, out in zip(processes, outs, strict=True):
        assert process.returncode == 0, out
    return _reports(outs)


def launch_forked(folder, code, replicas=2):
    """The same in processes that have torch already, for scripts that need no framework."""
    processes = start_ranks(folder, replicas, _execute, str(_script(folder, code)))
    results = [ended(process) for process in processes]
    assert [code for code, _, _ in results] == [0] * replicas, results
    return _reports([out for _, out, _ in results])


def _execute(path):
    runpy.run_path(path)


def _script(folder, code):
    path = folder / "train.py"
    path.write_text(COMMON + code)
    return path


def _reports(outs):
    return [[json.loads(line.removeprefix("REPORT ")) for line in out.splitlines() if line.startswith("REPORT")]
            for out in outs]  # fmt: skip
