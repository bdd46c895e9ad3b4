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
    found = []
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("diloco/**/*.py")]:
        for word in re.findall(r"/(?:root|home|work)/\w+|TODO|FIXME", path.read_text()):
            found.append(f"{path.name}: {word}")
    assert not found
