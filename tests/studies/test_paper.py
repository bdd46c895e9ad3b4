"""The paper's tables, recomputed by the planner's simulator."""

import json
from functools import cache

import pytest

from studies.paper import tables
from studies.paper.__main__ import as_json, as_text

pytestmark = pytest.mark.slow  # seconds of simulation; tests/plan has the tables one by one


def test_the_papers_tables_are_printed_and_the_json_has_the_same_scores(monkeypatch):
    for name in ("table_4", "other_tables"):
        monkeypatch.setattr(tables, name, cache(getattr(tables, name)))
    out = as_text()
    assert "Table 4: 72 of 75 cells equal, 75 within one grid step" in out
    assert "569.0 (569.0)" in out and "390.7 (471.5) *" in out
    assert json.loads(as_json())["scores"] == {"table 4": [72, 75, 75], "table 4, nominal": [65, 75, 75],
                                               "others": [42, 69, 70]}  # fmt: skip
