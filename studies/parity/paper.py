"""The paper's method, claim by claim: AdamW inside, a fixed outer optimizer.

Learning rates were tuned on seed 0, on a grid with √2 between neighbors; those runs are in results.jsonl too.
"""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.record import table
from studies.parity.cell import Cell, data_parallel
from studies.parity.spread import Bar, signed
from studies.parity.study import MANY, Study

LR = 0.0113
NARROW, WIDTH, WIDE = 16, 32, 64
"""Almost all rows have WIDTH."""
_dp = data_parallel(lr=LR, width=WIDTH)
_streaming = Cell(lr=LR, outer_lr=0.7, width=WIDTH)
_plain = {"fragments": "balanced:1", "overlap": 0, "codec": "float32"}
"""The complete model at once, in fp32, waiting for the result."""
DP, DILOCO, STREAMING = "data-parallel", "DiLoCo", "streaming, overlap 1, E3M0"


def at_width(width: int, name: str) -> str:
    return name if width == WIDTH else f"width {width}: {name}"


ROWS: dict[str, Cell] = {
    DP: _dp,
    STREAMING: _streaming,
    DILOCO: replace(_streaming, **_plain),
    "fp32 on the wire": replace(_streaming, codec="float32"),
    "overlap 5": replace(_streaming, overlap=5),
    at_width(WIDE, DP): replace(_dp, width=WIDE),
    at_width(WIDE, STREAMING): replace(_streaming, width=WIDE),
    at_width(NARROW, DP): replace(_dp, width=NARROW, lr=0.008),
    at_width(NARROW, STREAMING): replace(_streaming, width=NARROW, lr=0.008),
    "inner lr tuned too": replace(_streaming, lr=0.016),
    "random zeroing": replace(_streaming, codec="zeroing", outer_lr=2.8),
    "outer momentum 0.9": replace(_streaming, momentum=0.9, outer_lr=0.28),
    "M = 4": replace(_streaming, replicas=4),
    "M = 8": replace(_streaming, replicas=8),
    "M = 8, mean sent in fp32": replace(_streaming, replicas=8, second="float32"),
    "sync_every 100": replace(_streaming, sync_every=100),
    "sync_every 10": replace(_streaming, sync_every=10),
    "DiLoCo, sync_every 10": replace(_streaming, sync_every=10, **_plain),
    "M = 1": replace(_streaming, replicas=1),
    "plain averaging": replace(_streaming, outer_lr=1.0, momentum=0.0, **_plain),
    "keep_local 0.5": replace(_streaming, keep_local=0.5),
    "overlap 10": replace(_streaming, overlap=10),
    "overlap 5, keep_local 0.5": replace(_streaming, overlap=5, keep_local=0.5),
    "overlap 10, keep_local 0.5": replace(_streaming, overlap=10, keep_local=0.5),
    "streaming, fp32, no overlap": replace(_streaming, codec="float32", overlap=0),
    "overlap 1 and 5": replace(_streaming, overlap_of_last=5),
    "unsynced layers frozen": replace(_streaming, freeze=True),
    "bf16 on the wire": replace(_streaming, codec="bfloat16"),
    "int8 on the wire": replace(_streaming, codec="int8"),  # a codec that was cut; part of the estimate of noise
    "sequential": replace(_streaming, fragments="sequential:3"),
}
_UNLIKE = {
    "inner lr tuned too", "random zeroing", "outer momentum 0.9", "M = 4", "M = 8", "M = 8, mean sent in fp32",
    "sync_every 100", "sync_every 10", "DiLoCo, sync_every 10", "M = 1", "plain averaging", "unsynced layers frozen",
}  # fmt: skip
"""Differ from streaming in more than what is sent and when it is merged: their noise is their own."""
_HEADLINES = {name: MANY for name in list(ROWS)[:5]} | {at_width(NARROW, name): MANY for name in (DP, STREAMING)}
_HEADLINES |= {at_width(WIDE, name): range(1, 5) for name in (DP, STREAMING)}
PAPER = Study(
    Path(__file__).parent / "results.jsonl", ROWS, _HEADLINES,
    alike=lambda name: None if name in _UNLIKE else ROWS[name].width,
)  # fmt: skip


def data_parallel_of(row: str) -> str:
    """The data-parallel row of the same width."""
    return at_width(ROWS[row].width, DP)


def bars() -> list[Bar]:
    gap = PAPER.gap
    return [
        *(Bar(f"{at_width(width, STREAMING)}, against data-parallel",
              gap(at_width(width, STREAMING), at_width(width, DP)), high=1.0)
          for width in (WIDE, WIDTH, NARROW)),
        Bar("streaming, overlap 1, E3M0, against DiLoCo", gap(STREAMING, DILOCO), -0.5, 0.5),
        Bar("fp32 on the wire, against E3M0", gap("fp32 on the wire", STREAMING), -0.2, 0.2),
        Bar("random zeroing, against E3M0", gap("random zeroing", STREAMING), low=0.5),
        Bar("overlap 5, against 1", gap("overlap 5", STREAMING), -0.3, 0.3),
        Bar("one replica, against the model that is exported", gap(STREAMING, STREAMING, "replica"), low=0.0),
        Bar("M = 4, against M = 2", gap("M = 4", STREAMING), low=0.0),
        Bar("M = 8, against M = 4", gap("M = 8", "M = 4"), low=0.0),
    ]  # fmt: skip


def rows() -> str:
    head = ("row", "lr", "outer lr", "seeds", "loss", "gap to data-parallel, %", "gap to streaming, %")
    return table(head, [_line(name, cell) for name, cell in ROWS.items()])


def _line(name: str, cell: Cell) -> tuple[str, ...]:
    losses = [result["final"] for result in PAPER.runs(name).values()]
    against = [_gap(name, data_parallel_of(name)), _gap(name, STREAMING) if cell.width == WIDTH else ""]
    outer_lr = f"{cell.outer_lr:g}" if cell.replicas else ""
    return name, f"{cell.lr:g}", outer_lr, str(len(losses)), f"{fmean(losses):.4f}" if losses else "not run", *against


def _gap(row: str, against: str) -> str:
    gap = None if row == against else PAPER.gap(row, against)
    return "" if gap is None else signed(gap)
