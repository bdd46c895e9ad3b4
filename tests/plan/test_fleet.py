"""Fleets whose chips fail: the closed form agrees with the event simulation, and comes close to published figures."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.cli import main
from diloco.plan.fleet import Fleet, group_of, outcome, spare_slices
from studies.paper import fleet as paper
from studies.paper.events import simulate

YEAR = 365.25 * 86_400
SMALL = Fleet(chips=256, mtbf=YEAR / 10, slice=8, detect=30, restart=600, resize=60, repair=36_000, save_every=600)
LARGE = Fleet(chips=300_000, mtbf=YEAR, slice=64, detect=10, restart=120, resize=20, repair=3600, save_every=60)


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize(
    ("fleet", "members", "days"),
    [
        (SMALL, 1, 20_000),
        (replace(SMALL, quorum=3), 4, 20_000),
        (SMALL, 32, 5000),  # a slice each: an elastic member has none left to continue with
        (LARGE, 1, 60),
        (replace(LARGE, save_every=0.0), 4, 60),
        (replace(LARGE, chips=1_000_000, slice=1), 16, 30),
    ],
)
def test_closed_form_and_simulation_agree(fleet, members, days, elastic):
    predicted = outcome(fleet, members, elastic=elastic)
    simulated = simulate(fleet, members, elastic=elastic, days=days)
    assert simulated.goodput == pytest.approx(predicted.goodput, abs=0.006)
    assert simulated.uptime == pytest.approx(predicted.uptime, abs=0.006)


fleets = st.builds(
    Fleet, chips=st.sampled_from([64, 1000, 100_000, 5_000_000]), mtbf=st.sampled_from([YEAR / 50, YEAR, 6 * YEAR]),
    slice=st.sampled_from([1, 8, 256]), detect=st.sampled_from([0, 30]), restart=st.sampled_from([0, 60, 3600]),
    resize=st.sampled_from([0, 10, 300]), repair=st.sampled_from([0, 600, 86_400]),
    save_every=st.sampled_from([0, 60, 7200]),
)  # fmt: skip


@given(fleets, st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_goodput_is_a_share_and_never_grows_with_a_worse_input(fleet, members, elastic):
    usual = outcome(fleet, members, elastic=elastic)
    assert 0 <= usual.goodput <= usual.uptime + 1e-9 <= 1 + 2e-9
    for name in ("detect", "restart", "resize", "save_every"):  # repair changes the spares, in whole slices
        worse = outcome(replace(fleet, **{name: 2 * getattr(fleet, name) + 1}), members, elastic=elastic)
        # Where next to nothing gets done, members that stay away longer also fail less often.
        assert worse.goodput <= max(usual.goodput + 1e-4, 0.01), name
    assert outcome(replace(fleet, mtbf=math.inf), members, elastic=elastic).goodput == pytest.approx(1)


@pytest.mark.parametrize("elastic", [False, True])
def test_more_members_lose_less_and_a_quorum_costs(elastic):
    goodputs = [outcome(LARGE, members, elastic=elastic).goodput for members in (1, 2, 4, 8)]
    assert goodputs == sorted(goodputs) and goodputs[-1] > goodputs[0] + 0.1
    uptimes = [outcome(replace(LARGE, quorum=quorum), 4, elastic=elastic).uptime for quorum in (1, 2, 3, 4)]
    assert uptimes == sorted(uptimes, reverse=True)
    assert uptimes[-1] == pytest.approx(group_of(LARGE, 4, elastic=elastic).running ** 4)


def test_the_chosen_number_of_spares_is_the_best(monkeypatch):
    best = spare_slices(LARGE, 2)
    goodputs = {}
    for spares in range(best - 3, best + 4):
        monkeypatch.setattr("diloco.plan.fleet.spare_slices", lambda *_, spares=spares: spares)
        goodputs[spares] = outcome(LARGE, 2, elastic=False).goodput
    assert max(goodputs, key=goodputs.__getitem__) == best > LARGE.slices(2) * 0.005


@pytest.mark.slow
def test_nine_published_cells_are_met_with_one_set_of_assumptions():
    cells = paper.cells()
    assert len(cells) == 9
    assert max(abs(cell.ours - cell.published) for cell in cells) < 2.5
    assert max(abs(cell.ours - cell.simulated) for cell in cells) < 0.5
    assumed = paper.assumed(paper.FITTED_ON)
    assert {name: getattr(assumed, name) for name in paper.GRID} == paper.fitted()
    for chips in (1_200_000, 2_400_000):  # published: 100 % from four members on
        assert outcome(paper.assumed(chips), 4, elastic=True).uptime > 0.995


def test_the_tables_fit_and_the_numbers_of_members_that_fit_are_compared(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["fleet", "--chips", "2.4m", "--mtbf", "1y"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out and max(map(len, out.splitlines())) <= 60
    assert "a chip fails every 13.1 s" in " ".join(out.split())
    for chips, members in (("16", [1, 2]), ("64", [1, 2, 4, 8]), ("16k", [1, 2, 4, 8, 16])):
        assert main(["fleet", "--chips", chips, "--json"]) == 0
        assert [row["members"] for row in json.loads(capsys.readouterr().out)["rows"]] == members * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--chips is missing"),
        (["--chips", "few"], "--chips few: use a whole number"),
        (["--chips", "1k", "--members", "1"], "use 2 or more"),
        (["--chips", "64", "--members", "16"], "16 members need"),
        (["--chips", "8"], "2 members need"),
        (["--chips", "1k", "--quorum", "3"], "use 1 to 2"),
        (["--chips", "1k", "--slice", "0"], "at least 1"),
        (["--chips", "1k", "--mtbf", "0y"], "above 0"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys, words, message):
    assert main(["fleet", *words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
