"""What the published files promise about themselves."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.name)
def test_every_recipe_is_valid(path):
    from diloco.flags import parse
    from diloco.runs.config import TrainConfig

    config = parse(TrainConfig, [str(path)])
    assert config.model in ("tiny", "35m", "1b")


def test_no_file_names_a_path_of_a_machine_or_unfinished_work():
    texts = ["*.md", "*.toml", "*.cff", "Makefile", ".ci/*", ".github/**/*.yml", "docs/**/*.md", "recipes/*.toml"]
    code = [f"{tree}/**/*.{kind}" for tree in ("diloco", "benchmarks", "studies", "examples") for kind in ("py", "md")]
    words = re.compile(r"/(?:root|home|work)/\w+|\bTO" r"DO\b|\bFIX" r"ME\b")
    found = []
    for path in {path for pattern in [*texts, *code] for path in ROOT.glob(pattern)}:
        found += [f"{path.relative_to(ROOT)}: {word}" for word in words.findall(path.read_text())]
    assert not found
