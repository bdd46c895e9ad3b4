"""Axolotl's plugin against a stand-in for the interface that its documentation describes: BasePlugin, called in the
order of its command for training. The package itself is not installed anywhere in these tests."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import yaml

from diloco import E3M0, Balanced, ConfigError, Float32, Strided, run_replicas
from tests.integrations.test_attached import Trainer, arguments
from tests.support.frameworks import shown
from tests.support.models import flat

CONFIG = {"output_dir": "out", "diloco": {"sync_every": 4, "codec": "float32", "fragments": "balanced:3"}}
SHOWN = yaml.safe_load(shown("Axolotl", "yaml"))


@pytest.fixture
def plugin(monkeypatch):
    names = ("axolotl", "axolotl.integrations", "axolotl.integrations.base")
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].BasePlugin = type("BasePlugin", (), {})  # pyright: ignore
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "diloco.integrations.axolotl", raising=False)
    import diloco.integrations.axolotl as ours

    yield ours
    sys.modules.pop("diloco.integrations.axolotl")


class Rows(list):
    def shard(self, count, index):
        return Rows(self[index::count])


def test_the_plugin_trains_replicas_on_parts_of_the_data_in_folders_of_their_own(plugin, tmp_path):
    def command(reduce):
        cfg = {**CONFIG, "diloco": {**CONFIG["diloco"], "reduce": reduce}}
        made = plugin.DiLoCoPlugin()
        made.register(cfg)
        (callback,) = made.add_callbacks_pre_trainer(cfg, None)
        trainer = Trainer(callback, arguments(tmp_path / cfg["output_dir"], max_steps=25), reduce.replica)
        trainer.train_dataset = Rows(range(5))
        made.post_trainer_create(cfg, trainer)
        return trainer.train(), cfg["output_dir"]

    (one, first), (two, second) = run_replicas(2, command)
    assert torch.equal(flat(one.model), flat(two.model))
    assert (first, second) == ("out/replica-0", "out/replica-1")
    assert one.args.output_dir == str(tmp_path / first) and (tmp_path / second / "checkpoint-6/diloco.pt").exists()
    assert one.train_dataset == [0, 2, 4] and two.train_dataset == [1, 3]
    assert one.args.max_steps == 13  # Axolotl counts the steps that all of the data take
    made = one.callback.diloco
    assert made.schedule.sync_every == 4 and len(made.fragments) == len(Balanced(3).split(made._shapes, []))
    assert made._fragments[0].codec == Float32()


def test_its_section_of_the_configuration_is_found_by_its_name(plugin):
    module, _, name = plugin.DiLoCoPlugin().get_input_args().rpartition(".")
    assert getattr(sys.modules[module], name)(diloco={"sync_every": 5}).diloco == {"sync_every": 5}


def test_the_keys_that_the_page_shows_name_the_plugin_and_its_settings(plugin):
    assert SHOWN["plugins"] == [f"{plugin.__name__}.{plugin.DiLoCoPlugin.__name__}"]
    made = plugin.DiLoCoPlugin()
    run_replicas(1, lambda reduce: made.register({"diloco": {**SHOWN["diloco"], "reduce": reduce}}))
    assert made.callback._attached._settings == {"sync_every": 50, "codec": E3M0(), "fragments": Strided(3)}


def test_data_that_cannot_be_divided_are_refused(plugin):
    trainer = SimpleNamespace(train_dataset=iter([]))
    with pytest.raises(ConfigError, match="are a list_iterator, which cannot be divided over the replicas"):
        plugin.DiLoCoPlugin().post_trainer_create({}, trainer)
