"""An environment that holds a wheel, what it requires, and no other package; and the path of a stranger through it.

    python -m tests.support.clean make WHEEL FOLDER     the environment
    python -m tests.support.clean walk FOLDER           the commands of docs/tutorial.md, sections 1 to 3
    python -m tests.support.clean build SOURCES FOLDER  the README's `pip install .`, in the folder of the sources

`.ci/wheel` does all. What the wheel requires is linked, file by file, from the environment of this interpreter: nothing
is downloaded, and what the wheel does not declare cannot be imported.
"""

import importlib.metadata as metadata
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"(?:^<!-- (needs [^>]+) -->\n)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""A block of a page: what it needs, its kind, its text."""


def required(by: metadata.Distribution, extras: Iterable[str] = ()) -> list[Requirement]:
    """What it requires on this machine, with these extras."""
    found = [Requirement(each) for each in by.requires or []]
    extras = ["", *extras]
    return [each for each in found
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras)]  # fmt: skip


def closure(requirements: Iterable[Requirement]) -> dict[str, metadata.Distribution]:
    """What is required, and what that requires in turn, by name."""
    waiting, seen, found = list(requirements), set(), {}
    while waiting:
        each = waiting.pop()
        name, extras = canonicalize_name(each.name), frozenset(each.extras)
        if (name, extras) not in seen:
            seen.add((name, extras))
            found[name] = metadata.distribution(name)
            waiting += required(found[name], extras)
    return found


def link(distribution: metadata.Distribution, environment: Path) -> None:
    """Each of its files, and its commands as pip writes them."""
    (packages,) = environment.glob("lib/python*/site-packages")
    for file in distribution.files or []:
        here = packages / file
        if file.parts[0] != ".." and not here.is_symlink():  # ..: a command, whose first line names another interpreter
            here.parent.mkdir(parents=True, exist_ok=True)
            here.symlink_to(Path(str(file.locate())).resolve())
    for entry in distribution.entry_points.select(group="console_scripts"):
        command = environment / "bin" / entry.name
        command.write_text(f"#!{environment}/bin/python\nimport sys\nfrom {entry.module} import {entry.attr}\n"
                           f"sys.exit({entry.attr}())\n")  # fmt: skip
        command.chmod(0o755)


def prepare(environment: Path, requirements: Iterable[Requirement]) -> set[str]:
    """An environment with what is required; returns the names of what it has."""
    venv.create(environment, clear=True, symlinks=True)
    needed = closure(requirements)
    for each in needed.values():
        link(each, environment)
    return set(needed)


def make(wheel: Path, environment: Path) -> None:
    """pip installs the wheel, and finds that all it requires is there."""
    (folder,) = (each for each in zipfile.Path(wheel).iterdir() if each.name.endswith(".dist-info"))
    needed = prepare(environment, required(metadata.PathDistribution(folder)))  # pyright: ignore[reportArgumentType]
    python = str(environment / "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", str(wheel)]
    subprocess.run(pip, check=True)
    listed = "import importlib.metadata as m; print(*(each.name for each in m.distributions()))"
    names = subprocess.run([python, "-c", listed], check=True, capture_output=True, text=True).stdout.split()
    there = set(map(canonicalize_name, names))
    assert there == {"diloco", *needed}, f"not what the wheel requires: {sorted(there ^ {'diloco', *needed})}"
    print(f"{wheel.name} with {', '.join(sorted(needed))}")


def build(sources: Path, environment: Path) -> None:
    """Run the line in the unpacked sources. There is no network, so what builds them is in the environment too."""
    (line,) = (line.removeprefix("$ ") for needs, _, text in FENCE.findall((ROOT / "README.md").read_text())
               for line in text.splitlines() if "make wheel" in needs)  # fmt: skip
    with tarfile.open(sources) as packed:
        packed.extractall(environment.parent, filter="data")
    folder = environment.parent / sources.name.removesuffix(".tar.gz")
    tools = tomllib.loads((folder / "pyproject.toml").read_text())["build-system"]["requires"]
    prepare(environment, [*required(metadata.PathDistribution(folder)), *map(Requirement, ["pip", *tools])])
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0 is what the flag sets
    subprocess.run(f"{line} --quiet", shell=True, check=True, cwd=folder, env=variables(environment) | offline)
    subprocess.run(["diloco", "--version"], check=True, cwd=environment, env=variables(environment))


def variables(environment: Path) -> dict[str, str]:
    """Those of a process in the environment, and nothing of this process's."""
    return {"PATH": f"{environment}/bin:/usr/bin:/bin", "HOME": str(environment.parent), "LANG": "C.UTF-8"}


def path(page: str) -> tuple[list[str], str]:
    """The commands of sections 1 to 3 that are not marked, and the script that the page has one save."""
    blocks = FENCE.findall(page.partition("\n## 4.")[0])
    (script,) = (text for needs, kind, text in blocks if kind == "python" and not needs)
    shown = [text for needs, kind, text in blocks if kind == "console" and not needs]
    return [line.removeprefix("$ ") for text in shown for line in text.splitlines()], script


def walk(environment: Path) -> None:
    """Run them as they are printed, in an empty folder."""
    commands, script = path((ROOT / "docs/tutorial.md").read_text())
    folder = environment.with_name("stranger")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(script)
    here = variables(environment) | {"HOME": str(folder)}
    began = time.monotonic()
    for command in commands:
        at = time.monotonic()
        run = subprocess.run(command, shell=True, cwd=folder, env=here, capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"{command}\n{run.stdout}{run.stderr}ended with {run.returncode}")
        print(f"{time.monotonic() - at:6.1f} s  {command}", flush=True)
        if command.endswith("minimal.py"):
            print(f"{time.monotonic() - began:6.1f} s  to the first result")
    print(f"{time.monotonic() - began:6.1f} s  for all")


if __name__ == "__main__":
    verb, *paths = sys.argv[1:]
    {"make": make, "walk": walk, "build": build}[verb](*(Path(each).absolute() for each in paths))
