"""The callbacks' logic against small stand-ins for the frameworks. `make test-frameworks` runs the real ones."""

import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from diloco import Collective, ConfigError, DiLoCo, run_replicas
from diloco.integrations.attached import Attached
from diloco.integrations.transformers import STATE, DiLoCoCallback
from tests.support.models import Tiny, adamw, flat, loss_of

SETTINGS = {"sync_every": 4, "overlap": 1}


def arguments(folder, **others):
    return SimpleNamespace(output_dir=str(folder), load_best_model_at_end=False, should_save=True, **others)


class Trainer:
    """As transformers.Trainer calls its callbacks."""

    def __init__(self, callback, args, replica, first=0):
        self.model, self.callback, self.args, self.number = Tiny(replica), callback, args, replica
        self.optimizer = adamw(self.model)
        self.state = SimpleNamespace(global_step=first, max_steps=12, log_history=[])
        self.control = SimpleNamespace(should_evaluate=False)
        self.evaluated = []
        self.call("on_init_end")

    def call(self, event, **given):
        given |= {"model": self.model, "optimizer": self.optimizer, "train_dataloader": None}
        return getattr(self.callback, event)(self.args, self.state, self.control, **given)

    def load(self, folder):
        saved = torch.load(folder / "trainer.pt")
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])

    def train(self, last=12):
        self.call("on_train_begin")
        while self.state.global_step < last:
            self.state.global_step += 1
            loss_of(self.model, self.number, self.state.global_step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.control.should_evaluate = self.state.global_step % 6 == 0
            self.call("on_step_end")
            if self.control.should_evaluate:
                logs = {"loss": 1.0}
                self.state.log_history.append({**logs, "step": self.state.global_step})
                self.call("on_log", logs=logs)
                self.evaluated.append(flat(self.model))
                self.call("on_evaluate", metrics={})
                folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
                folder.mkdir(parents=True)
                torch.save((self.model.state_dict(), self.optimizer.state_dict()), folder / "trainer.pt")
                self.call("on_save")
        self.call("on_train_end")
        return self


def whole(folder):
    def loop(reduce):
        return Trainer(DiLoCoCallback(reduce=reduce, **SETTINGS), arguments(folder), reduce.replica).train()

    return run_replicas(2, loop)


def test_trainer_ends_equal_and_evaluates_the_anchors_and_has_figures_in_its_log(tmp_path):
    one, two = whole(tmp_path)
    assert torch.equal(flat(one.model), flat(two.model))
    assert len(one.evaluated) == 2
    assert all(torch.equal(a, b) for a, b in zip(one.evaluated, two.evaluated, strict=True))
    last = one.state.log_history[-1]
    assert last["diloco/rounds"] >= 6 and last["diloco/bytes_sent"] > 1000 and last["step"] == 12
    for m in range(2):  # a folder of its own, with its own state
        saved = torch.load(tmp_path / f"replica-{m}/checkpoint-6" / STATE, weights_only=True)
        assert saved["shard 0 of 1"]["replica"] == m


def test_trainer_resumes_as_if_it_had_not_been_interrupted(tmp_path):
    expected = flat(whole(tmp_path)[0].model)

    def resume(reduce):
        trainer = Trainer(DiLoCoCallback(reduce=reduce, **SETTINGS), arguments(tmp_path), reduce.replica, first=6)
        trainer.load(tmp_path / f"replica-{reduce.replica}/checkpoint-6")
        for path in (tmp_path / f"replica-{reduce.replica}/checkpoint-12").iterdir():
            path.unlink()
        (tmp_path / f"replica-{reduce.replica}/checkpoint-12").rmdir()
        return flat(trainer.train().model)

    assert all(torch.equal(weights, expected) for weights in run_replicas(2, resume))


def test_trainer_refuses_what_would_go_wrong_in_silence(tmp_path):
    def best(reduce):
        args = arguments(tmp_path)
        args.load_best_model_at_end = True
        Trainer(DiLoCoCallback(reduce=reduce), args, 0).train()

    def lost(reduce):
        Trainer(DiLoCoCallback(reduce=reduce), arguments(tmp_path), 0, first=5).train()

    with pytest.raises(ConfigError, match=r"load_best_model_at_end=True: .*before the last sync"):
        run_replicas(1, best)
    with pytest.raises(ConfigError, match=r"resumes at step 5, and .*replica-0/checkpoint-5 holds no diloco\.pt"):
        run_replicas(1, lost)


def test_a_state_of_another_replica_is_named_when_it_is_loaded():
    def loop(reduce):
        saved = DiLoCo(Tiny(), reduce=reduce).state_dict()
        if reduce.replica == 1:
            saved["shard 0 of 1"]["replica"] = 0
            with pytest.warns(UserWarning, match="replica 1 loads a state that replica 0 saved"):
                DiLoCo(Tiny(), reduce=reduce).load_state_dict(saved)
        saved["shard 0 of 1"]["replica"] = "member"  # of a bucket: that says nothing of a replica's number
        DiLoCo(Tiny(), reduce=reduce).load_state_dict(saved)

    run_replicas(2, loop)


@pytest.fixture
def lightning(monkeypatch):
    """The names that the callback takes from lightning."""
    names = ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks", "lightning.fabric",
             "lightning.fabric.utilities", "lightning.fabric.utilities.rank_zero")  # fmt: skip
    modules = {name: ModuleType(name) for name in names}
    modules["lightning.pytorch.callbacks"].Callback = object  # pyright: ignore
    modules["lightning.fabric.utilities.rank_zero"].rank_zero_only = SimpleNamespace(rank=1)  # pyright: ignore
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "diloco.integrations.lightning", raising=False)
    import diloco.integrations.lightning as ours

    yield ours.DiLoCoCallback
    sys.modules.pop("diloco.integrations.lightning")


