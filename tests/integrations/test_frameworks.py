"""docs/frameworks.md, as it stands there, with the real packages: two replicas in processes of their own."""

import shutil

import pytest

from tests.support.frameworks import COMMON, TINY, launch, shown

TRAINER, LIGHTNING, ACCELERATE = (shown(title) for title in ("transformers", "Lightning", "accelerate"))
pytestmark = pytest.mark.timeout(900)


def test_trainer_agrees_learns_and_resumes_bit_for_bit(tmp_path):
    end = """
log = trainer.state.log_history
report(trainer.model, evaluations=[entry["eval_loss"] for entry in log if "eval_loss" in entry], log=log[-2])
"""
    (one,), (two,) = launch(tmp_path, TINY + TRAINER.after + end)
    assert one["hash"] == two["hash"]
    assert one["evaluations"] == two["evaluations"] and one["evaluations"][-1] < 0.95 * 3.47  # ln 32
    assert one["log"]["diloco/rounds"] >= 4 and one["log"]["diloco/bytes_sent"] > 1000
    for m in range(2):
        saved = {path.name for path in (tmp_path / f"out/replica-{m}/checkpoint-10").iterdir()}
        assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "diloco.pt"} <= saved
        shutil.rmtree(tmp_path / f"out/replica-{m}/checkpoint-20")
    again = TINY + TRAINER.after.replace("trainer.train()", "trainer.train(resume_from_checkpoint=True)") + end
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
texts = dataset.remove_columns("labels")
for lora in (None, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")):
    torch.manual_seed(0)
    model = tiny() if lora is None else LlamaForCausalLM(model.config)
    args = SFTConfig(output_dir=f"sft-{lora is None}", max_steps=10, save_steps=5, max_length=12, **small)
    callback = DiLoCoCallback(reducer=reduce, sync_every=5)
    trainer = SFTTrainer(model, args, train_dataset=texts, processing_class=tokenizer, callbacks=[callback],
                         peft_config=lora)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    report(trainer.model, sent=log[-1]["diloco/bytes_sent"], losses=[entry["loss"] for entry in log])
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
    seen = []
    def training_step(self, batch, _):
        self.seen += [rows.tolist().index(row) for row in batch[0].tolist()]
        return self(batch[0])
    def validation_step(self, batch, _):
        self.log("val", self(batch[0]))
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
torch.manual_seed(int(os.environ.get("RANK", 0)))
module = Module()
rows = torch.randn(80, 8, generator=torch.Generator().manual_seed(0))
train_data = DataLoader(TensorDataset(rows), batch_size=4)
validation = DataLoader(TensorDataset(rows[:8]), batch_size=8)
from lightning.pytorch.callbacks import ModelCheckpoint
small = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
"""


def test_lightning_agrees_learns_and_resumes_bit_for_bit(tmp_path):
    end = """
report(module, val=float(trainer.callback_metrics["val"]), rounds=float(trainer.callback_metrics["diloco/rounds"]),
     seen=module.seen)
"""
    keep = "callbacks=[diloco, ModelCheckpoint(f'saved-{diloco.replica}', '{epoch}', save_top_k=-1)]"
    code = MODULE + LIGHTNING.after.replace("callbacks=[diloco]", keep) + end
    (one,), (two,) = launch(tmp_path, code)
    assert one["hash"] == two["hash"] and one["val"] == two["val"] < 1.5 and one["rounds"] >= 4
    assert one["seen"] == 2 * list(range(0, 80, 2)) and two["seen"] == 2 * list(range(1, 80, 2))
    again = code.replace("validation)\n", "validation, ckpt_path=f'saved-{diloco.replica}/epoch=0.ckpt')\n")
    assert "ckpt_path" in again
    for resumed, whole in zip(launch(tmp_path, again), (one, two), strict=True):
        assert resumed[0]["seen"] == whole["seen"][40:]
        assert resumed[0]["hash"] == whole["hash"] and resumed[0]["rounds"] == whole["rounds"]


def test_lightning_saves_the_anchors_it_has_monitored_and_refuses_other_averages(tmp_path):
    code = """
from diloco import ConfigError, replica
from diloco.integrations.lightning import DiLoCoCallback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
reduce = replica()
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return zip(rows[reduce.replica :: 2])
class Noisy(Module):  # so that the last weights are not the best
    def on_train_epoch_start(self):
        if self.trainer.current_epoch == 2:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 1.0
def fit(module, data, *others, **settings):
    diloco = DiLoCoCallback(reducer=reduce, sync_every=4, **settings)
    trainer = Trainer(max_epochs=3, **small, devices=1, callbacks=[diloco, *others], logger=False,
                      default_root_dir=f"out/{reduce.replica}")
    trainer.fit(module, data, validation)
    return trainer
shuffled = DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)
for weights_only in (False, True):
    Module.seen = []
    module = Noisy()
    best = ModelCheckpoint(f"{weights_only}-{reduce.replica}", monitor="val", save_weights_only=weights_only)
    trainer = fit(module, shuffled, best)
    (again,) = trainer.validate(module, validation, ckpt_path="best", verbose=False)
    report(module, best=float(best.best_model_score), again=again["val"], seen=module.seen)
