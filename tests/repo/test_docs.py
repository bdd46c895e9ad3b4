"""The pages that teach: every command and snippet on them is run, or marked with what it needs."""

import re
import runpy
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import diloco
from tests.repo.test_readme import BLOCKS, COMMANDS, FEWER, Summed, snippet, weights
from tests.support import clean, commands
from tests.support.clean import FENCE
from tests.support.commands import ended, start_ranks
from tests.support.processes import run

ROOT = Path(__file__).parents[2]
PAGES = ("concepts", "tutorial", "settings", "two-sites", "one-box", "fine-tuning", "troubleshooting", "architecture",
         "api", "comparison")  # fmt: skip
ELSEWHERE = {"bucket": "bucket/test_page.py", "clusters": "repo/test_clusters.py",
             "dashboard": "dashboard/test_page.py", "extending": "repo/test_extending.py",
             "frameworks": "support/frameworks.py", "planner": "plan/test_fleet.py"}  # fmt: skip
"""Pages whose blocks are run by other tests."""
TEXTS = {page: (ROOT / f"docs/{page}.md").read_text() for page in PAGES}
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
COMPLETE = next(code for page, code in SNIPPETS if page == "settings" and "evaluate" in code)
SHARDED = next(code for page, code in SNIPPETS if page == "two-sites" and "fully_shard" in code)
ALONE = {"concepts", "two-sites"}
"""Pages whose snippets need no process group."""


def test_a_block_is_of_a_kind_that_is_run_or_shows_an_output():
    assert {kind for _, _, kind, _ in FOUND} <= {"console", "python", "diff", "text"}
    assert all((kind, code) in BLOCKS for _, _, kind, code in FOUND if kind == "diff")
    assert all(line.startswith("$ ") for _, _, kind, code in FOUND if kind == "console" for line in code.splitlines())


def test_the_blocks_of_every_other_page_are_run_by_a_test_that_reads_it():
    shown = {path.stem for path in (ROOT / "docs").glob("*.md") if FENCE.search(path.read_text())}
    assert shown - set(PAGES) == set(ELSEWHERE)
    assert all(f"{page}.md" in (ROOT / "tests" / test).read_text() for page, test in ELSEWHERE.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("docs")
    sources = Path(shlex.__file__), Path(subprocess.__file__)
    (place / "notes.txt").write_text("\n\n".join(path.read_text() for path in sources))
    return place


@pytest.mark.slow
def test_the_commands_of_the_trainer_run_in_their_order(folder):
    few = {
        "train": FEWER,
        "compare": [*FEWER, "--replicas", "2", "--methods", "streaming"],
        "sample": ["--tokens", "2"],
    }
    shown = [shlex.split(command)[1:] for command in RUN_HERE if command.startswith("diloco ")]
    assert {verb for verb, *_ in shown} == {"recipes", "train", "sample", "plan", "compare"}
    assert shown[1][-1] == "first"
    shown.insert(2, ["export", "runs/first", "--to", "first-hf"])  # which the README's test runs in a folder of its own
    for words in shown:
        code, out, err = commands.run(folder, *words, *few.get(words[0], []))
        assert code == 0, (words, err)
        assert out.strip(), words
    assert all((folder / name).exists() for name in ("minimal.py", "pair.toml", "runs/tuned", "runs/own"))


def test_a_plan_that_is_shown_is_the_one_that_is_printed(tmp_path):
    """The excerpt, part by part. The command says how quick the machines are, so that this one does not matter."""
    shown = [(block.removeprefix("$ "), text) for (_, _, kind, block), (_, _, then, text) in pairwise(FOUND)
             if (kind, then) == ("console", "text") and "diloco plan " in block]  # fmt: skip
    assert len(shown) == 2
    for command, text in shown:
        assert "--codec-ns" in command and "--hook-ns" in command
        code, out, err = commands.run_here(tmp_path, *shlex.split(command)[1:])
        assert code == 0, err
        assert [part for part in text.split("\n\n") if _plain(part) not in _plain(out)] == [], command


def _script(name, *words):
    sys.argv = [name, *words]
    runpy.run_path(name, run_name="__main__")


@pytest.mark.slow
def test_the_script_of_the_tutorial_goes_on_and_makes_the_rounds_that_are_shown(folder):
    """In the processes that torchrun would start. tests/repo/test_package.py does the same for examples/minimal.py."""
    (folder / "train.py").write_text(SCRIPT)
    shown = [shlex.split(command) for command in RUN_HERE if command.startswith("torchrun")]
    start = ["torchrun", "--nproc_per_node", "2"]
    assert shown == [[*start, "minimal.py"], [*start, "train.py", "200"], [*start, "train.py", "300"]]
    for (*_, name, steps), text in zip(shown[1:], ["21 rounds, ", "13 rounds, "], strict=True):
        results = [ended(process) for process in start_ranks(folder, 2, _script, name, steps)]
        assert [code for code, _, _ in results] == [0, 0], results
        said = "".join(out for _, out, _ in results)
        losses = re.findall(rf"step {steps}: loss of the anchors ([\d.]+)", said)
        assert len(losses) == 2 and losses[0] == losses[1]
        assert text in said and text in TEXTS["tutorial"]
        assert ("goes on after step 200" in said) is (steps == "300")


def test_the_path_of_a_stranger_is_all_that_the_tutorial_shows_for_one_machine():
    """`.ci/wheel` runs it from a wheel, in an environment that has only what the wheel requires."""
    shown, script = clean.path(TEXTS["tutorial"])
    verbs = [" ".join(command.split()[:2]) for command in shown]
    assert verbs == ["diloco recipes", "torchrun --nproc_per_node", *(f"diloco {verb}" for verb in (
        "train", "report", "ls", "sample", "export")), *["torchrun --nproc_per_node"] * 2]  # fmt: skip
    assert script == SCRIPT


def test_every_command_is_run():
    assert all(command.startswith(("diloco ", "torchrun ")) for command in RUN_HERE)


@pytest.mark.slow
def test_the_targets_and_files_that_are_named_exist():
    """On all pages, and in CONTRIBUTING.md, whose block lists targets."""
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    targets = {line.split()[0] for line in said.splitlines()}
    text = (ROOT / "CONTRIBUTING.md").read_text()
    ((_, kind, block),) = FENCE.findall(text)
    listed = re.findall(r"^make ([a-z-]+) +# \S", block, re.MULTILINE)
    assert kind == "" and len(listed) == len(block.splitlines()) and set(listed) <= targets
    pages = [text, *(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])]
    named = [name for page in pages for name in re.findall(r"`make ([a-z-]+)", page)]
    assert set(named) <= targets
    files = re.findall(r"`(\.ci/\w+|[\w/]+/(?:\w+\.\w+)?)`", text)
    assert [name for name in files if not any((ROOT / top / name).exists() for top in (
        "", "diloco")) and name != "dist/"] == []  # fmt: skip


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


