"""The command line: quick, without torch, helpful when misused."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import fields, replace
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path

import pytest

from diloco.cli import COMMANDS, main
from diloco.cli.help import render
from diloco.errors import ConfigError
from diloco.exchange.world import World, own_address, own_job, own_world
from diloco.runs.config import METHODS, TrainConfig, distinguishes, names, reads
from diloco.runs.flags import meaning, parse, read_toml, spelled, to_toml
from diloco.train.settings import lr_at, resolve, weight_decay
from tests.support.commands import ended, run_here, start_ranks

ROOT = Path(__file__).parents[2]


def imported(*words):
    """The top-level packages that a command has imported when it ends, and its output."""
    code = (
        "import sys; from diloco.cli import main; main(sys.argv[1:]);"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    return set(result.stderr.split()), result.stdout


@pytest.mark.slow
def test_help_is_quick_and_imports_no_torch():
    slow = {"torch", "numpy", "rich", "jinja2", "tomllib"}
    modules, out = imported("--help")
    assert "diloco" in modules and not modules & slow
    assert all(command in out for command in COMMANDS)
    for command in ("train", "run"):
        modules, out = imported(command, "--help")
        assert "--sync-every" in out and not modules & (slow - {"tomllib"})


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_fits_80_columns_names_every_flag_once_and_has_valid_examples(command, tmp_path):
    module = import_module(f"diloco.cli.{command}")
    text = render(command, module.CONFIG, module.EXAMPLES, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "None" not in text and "{" not in text and "MISSING" not in text
    for field in fields(module.CONFIG):
        name = spelled(f"no-{field.name}" if field.default is True else field.name)
        label = field.name.removesuffix("s").upper() if meaning(field).positional else re.escape(name)
        (entry,) = re.findall(rf"^  {label}\b(?!-)(.*(?:\n {{9,}}.*)*)", text, re.MULTILINE)
        assert " ".join(entry.split()).endswith(".") and len(entry.split()) > 2
    with contextlib.chdir(tmp_path):
        for example in module.EXAMPLES:
            words = shlex.split(example)
            words = getattr(module, "complete", list)(words[words.index(command) + 1 :])
            assert isinstance(parse(module.CONFIG, words), module.CONFIG)


def test_help_shows_the_usual_flags_and_help_all_every_one(capsys):
    def output(*words):
        assert main(words) == 0
        return capsys.readouterr().out

    usual, full = output("train", "--help"), output("train", "--help-all")
    assert "  --sync-every" in usual and "  --outer" not in usual and "  --outer" in full
    hidden = sum(meaning(field).expert for field in fields(TrainConfig))
    assert f"diloco train --help-all shows {hidden} more flags." in usual and "--help-all" not in full
    usual, full = output("compare", "--help"), output("compare", "--help-all")
    assert "  --seeds" in usual and "  --model" not in usual and "see `diloco train --help`" in usual
    assert full.index("  --seeds") < full.index("  --model"), "inherited flags come last"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "did you mean train?"),
        (["train", "--sync-evry", "7"], "unknown flag --sync-evry; did you mean --sync-every?"),
        (["train", "--zzz", "7"], "unknown flag --zzz; --help-all lists all"),
        (["train", "--steps", "few"], "--steps few: use a whole number"),
        (["train", "--lr", "low"], "--lr low: use a number"),
        (["train", "--lr", "nan"], "--lr nan: use a number"),
        (["train", "--steps", "--json"], "--steps expected one argument"),
        (["train", "--method", "streming"], "streaming, diloco, dp or local; did you mean streaming?"),
        (["train", "--json=yes"], "--json takes no value"),
        (["train", "--codec", "topk"], "use e3m0, bfloat16, float32 or twobit"),
        (["train", "--track", "wandb", "logbook"], "--track logbook: use tensorboard, wandb or trackio"),
        (["train", "more"], "unexpected argument 'more': flags begin with --; configs: a path that ends in .toml, or"),
        (["train", "--steps", "5", "demo.toml"], "unexpected argument 'demo.toml': the config comes before the flags"),
        (["train", "absent.toml"], "absent.toml does not exist; `diloco train --help` lists the configs"),
        (["export", "runs/x"], "--to is missing"),
        (["export", "--to", "y"], "required: RUN"),
        (["export", "x", "y", "--to", "z"], "unexpected argument 'y'"),
        (["run", "--sync-every", "5"], "required: SCRIPT"),
        (["run", "-m"], "-m needs the name of a module"),
        (["plan", "--model", "1b", "--step-seconds", "1"], "--link is missing: Rate of the slowest link"),
        (["plan", "demo"], "unexpected argument 'demo': flags begin with --"),
    ],
)
def test_a_wrong_command_flag_or_value_is_refused_in_one_line(words, message, capsys):
    assert main(words) == 2
    assert message in (err := capsys.readouterr().err) and err.count("\n") == 1


def test_flags_are_read_as_people_write_them():
    config = parse(TrainConfig, ["--data", "a", "b", "--sync-every=7", "--overlap", "1", "--overlap", "2", "--compile",
                                 "--bucket", "b", "--no-json", "--seed", "-1", "--key-file", "k",
                                 "--steps", "7_000"])  # fmt: skip
    assert (config.data, config.sync_every, config.overlap, config.seed) == (("a", "b"), 7, 2, -1)
    assert (config.compile, config.json, config.key_file, config.steps) == (True, False, Path("k"), 7000)
    export = import_module("diloco.cli.export").CONFIG
    assert parse(export, ["runs/x", "--to", "y"]) == parse(export, ["--to", "y", "runs/x"]) == export(
        run=Path("runs/x"), to=Path("y"))  # fmt: skip
    report = import_module("diloco.cli.report").CONFIG
    assert parse(report, ["a", "b", "--json"]) == parse(report, ["a", "--json", "b"])
    assert parse(report, ["a", "b", "--json"]).runs == (Path("a"), Path("b"))
    dashboard = import_module("diloco.cli.dashboard").CONFIG
    assert parse(dashboard, []) == dashboard()
    script = import_module("diloco.cli.run")
    words = ["--sync-every", "5", "--no-shard", "-m", "trl.sft", "--overlap", "x", "--", "--help"]
    config = parse(script.CONFIG, script.complete(words))
    assert (config.sync_every, config.script) == (5, tuple(words[3:]))
    assert parse(script.CONFIG, script.complete(["--overlap", "5", "--", *words[3:]])).script == tuple(words[3:])


def test_steps_override_the_tokens_of_a_config_file_and_tokens_its_steps(tmp_path):
    (tmp_path / "tokens.toml").write_text('tokens = "1m"\n')
    (tmp_path / "steps.toml").write_text("steps = 9\n")
    config = parse(TrainConfig, [str(tmp_path / "tokens.toml"), "--steps", "7"])
    assert (config.steps, config.tokens) == (7, None)
    config = parse(TrainConfig, [str(tmp_path / "steps.toml"), "--tokens", "2m"])
    assert (config.steps, config.tokens) == (None, 2_000_000)
    with pytest.raises(ConfigError, match="set one of them"):
        parse(TrainConfig, [str(tmp_path / "steps.toml"), "--steps", "7", "--tokens", "2m"])


@pytest.mark.parametrize("text", ["1.5", "k", "1e99", "1" * 5000, "1e-3", "", "1kk", "²"])
def test_a_text_that_is_not_a_whole_number_is_refused(text):
    with pytest.raises(ConfigError, match="use a whole number, such as"):
        parse(TrainConfig, ["--steps", text])


def test_a_method_reads_its_own_settings_only():
    names = [field.name for field in fields(TrainConfig)]
    unread = {method: {name for name in names if not reads(method, name)} for method in METHODS}
    assert unread["streaming"] == set() and {"overlap", "codec"} < unread["diloco"] < unread["dp"] == unread["local"]
    assert "sync_every" not in unread["diloco"] and not unread["dp"] & {"lr", "batch", "replicas", "seed"}
    assert reads("dp", "of_a_later_version") and distinguishes("of_a_later_version")
    assert distinguishes("lr") and not any(map(distinguishes, ("name", "seed", "method", "resume", "timeout")))


def test_bucket_settings_say_so_and_are_refused_without_a_bucket():
    fields_of_bucket = [field for field in fields(TrainConfig) if meaning(field).needs == "bucket"]
    assert {"member", "quorum", "key_file"} < {field.name for field in fields_of_bucket}
    for field in fields_of_bucket:
        assert meaning(field).text.startswith("With --bucket: ")
        with pytest.raises(ConfigError, match=f"{spelled(field.name)} without --bucket: it would be ignored"):
            TrainConfig(**{field.name: "x"})
    for name, value in (("streams", 4), ("timeout", 60.0)):
        with pytest.raises(ConfigError, match=f"--{name} has no effect with --bucket"):
            TrainConfig(bucket="runs", **{name: value})


def test_a_config_written_as_toml_comes_back_the_same(tmp_path):
    config = TrainConfig(
        data=("a b.txt", 'c"d\\.txt', "e\n\x7fü😀.txt"),
        steps=7,
        lr=3e-4,
        compile=True,
        fragments="balanced:5",
        name="x",
    )
    (tmp_path / "recipe.toml").write_text(to_toml(config))
    assert parse(TrainConfig, [str(tmp_path / "recipe.toml")]) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[sync]\nevery = 3\n", "is a table"),
        (b"sync_every = = 3", "is not valid TOML"),
        (b"sync_evry = 3", "unknown setting sync_evry; did you mean sync_every?"),
        (b"steps = [1, 2]", "steps: .* use one value"),
        (b"name = '\xff'", "is not valid TOML"),
        (b"steps = " + b"1" * 5000, "is not valid TOML"),
        (b"steps = " + b"[" * 3000, "is not valid TOML"),
    ],
)
def test_a_broken_recipe_is_refused_with_the_reason(tmp_path, text, message):
    (tmp_path / "recipe.toml").write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        read_toml(TrainConfig, tmp_path / "recipe.toml")


ODD = ['"x"', '""', '"-1"', '"--resume"', '"\\u0000"', '"hf:"', '"train:"', "[]", '"nesterov:nan,inf"',
       '"balanced:0"', '"strided:99999999999999999"', "[1, 2]", "[[1]]", "{a = 1}", "nan", "inf", "-1", "0", "1.5",
       "1e400", "true", "1979-05-27", "9" * 30, "0x" + "f" * 5000]  # fmt: skip


def test_odd_values_of_every_setting_are_taken_or_refused_and_come_back_the_same(tmp_path):
    path, taken = tmp_path / "recipe.toml", 0
    for name, value in product([field.name for field in fields(TrainConfig)], ODD):
        path.write_text(f"{name} = {value}")
        try:
            config = parse(TrainConfig, [str(path)])
            resolve(config, 1000, 2)
        except ConfigError:
            continue
        taken += 1
        path.write_text(to_toml(config), encoding="utf-8")
        assert parse(TrainConfig, [str(path)]) == replace(config, **dict.fromkeys(names("start"), False))
    assert taken > 50


def test_torchrun_and_slurm_are_understood():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    world = own_world(2, None, torchrun)
    assert world == World(5, 8, 1, 2)
    assert (world.replica, world.replicas, world.shard) == (2, 4, 1)
    assert own_address(torchrun) == ("a", 1)
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "70012",
             "SLURM_STEP_NODELIST": "gpu[07-08,11]"}  # fmt: skip
    assert own_world(1, 4, slurm) == World(3, 4, 0)
    assert own_address(slurm) == ("gpu07", 20012)
    assert own_world(1, None, {}) is None
    assert own_address(slurm | {"SLURM_STEP_ID": "1"}) != own_address(slurm | {"SLURM_STEP_ID": "2"})
    assert own_job(slurm | {"SLURM_STEP_ID": "1"}) == "diloco/70012.1"
    assert own_world(1, None, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}) is None
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "gpu07"}  # the shell, not a task
    assert own_world(1, None, batch) is None
    with pytest.raises(ConfigError, match=r"replicas=3, shards=2 with 8 processes"):
        own_world(2, 3, torchrun)


def test_settings_that_are_not_set_are_derived_with_their_reasons():
    config, values = resolve(TrainConfig(context=2048), 35_000_000, 2)
    reasons = {value.name: value.reason for value in values}
    assert config.lr == pytest.approx(22256 * 35e6**-0.8827 * 2**0.2929, rel=0.01)
    assert config.batch == 32  # 0.00709 · 35e6^0.4695 · 2^0.3399 = 31.2, even
    assert config.steps == round(20 * 35_000_000 / (32 * 2048))
    assert config.inner == "muon" and resolve(TrainConfig(model="hf:x"), 35_000_000, 2)[0].inner == "adamw"
    assert "scaling law" in reasons["lr"] and "20 tokens" in reasons["tokens"]
    assert "grows with the rounds" in reasons["outer_momentum"]
    assert resolve(TrainConfig(), 35_000_000, 8)[0].outer == "nesterov:many"
    assert resolve(TrainConfig(outer="sgd"), 35_000_000, 8)[0].outer == "sgd"
    complete = TrainConfig(inner="muon", lr=1e-3, batch=8, steps=10,
                           outer="nesterov:0.7,0.8", eval_every=5)  # fmt: skip
    assert resolve(complete, 35_000_000, 2) == (replace(complete, replicas=2), [])


def test_the_learning_rate_warms_up_and_falls_to_five_percent():
    config = TrainConfig(lr=1.0, steps=110)
    rates = [lr_at(config, step) for step in range(1, 111)]
    assert rates[0] == pytest.approx(1 / 11) and rates[10] == 1.0
    assert rates[-1] == pytest.approx(0.05)
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert weight_decay(config) == 0.00909


def _be_late(words):
    """A machine whose clock is an hour behind, if it is not the first."""
    now, late = time.time, 3600 * (os.environ["RANK"] == "1")
    time.time = lambda: now() - late
    return main(words)


@pytest.mark.slow
def test_the_doctor_checks_this_machine_and_measures_link_and_clocks_under_torchrun(tmp_path):
    code, out, err = run_here(tmp_path, "doctor", "--json")
    here = {finding["what"]: finding for finding in json.loads(out)}
    assert code == 0 and here["torch"]["good"] and here["gloo"]["good"] and here["python"]["good"], err
    for command, clocks, good in ((main, "differ by", True), (_be_late, "differ by 1 h 00 min", None)):
        pair = [ended(p) for p in start_ranks(tmp_path, 2, command, ["doctor", "--json"])]
        assert [code for code, _, _ in pair] == [0, 0] and pair[1][1] == "", pair
        findings = {finding["what"]: finding for finding in json.loads(pair[0][1])}
        assert re.fullmatch(r"round trip [\d.]+ ms, \d+ Mbit/s each way", findings["replica 0 ↔ 1"]["value"])
        assert clocks in findings["clocks 0 and 1"]["value"] and findings["clocks 0 and 1"]["good"] is good
    assert "NTP" in findings["clocks 0 and 1"]["remedy"]


def test_the_doctor_tries_a_bucket_and_leaves_nothing_in_it(tmp_path):
    words = ["doctor", "--json", "--bucket"]
    code, out, err = run_here(tmp_path, *words, "absent")
    found = json.loads(out)[-1]
    assert code == 1 and found["good"] is False and "there is no folder" in found["value"], err
    (tmp_path / "meeting").mkdir()
    code, out, err = run_here(tmp_path, *words, "meeting")
    found = json.loads(out)[-1]
    assert code == 0 and re.fullmatch(r"[\d.]+ .bit/s up, [\d.]+ .bit/s down", found["value"]), err
    assert not [path for path in (tmp_path / "meeting").rglob("*") if path.is_file()]


def test_an_output_folder_that_cannot_be_made_is_refused_with_the_flag(tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("/proc/x", tmp_path / "file/x", tmp_path / "file"):
        code, _, err = run_here(tmp_path, "train", "--out", place)
        assert code == 2 and "cannot write to" in err and "--out" in err, err


WRONG = [
    ["train", "--model", "tinny"], ["train", "--data", "/no/such"],
    ["train", "--tokenizer", "/no/such"], ["train", "--resume"], ["compare", "--methods", "none"],
    ["watch", "/no/such"], ["export", "/no/such", "--to", "x"], ["sample", "/no/such"],
    ["doctor", "--megabytes", "1"], ["plan", "--model", "1b", "--step-seconds", "1", "--link", "1xyz"],
    ["plan", "--model", "1b", "--step-seconds", "1", "--link", "1gbit", "--tokens", "many"],
    ["fleet", "--chips", "16k", "--quorum", "3"],
]  # fmt: skip


@pytest.mark.slow
def test_a_wrong_argument_is_answered_before_anything_slow_is_imported_or_measured(tmp_path):
    """On a machine whose speed is not known yet, where a plan would measure it."""
    code = f"""
import sys
from diloco.cli import main
for words in {WRONG!r}:
    assert main(words) == 2, words
    assert not {{"torch", "rich", "jinja2"}} & set(sys.modules), words"""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0 and done.stderr.count("diloco: ") == len(WRONG), done.stderr
    assert not list(tmp_path.iterdir())