def test_lightning_ends_equal_validates_the_anchors_and_resumes_from_its_state(lightning):
    def fit(reduce, first, last, saved=None):
        model = Tiny(reduce.replica)
        optimizer = adamw(model)
        logged = []
        model.log_dict = logged.append
        callback = lightning(reduce=reduce, **SETTINGS)
        trainer = SimpleNamespace(world_size=1, optimizers=[optimizer], estimated_stepping_batches=float("inf"))
        callback.on_validation_start(trainer, model)  # the sanity check, before anything is there
        callback.on_validation_end(trainer, model)
        if saved:
            callback.load_state_dict(saved[0])
            model.load_state_dict(saved[1])
            optimizer.load_state_dict(saved[2])
        callback.on_train_start(trainer, model)
        seen, kept = None, None
        for step in range(first, last + 1):
            loss_of(model, reduce.replica, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            callback.on_train_batch_end(trainer, model, None, None, 0)
            if step == 6:
                callback.on_validation_start(trainer, model)
                seen = flat(model)
                callback.on_validation_end(trainer, model)
                weights = {k: v.clone() for k, v in model.state_dict().items()}
                kept = as_from_a_file((callback.state_dict(), weights, optimizer.state_dict()))
        callback.on_train_end(trainer, model)
        return flat(model), seen, kept, logged[-1]

    one, two = run_replicas(2, lambda reduce: fit(reduce, 1, 12))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert one[3]["diloco/rounds"] > 0
    saved = [one[2], two[2]]
    again = run_replicas(2, lambda reduce: fit(reduce, 7, 12, saved[reduce.replica])[0])
    assert torch.equal(again[0], one[0]) and torch.equal(again[1], one[0])


def as_from_a_file(value):
    """Nothing in it changes when training goes on."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def test_lightning_with_several_processes_for_one_model_is_refused(lightning, monkeypatch):
    monkeypatch.setattr("diloco.integrations.attached.replica", lambda: SimpleNamespace(take=None))
    with pytest.raises(ConfigError, match="a world of 2 processes that train one model: set devices=1"):
        lightning().on_train_start(SimpleNamespace(world_size=2), None)


def test_an_error_leaves_the_others_at_once():
    def loop(reduce):
        model = Tiny()
        attached = Attached(lambda: reduce, {})
        attached.begin(model, adamw(model), None)
        attached.fail(ValueError())
        with pytest.warns(RuntimeWarning, match="steps after DiLoCo has left"):
            attached.diloco._optimizers[0].step()

    run_replicas(1, loop)


def test_a_reducer_without_numbers_says_so():
    attached = Attached(lambda: Collective(), {})
    assert attached.folder == ""
    with pytest.raises(ConfigError, match="function gives no replica"):
        attached.replica  # noqa: B018
