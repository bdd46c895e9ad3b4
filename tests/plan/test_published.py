"""The simulator gives the figures of the paper and of two later ones."""

import pytest

from diloco.plan import methods
from diloco.plan.methods import model_of_layers
from diloco.plan.simulate import Group, required_rates
from studies.paper import tables as paper
from tests.plan.test_plan import count_steps


@pytest.mark.slow
def test_table_4_is_reproduced_and_in_time(monkeypatch):
    """In time: each row is one simulation of 400 steps (or two periods), for all rates of the grid at once."""
    steps = count_steps(monkeypatch)
    cells = paper.table_4()
    assert len(steps) == 3 * 5 * 400
    assert len(cells) == 75
    assert sum(cell.computed == cell.published for cell in cells) >= 72
    assert max(cell.steps for cell in cells) <= 1


@pytest.mark.slow
def test_with_nominal_sizes_the_tables_of_the_same_simulator_are_close():
    exact, near, count = paper.score(paper.table_4(1.0))
    assert exact >= 65 and near == count == 75
    cells = paper.other_tables()
    assert paper.score([cell for cell in cells if cell.table.startswith("2502")]) == (15, 15, 15)
    assert paper.score([cell for cell in cells if cell.table.startswith("2503")])[1:] == (54, 55)


def test_table_1_slowdowns_and_deepseek():
    checks = {check.what: check.computed for check in paper.checks()}
    assert checks["Table 1: slowdown of data-parallel at 1 Gbit/s"] == "162.5"
    assert float(checks["Table 1: slowdown of streaming at 1 Gbit/s"]) == pytest.approx(1.30, abs=0.015)
    deepseek = float(checks["Figure 16: DeepSeek-V3, streaming, near full utilisation"].split()[0])
    assert deepseek == pytest.approx(4.0, rel=0.06)


def test_the_paper_sees_little_gain_beyond_an_overlap_of_five():
    fragments = model_of_layers(1e11, 108).fragments("strided:3")
    rates = {
        overlap: required_rates(methods.streaming(fragments, 108, 100, overlap, paper.bits4), Group(4.9), [0.95, 0.99])
        for overlap in (0, 5, 20)
    }
    assert rates[0] == pytest.approx([3.02e9, 5.72e9], rel=0.01)
    assert rates[5] == pytest.approx([0.78e9, 0.81e9], rel=0.01)
    assert rates[20] == pytest.approx(rates[5], rel=1e-6)
