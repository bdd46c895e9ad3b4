"""Run the study: python -m studies.parity [--quick]. Interrupt it at any point; it continues where it was.

One run a core. Results are lines of results.jsonl beside this file, from which
`python -m studies.parity.page` writes docs/parity.md.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from studies.parity import study
from studies.parity.cell import Cell
from studies.parity.paired import FEW, compared
from studies.parity.results import append, load
from studies.parity.rows import ROWS, Row
from studies.parity.run import check_corpus, train
from studies.parity.spread import percent

PATH = Path(__file__).parent / "results.jsonl"
TYPICAL = 180.0
"""Seconds of a run, where none was done yet."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 seeds of a few rows, fewer steps: some minutes")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at a time")
    args = parser.parse_args()
    if args.quick:
        rows = study.quick(load(PATH))
        with tempfile.TemporaryDirectory() as folder:
            results = run_all(Path(folder) / "quick.jsonl", rows, args.processes, study.QUICK_SEEDS)
        named = {row.name: row for row in rows}
        for row in rows:
            for name in row.against:
                print(f"{row.name}, to {name}: {percent(compared(row, named[name], results))}")
    else:
        run_all(PATH, ROWS, args.processes, FEW)


def run_all(path: Path, rows: tuple[Row, ...], processes: int, seeds: int) -> dict[str, dict[str, Any]]:
    """All runs that the rows want; results are added to the file one by one."""
    results = load(path)
    check_corpus(path, results)
    seconds = [_seconds(result, rows[0].cell.steps) for result in (results or load(PATH)).values()] or [TYPICAL]
    print(f"at least {minutes(study.least(results, rows, seeds), seconds, processes):.0f} min", flush=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running: dict[Future[dict[str, Any]], tuple[str, Cell]] = {}
        while True:
            busy = {cell.key for _, cell in running.values()}
            todo = {cell.key: (row, cell) for row, cell in study.wanted(results, rows, seeds) if cell.key not in busy}
            for row, cell in list(todo.values())[: processes - len(running)]:
                running[pool.submit(train, cell)] = row, cell
            if not running:
                return results
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                row, cell = running.pop(future)
                result = future.result()
                results[result["key"]] = result
                seconds.append(_seconds(result, cell.steps))
                append(path, result)
                left = minutes(study.least(results, rows, seeds), seconds, processes)
                took = f"{result['final']:.4f}; at least {left:.0f} min to go"
                print(f"{time.strftime('%H:%M:%S')} {row}: {cell}: {took}", flush=True)


def _seconds(result: dict[str, Any], steps: int) -> float:
    """CPU seconds of a run, scaled to this number of steps."""
    return result["cpu_seconds"] * steps / result["cell"]["steps"]


def minutes(runs: int, seconds: list[float], processes: int) -> float:
    """Time for this many runs, at the mean of those that were done."""
    return runs * fmean(seconds) / processes / 60


if __name__ == "__main__":
    main()
