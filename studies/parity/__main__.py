"""Run the study of the paper's method: python -m studies.parity [--quick]. Interrupt it; it continues where it was.

One run a core. Results are lines of results.jsonl beside this file, from which
`python -m studies.parity.page` writes docs/parity.md.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from studies.parity import paper, today
from studies.parity.cell import EVALUATED
from studies.parity.spread import percent
from studies.parity.study import Study, arguments, main

QUICK: dict[str, tuple[str, ...]] = {
    paper.DP: (),
    paper.DILOCO: (paper.DP,),
    paper.STREAMING: (paper.DP,),
    "random zeroing": (paper.DP,),
    today.MUON: (paper.DP,),
    today.DEFAULTS: (paper.DP, today.MUON),
}
"""Rows, and those that they are compared with."""
STEPS, SEEDS = 900, (1, 2)


def quick(processes: int) -> None:
    """A few rows in a third of the steps."""
    rows = {**today.ROWS, **paper.ROWS}
    cells = {name: replace(rows[name], width=paper.WIDTH, evaluated=EVALUATED, steps=STEPS) for name in QUICK}
    with tempfile.TemporaryDirectory() as folder:
        study = Study(Path(folder) / "quick.jsonl", cells)
        study.run(study.wanted(seeds=SEEDS), processes)
        done = Study(study.path, cells)
        for name, others in QUICK.items():
            for other in others:
                print(f"{name}, to {other}: {percent(done.gap(name, other))}")


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="2 seeds of a few rows, fewer steps: some minutes")
    args = parser.parse_args()
    if args.quick:
        quick(args.processes)
    else:
        main(paper.PAPER, args)
