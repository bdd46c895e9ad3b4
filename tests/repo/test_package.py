"""The package as a user meets it: imports, version, examples, configs."""

import importlib.metadata
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import diloco
from diloco.errors import install_command
from diloco.runs.config import TrainConfig
from diloco.runs.flags import parse
from tests.support.commands import ended, run_here, start_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def example(name: str) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.slow
def test_importing_the_package_imports_no_torch_and_knows_its_names():
    code = "import sys, diloco; print({'torch', 'numpy'} & sys.modules.keys()); print(*dir(diloco))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    heavy, names = result.stdout.splitlines()
    assert heavy == "set()"
    assert set(diloco.__all__) <= set(names.split())


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file://{folder}", "dir_info": {}}, "pip install '{folder}[hf]'"),
        ({"url": "file://{folder}", "dir_info": {"editable": True}}, "pip install -e '{folder}[hf]'"),
        ({"url": "file://{folder}/gone", "dir_info": {}}, "pip install 'diloco[hf]'"),
        ({"url": "https://a.b/c", "vcs_info": {"vcs": "git"}}, "pip install 'diloco[hf] @ git+https://a.b/c'"),
        ({"url": "file:///d/e.whl", "archive_info": {}}, "pip install 'diloco[hf] @ file:///d/e.whl'"),
        (None, "pip install 'diloco[hf]'"),
    ],
)
def test_the_hint_to_install_an_extra_fits_how_this_package_was_installed(tmp_path, monkeypatch, origin, command):
    """Every message about a missing extra asks the same function."""
    home = tmp_path / "diloco-0.1.0.dist-info"
    home.mkdir()
    (home / "METADATA").write_text("Metadata-Version: 2.1\nName: diloco\nVersion: 0.1.0\n")
    if origin:
        (home / "direct_url.json").write_text(json.dumps(origin).replace("{folder}", str(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert install_command("hf") == command.replace("{folder}", str(tmp_path))


def test_the_installed_version_is_that_of_the_package():
    assert importlib.metadata.version("diloco") == diloco.__version__


@pytest.mark.slow
def test_a_release_shows_an_index_the_readme_with_links_that_lead_somewhere():
    def readme(**variables: str) -> str:
        command = [sys.executable, "-m", "hatchling", "metadata"]
        environment = {**os.environ, **variables}
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        return json.loads(result.stdout)["readme"]["text"]

    assert readme(REPOSITORY="") == (ROOT / "README.md").read_text()
    repository, tag = "https://host.example/o/diloco", f"v{diloco.__version__}"
    text = readme(REPOSITORY=repository)
    assert f"]({repository}/raw/{tag}/docs/report.png)" in text
    assert f"]({repository}/blob/{tag}/docs/claims.md#traffic)" in text
    assert not re.findall(r"\]\((?!https://|#)", text)
    assert "$ pip install diloco\n" in text and "pip install 'diloco[bucket,hf]'" in text
    assert not re.findall(r"pip install '?\.|project's folder|anywhere:", text)


def test_every_public_name_can_be_imported_and_a_wrong_one_says_so():
    for name in diloco.__all__:
        assert getattr(diloco, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Diloco'"):
        diloco.Diloco  # noqa: B018


@pytest.mark.slow
def test_the_minimal_example_ends_with_equal_replicas_and_a_lower_loss(tmp_path):
    results = [ended(process) for process in start_ranks(tmp_path, 2, example, "minimal.py")]
    assert [code for code, _, _ in results] == [0, 0], results
    out = "".join(printed for _, printed, _ in results)
    weights = re.findall(r"weights (-?[\d.]+)", out)
    losses = [float(x) for x in re.findall(r"replica \d: loss ([\d.]+)", out)]
    assert len(weights) == 2 and weights[0] == weights[1]
    assert max(losses) < 2.5  # ln 256 = 5.5; the unigram model gives about 3.1


@pytest.mark.slow
def test_the_new_codec_works(capsys):
    example("new_codec.py")
    losses = dict(re.findall(r"^(\w+) .* loss ([\d.]+)$", capsys.readouterr().out, re.MULTILINE))
    assert set(losses) == {"Float32", "E3M0", "Sign"}
    assert float(losses["E3M0"]) < 2 * float(losses["Float32"]) < float(losses["Sign"])


@pytest.mark.slow
def test_a_new_outer_optimizer_is_compared_with_the_shipped_ones(capsys):
    main = runpy.run_path(str(EXAMPLES / "outer_rule.py"))["main"]
    main(["--replicas", "2", "--steps", "48", "--sync-every", "4", "--seeds", "2"])  # Nesterov starts as SGD
    rows = re.findall(r"^(\w+) +loss ([\d.]+) ", capsys.readouterr().out, re.MULTILINE)
    losses = {name: float(loss) for name, loss in rows}
    assert losses.keys() == {"average", "paper", "shipped", "adam"}
    assert len(set(losses.values())) == 4 and losses["shipped"] < 4.5  # ln 256 = 5.5


def test_shipped_configs_are_valid_and_listed_in_the_help(tmp_path):
    code, out, _ = run_here(tmp_path, "train", "--help")
    assert code == 0
    for path in (ROOT / "recipes").glob("*.toml"):
        assert path.stem in out and parse(TrainConfig, [path.stem]) == parse(TrainConfig, [str(path)])
