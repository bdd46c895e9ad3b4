"""DPO with TRL: the reference must be the model that all replicas start with."""

import pytest

from tests.support.frameworks import TINY, launch

pytestmark = pytest.mark.timeout(900)
CODE = """
import copy
from diloco import replica
from diloco.integrations.transformers import DiLoCoCallback
reduce = replica()
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
words = Tokenizer(models.WordLevel({str(i): i for i in range(32)}, unk_token="0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
pairs = [{"prompt": f"{i}", "chosen": f" {(i + 1) % 32} {(i + 2) % 32}", "rejected": f" {(i + 5) % 32} 7"}
         for i in range(2, 32)] * 4
pairs = Dataset.from_list(pairs)
for lora in (None, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")):
    torch.manual_seed(0)  # the same start on all replicas: the reference is a copy of it
    model = LlamaForCausalLM(model.config)
    args = DPOConfig(output_dir=f"dpo-{lora is None}", max_steps=10, save_steps=5, max_length=12, beta=1.0, **small)
    callback = DiLoCoCallback(reducer=reduce, sync_every=5)
    reference = copy.deepcopy(model) if lora is None else None  # without one TRL loads it from a hub
    trainer = DPOTrainer(model, reference, args=args, train_dataset=pairs, processing_class=tokenizer,
                         callbacks=[callback], peft_config=lora)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    report(trainer.model, losses=[entry["loss"] for entry in log], rounds=log[-1]["diloco/rounds"])
"""


def test_dpo_with_and_without_lora_agrees_and_learns(tmp_path):
    (full, lora), (full2, lora2) = launch(tmp_path, TINY + CODE)
    assert full["hash"] == full2["hash"] and lora["hash"] == lora2["hash"]
    assert full["losses"][-1] < full["losses"][0] and full["rounds"] >= 2
    for m in range(2):
        saved = {path.name for path in (tmp_path / f"dpo-True/replica-{m}/checkpoint-5").iterdir()}
        assert {"model.safetensors", "optimizer.pt", "diloco.pt"} <= saved
