"""Check the installed package. Run by its interpreter: python -I tests/support/installed.py WHEEL"""

import importlib.metadata
import sys
from pathlib import Path

import diloco


def check(wheel: Path) -> None:
    installed, source = Path(diloco.__file__).parent, Path(__file__).parents[2] / "diloco"
    assert installed.is_relative_to(sys.prefix), f"imported from {installed}, not from the wheel"
    files = {p.relative_to(source) for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    files -= {Path("codecs/_kernels.so")}
    missing = files - {p.relative_to(installed) for p in installed.rglob("*")}
    assert not missing, f"not in the wheel: {sorted(map(str, missing))}"
    assert any(path.parts[0] == "report" and path.suffix == ".js" for path in files), "the report has no assets"
    for name in diloco.__all__:
        getattr(diloco, name)
    levels = importlib.import_module("diloco.codecs.kernels").levels()
    assert ("plain" in levels) is ("manylinux" in wheel.name), f"{wheel.name} computes at {levels}"
    version = importlib.metadata.version("diloco")
    assert version == diloco.__version__ == wheel.name.split("-")[1], f"{version}, {diloco.__version__}, {wheel.name}"
    assert wheel.stat().st_size <= 1_000_000, f"{wheel.name} has {wheel.stat().st_size:,} bytes"
    print(f"{wheel.name}: {len(files)} files, {len(diloco.__all__)} public names, kernels {', '.join(levels)}")


if __name__ == "__main__":
    check(Path(sys.argv[1]))
