"""The pages that teach: every command and snippet on them is run, or marked with what it needs; the site is built."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import diloco
from tests.repo.test_readme import BLOCKS, COMMANDS, FEWER, Summed
from tests.support import commands
from tests.support.commands import ended, start_ranks
from tests.support.processes import run

ROOT = Path(__file__).parents[2]
PAGES = ("concepts", "tutorial", "settings", "two-sites", "one-box", "fine-tuning", "troubleshooting", "architecture",
         "api", "comparison")  # fmt: skip
TEXTS = {page: (ROOT / f"docs/{page}.md").read_text() for page in PAGES}
FENCE = re.compile(r"(?:^<!-- (needs [^>]+) -->\n)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FOUND = [(page, *block) for page, text in TEXTS.items() for block in FENCE.findall(text)]
RUN_HERE = list(dict.fromkeys(
    line.removeprefix("$ ")
    for _, needs, kind, block in FOUND if kind == "console" and not needs
    for line in block.splitlines() if line.removeprefix("$ ") not in COMMANDS
))  # fmt: skip
"""In the order of the pages, each once, without what the README's test runs."""
SNIPPETS = {(page, code) for page, needs, kind, code in FOUND
            if kind == "python" and not needs and (kind, code) not in BLOCKS}  # fmt: skip
SCRIPT = next(code for page, code in SNIPPETS if page == "tutorial")
ALONE = {"concepts", "two-sites"}
"""Pages whose snippets need no process group."""


def test_a_block_is_of_a_kind_that_is_run_or_shows_an_output():
    assert {kind for _, _, kind, _ in FOUND} <= {"console", "python", "diff", "text"}
    assert all((kind, code) in BLOCKS for _, _, kind, code in FOUND if kind == "diff")
    assert all(line.startswith("$ ") for _, _, kind, code in FOUND if kind == "console" for line in code.splitlines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("docs")
    sources = Path(shlex.__file__), Path(subprocess.__file__)
    (place / "notes.txt").write_text("\n\n".join(path.read_text() for path in sources))
    (place / "recipes").symlink_to(ROOT / "recipes")
    return place


def test_the_commands_of_the_trainer_run_in_their_order(folder):
    few = {
        "train": FEWER,
        "compare": [*FEWER, "--replicas", "2", "--methods", "streaming"],
        "sample": ["--tokens", "2"],
    }
    shown = [shlex.split(command)[1:] for command in RUN_HERE if command.startswith("diloco ")]
    assert {verb for verb, *_ in shown} == {"train", "sample", "plan", "compare"}
    assert shown[0][-1] == "first"
    shown.insert(1, ["export", "runs/first", "--to", "first-hf"])  # which the README's test runs in a folder of its own
    for words in shown:
        code, out, err = commands.run(folder, *words, *few.get(words[0], []))
        assert code == 0, (words, err)
        assert out.strip(), words
    assert (folder / "pair.toml").exists() and (folder / "runs/tuned").is_dir() and (folder / "runs/own").is_dir()


def _script(name, *words):
    sys.argv = [name, *words]
    runpy.run_path(name, run_name="__main__")


def test_the_script_of_the_tutorial_goes_on_and_makes_the_rounds_that_are_shown(folder):
    """In the processes that torchrun would start. tests/repo/test_package.py does the same for examples/minimal.py."""
    (folder / "train.py").write_text(SCRIPT)
    shown = [shlex.split(command) for command in RUN_HERE if command.startswith("torchrun")]
    start = ["torchrun", "--nproc_per_node", "2"]
    assert shown == [[*start, "examples/minimal.py"], [*start, "train.py", "200"], [*start, "train.py", "300"]]
    for (*_, name, steps), text in zip(shown[1:], ["21 rounds, ", "13 rounds, "], strict=True):
        results = [ended(process) for process in start_ranks(folder, 2, _script, name, steps)]
        assert [code for code, _, _ in results] == [0, 0], results
        said = "".join(out for _, out, _ in results)
        losses = re.findall(rf"step {steps}: loss of the anchors ([\d.]+)", said)
        assert len(losses) == 2 and losses[0] == losses[1]
        assert text in said and text in TEXTS["tutorial"]
        assert ("goes on after step 200" in said) is (steps == "300")


def test_every_command_is_run():
    assert all(command.startswith(("diloco ", "torchrun ")) for command in RUN_HERE)


def _names(model):
    return {
        "model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "print": lambda *_: None,
        "data": [torch.randn(4, 8) for _ in range(25)], "torch": torch,
        **{name: getattr(diloco, name) for name in diloco.__all__},
    }  # fmt: skip


def _together(rank, snippets):
    """What each leaves of its DiLoCo."""
    told = []
    for code in snippets:
        torch.manual_seed(0)  # what is frozen must be equal
        model = Summed()
        torch.manual_seed(rank)
        names = _names(model)
        if "diloco =" not in code:
            names["diloco"] = diloco.DiLoCo(names["model"], names["optimizer"])
        exec(compile(code, "docs", "exec"), names)
        told.append((repr(names["diloco"]), names["diloco"].stats.rounds))
    return told


def test_the_snippets_that_need_a_process_group_run():
    codes = [code for page, code in sorted(SNIPPETS) if page not in ALONE and code != SCRIPT]
    one, two = run(2, _together, codes)
    assert [rounds for _, rounds in one] == [rounds for _, rounds in two]
    assert len(one) == 3 and any("sync_every=30" in text for text, _ in one) and any(rounds for _, rounds in one)


def test_the_snippets_that_need_none_run():
    codes = [code for page, code in sorted(SNIPPETS) if page in ALONE]
    for code in codes:
        said: list[object] = []
        names = {**_names(Summed()), "print": lambda *words, said=said: said.extend(words)}
        exec(compile(code, "docs", "exec"), names)
        assert not said or said == [11, "rounds; equal at the end:", True]
    assert len(codes) == 2


def test_the_page_of_the_api_has_every_public_name():
    listed = set(re.findall(r"^::: diloco[\w.]*\.(\w+)$", TEXTS["api"], re.MULTILINE))
    names = {name if name != "run_replicas" else "run" for name in diloco.__all__ if name != "__version__"}
    assert listed == names | {"Stats"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    place = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return place


def test_the_site_has_all_pages_and_asks_no_other_host(site):
    pages = sorted(site.glob("*.html"))
    assert {path.stem for path in pages} >= {"index", *(path.stem for path in (ROOT / "docs").glob("*.md"))}
    for path in pages:
        text = path.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\" >]+)", text)
        loaded += re.findall(r"<link\b[^>]*\brel=\"?(?:stylesheet|icon|preconnect|preload)\"?[^>]*", text)
        assert len(loaded) > 3 and not [each for each in loaded if "//" in each], path.name


def test_the_target_builds_the_site():
    plan = subprocess.run(["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True).stdout
    assert "mkdocs build --strict" in plan
