"""The documentation site builds without a warning, loads nothing from another host, and its commands can be copied."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(folder: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_another_host(tmp_path: Path) -> None:
    build(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.html")} >= {path.stem for path in (ROOT / "docs").glob("*.md")}
    for page in tmp_path.glob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\" >]+)", text)
        loaded += re.findall(r"<link\b[^>]*\brel=\"?(?:stylesheet|icon|preconnect|preload)\"?[^>]*", text)
        assert not [target for target in loaded if "//" in target], page.name
