"""What a benchmark or a study leaves behind: a JSON file with settings, values, targets and the machine."""

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
"""Where benchmarks write. A study writes into its own folder."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A measured value and the bound that it should keep."""

    what: str
    measured: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        low = self.at_least is None or self.measured >= self.at_least
        return low and (self.at_most is None or self.measured <= self.at_most)

    @property
    def bound(self) -> str:
        return f"≥ {self.at_least:.4g}" if self.at_least is not None else f"≤ {self.at_most:.4g}"

    def __str__(self) -> str:
        return f"{self.what}: {self.measured:.4g} (target {self.bound}, {'met' if self.met else 'MISSED'})"


def write(path: Path, settings: Record, values: Record, targets: list[Target], *, quiet: bool = False) -> None:
    """Save the record, and print the targets."""
    record = {"settings": settings, "machine": machine(), "values": values, "targets": [asdict(t) for t in targets]}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    if not quiet:
        print(*targets, sep="\n")


def read(path: Path) -> Record | None:
    return json.loads(path.read_text()) if path.exists() else None


def machine() -> Record:
    """What the figures depend on; nothing that names the machine itself."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *rows])


def insert(page: str, tables: Mapping[str, str]) -> str:
    """The page with each table between `<!-- NAME -->` and `<!-- /NAME -->`. The rest of it is written by hand."""
    for name, text in tables.items():
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"\n<!-- /{name} -->")
        if not end:
            raise ValueError(f"the page has no <!-- {name} --> with a <!-- /{name} --> after it")
        page = before + begin + text.strip() + end + after
    return page
