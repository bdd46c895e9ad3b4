"""A clean environment with a wheel and its requirements, and the tutorial run in it.

    python -m tests.support.clean make WHEEL FOLDER     create the environment
    python -m tests.support.clean walk FOLDER           run the commands of docs/tutorial.md for one machine
    python -m tests.support.clean build SOURCES FOLDER  run the README's `pip install .` in the unpacked sources

`.ci/wheel` runs all three. Requirements are linked, file by file, from the environment of this interpreter: nothing is
downloaded, and a package that the wheel does not declare cannot be imported.
"""

import importlib.metadata as metadata
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

from tests.support.pages import ROOT, blocks


def required(distribution: metadata.Distribution, extras: Iterable[str] = ()) -> list[Requirement]:
    """The requirements that apply on this machine with these extras."""
    extras = ["", *extras]
    requirements = [Requirement(text) for text in distribution.requires or []]
    return [r for r in requirements if not r.marker or any(r.marker.evaluate({"extra": extra}) for extra in extras)]


def closure(requirements: Iterable[Requirement]) -> dict[str, metadata.Distribution]:
    """The requirements and their own requirements, by name."""
    queue, seen, distributions = list(requirements), set(), {}
    while queue:
        requirement = queue.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) not in seen:
            seen.add((name, extras))
            distributions[name] = metadata.distribution(name)
            queue += required(distributions[name], extras)
    return distributions


def link(distribution: metadata.Distribution, environment: Path) -> None:
    """Link the files of a package, and write its commands as pip does."""
    (packages,) = environment.glob("lib/python*/site-packages")
    for file in distribution.files or []:
        target = packages / file
        if (
            file.parts[0] != ".." and not target.is_symlink()
        ):  # ..: a command, whose first line names another interpreter
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(Path(str(file.locate())).resolve())
    for entry in distribution.entry_points.select(group="console_scripts"):
        command = environment / "bin" / entry.name
        command.write_text(f"#!{environment}/bin/python\nimport sys\nfrom {entry.module} import {entry.attr}\n"
                           f"sys.exit({entry.attr}())\n")  # fmt: skip
        command.chmod(0o755)


def prepare(environment: Path, requirements: Iterable[Requirement]) -> set[str]:
    """Create an environment with these requirements; returns the names of its packages."""
    venv.create(environment, clear=True, symlinks=True)
    distributions = closure(requirements)
    for distribution in distributions.values():
        link(distribution, environment)
    return set(distributions)


def make(wheel: Path, environment: Path) -> None:
    """Let pip install the wheel without a network, which works only if its requirements are there."""
    (folder,) = (path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
    needed = prepare(environment, required(metadata.PathDistribution(folder)))  # pyright: ignore[reportArgumentType]
    python = str(environment / "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", str(wheel)]
    subprocess.run(pip, check=True)
    listing = "import importlib.metadata as m; print(*(package.name for package in m.distributions()))"
    names = subprocess.run([python, "-c", listing], check=True, capture_output=True, text=True).stdout.split()
    installed = set(map(canonicalize_name, names))
    assert installed == {"diloco", *needed}, f"not required by the wheel: {sorted(installed - needed)}"
    print(f"{wheel.name} with {', '.join(sorted(needed))}")


def build(sources: Path, environment: Path) -> None:
    """Run the README's line in the unpacked sources. Without a network, the environment also needs the build tools."""
    (line,) = (line for block in blocks("README.md") if "make wheel" in block.mark for line in block.commands)
    with tarfile.open(sources) as packed:
        packed.extractall(environment.parent, filter="data")
    folder = environment.parent / sources.name.removesuffix(".tar.gz")
    tools = tomllib.loads((folder / "pyproject.toml").read_text())["build-system"]["requires"]
    prepare(environment, [*required(metadata.PathDistribution(folder)), *map(Requirement, ["pip", *tools])])
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0 is what the flag sets
    subprocess.run(f"{line} --quiet", shell=True, check=True, cwd=folder, env=variables(environment) | offline)
    subprocess.run(["diloco", "--version"], check=True, cwd=environment, env=variables(environment))


def variables(environment: Path) -> dict[str, str]:
    """The variables of a process in the environment, with nothing inherited."""
    return {"PATH": f"{environment}/bin:/usr/bin:/bin", "HOME": str(environment.parent), "LANG": "C.UTF-8"}


def walk(environment: Path) -> None:
    """Run the tutorial's commands for one machine in an empty folder."""
    folder = environment.with_name("stranger")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "examples", folder / "examples")
    commands = []
    for block in blocks("docs/tutorial.md"):
        if block.mark.startswith("file: "):
            (folder / block.mark.removeprefix("file: ")).write_text(block.text)
        elif block.kind == "console" and not block.mark:
            commands += [line for line in block.commands if "--nnodes" not in line]
    home = variables(environment) | {"HOME": str(folder)}
    for command in commands:
        began = time.monotonic()
        run = subprocess.run(command, shell=True, cwd=folder, env=home, capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"{command}\n{run.stdout}{run.stderr}exited with {run.returncode}")
        print(f"{time.monotonic() - began:6.1f} s  {command}", flush=True)


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    {"make": make, "walk": walk, "build": build}[command](*(Path(path).absolute() for path in paths))
