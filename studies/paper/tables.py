"""The paper's bandwidth tables, recomputed: Table 4 cell by cell, and what else was published from the same simulator.

How the published numbers were made was found by fitting, not stated: bandwidths on 50 points from 0.1 to 1000 Gbit/s;
printed is the largest point that still falls short of the target; 16 bits a parameter, 4 for FP4, once a round; a
fragment every round(100 / fragments) steps; 400 steps. Three reporting rules, ten spacings, two layer patterns and
fifteen payload scales were tried on Table 4, so its score is in-sample; the other checks are not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from diloco.plan import methods
from diloco.plan.methods import model_of_layers
from diloco.plan.simulate import Group, Message, Method, required_rates, simulate
from diloco.plan.traffic import Bytes

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
GRID = tuple(round(float(x), 2) for x in np.logspace(-1, 3, 50))
"""Gbit/s."""
STEPS = 400
SCALE = 1.0133
"""Table 1's data-parallel hours imply 1.33 % more bits than 16 · 1e9."""
SIZES = {"1B": (1e9, 24, 0.1), "10B": (1e10, 48, 0.8), "100B": (1e11, 108, 4.9)}
"""Parameters, layers, seconds a step."""
TABLE_4 = {
    "1B": {
        "Data-Parallel": "86.8 152.6 184.2 222.3 569.0",
        "Vanilla DiLoCo": "1.4 6.2 13.3 23.3 86.8",
        "Streaming DiLoCo": "1.4 5.2 9.1 16.0 28.1",
        "+ overlapped com.": "1.4 4.3 6.2 9.1 11.0",
        "+ overlapped FP4 com.": "0.4 0.9 1.7 2.0 3.0",
    },
    "10B": {
        "Data-Parallel": "104.8 222.3 222.3 268.3 471.5",
        "Vanilla DiLoCo": "1.7 7.5 16.0 33.9 104.8",
        "Streaming DiLoCo": "1.7 5.2 9.1 13.3 19.3",
        "+ overlapped com.": "1.7 3.6 5.2 6.2 7.5",
        "+ overlapped FP4 com.": "0.4 0.9 1.4 1.4 1.7",
    },
    "100B": {
        "Data-Parallel": "184.2 323.8 390.7 390.7 471.5",
        "Vanilla DiLoCo": "3.0 11.0 23.3 49.4 184.2",
        "Streaming DiLoCo": "2.4 6.2 9.1 11.0 19.3",
        "+ overlapped com.": "1.7 3.6 4.3 5.2 5.2",
        "+ overlapped FP4 com.": "0.5 0.9 1.1 1.1 1.4",
    },
}
SCALING_LAWS_6 = {
    ("10B", 1e10, 48, 0.8): {
        1: "104.8 184.2 222.3 222.3 390.7",
        10: "16.0 49.4 86.8 152.6 222.3",
        50: "3.0 11.0 23.3 41.0 126.5",
        100: "1.4 6.2 13.3 23.3 86.8",
        300: "0.5 2.0 4.3 9.1 41.0",
    },
    ("Llama3-405B", 405e9, 126, 26.0): {
        1: "126.5 222.3 268.3 323.8 323.8",
        100: "2.0 7.5 16.0 33.9 126.5",
        300: "0.7 3.0 6.2 13.3 59.6",
    },
    ("DeepSeek-V3", 671e9, 61, 20.0): {
        1: "323.8 569.0 686.6 686.6 1000.0",
        100: "4.3 16.0 41.0 72.0 268.3",
        300: "1.7 6.2 13.3 28.1 126.5",
    },
}
"""Scaling Laws for DiLoCo (arXiv 2503.09799), Table 6, the rows that we have; 1 is data-parallel."""
EAGER_5 = {"1B": "2.4 3.6 4.3 4.3 4.3", "10B": "1.4 2.4 2.4 3.0 3.0", "100B": "0.9 1.7 2.0 2.0 2.0"}
"""Eager Updates (arXiv 2502.12996), Table 5, overlap 1, FP4, headed H=30; met only by a fragment every step."""


@dataclass(frozen=True)
class Cell:
    table: str
    row: str
    target: float
    published: str
    point: int
    """The grid point that our own table would print."""

    @property
    def computed(self) -> str:
        return f"{GRID[self.point]:.1f}"

    @property
    def steps(self) -> int:
        """Grid steps between the two; one decimal does not always tell neighbours apart."""
        return min(abs(self.point - i) for i, x in enumerate(GRID) if f"{x:.1f}" == self.published)


@dataclass(frozen=True)
class Check:
    what: str
    published: str
    computed: str


def bits16(n: float) -> float:
    return 2 * n


def bits4(n: float) -> float:
    return n / 2


def rows(parameters: float, layers: int, sync_every: int = 100) -> dict[str, Method]:
    """The five rows of Table 4."""
    model = model_of_layers(parameters, layers)
    pieces, strided = model.pieces(), model.fragments("strided:3")
    return {
        "Data-Parallel": methods.data_parallel(pieces, bits16),
        "Vanilla DiLoCo": methods.diloco(pieces, sync_every, bits16),
        "Streaming DiLoCo": _streaming(strided, layers, sync_every, 0, bits16),
        "+ overlapped com.": _streaming(strided, layers, sync_every, 1, bits16),
        "+ overlapped FP4 com.": _streaming(strided, layers, sync_every, 1, bits4),
    }


