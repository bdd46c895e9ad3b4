"""One replica of a cell, in its network namespace: steps are pauses, as if an accelerator trained meanwhile.

A cell has fixed settings, or is flown by the autopilot. Each replica shapes what it sends itself.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import processes
from benchmarks.record import Record
from diloco import DiLoCo
from diloco.autopilot.pilot import autopilot
from diloco.codecs.codec import codec_named
from diloco.core.fragment import fragmenter
from diloco.exchange.collective import Collective
from diloco.plan.choose import Settings
from tests.support.netns import Rate, shaping

LAYERS, WIDTH, STEP_SECONDS = 12, 576, 0.05
PERIODS = 2
"""Sync periods that are measured with the autopilot. Fixed settings: whole periods of at least `LEAST` steps."""
LEAST = 90


@dataclass(frozen=True, kw_only=True)
class Cell:
    settings: Settings | None = None
    """None: the autopilot's."""
    mbit: float
    scale: float = 1.0
    """Of the lengths that are measured, for a quick try."""


def main() -> None:
    parser = argparse.ArgumentParser(description="one replica of all cells of a rate")
    parser.add_argument("--cells", required=True)
    rank = processes.pin()
    rows = []
    dist.init_process_group("gloo")
    for given in json.loads(parser.parse_args().cells):
        cell = Cell(**{**given, "settings": Settings(**given["settings"]) if given["settings"] else None})
        shape(cell.mbit)
        rows.append(fixed(cell) if cell.settings else flown(cell))
        if rank == 0:
            told = {key: rows[-1][key] for key in ("mbit", "settings", "measured")}
            print(json.dumps(told), file=sys.stderr, flush=True)
    print(json.dumps(rows), flush=True)
    os._exit(0)  # without the last sync of models that nobody wants


def shape(mbit: float) -> None:
    subprocess.run(shaping(Rate(mbit)), check=True, capture_output=True)


class Loop:
    """A DiLoCo whose steps are pauses, and when each step ended."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))})
        self.diloco = DiLoCo(model, reducer=Collective(), **settings)
        self.diloco.join()
        self.ended = [time.perf_counter()]

    def run(self, steps: int, pause: float = STEP_SECONDS) -> None:
        for _ in range(steps):
            time.sleep(pause)
            self.diloco.step()
            self.ended.append(time.perf_counter())

    def utilization(self, first: int, last: int) -> float:
        return (last - first) * STEP_SECONDS / (self.ended[last] - self.ended[first])

    def close(self) -> None:
        """Nothing of this cell is on the link when the next one begins."""
        for future in list(self.diloco.reducer._rounds.values()):  # pyright: ignore[reportAttributeAccessIssue]
            future.result()
        dist.barrier()
        self.diloco.reducer.leave()


def fixed(cell: Cell) -> Record:
    assert cell.settings is not None
    settings = cell.settings
    loop = Loop(sync_every=settings.sync_every, fragments=fragmenter(settings.fragments), overlap=settings.overlap,
                codec=codec_named(settings.codec))  # fmt: skip
    loop.run(settings.sync_every - 1, pause=0)  # nothing is sent before, so there is no need to pause
    warm = settings.sync_every  # until the first rounds have come back, and a queue has built up
    steps = -(-int(LEAST * cell.scale) // settings.sync_every) * settings.sync_every
    loop.run(warm + steps)
    first = 2 * settings.sync_every - 1
    row = {"settings": asdict(settings), "mbit": cell.mbit, "measured": loop.utilization(first, first + steps)}
    loop.close()
    return row


def flown(cell: Cell) -> Record:
    said: list[tuple[int, str, Any]] = []
    loop = Loop(overlap="auto")
    pilot = autopilot(loop.diloco, say=lambda text, values: said.append((loop.diloco.step_count, text, dict(values))))
    assert pilot is not None
    loop.run(10)
    assert pilot.choice is not None
    sync_every, periods = loop.diloco.schedule.sync_every, max(round(PERIODS * cell.scale), 1)
    first, last = 2 * sync_every, (2 + periods) * sync_every
    loop.run(last - 10)
    row: Record = {"mbit": cell.mbit, "settings": asdict(pilot.choice.settings), "expected": pilot.choice.utilization,
                   "measured": loop.utilization(first, last)}  # fmt: skip
    applied = [(r.applied_step, r.overlap) for r in loop.diloco.stats.last]
    row["overlaps"] = [new for old, new in pairwise([(0, -1), *applied]) if old[1] != new[1]]  # where it changes
    row["said"] = said
    loop.close()
    return row


if __name__ == "__main__":
    main()
