"""`diloco train --auto`: it measures, chooses, says why, goes on, and resumes."""

import json
import tomllib
from dataclasses import fields

import pytest

from diloco.cli.train import complete
from diloco.flags import parse
from diloco.plan.choose import Settings
from diloco.runs.config import TUNED, TrainConfig
from diloco.runs.reader import read
from tests.support.commands import run, run_here

WORDS = ["--data", "corpus.txt", "--model", "tiny", "--batch", "4", "--context", "32", "--eval-every", "1000",
         "--eval-tokens", "512", "--auto"]  # fmt: skip


def events(folder, kind):
    lines = (folder / "replica-0" / "events.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == kind]


@pytest.mark.slow
def test_auto_measures_chooses_says_why_and_the_run_goes_on_and_is_resumed(place):
    code, _, err = run(place, "train", *WORDS, "--steps", "20", "--codec", "bfloat16", "--name", "auto")
    assert code == 0, err
    folder = place / "runs" / "auto"
    [chosen] = events(folder, "autopilot")
    assert chosen["step"] == 10 and chosen["codec"] == "bfloat16" and chosen["rate"] > 0 and chosen["step_seconds"] > 0
    said = (folder / "derived.txt").read_text()
    for name in ("sync_every", "fragments", "overlap", "codec"):
        assert f"  {name} = {chosen[name]}: " in said
    assert "codec = bfloat16: given" in said and f"expected: {100 * chosen['expected_utilization']:.1f} % busy" in said
    assert "autopilot: a step takes" in err  # the live view shows it too
    config = tomllib.loads((folder / "config.toml").read_text())
    assert (config["sync_every"], config["fragments"]) == (chosen["sync_every"], chosen["fragments"])
    assert config["overlap"] == "auto" and config["kept"] == ["codec"]
    recorded = read(folder)
    assert len({r.fragment for r in recorded.replicas[0].rounds}) > 1
    assert all(r.overlap is not None and 1 <= r.overlap <= 5 for r in recorded.replicas[0].rounds)
    assert json.loads((folder / "summary.json").read_text())["predicted_utilization"] > 0

    code, _, err = run(place, "train", "--resume", "--name", "auto", "--steps", "25")
    assert code == 0, err
    assert len(events(folder, "autopilot")) == 1  # the settings were chosen once
    assert read(folder).replicas[0].steps[-1].step == 25


def test_the_autopilot_chooses_what_the_planner_chooses():
    assert tuple(field.name for field in fields(Settings)) == TUNED


def test_what_is_given_is_kept_here_in_a_recipe_and_from_before(tmp_path):
    assert parse(TrainConfig, complete(["--auto", "--sync-every", "50", "--codec=twobit"])).kept == (
        "codec",
        "sync_every",
    )
    assert parse(TrainConfig, complete(["--auto"])).kept == ()
    assert "--kept" not in complete(["--sync-every", "50"])
    recipe = tmp_path / "r.toml"
    recipe.write_text("sync_every = 7\n")
    assert parse(TrainConfig, complete([str(recipe), "--auto", "--overlap", "2"])).kept == ("overlap", "sync_every")
    run_folder = tmp_path / "runs" / "x"
    run_folder.mkdir(parents=True)
    (run_folder / "config.toml").write_text('inner = "adamw"\nauto = true\nsync_every = 30\nkept = ["codec"]\n')
    words = ["--resume", "--out", str(tmp_path / "runs"), "--name", "x"]
    assert parse(TrainConfig, complete(words)).kept == ("codec",)
    assert parse(TrainConfig, complete([*words, "--sync-every", "9"])).kept == ("codec", "sync_every")


def test_auto_is_refused_where_nothing_is_streamed(tmp_path):
    code, _, err = run_here(tmp_path, "train", "--auto", "--method", "dp")
    assert code == 2
    assert "--auto with method dp: it chooses how to stream; leave --method out, or --auto" in err


@pytest.mark.parametrize(("word", "value"), [("auto", "auto"), ("3", 3)])
def test_the_overlap_is_a_number_or_auto(word, value):
    assert parse(TrainConfig, ["--overlap", word]).overlap == value


def test_a_wrong_overlap_says_what_may_be_given():
    with pytest.raises(Exception, match=r"--overlap often: give a whole number.* or auto$"):
        parse(TrainConfig, ["--overlap", "often"])


@pytest.mark.slow
def test_a_member_of_a_bucket_adapts_its_own_overlap_only(place, tmp_path):
    words = [*WORDS, "--steps", "20", "--sync-every", "10", "--bucket", tmp_path, "--member", "a"]
    code, _, err = run(place, "train", *words, "--replicas", "1", "--name", "auto-member")
    assert code == 0, err
    assert "with a Bucket, sync_every, fragments and codec stay as given" in err
    folder = place / "runs" / "auto-member"
    assert tomllib.loads((folder / "config.toml").read_text())["overlap"] == "auto"
