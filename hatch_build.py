"""Compile diloco/codecs/kernels.c when the package is built, and write its page for an index.

Without a C compiler, or with CC=none, the package is pure Python, for every platform, and slower. Only a release knows
the address of the repository, REPOSITORY; otherwise the page is README.md as it is."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.tags import sys_tags

FLAGS = ["-O3", "-std=c11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"]
"""No contraction of multiply and add, no fast mathematics: the bits must be those of the code in Python."""


class Kernels(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(self.root, "diloco", "codecs", "kernels.c")
        library = source.with_name("_kernels.so")
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            self.app.display_warning("no C compiler: diloco is built without its fast kernels")
            library.unlink(missing_ok=True)
            return
        partial = library.with_suffix(".new")
        done = subprocess.run([compiler, *FLAGS, "-o", str(partial), str(source)], capture_output=True, text=True)
        if done.returncode:
            self.app.display_warning(f"{compiler} failed, diloco is built without its fast kernels:\n{done.stderr}")
            library.unlink(missing_ok=True)
            return
        partial.replace(library)
        build_data["artifacts"].append("diloco/codecs/_kernels.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{next(sys_tags()).platform}"  # no Python in it: one wheel for all versions


class Readme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text, repository = Path(self.root, "README.md").read_text(), os.environ.get("REPOSITORY")
        if repository:
            metadata["urls"] = {"Source": repository}
            text = for_index(text, repository, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def for_index(text: str, repository: str, tag: str) -> str:
    """Links to files lead to the repository, and what is installed is the package of the index."""
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\g<1>{repository}/raw/{tag}/", text)
    text = re.sub(r"(\]\()(?!https?:|#)", rf"\g<1>{repository}/blob/{tag}/", text)
    text = text.replace(" In the project's folder:", "").replace("\n\nThen, anywhere:", "")
    return text.replace("pip install .", "pip install diloco").replace("pip install '.[", "pip install 'diloco[")