for others, data, settings in (([EMAWeightAveraging(decay=0.9)], train_data, {}),
                               ([StochasticWeightAveraging(swa_lrs=1e-2)], train_data, {}),
                               ([], DataLoader(Stream(), 4), {}), ([], DataLoader(Stream(), 4), {"shard": False})):
    try:
        fit(module, data, *others, **settings)
        print("REPORT", json.dumps("done"))
    except ConfigError as error:
        print("REPORT", json.dumps(str(error)))
"""
    one, two = launch(tmp_path, MODULE + code)
    assert one[0]["hash"] == two[0]["hash"] and one[1]["hash"] == two[1]["hash"]
    epochs = [one[0]["seen"][i : i + 40] for i in (0, 40, 80)], [two[0]["seen"][i : i + 40] for i in (0, 40, 80)]
    assert all(sorted(a + b) == list(range(80)) for a, b in zip(*epochs, strict=True)), "each has its half"
    assert epochs[0][0] != epochs[0][1], "shuffled anew"
    for best in (*one[:2], *two[:2]):
        assert best["best"] == pytest.approx(best["again"], rel=1e-6)
    assert one[2].startswith("EMAWeightAveraging puts each replica's own weights")
    assert one[3].startswith("StochasticWeightAveraging puts each replica's own weights")
    assert "is a Stream" in one[4] and one[5] == "done"


def test_accelerate_agrees_learns_and_resumes_bit_for_bit(tmp_path):
    setup = """
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.utils.data import DataLoader
dataset.set_format("torch")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
held_out.set_format("torch")
evaluated = []
def evaluate(model):
    with torch.no_grad():
        evaluated.append(model(**held_out[:]).loss.item())
"""
    end = """
evaluate(model)
saved = load_file(f"out/replica-{reduce.replica}/agreed/model.safetensors")
report(model, steps=diloco.step_count, rounds=diloco.stats.rounds, evaluated=evaluated,
     agreed=all(model.state_dict()[name].equal(values) for name, values in saved.items()), rows=len(dataset))
"""
    whole, folder = ACCELERATE.after, "f'out/replica-{reduce.replica}'"
    save = f"    if diloco.step_count == 10:\n        accelerator.save_state({folder})\ndiloco.finish()"
    (one,), (two,) = launch(tmp_path, TINY + setup + whole.replace("diloco.finish()", save) + end)
    assert one["hash"] == two["hash"] and one["steps"] == 20 and one["rounds"] >= 4 and one["rows"] == 80
    assert one["agreed"] and two["agreed"]
    assert one["evaluated"] == two["evaluated"] and one["evaluated"][-1] < 0.95 * 3.47  # ln 32
    for m in range(2):
        saved = {path.name for path in (tmp_path / f"out/replica-{m}").iterdir()}
        assert {"model.safetensors", "optimizer.bin", "custom_checkpoint_0.pkl"} <= saved
    rest = f"accelerator.load_state({folder})\nfor step, batch in enumerate(accelerator.skip_first_batches(data, 10)):"
    again = whole.replace("for step, batch in enumerate(data):", rest)
    assert "load_state" in again
    for (resumed,) in launch(tmp_path, TINY + setup + again + end):
        assert resumed["hash"] == one["hash"] and resumed["rounds"] == one["rounds"]


def test_evaluations_do_not_change_training_with_a_schedule_free_optimizer(tmp_path):
    code = """
from diloco import replica
from diloco.integrations.transformers import DiLoCoCallback
reduce = replica()
for strategy in ("steps", "no"):
    torch.manual_seed(0)
    model = LlamaForCausalLM(model.config)
    args = TrainingArguments(output_dir=strategy, max_steps=16, eval_strategy=strategy, eval_steps=4,
                             save_strategy="no", optim="schedule_free_adamw", lr_scheduler_type="constant", **small)
    trainer = Trainer(model, args, train_dataset=dataset, eval_dataset=held_out,
                      callbacks=[DiLoCoCallback(reducer=reduce, sync_every=5)])
    trainer.train()
    report(model, evaluations=[entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry])
"""
    (one, never), (two, _) = launch(tmp_path, TINY + code)
    assert one["hash"] == two["hash"] == never["hash"]
    assert one["evaluations"] == two["evaluations"] and len(one["evaluations"]) == 4


def test_an_unchanged_lightning_script_becomes_a_replica(tmp_path):
    script = """
trainer = Trainer(max_steps=20, **small, default_root_dir="out")
trainer.fit(module, train_data, validation)
report(module, seen=sorted(set(module.seen)), folder=str(trainer.default_root_dir))
"""
    (tmp_path / "plain.py").write_text(COMMON + MODULE + script)
    code = "from diloco.cli import main\nmain(['run', '--sync-every', '5', '--codec', 'float32', 'plain.py'])\n"
    (one,), (two,) = launch(tmp_path, code)
    assert one["hash"] == two["hash"] and one["folder"].endswith("out/replica-0")
    assert one["seen"] == list(range(0, 80, 2)) and two["seen"] == list(range(1, 80, 2))