@pytest.mark.slow
def test_the_snippets_that_need_a_process_group_run():
    codes = [code for page, code in sorted(SNIPPETS) if page not in ALONE and code not in (SCRIPT, COMPLETE)]
    one, two = run(2, _together, codes)
    assert [rounds for _, rounds in one] == [rounds for _, rounds in two]
    assert len(one) == 4 and any("sync_every=30" in text for text, _ in one) and any(rounds for _, rounds in one)


def _execute(code):
    exec(compile(code, "api.md", "exec"), {})


@pytest.mark.slow
def test_the_trainer_is_called_from_python(folder):
    (code,) = [code for page, needs, kind, code in FOUND if (page, kind) == ("api", "python") and needs]
    few = code.replace("steps=200", "steps=4, context=32, eval_tokens=512, data=('notes.txt',)")
    assert few != code
    done, out, err = ended(commands.Command(folder, _execute, few))
    assert done == 0, err
    finished, loss, sent, exposed = map(float, out.split())
    assert finished == 0 and 1 < loss < 7 and sent > 0 and exposed >= 0
    assert "loss of the anchors" not in out, "nothing is shown that was not asked for"


def test_the_snippets_that_need_none_run():
    codes = [code for page, code in sorted(SNIPPETS) if page in ALONE and code != SHARDED]
    for code in codes:
        said: list[object] = []
        names = {**_names(Summed()), "print": lambda *words, said=said: said.extend(words)}
        exec(compile(code, "docs", "exec"), names)
        assert not said or said == [11, "rounds; equal at the end:", True]
    assert len(codes) == 2


@pytest.mark.slow
def test_the_snippet_with_all_settings_runs():
    one, two = run(2, weights, COMPLETE)
    assert torch.equal(one[0], two[0])
    assert one[1] == 1 and one[2] == ["diloco"]


def _sharded(rank, code):
    _, _, names = snippet(0, code)
    return list(names["diloco"].state_dict())


@pytest.mark.slow
def test_the_fsdp_snippet_runs():
    assert run(4, _sharded, SHARDED) == [["shard 0 of 2"], ["shard 1 of 2"]] * 2


def _plain(text):
    return " ".join(text.replace("−", "-").split())
