"""torchtitan's own program with the flags of docs/frameworks.md: two jobs, each a replica.

torchtitan wants an accelerator. What it asks of one is given here by the CPU, and its attention, which has no backward
there, is torch's own; everything else is torchtitan.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.support.frameworks import COMMON, ROOT, shown
from tests.support.s3 import free_port

pytestmark = pytest.mark.timeout(900)
PROGRAM = """
import types
import torch.distributed as dist
kernels = types.ModuleType("torchtitan.distributed.minimal_async_ep.kernels")  # they need triton
kernels.__getattr__ = lambda name: None
sys.modules[kernels.__name__] = kernels
torch._utils._get_available_device_type, torch._utils._get_device_module = lambda: "cpu", lambda kind: torch.cpu
properties = types.SimpleNamespace(total_memory=1)
for name, value in {"get_device_name": "cpu", "current_device": 0, "empty_cache": None, "reset_peak_memory_stats": None,
                    "memory_stats": {}, "get_device_properties": properties}.items():
    setattr(torch.cpu, name, lambda *_, value=value: value)
if not hasattr(dist, "set_timeout"):  # torchtitan 0.3 is made for the torch after 2.13
    dist.set_timeout = lambda timeout, group: None
from diloco.core.tensors import fsdp_modules, reshard
from torchtitan import train, trainer
from torchtitan.models.common import attention, decoder
def forward(self, q_BLNH, k_BLNH, v_BLNH, *, scale=None, enable_gqa=False, **_):
    q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, scale=scale, is_causal=True, enable_gqa=enable_gqa).transpose(1, 2)
attention.FlexAttention.forward = forward
decoder.Decoder.get_attention_masks = lambda self, positions: None
log, log_validation = trainer.MetricsProcessor.log, trainer.MetricsProcessor.log_validation
close = trainer.Trainer.close
logged, validated = [], []
def kept(self, step, loss, *args, extra_metrics=None, **more):
    logged.append({"loss": float(loss), **extra_metrics})
    log(self, step, loss, *args, extra_metrics=extra_metrics, **more)
def kept_validation(self, loss, *args, **more):
    validated.append(float(loss))
    log_validation(self, loss, *args, **more)
def closing(self):
    reshard(fsdp_modules(self.model_parts[0]))  # after a validation FSDP2 shows the parameters that it has gathered
    report(self.model_parts[0], logged=logged, validated=validated)
    close(self)
trainer.MetricsProcessor.log, trainer.MetricsProcessor.log_validation = kept, kept_validation
trainer.Trainer.close = closing
train.main()
"""
CONFIG = """
from datasets import Dataset
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3.config_registry import llama3_debugmodel
rows = [" ".join(str((3 * i + j) % 32) for j in range(20)) for i in range(200)]
DATASETS["numbers"] = DatasetConfig("", lambda _: Dataset.from_dict({"text": rows}), lambda sample: sample["text"])
def tiny():
    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:3]
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    config.hf_assets_path, config.dataloader.dataset = "assets", "numbers"
    training, checkpoint, validator = config.training, config.checkpoint, config.validator
    training.local_batch_size, training.seq_len, training.steps, training.disable_cuda_graphs = 4, 16, 8, True
    checkpoint.enable, checkpoint.interval = True, 4
    validator.enable, validator.freq, validator.steps, validator.dataloader = True, 4, 1, config.dataloader
    config.optimizer = default_adamw(lr=3e-3)
    return config
"""


@pytest.fixture
def folder(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({str(i): i for i in range(32)} | {"<s>": 32, "</s>": 33}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore
    (tmp_path / "assets").mkdir()
    words.save(str(tmp_path / "assets/tokenizer.json"))
    (tmp_path / "assets/tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (tmp_path / "program.py").write_text(COMMON + PROGRAM)
    (tmp_path / "tiny_titan.py").write_text(CONFIG)
    registry = "torchtitan.models.llama3.config_registry import llama3_8b"
    module = shown("torchtitan", "python").text.replace(registry, "tiny_titan import tiny as llama3_8b")
    (tmp_path / "my_configs.py").write_text(module)
    return tmp_path


def start(folder, flags, replica, at):
    """One job, with the flags of the docs."""
    changed = {"first-host:29400": f"127.0.0.1:{at}", "0": str(replica)}
    words = [changed.get(word, word) for word in flags] + ["--diloco.sync_every", "4"]
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(free_port()), "PYTHONPATH": f"{ROOT}:{folder}", "GLOO_SOCKET_IFNAME": "lo",
                   "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}  # fmt: skip
    return subprocess.Popen([sys.executable, "program.py", *words], env=environment, cwd=folder, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def both(folder):
    words = shlex.split(shown("torchtitan", "console").commands[0])
    flags, at = words[words.index("--module") :], free_port()
    jobs = [start(folder, flags, replica, at) for replica in range(2)]
    outs = [job.communicate(timeout=800)[0] for job in jobs]
    for job, out in zip(jobs, outs, strict=True):
        assert job.returncode == 0, out[-5000:]
    lines = [line for out in outs for line in out.splitlines() if "REPORT" in line]
    reports = [json.loads(line.removeprefix("REPORT ")) for line in lines]
    return reports, outs


def test_torchtitan_agrees_learns_validates_the_anchors_and_resumes_bit_for_bit(folder):
    (one, two), outs = both(folder)
    assert one["hash"] == two["hash"]
    assert len(one["validated"]) == 3 and one["validated"] == two["validated"]  # at the steps 1, 4 and 8
    assert one["logged"][-1]["loss"] < 0.8 * one["logged"][0]["loss"]
    assert one["logged"][-1]["diloco/rounds"] >= 2 and one["logged"][-1]["diloco/bytes_sent"] > 100_000
    assert all("diloco/bytes_sent" in out for out in outs)  # on the console
    assert one["logged"][0]["loss"] != two["logged"][0]["loss"]  # data of their own
    for replica in range(2):
        saved = folder / f"outputs/replica-{replica}/checkpoint"
        assert {path.name for path in saved.iterdir()} == {"step-4", "step-8"}
        shutil.rmtree(saved / "step-8")
    (again, other), _ = both(folder)
    assert again["hash"] == other["hash"] == one["hash"]
    assert [entry["loss"] for entry in again["logged"]] == [entry["loss"] for entry in one["logged"][4:]]
