"""The callback in the real transformers.Trainer: two replicas in processes of their own."""

import shlex

import pytest
from safetensors.torch import load_file

from tests.support.frameworks import COMMON, TINY, launch_forked, shown

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
START = """
from transformers import TrainerCallback, set_seed
from diloco import ConfigError, replica
from diloco.integrations.transformers import DiLoCoCallback
number = int(os.environ["RANK"])
reduce = replica()
rows = [{"input_ids": row, "labels": row} for row in rows[:160]]
class Collate:
    def __init__(self):
        self.seen = []
    def __call__(self, examples):
        self.seen += [example["input_ids"] for example in examples]
        return {name: torch.tensor([example[name] for example in examples]) for name in ("input_ids", "labels")}
def trainer(data, callbacks=(), shard=True, **changed):
    set_seed(number)
    arguments = {"output_dir": "out", "max_steps": 12, **small, "save_strategy": "no", **changed}
    diloco = DiLoCoCallback(reducer=reduce, sync_every=5, shard=shard)
    held_outs = {"a": held_out.select(range(20)), "b": held_out.select(range(20, 40))}
    return Trainer(tiny(), TrainingArguments(**arguments), Collate(), train_dataset=data, eval_dataset=held_outs,
                   callbacks=[diloco, *callbacks])
"""


def test_all_evaluations_and_checkpoints_are_of_the_anchors_and_one_path_resumes_all_replicas(tmp_path):
    code = """
class Ask(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_evaluate |= state.global_step == 3
        if state.global_step == 4:
            self.trainer.evaluate()
            local.append(self.trainer.model.model.embed_tokens.weight.sum().item())
ask, local = Ask(), []
first = ask.trainer = trainer(dataset, [ask], eval_strategy="steps", eval_steps=6, save_strategy="steps", save_steps=6)
first.train()
log = [[entry[name] for name in ("eval_a_loss", "eval_b_loss") if name in entry] for entry in first.state.log_history]
report(first.model, log=[entry for entry in log if entry], local=local)
again = trainer(dataset, max_steps=12)
again.train(resume_from_checkpoint="out/replica-0/checkpoint-6")
report(again.model)
"""
    (one, resumed), (two, resumed2) = launch_forked(tmp_path, TINY + START + code)
    assert one["hash"] == two["hash"] and one["local"] != two["local"]
    assert one["log"] == two["log"] and len(one["log"]) == 8  # two sets at the steps 3, 4, 6 and 12
    assert resumed["hash"] == resumed2["hash"] == one["hash"]
    weights = [load_file(tmp_path / f"out/replica-{n}/checkpoint-6/model.safetensors") for n in range(2)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_each_replica_trains_on_its_part_of_any_kind_of_dataset(tmp_path):
    code = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(rows)
for data, shard in ((dataset, True), (rows, True), (Stream(), True), (dataset.to_iterable_dataset(), True),
                    (dataset, False)):
    run = trainer(data, max_steps=20, shard=shard)
    run.train()
    report(run.model, seen=run.data_collator.seen, rows=[row["input_ids"] for row in rows])
"""
    (*divided, whole), (*divided2, whole2) = launch_forked(tmp_path, TINY + START + code)
    for one, two in zip(divided, divided2, strict=True):
        assert sorted(one["seen"] + two["seen"]) == sorted(one["rows"]) and one["hash"] == two["hash"]
    assert sorted(whole["seen"] + whole2["seen"]) != sorted(whole["rows"])


def test_what_would_replace_the_agreed_model_is_refused(tmp_path):
    code = """
for data, changed in ((dataset, {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}),
                      (dataset, {"sync_ref_model": True}), (zip(rows), {})):
    ref = changed.pop("sync_ref_model", False)
    run = trainer(data, **changed)
    run.args.sync_ref_model = ref
    try:
        run.train()
    except ConfigError as error:
        print("REPORT", json.dumps(str(error)))
"""
    for best, reference, kind in launch_forked(tmp_path, TINY + START + code):
        assert best.startswith("load_best_model_at_end=True puts each replica's own weights")
        assert reference.startswith("sync_ref_model=True puts each replica's own weights")
        assert "train_dataset is a zip" in kind


def test_an_unchanged_script_becomes_a_replica_if_it_has_a_trainer(tmp_path):
    words = shlex.split(shown("Without", "console").commands[0])
    flags = words[words.index("diloco") + 1 :]
    script = f"""
{TINY}
assert sys.argv == ["train.py", "--output_dir", "out"]
{shown("transformers").before}
report(trainer.model, rows=len(trainer.train_dataset), folder=trainer.args.output_dir)
"""
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/train.py").write_text(COMMON + script)
    (tmp_path / "plain/loop.py").write_text("""
import torch
model = torch.nn.Linear(2, 2)
torch.optim.SGD(model.parameters(), lr=1e-2).step()
""")
    code = """
import contextlib, io
from diloco.cli import main
os.chdir("plain")
with contextlib.redirect_stderr(io.StringIO()) as err:
    code = main(["run", "loop.py"] if os.path.exists("../loop") else flags)
if code:
    print("REPORT", json.dumps(err.getvalue()))
"""
    code = f"flags = {flags}\n{code}"
    (one,), (two,) = launch_forked(tmp_path, code)
    assert one["hash"] == two["hash"] and one["rows"] == two["rows"] == 80
    assert (one["folder"], two["folder"]) == ("out/replica-0", "out/replica-1")
    (tmp_path / "loop").touch()
    for (error,) in launch_forked(tmp_path, code):
        assert "loop.py trains without a transformers or Lightning Trainer" in error
