"""The command line: quick, without torch, helpful when misused."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import fields, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from diloco.cli import COMMANDS, doctor, main
from diloco.cli.help import render
from diloco.errors import ConfigError
from diloco.flags import meaning, parse, spelled, stored, to_toml
from diloco.outer import Nesterov
from diloco.runs.config import METHODS, TrainConfig, distinguishes, reads
from diloco.train import setup
from diloco.train.defaults import lr_at, resolve
from diloco.world import World, address_from, job_from, world_from
from tests.support.commands import ended, run_here, start_ranks

ROOT = Path(__file__).parents[2]


def diloco(*words):
    return subprocess.run([sys.executable, "-m", "diloco", *words], capture_output=True, text=True, timeout=60)


def imported(*words):
    """The top-level packages that a command has imported when it ends, and what it printed."""
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
    assert all(verb in out for verb in COMMANDS)
    modules, out = imported("train", "--help")
    assert not modules & (slow - {"tomllib"})
    assert "--sync-every" in out


@pytest.mark.parametrize("verb", COMMANDS)
def test_the_help_of_every_verb_fits_80_columns_and_names_every_flag_once(verb):
    module = import_module(f"diloco.cli.{verb}")
    text = render(verb, module.CONFIG, module.EXAMPLES, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "None" not in text and "{" not in text and "MISSING" not in text
    for field in fields(module.CONFIG):
        name = spelled(f"[no-]{field.name}" if field.default is True else field.name)
        shown = field.name.removesuffix("s").upper() if meaning(field).positional else re.escape(name)
        (entry,) = re.findall(rf"^  {shown}\b(?!-)(.*(?:\n {{24}}.*)*)", text, re.MULTILINE)
        assert " ".join(entry.split()).endswith(".") and len(entry.split()) > 2
    assert text.count("examples:") == 1 and module.EXAMPLES


def test_the_help_says_what_a_default_is_and_why():
    text = " ".join(render("train", TrainConfig, ["diloco train"], width=80).split())
    for said in ("Default: by scaling law.", "Default: strided:3 (as in the paper).", "Default: 600.", "Default: off.",
                 "--[no-]outer-follow", "Default: on (prevents",
                 "e3m0, bfloat16, float32, twobit or topk.", "--pace decoupled|strict",
                 "Outer optimizer: nesterov, nesterov:LR,MOMENTUM, sgd or sgd:LR.",
                 "Weight decay, applied to matrices only."):  # fmt: skip
        assert said in text
    assert text.index("model and data:") < text.index("optimization:") < text.index("sync:") < text.index("members:")


def test_help_shows_the_usual_flags_and_help_all_every_one(capsys):
    def shown(*words):
        assert main(words) == 0
        return capsys.readouterr().out

    usual, every = shown("train", "--help"), shown("train", "--help-all")
    assert "  --sync-every" in usual and "  --keep-local" not in usual and "  --keep-local" in every
    assert len(usual.splitlines()) < 0.7 * len(every.splitlines())
    hidden = sum(meaning(field).expert for field in fields(TrainConfig))
    assert f"diloco train --help-all shows {hidden} more flags." in usual and "--help-all" not in every
    own, every = shown("compare", "--help"), shown("compare", "--help-all")
    assert "  --vary" in own and "  --model" not in own and "see `diloco train --help`" in own
    assert every.index("  --vary") < every.index("  --model"), "its own flags come first"
    assert "--help-all" not in shown("ls", "--help")


@pytest.mark.parametrize("verb", COMMANDS)
def test_the_examples_in_the_help_are_valid_in_any_folder(verb, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    module = import_module(f"diloco.cli.{verb}")
    for example in module.EXAMPLES:
        words = shlex.split(example)
        assert isinstance(parse(module.CONFIG, words[words.index(verb) + 1 :]), module.CONFIG)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sync-evry", "7"], "unknown flag --sync-evry; did you mean --sync-every?"),
        (["--zzz", "7"], "unknown flag --zzz; --help-all lists all"),
        (["--steps", "few"], "--steps few: give a whole number"),
        (["--lr", "low"], "--lr low: give a number"),
        (["--steps"], "--steps: give a value"),
        (["--steps", "--json"], "--steps: give a value"),
        (["--method", "streming"], "--method streming: give streaming, diloco, dp or local; did you mean streaming?"),
        (["--json=yes"], "--json yes: give true or false"),
        (["--codec", "int3"], "give e3m0, bfloat16, float32, twobit or topk"),
        (["--track", "wandb", "logbook"], "--track logbook: give tensorboard, wandb or trackio"),
        (["more"], "unexpected argument 'more': flags begin with --; recipes: a path that ends in .toml, or demo,"),
        (["--steps", "5", "demo.toml"], "unexpected argument 'demo.toml': a recipe comes before the flags"),
        (["recipes/absent.toml"], "recipes/absent.toml does not exist; these recipes come with diloco, by name: demo"),
    ],
)
def test_a_wrong_flag_or_value_is_refused_in_one_line(words, message, capsys):
    assert main(["train", *words]) == 2
    assert message in (said := capsys.readouterr().err) and said.count("\n") == 1


def test_flags_are_read_as_people_write_them():
    config = parse(TrainConfig, ["--data", "a", "b", "--sync_every=7", "--overlap", "1", "--overlap", "2", "--compile",
                                 "--bucket", "b", "--no-json", "--seed", "-1", "--key-file", "k",
                                 "--tokens", "7_000"])  # fmt: skip
    assert (config.data, config.sync_every, config.overlap, config.seed) == (("a", "b"), 7, 2, -1)
    assert (config.compile, config.json, config.key_file, config.tokens) == (True, False, Path("k"), 7000)
    export = import_module("diloco.cli.export").CONFIG
    assert parse(export, ["runs/x", "--to", "y"]) == parse(export, ["--to", "y", "runs/x"]) == export(
        run=Path("runs/x"), to=Path("y"))  # fmt: skip
    report = import_module("diloco.cli.report").CONFIG
    assert parse(report, ["a", "--json", "b"]).runs == (Path("a"), Path("b"))
    for words, message in ((["runs/x"], "--to is missing"), (["--to", "y"], "RUN is missing"),
                           (["x", "y", "--to", "z"], "unexpected argument 'y'")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            parse(export, words)


@pytest.mark.parametrize(("text", "value"), [("1m", 1_000_000), ("10k", 10_000), ("1e3", 1000), ("1.5K", 1500)])
def test_a_whole_number_may_be_written_short(text, value):
    assert parse(TrainConfig, ["--tokens", text]).tokens == parse(TrainConfig, ["--steps", text]).steps == value


@pytest.mark.parametrize("text", ["1.5", "k", "1e99", "1" * 5000, "1e-3", "", "1kk", "²"])
def test_what_is_no_whole_number_is_refused(text):
    with pytest.raises(ConfigError, match="give a whole number, such as"):
        parse(TrainConfig, ["--steps", text])


def test_a_method_reads_its_own_settings_only():
    known = [field.name for field in fields(TrainConfig)]
    unread = {method: {name for name in known if not reads(method, name)} for method in METHODS}
    assert unread["streaming"] == set()
    tuned = {"auto", "kept"}
    assert unread["diloco"] == {"fragments", "overlap", "keep_local", "codec", "mean_codec"} | tuned
    assert unread["dp"] == unread["local"] > {"sync_every", "outer", "outer_lr", "feedback", "streams", "bucket"}
    assert not unread["dp"] & {"lr", "batch", "replicas", "seed"}
    assert reads("dp", "of_a_later_version") and distinguishes("of_a_later_version")
    same = {"name", "out", "seed", "method", "resume", "track", "device", "keep", "save_every", "timeout", "json"}
    assert {name for name in known if not distinguishes(name)} == same | {"join_only", "dashboard", "dry_run"}


def test_what_only_a_bucket_reads_says_so_and_is_refused_without_one():
    given = {"member": "x", "join_only": True, "pace": "strict", "quorum": 2, "grace": 1.0,
             "key_file": Path("key"), "encrypt": Path("secret")}  # fmt: skip
    needing = {field.name: meaning(field).text for field in fields(TrainConfig) if meaning(field).needs == "bucket"}
    assert needing.keys() == given.keys()
    for name, value in given.items():
        assert needing[name].startswith("With --bucket: ")
        with pytest.raises(ConfigError, match=f"{spelled(name)} without --bucket: it would be ignored"):
            TrainConfig(**{name: value})


def test_the_outer_rule_is_chosen_by_a_flag():
    short, _ = resolve(TrainConfig(outer="nesterov:0.3,0.8"), 35_000_000, 2)
    assert (short.outer, short.outer_lr, short.outer_momentum) == ("nesterov", 0.3, 0.8)
    assert parse(TrainConfig, ["--outer", "nesterov", "--outer-lr", "0.3", "--outer-momentum", "0.8"]).outer_lr == 0.3
    mean, rules = resolve(TrainConfig(outer="sgd"), 35_000_000, 2)
    assert (mean.outer, mean.outer_lr, mean.outer_momentum) == ("sgd", 1.0, None)
    assert "mean of the replicas" in {rule.name: rule.reason for rule in rules}["outer_lr"]
    assert resolve(TrainConfig(outer="sgd:0.5"), 35_000_000, 2)[0].outer_lr == 0.5
    again, _ = resolve(replace(short, steps=None, weight_decay=None), 35_000_000, 2)  # as when it is resumed
    assert (again.outer, again.outer_lr) == ("nesterov", 0.3)


def test_the_feedback_is_what_the_codec_is_meant_for_unless_it_is_given():
    found = {}
    for codec in ("e3m0", "twobit", "topk"):
        config, rules = resolve(TrainConfig(codec=codec), 35_000_000, 2)
        found[codec] = config.feedback, any(rule.name == "feedback" for rule in rules)
    assert found == {"e3m0": (0.0, False), "twobit": (0.9, True), "topk": (0.95, True)}
    assert resolve(TrainConfig(codec="twobit", feedback=0.0), 35_000_000, 2)[0].feedback == 0
    assert resolve(TrainConfig(codec="twobit", method="diloco"), 35_000_000, 2)[0].feedback == 0  # it sends fp32


@pytest.mark.parametrize("given", [
    {"outer": "adam"}, {"outer": "nesterov:"}, {"outer": "nesterov:0.6"}, {"outer": "sgd:1,2"}, {"outer": "sgd:-1"},
    {"outer": "nesterov:a,b"}, {"outer": "nesterov:0.6,0.9", "outer_lr": 0.6}, {"outer": "sgd:1", "outer_lr": 1.0},
    {"outer": "nesterov:0.6,0.9", "outer_momentum": 0.9}, {"outer": "sgd", "outer_momentum": 0.9},
])  # fmt: skip
def test_an_outer_rule_that_is_none_or_is_given_twice_is_refused(given):
    with pytest.raises(ConfigError, match=r"outer( lr)?="):
        TrainConfig(**given)


@pytest.mark.slow
def test_a_wrong_verb_gets_a_suggestion():
    result = diloco("trian")
    assert result.returncode == 2
    assert "did you mean train?" in result.stderr


@pytest.mark.slow
def test_the_version_is_the_packages():
    assert diloco("--version").stdout.startswith("diloco 0.")


def test_a_config_written_as_a_recipe_comes_back_the_same(tmp_path):
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
        (b"name = '\xff'", "is not valid TOML"),
        (b"steps = " + b"1" * 5000, "is not valid TOML"),
        (b"steps = " + b"[" * 3000, "is not valid TOML"),
    ],
)
def test_a_broken_recipe_is_refused_with_the_reason(tmp_path, text, message):
    (tmp_path / "recipe.toml").write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        stored(tmp_path / "recipe.toml")


def _mutated(random, recipe):
    """A recipe with some bytes changed, or some settings with values of any kind."""
    if random.random() < 0.4:
        changed = bytearray(recipe)
        for _ in range(random.randrange(4)):
            start = random.randrange(len(changed))
            changed[start : start + random.randrange(20)] = random.randbytes(random.randrange(4))
        return bytes(changed)
    values = [b'"x"', b'""', b'"-1"', b'"--resume"', b'"\\u0000"', b'"\xff"', b'"hf:"', b'"train:"', b'"named:("',
              b"[]", b'"nesterov:nan,inf"', b'"balanced:0"', b'"strided:99999999999999999"', b"[1, 2]", b"[[1]]",
              b"{a = 1}", b"nan", b"inf", b"-1", b"0", b"1.5", b"1e400", b"true", b"1979-05-27", b"9" * 30, b"9" * 5000,
              b"0x" + b"f" * 5000, b"[" * 3000 + b"]" * 3000]  # fmt: skip
    names = random.sample([field.name for field in fields(TrainConfig)], random.randrange(3))
    kept = [line for line in recipe.splitlines() if random.random() < 0.5 and not line.startswith(tuple(
        name.encode() for name in names))]  # fmt: skip
    return b"\n".join([*kept, *(b"%s = %s" % (name.encode(), random.choice(values)) for name in names)])


def test_a_thousand_mutated_recipes_are_taken_or_refused(tmp_path):
    recipe, random = to_toml(TrainConfig(data=("a",), steps=90, batch=8, lr=0.1, name="x")).encode(), Random(5)
    path, taken = tmp_path / "recipe.toml", 0
    for _ in range(1000):
        path.write_bytes(_mutated(random, recipe))
        try:
            config = parse(TrainConfig, [str(path)])
            resolve(config, 1000, 2)
        except ConfigError:
            continue
        taken += 1
        path.write_text(to_toml(config), encoding="utf-8")
        assert parse(TrainConfig, [str(path)]) == replace(config, resume=False, json=False, dry_run=False,
                                                          dashboard=False, join_only=False)  # fmt: skip
    assert 50 < taken < 950


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
    assert address_from(slurm | {"SLURM_STEP_ID": "1"}) != address_from(slurm | {"SLURM_STEP_ID": "2"})
    assert job_from(slurm | {"SLURM_STEP_ID": "1"}) == "diloco/70012.1"
    assert world_from({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}, 1, None) is None
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "gpu07"}  # the shell, not a task
    assert world_from(batch, 1, None) is None
    with pytest.raises(ConfigError, match=r"replicas=3, shards=2 with 8 processes"):
        world_from(torchrun, 2, 3)


def test_what_is_not_given_is_derived_with_its_reason():
    config, rules = resolve(TrainConfig(context=2048), 35_000_000, 2)
    derived = {rule.name: rule for rule in rules}
    assert config.lr == pytest.approx(22256 * 35e6**-0.8827 * 2**0.2929, rel=0.01)
    assert config.batch == 32  # 0.00709 · 35e6^0.4695 · 2^0.3399 = 31.2, even
    assert config.steps == round(20 * 35_000_000 / (32 * 2048))
    assert config.warmup == 1000 and config.weight_decay == pytest.approx(1 / config.steps, 0.01)
    assert config.inner == "muon" and resolve(TrainConfig(model="hf:x"), 35_000_000, 2)[0].inner == "adamw"
    assert "scaling law" in derived["lr"].reason and "20 tokens" in derived["tokens"].reason
    given = TrainConfig(inner="muon", lr=1e-3, batch=8, steps=10, warmup=0, weight_decay=0.0, outer_lr=0.7,
                        outer_momentum=0.8, eval_every=5)  # fmt: skip
    config, rules = resolve(given, 35_000_000, 2)
    assert rules == []
    assert (config.lr, config.batch, config.steps, config.outer_lr) == (1e-3, 8, 10, 0.7)


def test_the_outer_rule_grows_with_the_rounds_unless_it_is_given():
    config, rules = resolve(TrainConfig(steps=300), 700_000, 2)
    assert (config.outer_lr, config.outer_momentum, setup.outer(config)) == (None, None, Nesterov())
    assert {rule.name: rule.value for rule in rules}["outer_momentum"] == "0 to 0.9"
    given, rules = resolve(TrainConfig(outer="nesterov:0.4,0.9", outer_follow=False), 700_000, 2)
    assert setup.outer(given) == Nesterov(0.4, 0.9, follow=False)
    assert not {"outer_lr", "outer_momentum"} & {rule.name for rule in rules}


def test_the_learning_rate_warms_up_and_falls_to_five_percent():
    config = TrainConfig(lr=1.0, warmup=10, steps=110)
    rates = [lr_at(config, step) for step in range(1, 111)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.05)
    assert rates[59] == pytest.approx(0.525)
    assert all(a >= b for a, b in pairwise(rates[9:]))


@pytest.mark.slow
def test_doctor_lists_what_is_here_and_measures_the_link_under_torchrun(tmp_path):
    code, out, err = run_here(tmp_path, "doctor", "--json")
    found = {f["what"]: f for f in json.loads(out)}
    assert code == 0 and found["torch"]["good"] and found["gloo"]["good"] and found["python"]["good"], err
    pair = [ended(process) for process in start_ranks(tmp_path, 2, main, ["doctor", "--json"])]
    assert [code for code, _, _ in pair] == [0, 0], pair
    told = {f["what"]: f for f in json.loads(pair[0][1])}
    assert re.fullmatch(r"round trip [\d.]+ ms, \d+ Mbit/s each way", told["replica 0 ↔ 1"]["value"])
    assert "differ by" in told["clocks 0 and 1"]["value"] and told["clocks 0 and 1"]["good"]
    assert pair[1][1] == ""


def test_the_doctor_fits_80_columns_lists_extras_in_one_line_and_ends_with_a_verdict(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    found = doctor.look_here()
    assert sum(finding.what.startswith("extra") for finding in found) == 1
    bad = doctor.Finding("host name", "has no address " * 8, False, "set GLOO_SOCKET_IFNAME " * 6)
    for findings, verdict in ((found, "no problems"), ([*found, bad], "problems: host name")):
        out = io.StringIO()
        monkeypatch.setenv("COLUMNS", "80")
        with contextlib.redirect_stdout(out):
            doctor.show(findings, as_json=False)
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= 80 and lines[-1].startswith(verdict)


def _be_late(words):
    """A machine whose clock is an hour behind, if it is not the first."""
    now, late = time.time, 3600 * (os.environ["RANK"] == "1")
    time.time = lambda: now() - late
    return main(words)


@pytest.mark.slow
def test_the_doctor_remarks_on_clocks_that_differ(tmp_path):
    pair = [ended(process) for process in start_ranks(tmp_path, 2, _be_late, ["doctor", "--json", "--megabytes", "1"])]
    assert [code for code, _, _ in pair] == [0, 0], pair
    clocks = next(f for f in json.loads(pair[0][1]) if f["what"] == "clocks 0 and 1")
    assert clocks["value"] == "differ by 1 h 00 min" and clocks["good"] is None and "NTP" in clocks["remedy"]


def test_the_doctor_tries_a_bucket_and_leaves_nothing_in_it(tmp_path):
    words = ["doctor", "--json", "--megabytes", "1", "--bucket"]
    code, out, err = run_here(tmp_path, *words, "absent")
    found = json.loads(out)[-1]
    assert code == 1 and found["good"] is False and "there is no folder" in found["value"], err
    (tmp_path / "meeting").mkdir()
    code, out, err = run_here(tmp_path, *words, "meeting")
    found = json.loads(out)[-1]
    assert code == 0 and re.fullmatch(r"[\d.]+ .bit/s up, [\d.]+ .bit/s down", found["value"]), err
    assert not [path for path in (tmp_path / "meeting").rglob("*") if path.is_file()]


def test_the_doctor_refuses_a_message_without_a_size(tmp_path):
    code, out, err = run_here(tmp_path, "doctor", "--megabytes", "-1")
    assert (code, out) == (2, "") and "megabytes=-1: give a size above 0" in err


@pytest.mark.parametrize("words", [["train", "--out"], ["recipes", "demo", "--to"]])
def test_an_output_folder_that_cannot_be_made_is_refused_with_the_flag(words, tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("/proc/x", tmp_path / "file/x", tmp_path / "file"):
        code, _, err = run_here(tmp_path, *words, place)
        assert code == 2 and "cannot write to" in err and f"give another folder with {words[-1]}" in err, err


def test_another_file_that_cannot_be_written_is_named_without_an_errno(tmp_path):
    given = ["--model", "1b", "--step-seconds", "1", "--link", "1gbit", "--codec-ns", "0", "--hook-ns", "0"]
    code, _, err = run_here(tmp_path, "plan", *given, "--write", "/proc/x/plan.toml")
    assert code == 1 and err == "diloco: /proc/x: No such file or directory\n"


WRONG = [
    ["train", "--model", "tinny"], ["train", "--bucket", "s3x://a"], ["train", "--data", "/no/such"],
    ["train", "--tokenizer", "/no/such"], ["train", "--resume"], ["compare", "--methods", "none"],
    ["watch", "/no/such"], ["export", "/no/such", "--to", "x"], ["sample", "/no/such"],
    ["doctor", "--megabytes", "-1"], ["plan", "--model", "1b", "--step-seconds", "1", "--link", "1xyz"],
    ["plan", "--model", "1b", "--step-seconds", "1", "--link", "1gbit", "--memory", "many"],
    ["plan", "--model", "1b", "--step-seconds", "1", "--link", "1gbit", "--plot", "plan.zip"],
    ["fleet", "--chips", "16k", "--plot", "fleet.zip"],
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
