"""The lines of the report: what is compared with what."""

from dataclasses import dataclass, replace
from typing import Any

from studies.parity.cell import Cell, data_parallel

LR, OUTER = "lr", "outer_lr"
START = {LR: 0.0113, OUTER: 0.7}
WIDTH, NARROW, WIDE = 32, 16, 64
"""The width of almost all rows, and those of the two other sizes."""
WIDTHS = (NARROW, WIDTH, WIDE)


@dataclass(frozen=True)
class Row:
    """A line of the report: a setting, what is tuned, and the row from which it takes tuned values."""

    name: str
    cell: Cell
    tune: tuple[str, ...] = ()
    like: str | None = None
    against: tuple[str, ...] = ()
    """Rows it is compared with."""
    headline: bool = False
    """Gets as many seeds as resolve its comparisons."""


BASE = Cell(lr=0, width=WIDTH)
"""Streaming, overlap 1, E3M0; lr and outer_lr come from tuning."""
PLAIN = {"fragments": "balanced:1", "overlap": 0, "codec": "float32"}
"""The complete model at once, in fp32, waiting for the result."""
DP, DILOCO, STREAMING = "data-parallel", "DiLoCo", "streaming, overlap 1, E3M0"


def at_width(width: int, name: str) -> str:
    return name if width == WIDTH else f"width {width}: {name}"


def _sizes(width: int) -> tuple[Row, Row]:
    """Data-parallel and streaming at another width."""
    dp = at_width(width, DP)
    streaming = replace(BASE, width=width, outer_lr=START[OUTER])
    return (
        Row(dp, data_parallel(lr=0, width=width), (LR,), like=DP, headline=True),
        Row(at_width(width, STREAMING), streaming, like=dp, against=(dp,), headline=True),
    )


def _ablation(name: str, tune: tuple[str, ...] = (), like: str = STREAMING, **changes: Any) -> Row:
    """One change to streaming."""
    return Row(name, replace(BASE, **changes), tune, like=like, against=(STREAMING, DP))


ROWS = (
    Row(DP, data_parallel(lr=0, width=WIDTH), (LR,), headline=True),
    Row(STREAMING, replace(BASE, outer_lr=START[OUTER]), (OUTER,), like=DP, headline=True, against=(DP, DILOCO)),
    Row(DILOCO, replace(BASE, **PLAIN), (OUTER,), like=STREAMING, headline=True, against=(DP,)),
    Row("fp32 on the wire", replace(BASE, codec="float32"), like=STREAMING, headline=True, against=(STREAMING,)),
    Row("overlap 5", replace(BASE, overlap=5), like=STREAMING, headline=True, against=(STREAMING,)),
    *_sizes(WIDE),
    *_sizes(NARROW),
    Row("inner lr tuned too", BASE, (LR, OUTER), against=(DP, STREAMING)),
    _ablation("random zeroing", (OUTER,), codec="zeroing", outer_lr=2.0),
    _ablation("outer momentum 0.9", (OUTER,), momentum=0.9, outer_lr=0.4),
    _ablation("M = 4", replicas=4),
    _ablation("M = 8", replicas=8),
    _ablation("M = 8, mean sent in fp32", replicas=8, second="float32"),
    _ablation("sync_every 100", sync_every=100),
    _ablation("sync_every 10", sync_every=10),
    _ablation("DiLoCo, sync_every 10", sync_every=10, **PLAIN),
    _ablation("M = 1", replicas=1),
    _ablation("plain averaging", outer_lr=1.0, momentum=0.0, **PLAIN),
    _ablation("keep_local 0.5", keep_local=0.5),
    _ablation("overlap 10", overlap=10),
    _ablation("overlap 5, keep_local 0.5", like="keep_local 0.5", overlap=5, keep_local=0.5),
    _ablation("overlap 10, keep_local 0.5", like="keep_local 0.5", overlap=10, keep_local=0.5),
    _ablation("streaming, fp32, no overlap", codec="float32", overlap=0),
    _ablation("overlap 1 and 5", overlap_of_last=5),
    _ablation("unsynced layers frozen", freeze=True),
    _ablation("bf16 on the wire", codec="bfloat16"),
    _ablation("int8 on the wire", codec="int8"),  # a codec that was cut; its runs are part of the estimate of noise
    _ablation("sequential", fragments="sequential:3"),
)
UNLIKE = (
    "inner lr tuned too", "random zeroing", "outer momentum 0.9", "M = 4", "M = 8", "M = 8, mean sent in fp32",
    "sync_every 100", "sync_every 10", "DiLoCo, sync_every 10", "M = 1", "plain averaging", "unsynced layers frozen",
)  # fmt: skip
"""Differ from streaming in more than what is sent and when it is merged: their noise is their own."""
NAMED = {row.name: row for row in ROWS}


def data_parallel_of(row: Row) -> Row:
    """The data-parallel row of the same width."""
    return NAMED[at_width(row.cell.width, DP)]
