"""The command line: quick, without torch, helpful when misused."""

import json
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from diloco.cli import VERBS
from diloco.errors import ConfigError
from diloco.recipe import flags
from diloco.runs.config import TrainConfig, to_toml
from diloco.train.defaults import lr_at, resolve
from diloco.world import World, address_from, world_from


def diloco(*words):
    return subprocess.run([sys.executable, "-m", "diloco", *words], capture_output=True, text=True, timeout=60)


def test_help_is_quick_and_imports_no_torch():
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        result = diloco("--help")
        seconds.append(time.perf_counter() - began)
        assert result.returncode == 0
    assert all(verb in result.stdout for verb in VERBS)
    assert min(seconds) < 0.4
    code = "import sys; from diloco.cli import main; main(['--help']); main(['train', '--help'])"
    result = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True)
    assert "--sync-every" in result.stdout
    assert "tyro" in result.stderr and " torch\n" not in result.stderr


def test_a_wrong_verb_gets_a_suggestion():
    result = diloco("trian")
    assert result.returncode == 2
    assert "did you mean train?" in result.stderr


def test_the_version_is_the_packages():
    assert diloco("--version").stdout.startswith("diloco 0.")


def test_a_config_written_as_a_recipe_comes_back_the_same(tmp_path):
    import tyro

    config = TrainConfig(data=("a b.txt", 'c"d.txt'), steps=7, lr=3e-4, compile=True, fragments="balanced:5", name="x")
    (tmp_path / "recipe.toml").write_text(to_toml(config))
    assert tyro.cli(TrainConfig, args=flags(tmp_path / "recipe.toml")) == config


@pytest.mark.parametrize(
    ("text", "message"), [("[sync]\nevery = 3\n", "is a table"), ("sync_every = = 3", "is no TOML")]
)
def test_a_broken_recipe_is_refused_with_the_reason(tmp_path, text, message):
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        flags(tmp_path / "recipe.toml")


def test_torchrun_and_slurm_are_understood():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    world = world_from(torchrun, 2, None)
    assert world == World(5, 8, 1, 2)
    assert (world.replica, world.replicas, world.shard) == (2, 4, 1)
    assert address_from(torchrun) == ("a", 1)
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "70012",
             "SLURM_STEP_NODELIST": "gpu[07-08,11]"}  # fmt: skip
    assert world_from(slurm, 1, 4) == World(3, 4, 0)
    assert address_from(slurm) == ("gpu07", 20012)
    assert world_from({}, 1, None) is None
    assert world_from({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, 1, None) is None
    with pytest.raises(ConfigError, match=r"replicas=3, shards=2 with 8 processes"):
        world_from(torchrun, 2, 3)


def test_what_is_not_given_is_derived_with_its_reason():
    config, rules = resolve(TrainConfig(context=2048), 35_000_000, 2)
    derived = {rule.name: rule for rule in rules}
    assert config.lr == pytest.approx(22256 * 35e6**-0.8827 * 2**0.2929, rel=0.01)
    assert config.batch == 32  # 0.00709 · 35e6^0.4695 · 2^0.3399 = 31.2, even
    assert config.steps == round(20 * 35_000_000 / (32 * 2048))
    assert (
        config.outer_lr == 0.6
        and config.warmup == 1000
        and config.weight_decay == pytest.approx(1 / config.steps, 0.01)
    )
    assert "scaling law" in derived["lr"].reason and "20 tokens" in derived["tokens"].reason
    given = TrainConfig(lr=1e-3, batch=8, steps=10, warmup=0, weight_decay=0.0, outer_lr=0.7,
                        outer_momentum=0.8)  # fmt: skip
    config, rules = resolve(given, 35_000_000, 2)
    assert rules == []
    assert (config.lr, config.batch, config.steps, config.outer_lr) == (1e-3, 8, 10, 0.7)
    assert resolve(TrainConfig(), 35_000_000, 8)[0].outer_lr == 0.8
    assert resolve(TrainConfig(), 35_000_000, 3)[0].outer_lr == 0.6


@pytest.mark.parametrize(("parameters", "rounds", "given", "outer"), [
    (700_000, 100, None, (0.7, 0.5)), (700_000, 300, None, (0.6, 0.9)), (35_000_000, 100, None, (0.6, 0.9)),
    (700_000, 100, 0.9, (0.6, 0.9)),
])  # fmt: skip
def test_the_outer_momentum_of_a_small_model_in_a_short_run_is_lower(parameters, rounds, given, outer):
    config, _ = resolve(TrainConfig(steps=30 * rounds, sync_every=30, outer_momentum=given), parameters, 2)
    assert (config.outer_lr, config.outer_momentum) == outer


def test_the_learning_rate_warms_up_and_falls_to_five_percent():
    config = TrainConfig(lr=1.0, warmup=10, steps=110)
    rates = [lr_at(config, step) for step in range(1, 111)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.05)
    assert rates[59] == pytest.approx(0.525)
    assert all(a >= b for a, b in pairwise(rates[9:]))


def test_doctor_lists_what_is_here_and_measures_the_link_under_torchrun():
    alone = diloco("doctor", "--json")
    found = {f["what"]: f for f in json.loads(alone.stdout)}
    assert found["torch"]["good"] and found["gloo"]["good"] and found["python"]["good"]
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "diloco", "doctor", "--json"]
    pair = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=90)
    assert pair.returncode == 0, pair.stderr
    link = next(f for f in json.loads(pair.stdout) if f["what"] == "replica 0 ↔ 1")
    assert "round trip" in link["value"] and "Mbit/s each way" in link["value"]
