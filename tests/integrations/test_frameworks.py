"""docs/frameworks.md, as it stands there, with the real packages: two replicas in processes of their own."""

import shutil

import pytest

from tests.support.frameworks import TINY, after, launch, longer, shown

TRAINER, LIGHTNING, ACCELERATE = (shown(title) for title in ("transformers", "Lightning", "accelerate"))
pytestmark = pytest.mark.timeout(900)


def test_the_diffs_are_short():
    assert longer(TRAINER) <= 3 and longer(LIGHTNING) <= 2 and longer(ACCELERATE) <= 5


def test_trainer_agrees_learns_and_resumes_bit_for_bit(tmp_path):
    end = """
log = trainer.state.log_history
said(trainer.model, evaluations=[each["eval_loss"] for each in log if "eval_loss" in each], log=log[-2])
"""
    (one,), (two,) = launch(tmp_path, TINY + after(TRAINER) + end)
    assert one["hash"] == two["hash"]
    assert one["evaluations"] == two["evaluations"] and one["evaluations"][-1] < 0.95 * 3.47  # ln 32
    assert one["log"]["diloco/rounds"] >= 4 and one["log"]["diloco/bytes_sent"] > 1000
    for m in range(2):
        saved = {path.name for path in (tmp_path / f"out/replica-{m}/checkpoint-10").iterdir()}
        assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "diloco.pt"} <= saved
        shutil.rmtree(tmp_path / f"out/replica-{m}/checkpoint-20")
    again = TINY + after(TRAINER).replace("trainer.train()", "trainer.train(resume_from_checkpoint=True)") + end
    for (resumed,) in launch(tmp_path, again):
        assert resumed["hash"] == one["hash"]
        assert resumed["evaluations"] == one["evaluations"]


def test_sft_with_and_without_lora_agrees(tmp_path):
    code = """
from diloco import replica
from diloco.integrations.transformers import DiLoCoCallback
reduce = replica()
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
words = {str(i): i for i in range(32)}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token="0",
                                    eos_token="1")
mine = dataset.remove_columns("labels").shard(reduce.replicas, reduce.replica)
for lora in (None, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")):
    torch.manual_seed(0)
    model = tiny() if lora is None else LlamaForCausalLM(model.config)
    args = SFTConfig(output_dir=f"sft-{lora is None}", max_steps=10, save_steps=5, max_length=12, **small)
    callback = DiLoCoCallback(reduce=reduce, sync_every=5)
    trainer = SFTTrainer(model, args, train_dataset=mine, processing_class=tokenizer, callbacks=[callback],
                         peft_config=lora)
    trainer.train()
    log = [each for each in trainer.state.log_history if "loss" in each]
    said(trainer.model, sent=log[-1]["diloco/bytes_sent"], losses=[each["loss"] for each in log])
"""
    (full, lora), (full2, lora2) = launch(tmp_path, TINY + code)
    assert full["hash"] == full2["hash"] and lora["hash"] == lora2["hash"]
    assert lora["sent"] < 0.3 * full["sent"] and full["losses"][-1] < full["losses"][0]
    for m in range(2):
        saved = {path.name for path in (tmp_path / f"sft-False/replica-{m}/checkpoint-5").iterdir()}
        assert {"adapter_model.safetensors", "optimizer.pt", "diloco.pt"} <= saved


MODULE = """
import lightning.pytorch as pl
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset
class Module(Layers, pl.LightningModule):
    def training_step(self, batch, _):
        return self(batch[0])
    def validation_step(self, batch, _):
        self.log("val", self(batch[0]))
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
torch.manual_seed(int(os.environ.get("RANK", 0)))
module = Module()
rows = torch.randn(80, 8, generator=torch.Generator().manual_seed(0))
def loader(replica, replicas):
    return DataLoader(TensorDataset(rows[replica::replicas]), batch_size=4)
validation = DataLoader(TensorDataset(rows[:8]), batch_size=8)
from lightning.pytorch.callbacks import ModelCheckpoint
small = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
"""


def test_lightning_agrees_learns_and_resumes_bit_for_bit(tmp_path):
    end = """
said(module, val=float(trainer.callback_metrics["val"]), rounds=float(trainer.callback_metrics["diloco/rounds"]))
"""
    keep = "callbacks=[diloco, ModelCheckpoint(f'saved-{diloco.replica}', '{epoch}', save_top_k=-1)]"
    code = MODULE + after(LIGHTNING).replace("callbacks=[diloco]", keep) + end
    (one,), (two,) = launch(tmp_path, code)
    assert one["hash"] == two["hash"] and one["val"] == two["val"] < 1.5 and one["rounds"] >= 4
    again = code.replace("validation)\n", "validation, ckpt_path=f'saved-{diloco.replica}/epoch=0.ckpt')\n")
    assert "ckpt_path" in again
    for (resumed,) in launch(tmp_path, again):
        assert resumed["hash"] == one["hash"] and resumed["rounds"] < one["rounds"]


def test_accelerate_agrees_learns_and_resumes_bit_for_bit(tmp_path):
    setup = """
from accelerate import Accelerator
from torch.utils.data import DataLoader
dataset.set_format("torch")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
part = int(os.environ["RANK"])
data = DataLoader(dataset.shard(2, part), batch_size=4)
held_out.set_format("torch")
def loss():
    with torch.no_grad():
        return model(**held_out[:]).loss.item()
first = loss()
"""
    end = """
said(model, steps=diloco.step_count, rounds=diloco.stats.rounds, losses=[first, loss()])
"""
    whole, folder = after(ACCELERATE), "f'out/replica-{reduce.replica}'"
    save = f"    if diloco.step_count == 10:\n        accelerator.save_state({folder})\ndiloco.finish()"
    (one,), (two,) = launch(tmp_path, TINY + setup + whole.replace("diloco.finish()", save) + end)
    assert one["hash"] == two["hash"] and one["steps"] == 20 and one["rounds"] >= 4
    assert one["losses"][1] < 0.95 * one["losses"][0]
    for m in range(2):
        saved = {path.name for path in (tmp_path / f"out/replica-{m}").iterdir()}
        assert {"model.safetensors", "optimizer.bin", "custom_checkpoint_0.pkl"} <= saved
    rest = f"accelerator.load_state({folder})\nfor batch in accelerator.skip_first_batches(data, 10):"
    for (resumed,) in launch(tmp_path, TINY + setup + whole.replace("for batch in data:", rest) + end):
        assert resumed["hash"] == one["hash"] and resumed["rounds"] < one["rounds"]


def test_schedule_free_weights_agree_after_finish(tmp_path):
    code = """
import schedulefree
from diloco import DiLoCo, replica
reduce = replica()
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2)
optimizer.train()
data = torch.tensor(rows)[reduce.replica :: 2]
with DiLoCo(model, optimizer, sync_every=5, reduce=reduce):
    for batch in data.split(5):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
optimizer.eval()
said(model)
"""
    (one,), (two,) = launch(tmp_path, TINY + code)
    assert one["hash"] == two["hash"]
