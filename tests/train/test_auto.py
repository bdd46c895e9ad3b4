"""`diloco train --auto`: measures, chooses, gives reasons, continues, and resumes."""

import json
import tomllib
from dataclasses import fields

import pytest

from diloco.cli.train import complete
from diloco.errors import ConfigError
from diloco.plan.choose import Settings
from diloco.runs.config import TUNED, TrainConfig
from diloco.runs.flags import parse
from diloco.runs.reader import read
from tests.support.commands import run

WORDS = ["--data", "corpus.txt", "--model", "tiny", "--batch", "4", "--context", "32", "--eval-every", "1000",
         "--auto"]  # fmt: skip


def events(folder, kind):
    lines = (folder / "replica-0" / "events.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == kind]


@pytest.mark.slow
def test_auto_measures_chooses_and_gives_reasons_and_the_run_continues_and_resumes(place):
    code, _, err = run(place, "train", *WORDS, "--steps", "20", "--codec", "bfloat16", "--name", "auto")
    assert code == 0, err
    folder = place / "runs" / "auto"
    [chosen] = events(folder, "autopilot")
    assert chosen["overlap"] >= 1  # the automatic one starts there, even if 0 would be enough
    assert chosen["step"] == 10 and chosen["codec"] == "bfloat16" and chosen["rate"] > 0 and chosen["step_seconds"] > 0
    reasons = (folder / "derived.txt").read_text()
    for name in ("sync_every", "fragments", "overlap", "codec"):
        assert f"  {name} = {chosen[name]}: " in reasons
    assert "codec = bfloat16: set explicitly" in reasons
    assert f"expected: {100 * chosen['expected_utilization']:.1f} %" in reasons
    assert "autopilot: a step takes" in err  # the live view shows it too
    config = tomllib.loads((folder / "config.toml").read_text())
    assert (config["sync_every"], config["fragments"]) == (chosen["sync_every"], chosen["fragments"])
    assert config["overlap"] == "auto" and config["auto"] == ["sync_every", "fragments", "overlap"]
    recorded = read(folder)
    assert len({r.fragment for r in recorded.replicas[0].rounds}) > 1
    assert all(r.overlap is not None and 1 <= r.overlap <= 5 for r in recorded.replicas[0].rounds)

    code, _, err = run(place, "train", "--resume", "--name", "auto", "--steps", "25")
    assert code == 0, err
    assert len(events(folder, "autopilot")) == 1  # the settings were chosen once
    assert read(folder).replicas[0].steps[-1].step == 25


def test_the_autopilot_chooses_what_the_planner_chooses():
    assert tuple(field.name for field in fields(Settings)) == TUNED


def test_the_autopilot_leaves_alone_what_is_set_here_in_a_config_or_before(tmp_path):
    def chosen(*words):
        return parse(TrainConfig, complete(words)).auto

    assert chosen("--auto") == TUNED and chosen("--sync-every", "50") == ()
    assert chosen("--auto", "--sync-every", "50", "--codec=twobit") == ("fragments", "overlap")
    assert chosen("--auto", "overlap", "codec") == ("overlap", "codec")
    config = tmp_path / "r.toml"
    config.write_text("sync_every = 7\n")
    assert chosen(str(config), "--auto", "--overlap", "2") == ("fragments", "codec")
    run_folder = tmp_path / "runs" / "x"
    run_folder.mkdir(parents=True)
    (run_folder / "config.toml").write_text('inner = "adamw"\nauto = ["overlap", "codec"]\nsync_every = 30\n')
    resume = ["--resume", "--out", str(tmp_path / "runs"), "--name", "x"]
    assert chosen(*resume) == ("overlap", "codec") and chosen(*resume, "--codec", "e3m0") == ("overlap",)


def test_the_overlap_is_a_number_or_auto():
    assert [parse(TrainConfig, ["--overlap", word]).overlap for word in ("auto", "3")] == ["auto", 3]
    with pytest.raises(ConfigError, match=r"--overlap often: use a whole number.* or auto$"):
        parse(TrainConfig, ["--overlap", "often"])
