"""What the installed package must hold. Run by its interpreter: python -I tests/support/installed.py WHEEL"""

import importlib.metadata
import sys
from pathlib import Path

import diloco


def check(wheel: Path) -> None:
    here, source = Path(diloco.__file__).parent, Path(__file__).parents[2] / "diloco"
    assert here.is_relative_to(sys.prefix), f"imported from {here}, not from the wheel"
    wanted = {p.relative_to(source) for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    wanted -= {Path("_kernels.so")}
    missing = wanted - {p.relative_to(here) for p in here.rglob("*")}
    assert not missing, f"not in the wheel: {sorted(map(str, missing))}"
    assert any(path.parts[0] == "report" and path.suffix == ".js" for path in wanted), "the report has no assets"
    for name in diloco.__all__:
        getattr(diloco, name)
    levels = importlib.import_module("diloco.kernels").levels()
    assert ("plain" in levels) is ("manylinux" in wheel.name), f"{wheel.name} computes at {levels}"
    version = importlib.metadata.version("diloco")
    assert version == diloco.__version__ == wheel.name.split("-")[1], f"{version}, {diloco.__version__}, {wheel.name}"
    assert wheel.stat().st_size <= 1_000_000, f"{wheel.name} has {wheel.stat().st_size:,} bytes"
    print(f"{wheel.name}: {len(wanted)} files, {len(diloco.__all__)} public names, kernels {', '.join(levels)}")


if __name__ == "__main__":
    check(Path(sys.argv[1]))
