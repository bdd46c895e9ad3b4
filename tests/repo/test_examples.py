"""The examples run as their pages show them, at a smaller size; examples/lora in tests/integrations/test_lora.py."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from tests.support.commands import ended, run, run_here, start, wait_for

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def shown(page: Path) -> list[list[str]]:
    """The words of the commands of a page, in order."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [shlex.split(line.removeprefix("$ ")) for block in blocks for line in block.splitlines()]


@pytest.mark.slow
def test_a_new_outer_rule_is_compared_with_the_shipped_ones(capsys):
    main = runpy.run_path(str(EXAMPLES / "outer_rule.py"))["main"]
    main(
        ["--replicas", "2", "--steps", "48", "--sync-every", "4", "--seeds", "2"]
    )  # the shipped rule is SGD for ten rounds
    rows = re.findall(r"^(\w+) +loss ([\d.]+) +([+-][\d.]+) ± ([\d.]+) % against shipped, 2 seeds$",
                      capsys.readouterr().out, re.MULTILINE)  # fmt: skip
    assert [name for name, *_ in rows] == ["average", "paper", "shipped", "adam"]
    losses = {name: float(loss) for name, loss, *_ in rows}
    assert len(set(losses.values())) == 4 and losses["shipped"] < 4.5  # ln 256 = 5.5
    assert rows[2][2:] == ("+0.00", "0.00")
    assert len((EXAMPLES / "outer_rule.py").read_text().splitlines()) <= 100


@pytest.mark.slow
def test_two_sites_pretrain_one_model_through_a_bucket(tmp_path):
    plan, north, south, watch, report, export, sample = shown(EXAMPLES / "bucket/README.md")
    fewer = ["--model", "tiny", "--context", "32", "--batch", "4", "--steps", "20", "--sync-every", "10", "--inner",
             "adamw", "--no-compile", "--overlap", "2", "--eval-tokens", "512", "--quorum", "2"]  # fmt: skip
    here = {"s3://my-bucket/run-1": tmp_path / "bucket", "examples/bucket/run.toml": EXAMPLES / "bucket/run.toml"}
    sites = {}
    for name, words in (("north", north), ("south", south)):
        site = tmp_path / name
        site.mkdir()
        (site / f"{name}.txt").write_text(f"In the {name} it is " + "cold and windy and " * 2000)
        sites[name] = start(site, *(here.get(word, word) for word in words[1:]), *fewer)
        if name == "north":
            wait_for((tmp_path / "bucket/run.json").exists, sites[name])
    results = {name: ended(process) for name, process in sites.items()}
    assert [code for code, _, _ in results.values()] == [0, 0], results
    assert re.search(r"created run \w+, as north", results["north"][2])
    assert re.search(r"joined run \w+ at round \d+, as south", results["south"][2])
    for words in (plan, watch, report, export):
        code, out, err = run_here(tmp_path / "north", *(here.get(word, word) for word in words[1:]))
        assert code == 0 and (out or err), (words, err)
    code, _, err = run_here(tmp_path / "south", *export[1:])
    assert code == 0, err
    exported = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in sites]
    assert exported[0] == exported[1]  # the same bits
    code, out, err = run(tmp_path / "north", *sample[1:], "--tokens", "4")
    assert code == 0 and out, err


def test_recipes_and_examples_are_listed_printed_and_copied(tmp_path):
    code, out, _ = run_here(tmp_path, "recipes")
    listed = [line.split()[0] for line in out.splitlines()]
    own = [path.stem for folder in ("recipes", "examples") for path in sorted((ROOT / folder).iterdir())]
    assert (
        code == 0 and listed == [name for name in own if not name.startswith("_")] and len(set(listed)) == len(listed)
    )
    assert all(len(line.split(maxsplit=1)[1]) > 10 for line in out.splitlines())
    code, out, _ = run_here(tmp_path, "recipes", "demo")
    assert code == 0 and out == (ROOT / "recipes/demo.toml").read_text()
    code, out, _ = run_here(tmp_path, "recipes", "bucket", "--to", "mine")
    assert code == 0 and (tmp_path / "mine/bucket/run.toml").read_bytes() == (EXAMPLES / "bucket/run.toml").read_bytes()
    for words, says in ((["bucket", "--to", "mine"], "exists already"), (["dmo"], "give one of demo, paper-35m"),
                        (["--to", "mine"], "without a name")):  # fmt: skip
        code, _, err = run_here(tmp_path, "recipes", *words)
        assert code == 2 and says in err and err.count("\n") == 1


def test_a_dry_run_with_the_recipe_of_the_two_sites_leaves_the_bucket_alone(tmp_path):
    code, out, err = run_here(tmp_path, "train", EXAMPLES / "bucket/run.toml", "--bucket", "b", "--dry-run")
    assert code == 0 and "19M parameters" in out, err
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}
