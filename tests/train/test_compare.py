"""`diloco compare`: methods at equal tokens."""

import json
import re

import pytest
import torch

from diloco.cli import compare
from diloco.cli.compare import CompareConfig, _finished, plan
from diloco.errors import ConfigError
from diloco.runs.config import TrainConfig
from diloco.runs.folder import locked
from tests.support.commands import SMALL, run, run_here, weights


@pytest.mark.slow
def test_compare_runs_the_methods_at_equal_tokens_and_goes_on_where_it_was_interrupted(place):
    words = ["compare", *SMALL, "--data", "corpus.txt", "--steps", "20", "--methods", "dp,diloco,local", "--name",
             "compared"]  # fmt: skip
    code, out, err = run(place, *words, "--json")
    assert code == 0, err
    assert "3 runs in runs/compared" in err
    assert "run 1 of 3: dp-seed0\n" in err
    assert re.search(r"run 3 of 3: local-seed0; about .+ left", err)
    summaries = {summary["method"]: summary for summary in json.loads(out)}
    assert {summary["tokens"] for summary in summaries.values()} == {20 * 4 * 32}
    parameters = summaries["dp"]["parameters"]
    assert summaries["diloco"]["bytes_sent"] == pytest.approx(2 * 4 * parameters, rel=0.01)
    assert summaries["diloco"]["largest_burst"] == pytest.approx(4 * parameters, rel=0.01)
    assert summaries["dp"]["bytes_sent"] == 20 * 4 * parameters
    assert summaries["local"]["bytes_sent"] == 0
    for method in summaries:
        one, two = (weights(place, f"compared/{method}-seed0", 20, replica) for replica in (0, 1))
        equal = all(torch.equal(one[key], two[key]) for key in one if key.startswith("/model/"))
        assert equal == (method != "local")
    before = (place / "runs/compared/dp-seed0/summary.json").stat().st_mtime
    code, out, err = run_here(place, *words)
    assert code == 0, err
    assert "%" in out and "report.html" in out
    assert (place / "runs/compared/dp-seed0/summary.json").stat().st_mtime == before
    code, _, err = run_here(place, "compare", *SMALL, "--data", "corpus.txt", "--tokens", "2560", *words[-4:])
    assert code == 0, err  # as many steps, from the tokens
    code, out, err = run_here(place, *words[:-1], "planned", "--dry-run")
    assert code == 0 and not (place / "runs/planned").exists(), err
    code, _, err = run_here(place, *words, "--lr", "0.1")
    assert code == 2 and "compared/dp-seed0 was run with lr 0.008, not 0.1: use another --name" in err


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(tmp_path, monkeypatch):
    begun = tmp_path / "compared/dp-seed0"
    begun.mkdir(parents=True)
    (begun / "config.toml").write_text('method = "dp"\n')
    cells = []
    monkeypatch.setattr(compare, "run_here", lambda cell, show: (cells.append(cell), (3, None))[1])
    assert compare.main(CompareConfig(methods="dp", out=tmp_path, name="compared")) == 3
    assert [cell.resume for cell in cells] == [False] and not begun.exists()


def test_a_run_that_trains_is_not_begun_again_and_a_dry_run_deletes_nothing(tmp_path, monkeypatch):
    begun = tmp_path / "compared/dp-seed0"
    begun.mkdir(parents=True)
    (begun / "config.toml").write_text('method = "dp"\n')
    monkeypatch.setattr(compare, "run_here", lambda cell, show: (0, None))
    with locked(begun), pytest.raises(ConfigError, match="in use"):
        compare.main(CompareConfig(methods="dp", out=tmp_path, name="compared"))
    names = []
    monkeypatch.setattr(compare, "run_here", lambda cell, show: (names.append(cell.name), (0, None))[1])
    compare.main(CompareConfig(methods="dp", out=tmp_path, name="compared", dry_run=True))
    assert (begun / "config.toml").exists() and names == [None]


def test_a_comparison_of_many_replicas_goes_on_though_their_outer_optimizer_is_derived(tmp_path):
    (tmp_path / "config.toml").write_text('outer = "nesterov:many"\nreplicas = 8\n')
    compare._check_same(TrainConfig(replicas=8), tmp_path)
    with pytest.raises(ConfigError, match="outer nesterov:many, not sgd"):
        compare._check_same(TrainConfig(replicas=8, outer="sgd"), tmp_path)
    with pytest.raises(ConfigError, match="leave --auto out"):
        compare.complete(["--auto"])


def test_a_run_that_was_stopped_is_not_compared_as_it_is(tmp_path):
    for stopped in (True, False):
        (tmp_path / "summary.json").write_text(json.dumps({"stopped": stopped}))
        assert _finished(tmp_path) is not stopped
    assert not _finished(tmp_path / "absent")


def test_compare_plans_every_method_for_every_seed():
    cells = dict(plan(CompareConfig(methods="dp,streaming", seeds=2, seed=3, overlap=5)))
    assert list(cells) == ["dp-seed3", "dp-seed4", "streaming-seed3", "streaming-seed4"]
    chosen = cells["streaming-seed4"]
    assert (chosen.overlap, chosen.seed, chosen.method) == (5, 4, "streaming")
    for wrong, message in (
        ({"methods": "dp,sgd"}, "is not a method"), ({"seeds": 0}, "seeds=0"), ({"auto": ("codec",)}, "--auto out")
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            plan(CompareConfig(**wrong))
