"""The second part: what the trainer does today, Muon inside and an outer rule that grows, beside data-parallel.

Its runs are lines of today.jsonl: python -m studies.parity.today. Learning rates are AdamW's best of the first part;
for Muon, whose updates have the size of AdamW's, √2 times as much was tried and was no better.
"""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.record import table
from studies.parity.cell import Cell, data_parallel
from studies.parity.spread import Bar, signed
from studies.parity.study import SEEDS, Study, arguments, main

ALL = 1 << 21
"""More than all of the held-out text, which has 0.6 MB."""
LR = 0.0113
TAIL = 60
_dp = replace(data_parallel(lr=LR), evaluated=ALL)
_dp_muon = replace(_dp, inner="muon")
_streaming = Cell(lr=LR, momentum=0, outer="growing", evaluated=ALL)
_muon = replace(_streaming, inner="muon")
# As Nesterov(many=True), to rounding.
_many = replace(_muon, outer="capped", outer_lr=0.9, momentum=0.8)
_fixed = replace(_muon, outer="following", outer_lr=0.7, momentum=0.5)
ADAMW, MUON, DEFAULTS = "data-parallel, AdamW", "data-parallel, Muon", "the trainer's defaults"
SAME = "defaults with AdamW"
TWO_BITS, TOPK = "defaults, 2 bits", "defaults, top-k"
RARE = f"{TWO_BITS}, sync_every 90"
ONE, FOUR, EIGHT = (f"defaults, M = {replicas}" for replicas in (1, 4, 8))
AS_TWO = "M = 8, outer as with two"
LARGEST, KEPT = "1M parameters: ", "batch and tokens × 2: "
"""Such rows are compared with those of the same prefix."""
AVERAGED = f"data-parallel, Muon, mean of the last {TAIL} steps' weights"


