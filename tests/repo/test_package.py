"""The package as a user meets it, imports and examples, and as a reader does, sizes and directions."""

import ast
import importlib.metadata
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from diloco.errors import install_command
from tests.support.commands import ended, start_ranks

ROOT = Path(__file__).parents[2]


def command(*words: str, **kwargs) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GLOO")}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, **kwargs)


def example(name: str) -> None:
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


@pytest.mark.slow
def test_importing_the_package_imports_no_torch_and_knows_its_names():
    heavy = {"torch", "numpy", "transformers", "lightning", "torchtitan", "axolotl"}
    code = f"import sys, diloco; print({heavy} & sys.modules.keys()); print(*dir(diloco))"
    result = command(sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr
    flags, names = result.stdout.splitlines()
    assert flags == "set()"
    assert {"DiLoCo", "E3M0", "Nesterov", "Strided", "Collective", "PeerLost"} <= set(names.split())


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
    """Every message asks the same function; `doctor` shows what it says of each extra that is missing."""
    home = tmp_path / "diloco-0.1.0.dist-info"
    home.mkdir()
    (home / "METADATA").write_text("Metadata-Version: 2.1\nName: diloco\nVersion: 0.1.0\n")
    if origin:
        (home / "direct_url.json").write_text(json.dumps(origin).replace("{folder}", str(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert install_command("hf") == command.replace("{folder}", str(tmp_path))


def test_the_version_stands_in_one_place():
    import diloco

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"] and "version" not in project["project"]
    assert project["tool"]["hatch"]["version"] == {"path": "diloco/__init__.py"}
    assert importlib.metadata.version("diloco") == diloco.__version__
    assert f"\nversion: {diloco.__version__}\n" in (ROOT / "CITATION.cff").read_text()


NEEDED = {
    "torch": "training",
    "numpy": "tokens, plans",
    "jinja2": "the report",
    "rich": "the terminal",
    "safetensors": "the export",
}
"""What the core requires, each for which of its parts."""


def test_what_is_required_is_what_the_core_needs_and_no_more():
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split(r"[>=]", each)[0] for each in required} == NEEDED.keys()
    assert NEEDED.keys() <= set.union(*(imported(path) for path in SOURCES))


def test_what_is_imported_with_a_module_is_required():
    """What an extra brings is imported in the function that needs it. An integration needs its framework."""
    own = {"diloco", *sys.stdlib_module_names}
    found = {str(path.relative_to(ROOT)): at_once(text) - own - NEEDED.keys()
             for path, text in SOURCES.items() if "integrations" not in path.parts}  # fmt: skip
    assert {name: packages for name, packages in found.items() if packages} == {}
    assert at_once("if here:\n    import a.b\nelse:\n    from c import d\ndef later():\n    import e") == {"a", "c"}
    assert at_once("class Here:\n    import a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c") == {"a", "c"}


def test_every_public_name_can_be_imported_and_a_wrong_one_says_so():
    import diloco

    for name in diloco.__all__:
        assert getattr(diloco, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Diloco'"):
        diloco.Diloco  # noqa: B018


@pytest.mark.slow
def test_the_minimal_example_ends_with_equal_replicas_and_a_lower_loss(tmp_path):
    results = [ended(process) for process in start_ranks(tmp_path, 2, example, "minimal.py")]
    assert [code for code, _, _ in results] == [0, 0], results
    out = "".join(said for _, said, _ in results)
    weights = re.findall(r"weights (-?[\d.]+)", out)
    losses = [float(x) for x in re.findall(r"replica \d: loss ([\d.]+)", out)]
    assert len(weights) == 2 and weights[0] == weights[1]
    assert max(losses) < 2.5  # ln 256 = 5.5; the bytes' own frequencies alone give about 3.1


@pytest.mark.slow
def test_a_codec_of_ones_own_works(capsys):
    example("new_codec.py")
    losses = dict(re.findall(r"^(\w+) .* loss ([\d.]+)$", capsys.readouterr().out, re.MULTILINE))
    assert set(losses) == {"Float32", "E3M0", "Sign"}
    assert float(losses["E3M0"]) < 2 * float(losses["Float32"]) < float(losses["Sign"])


SOURCES = {path: path.read_text() for path in sorted((ROOT / "diloco").rglob("*.py"))}


def imported(path: Path) -> set[str]:
    """The packages that a file imports."""
    return set().union(*(named(node) for node in ast.walk(ast.parse(path.read_text()))))


def named(node: ast.AST) -> set[str]:
    """The packages that a statement imports."""
    if isinstance(node, ast.Import):
        return {name.name.partition(".")[0] for name in node.names}
    return {node.module.partition(".")[0]} if isinstance(node, ast.ImportFrom) and node.module else set()


def at_once(text: str) -> set[str]:
    """The packages that are imported when the file is: not in its functions, and not for types only."""
    found, waiting = set[str](), list[ast.AST](ast.parse(text).body)
    while waiting:
        node = waiting.pop()
        found |= named(node)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return found


@pytest.mark.slow
def test_each_tree_imports_only_what_is_below_it():
    allowed = {"diloco": set(), "examples": set(), "tests": {"studies"}, "benchmarks": {"studies", "tests"},
               "studies": {"benchmarks", "tests"}}  # fmt: skip
    for tree, others in allowed.items():
        for path in (ROOT / tree).rglob("*.py"):
            found = imported(path) & allowed.keys() - {tree, "diloco"}
            assert found <= others, f"{path.relative_to(ROOT)} imports {found - others}"
