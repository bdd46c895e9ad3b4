"""Axolotl itself, with the keys of docs/frameworks.md: two replicas, as torchrun starts them."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.support.frameworks import ROOT, shown
from tests.support.s3 import free_port

pytestmark = pytest.mark.timeout(900)
CONFIG = """
base_model: ./model
datasets: [{path: data.jsonl, ds_type: json, type: completion}]
dataset_prepared_path: prepared
val_set_size: 0.1
sequence_len: 16
micro_batch_size: 4
gradient_accumulation_steps: 1
num_epochs: 1
optimizer: adamw_torch
learning_rate: 0.01
lr_scheduler: cosine
output_dir: out
evals_per_epoch: 2
save_steps: 16
logging_steps: 5
auto_resume_from_checkpoints: true
bf16: false
tf32: false
"""


def train(folder):
    """The log, and for each replica the bytes of its model and its evaluations."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
                   "AXOLOTL_DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
    command = [*torchrun, str(free_port()), "-m", "axolotl.cli.train", "config.yml"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    replicas = [folder / f"out/replica-{n}" for n in range(2)]
    states = [json.loads((replica / "checkpoint-45/trainer_state.json").read_text()) for replica in replicas]
    evaluations = [[entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
                   for state in states]  # fmt: skip
    log = done.stdout + done.stderr + (replicas[0] / "debug.log").read_text()
    return log, [(replica / "model.safetensors").read_bytes() for replica in replicas], evaluations


def test_axolotl_agrees_learns_and_resumes_bit_for_bit(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(32)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", bos_token="2")
    tokenizer.save_pretrained(tmp_path / "model")
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **size)).save_pretrained(tmp_path / "model")
    texts = [" ".join(str(3 + (3 * i + j) % 29) for j in range(12)) for i in range(200)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    keys = yaml.safe_load(shown("Axolotl", "yaml").text)
    keys["diloco"]["sync_every"] = 5
    (tmp_path / "config.yml").write_text(CONFIG + yaml.safe_dump(keys))

    log, (one, two), (losses, losses2) = train(tmp_path)
    assert "total_num_steps: 89" in log, "of which each replica takes half, 45"
    assert "Plugin loaded successfully" in log and "diloco/rounds" in log
    assert one == two and losses == losses2 and losses[-1] < losses[0]
    for n in range(2):
        shutil.rmtree(tmp_path / f"out/replica-{n}/checkpoint-45")
    _, resumed, _ = train(tmp_path)
    assert resumed == [one, one]
