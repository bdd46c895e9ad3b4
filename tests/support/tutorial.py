"""Run the tutorial's commands for one machine in an empty folder, with the `diloco` of another environment.

    python -m tests.support.tutorial ENVIRONMENT

`.ci/wheel` does so with a wheel.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.support.pages import ROOT, blocks


def walk(environment: Path) -> None:
    folder = environment.with_name("stranger")
    folder.mkdir()
    shutil.copytree(ROOT / "examples", folder / "examples")
    commands = []
    for block in blocks("docs/tutorial.md"):
        if block.mark.startswith("file: "):
            (folder / block.mark.removeprefix("file: ")).write_text(block.text)
        elif block.kind == "console" and not block.mark:
            commands += [line for line in block.commands if "--nnodes" not in line]
    variables = {"PATH": f"{environment}/bin:/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8"}
    for command in commands:
        began = time.monotonic()
        run = subprocess.run(command, shell=True, cwd=folder, env=variables, capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"{command}\n{run.stdout}{run.stderr}exited with {run.returncode}")
        print(f"{time.monotonic() - began:6.1f} s  {command}", flush=True)


if __name__ == "__main__":
    walk(Path(sys.argv[1]).absolute())
