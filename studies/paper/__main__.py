"""Recompute the paper's bandwidth tables beside the published numbers. Run: python -m studies.paper [--json]"""

import json
import sys
from dataclasses import asdict

from diloco.plan.table import Sheet
from diloco.runs.units import percent
from studies.paper import tables


def as_text() -> str:
    out = ""
    cells = tables.table_4()
    for number in tables.SIZES:
        mine = [cell for cell in cells if cell.table.endswith(f", {number}")]
        out += _cells(f"Table 4, {number}: Gbit/s for a utilisation, ours (published)", mine)
    equal, near, count = tables.score(cells)
    nominal = tables.score(tables.table_4(1.0))
    out += f"Table 4: {equal} of {count} cells equal, {near} within one grid step; parameters "
    out += f"{percent(tables.SCALE - 1, signed=True)}, as Table 1 implies.\n"
    out += f"With nominal sizes: {nominal[0]} equal, {nominal[1]} within one grid step. A grid step is 21 %.\n\n"
    other = tables.other_tables()
    for name in dict.fromkeys(cell.table for cell in other):
        out += _cells(name, [cell for cell in other if cell.table == name])
    for source in ("2503.09799 Table 6", "2502.12996 Table 5"):
        score = tables.score(cell for cell in other if cell.table.startswith(source))
        out += f"arXiv {source}: {score[0]} of {score[2]} cells equal, {score[1]} within one grid step.\n"
    checks = [[check.what, check.published, check.computed] for check in tables.checks()]
    return f"{out}\n{Sheet('Other numbers', ['what', 'published', 'ours'], checks, left=3)}"


def as_json() -> str:
    nominal, scaled, other = tables.table_4(1.0), tables.table_4(), tables.other_tables()
    cells = [asdict(cell) | {"computed": cell.computed} for cell in (*scaled, *other)]
    scores = {"table 4": tables.score(scaled), "table 4, nominal": tables.score(nominal), "others": tables.score(other)}
    return json.dumps({"scores": scores, "cells": cells, "checks": [asdict(c) for c in tables.checks()]}) + "\n"


def _cells(title: str, cells: list[tables.Cell]) -> str:
    lines = []
    for row in dict.fromkeys(cell.row for cell in cells):
        mine = [cell for cell in cells if cell.row == row]
        marks = (f"{c.computed} ({c.published}){'' if c.computed == c.published else ' *'}" for c in mine)
        lines.append([row, *marks])
    return str(Sheet(title, ["method", *(percent(target, digits=0) for target in tables.TARGETS)], lines))


if __name__ == "__main__":
    print(as_json() if "--json" in sys.argv[1:] else as_text(), end="")