def _streaming(
    fragments: Sequence[Sequence[Message]], layers: int, sync_every: int, overlap: int, nbytes: Bytes
) -> Method:
    """Streaming as in the paper's table: a fragment every round(sync_every / fragments) steps, from the first step."""
    return _fragment_every(max(1, round(sync_every / len(fragments))), fragments, layers, overlap, nbytes)


def _fragment_every(
    steps: int, fragments: Sequence[Sequence[Message]], layers: int, overlap: int, nbytes: Bytes
) -> Method:
    messages = [sorted(fragment, reverse=True) for fragment in fragments]

    def sends(step: int) -> Sequence[Message]:
        return messages[step // steps % len(messages)] if step % steps == 0 else ()

    return Method(layers, sends, nbytes, steps * len(fragments), overlap)


def table_4(scale: float = SCALE) -> list[Cell]:
    cells: list[Cell] = []
    for size, (parameters, layers, seconds) in SIZES.items():
        for name, each in rows(parameters * scale, layers).items():
            cells += _cells(f"Table 4, {size}", name, each, seconds, TABLE_4[size][name])
    return cells


def other_tables() -> list[Cell]:
    """Tables that were not used to find the rules, with nominal sizes."""
    cells: list[Cell] = []
    for (size, parameters, layers, seconds), published_rows in SCALING_LAWS_6.items():
        pieces = model_of_layers(parameters, layers).pieces()
        for sync_every, published in published_rows.items():
            each = (
                methods.diloco(pieces, sync_every, bits16) if sync_every > 1 else methods.data_parallel(pieces, bits16)
            )
            row = f"sync_every {sync_every}" if sync_every > 1 else "Data-Parallel"
            cells += _cells(f"2503.09799 Table 6, {size}", row, each, seconds, published)
    for size, published in EAGER_5.items():
        parameters, layers, seconds = SIZES[size]
        fragments = model_of_layers(parameters, layers).fragments("strided:3")
        each = _fragment_every(1, fragments, layers, 1, bits4)
        cells += _cells(f"2502.12996 Table 5, {size}", "overlap 1, FP4", each, seconds, published)
    return cells


def checks() -> list[Check]:
    """Published numbers that stand alone, outside the tables."""
    parameters, layers, seconds = SIZES["1B"]
    named = rows(parameters * SCALE, layers)
    group, gigabit = Group(seconds), 1e9
    slow = {name: 1 / float(simulate(named[name], group, gigabit, STEPS)[0]) for name in named}
    deepseek = model_of_layers(671e9, 61)
    fp4 = _streaming(deepseek.fragments("strided:3"), 61, 100, 1, bits4)
    hundred = model_of_layers(1e11, 108)
    sweep = [
        required_rates(methods.streaming(hundred.fragments("strided:3"), 108, 100, overlap, bits4), Group(4.9), [0.99])[
            0
        ]
        for overlap in (5, 10)
    ]
    floors = [n * 4 / (100 * t) / 1e9 for n, _, t in SIZES.values()]
    return [
        Check("Table 1: slowdown of data-parallel at 1 Gbit/s", "162.5", f"{slow['Data-Parallel']:.1f}"),
        Check("Table 1: slowdown of streaming at 1 Gbit/s", "1.30", f"{slow['+ overlapped FP4 com.']:.2f}"),
        Check("Figure 16: DeepSeek-V3, streaming, near full utilisation", "about 4 Gbit/s",
              f"{required_rates(fp4, Group(20.1), [0.99])[0] / 1e9:.1f} Gbit/s at 99 %"),
        Check("100B: overlap 10 instead of 5, rate for 99 %", "little gain",
              f"{sweep[0] / 1e9:.2f} and {sweep[1] / 1e9:.2f} Gbit/s"),
        Check("least rate for full utilisation, FP4, 1B / 10B / 100B", "–",
              " / ".join(f"{rate:.2f}" for rate in floors) + " Gbit/s"),
    ]  # fmt: skip


def printed(method: Method, seconds: float) -> list[int]:
    """A row of the table by the paper's rule: the last grid point that falls short of each target."""
    steps = max(STEPS, 2 * method.period)
    shares = simulate(method, Group(seconds), np.array(GRID) * 1e9, steps)
    out = []
    for target in TARGETS:
        reached = np.flatnonzero(shares >= target)
        first = int(reached[0]) if len(reached) else len(GRID)
        out.append(max(first - 1, 0))
    return out


def score(cells: Iterable[Cell]) -> tuple[int, int, int]:
    """Cells that are equal, cells within one grid step, all cells."""
    cells = list(cells)
    return sum(c.computed == c.published for c in cells), sum(c.steps <= 1 for c in cells), len(cells)


def _cells(table: str, row: str, method: Method, seconds: float, published: str) -> list[Cell]:
    points = printed(method, seconds)
    return [Cell(table, row, *cell) for cell in zip(TARGETS, published.split(), points, strict=True)]