def _larger(cell: Cell, batch: int) -> Cell:
    """A larger batch at equal tokens; the learning rate grows with its root."""
    return replace(cell, batch=batch, steps=cell.steps // batch, lr=round(cell.lr * batch**0.5, 4))


def _largest(cell: Cell) -> Cell:
    """20 bytes for each of 1.0M parameters. The learning rate is that of width 64: it was not tuned again."""
    return replace(cell, width=112, batch=2, steps=4920)


ROWS: dict[str, Cell] = {
    DEFAULTS: _muon,
    ADAMW: _dp,
    MUON: _dp_muon,
    SAME: _streaming,
    TWO_BITS: replace(_muon, codec="twobit"),
    **{f"{TWO_BITS}, sync_every {every}": replace(_muon, codec="twobit", sync_every=every) for every in (60, 90, 270)},
    TOPK: replace(_muon, codec="topk"),  # a codec that was cut; part of the estimate of noise
    "defaults, outer 0.7/0.5": replace(_fixed, outer="paper"),
    "defaults, outer 0.7/0.5 that follows the lr": _fixed,
    "defaults, outer 0.28/0.9 that follows the lr": replace(_fixed, outer_lr=0.28, momentum=0.9),
    "defaults, overlap 5": replace(_muon, overlap=5),
    "defaults, keep_local 0.5": replace(_muon, keep_local=0.5),
    f"{TWO_BITS}, overlap 5": replace(_muon, codec="twobit", overlap=5),
    f"{TWO_BITS}, keep_local 0.5": replace(_muon, codec="twobit", keep_local=0.5),
    f"{TWO_BITS} with AdamW": replace(_streaming, codec="twobit"),
    f"{TWO_BITS}, M = 4": replace(_muon, codec="twobit", replicas=4),
    f"{AS_TWO}, 2 bits": replace(_muon, codec="twobit", replicas=8),
    ONE: replace(_muon, replicas=1),
    FOUR: replace(_muon, replicas=4),
    f"{FOUR}, outer 1/0.5": replace(_fixed, replicas=4, outer_lr=1.0),
    EIGHT: replace(_many, replicas=8),
    AS_TWO: replace(_muon, replicas=8),
    f"{AS_TWO}, outer 1.41/0.5": replace(_fixed, replicas=8, outer_lr=1.41),
    f"{AS_TWO}, outer 1/0 to 0.9/0.9": replace(_many, replicas=8, momentum=0.9),
    f"{AS_TWO}, outer 1/0 to 1.2/0.8": replace(_many, replicas=8, outer_lr=1.2),
    f"{AS_TWO}, mean sent in bfloat16": replace(_muon, replicas=8, second="bfloat16"),
    f"{AS_TWO}, sync_every 12": replace(_muon, replicas=8, sync_every=12),
    f"{DEFAULTS}, outer as with eight": _many,
    f"{FOUR}, outer as with eight": replace(_many, replicas=4),
    AVERAGED: replace(_dp_muon, tail=TAIL),
    f"{KEPT}{FOUR}": replace(_muon, replicas=4, batch=2),
    f"{KEPT}{MUON}": replace(_dp_muon, batch=2),
    f"{KEPT}{MUON}, lr × √2": replace(_dp_muon, batch=2, lr=0.016),
    **{
        f"batch × {batch}: {name}": _larger(cell, batch)
        for batch in (2, 4)
        for name, cell in ((DEFAULTS, _muon), (MUON, _dp_muon))
    },
    f"batch × 2: {FOUR}": _larger(replace(_muon, replicas=4), 2),
    **{LARGEST + name: _largest(cell) for name, cell in ((DEFAULTS, _muon), (ADAMW, _dp), (MUON, _dp_muon))},
}
"""The most important first."""


def _alike(name: str) -> str | None:
    """Rows of one inner optimizer, supposing that larger models and batches vary no more. A mean of weights varies with
    the run that it is of."""
    return None if name == AVERAGED else ROWS[name].inner


TODAY = Study(
    Path(__file__).parent / "today.jsonl", ROWS, dict.fromkeys((DEFAULTS, ADAMW, MUON), SEEDS), alike=_alike
)  # fmt: skip


def _bits(row: str) -> str:
    """Sent for each parameter in 30 steps. What `finish()` sends makes up for the first period, in which some wait."""
    results = TODAY.runs(row).values()
    parts = [8 * r["bytes_sent"] / r["parameters"] / r["cell"]["steps"] * _muon.sync_every for r in results]
    return f"{fmean(parts):.3g}"


def bars() -> list[Bar]:
    gap = TODAY.gap
    return [
        Bar("the defaults, to data-parallel AdamW", gap(DEFAULTS, ADAMW), high=-1.5),
        Bar("the same with 1M parameters", gap(LARGEST + DEFAULTS, LARGEST + ADAMW), high=-1.5),
        Bar("the defaults, to data-parallel Muon", gap(DEFAULTS, MUON), high=0.5),
        Bar("the defaults with AdamW, to data-parallel AdamW", gap(SAME, ADAMW), high=0.5),
        Bar("four replicas, to data-parallel Muon", gap(FOUR, MUON), high=1.0),
        Bar("eight replicas, to data-parallel Muon", gap(EIGHT, MUON), high=2.0),
        Bar("2 bits, to 4 bits", gap(TWO_BITS, DEFAULTS), high=0.2),
        Bar("below one bit: 2 bits with sync_every 90, to 4 bits with 30", gap(RARE, DEFAULTS), high=1.0),
        Bar("below one bit: top-k, to 4 bits", gap(TOPK, DEFAULTS), high=1.0),
    ]


def rows() -> str:
    lines = [_line(name, cell) for name, cell in ROWS.items() if TODAY.runs(name)]
    return table(("row", "seeds", "loss", "to data-parallel Muon, %", "to the defaults, %", "bits"), lines)


def tried() -> str:
    """What was changed for several replicas, against as many with the outer optimizer that two have."""
    names = [(name, base) for base in (DEFAULTS, FOUR, AS_TWO) for name in ROWS if name.startswith(f"{base}, ")]
    names = [(EIGHT, AS_TWO), *((name, base) for name, base in names if base != DEFAULTS or "eight" in name)]
    lines = [(name.removeprefix("defaults, "), signed(gap), str(gap.n), _bits(name))
             for name, base in names if (gap := TODAY.gap(name, base)) is not None]  # fmt: skip
    return table(("setting", "change, %", "seeds", "bits a parameter in 30 steps"), lines)


def _line(name: str, cell: Cell) -> tuple[str, ...]:
    results = TODAY.runs(name).values()
    bits = _bits(name) if cell.replicas else ""
    loss = f"{fmean(result['final'] for result in results):.4f}"
    return name, str(len(results)), loss, _gap(name, MUON), _gap(name, DEFAULTS), bits


def _gap(row: str, against: str) -> str:
    """To the row of the same size and batch."""
    prefix, colon, _ = row.rpartition(": ")
    other = prefix + colon + against
    gap = TODAY.gap(row, other) if other in ROWS and other != row else None
    return "" if gap is None else signed(gap)


if __name__ == "__main__":
    main(TODAY, arguments(__doc__).parse_args())
