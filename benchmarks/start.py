"""How soon the package answers. Run: python -m benchmarks.start

Each figure is the median of fresh interpreters, from their start to their end, with nothing subtracted. The commands
take turns, because the speed of a machine changes. What Python compiles at a first import is compiled before.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.record import RESULTS, Target, write

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "python": ["-c", "pass"],
    "import": ["-c", "import diloco"],
    "help": ["-m", "diloco", "--help"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description="how soon the package answers")
    parser.add_argument("--times", type=int, default=25, help="interpreters of each kind")
    times = parser.parse_args().times
    for words in COMMANDS.values():
        seconds(words)
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(times):
        for name, words in COMMANDS.items():
            found[name].append(seconds(words))
    values = {name: {"median": statistics.median(each), "least": min(each), "times": len(each)}
              for name, each in found.items()}  # fmt: skip
    for name, value in values.items():
        print(f"{name}: {value['median']:.3f} s (median of {value['times']}), at least {value['least']:.3f} s")
    targets = [Target("`import diloco`, s", values["import"]["median"], at_most=0.1)]
    write(RESULTS / "start.json", {"times": times}, values, targets)


def seconds(words: list[str]) -> float:
    """Of an interpreter that does this and ends."""
    began = time.perf_counter()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
