"""Fleets whose chips fail: closed form and event simulation agree, and come near what was published."""

import html
import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.cli import main
from diloco.plan.events import simulate
from diloco.plan.failures import Fleet, group_of, kept, outcome, spare_slices
from diloco.plan.fleet import INPUTS, effects
from studies.paper import fleet as paper
from tests.support.commands import run_here

YEAR = 365.25 * 86_400
SMALL = Fleet(chips=256, mtbf=YEAR / 10, slice=8, detect=30, restart=600, resize=60, repair=36_000, save_every=600)
LARGE = Fleet(chips=300_000, mtbf=YEAR, slice=64, detect=10, restart=120, resize=20, repair=3600, save_every=60)
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/planner.md").read_text()
SHOWN = [line.removeprefix("$ ") for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
         for line in block.splitlines() if line.startswith("$ ")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize(
    ("fleet", "members", "days"),
    [
        (SMALL, 1, 20_000),
        (replace(SMALL, spares=0.0), 1, 20_000),
        (replace(SMALL, repair=0.0), 4, 20_000),
        (replace(SMALL, quorum=3, rejoin=900), 4, 20_000),
        (replace(SMALL, grace=300), 4, 20_000),
        (replace(SMALL, grace=10_000, quorum=2), 8, 20_000),
        (SMALL, 32, 5000),  # a slice each: an elastic member has nothing to go on with
        (LARGE, 1, 60),
        (replace(LARGE, spares=0.02, save_every=0.0), 4, 60),
        (replace(LARGE, chips=1_000_000, slice=1), 16, 30),
    ],
)
def test_closed_form_and_simulation_agree(fleet, members, days, elastic):
    predicted, simulated = (
        outcome(fleet, members, elastic=elastic),
        simulate(fleet, members, elastic=elastic, days=days),
    )
    assert simulated.goodput == pytest.approx(predicted.goodput, abs=0.006)
    assert simulated.uptime == pytest.approx(predicted.uptime, abs=0.006)


def test_the_simulation_gives_what_a_count_by_hand_gives():
    """One slice, no spare: up for a mean of 1000 s, then 200 s of repair and 50 s of restart."""
    fleet = Fleet(chips=1, mtbf=1000, restart=50, repair=200)
    rng = np.random.default_rng(1)
    up = rng.exponential(1000, 100_000)
    away = 50 + rng.exponential(200, 100_000)
    for every, useful in ((0.0, up), (100.0, up // 100 * 100)):
        expected = useful.sum() / (up.sum() + away.sum())
        found = simulate(replace(fleet, save_every=every), 1, elastic=False, days=1200).goodput
        assert found == pytest.approx(expected, abs=0.01)


def test_what_is_kept_is_what_counted_checkpoints_keep():
    lasted = np.random.default_rng(0).exponential(100, 1_000_000)
    for every in (10.0, 100.0, 300.0):
        assert kept(1 / 100, every) == pytest.approx((lasted // every * every).sum() / lasted.sum(), rel=0.01)
    assert kept(1, 1e6) == 0 and kept(0, 100) == 1


ways = st.tuples(st.sampled_from([1, 2, 4, 8]), st.booleans())
fleets = st.builds(
    Fleet, chips=st.sampled_from([64, 1000, 100_000, 5_000_000]), mtbf=st.sampled_from([YEAR / 50, YEAR, 6 * YEAR]),
    slice=st.sampled_from([1, 8, 256]), detect=st.sampled_from([0, 30]), restart=st.sampled_from([0, 60, 3600]),
    rejoin=st.sampled_from([0, 600]), resize=st.sampled_from([0, 10, 300]), repair=st.sampled_from([0, 600, 86_400]),
    save_every=st.sampled_from([0, 60, 7200]), spares=st.sampled_from([None, 0.0, 0.1]),
    grace=st.sampled_from([0, 60, 1e5]),
)  # fmt: skip


@given(fleets, ways)
def test_goodput_is_a_share_and_never_grows_with_a_worse_input(fleet, way):
    members, elastic = way
    usual = outcome(fleet, members, elastic=elastic)
    assert 0 <= usual.goodput <= usual.uptime + 1e-9 <= 1 + 2e-9
    fleet = replace(fleet, grace=0)  # with it, chips that are away do not fail, and nobody waits for them
    usual = outcome(fleet, members, elastic=elastic)
    for name in ("detect", "restart", "rejoin", "resize", "repair", "save_every"):
        if name == "repair" and fleet.spares is None:
            continue  # other spares are chosen, in whole slices
        worse = outcome(replace(fleet, **{name: 2 * getattr(fleet, name) + 1}), members, elastic=elastic)
        # Where next to nothing gets done, members that stay away longer also fail less often.
        assert worse.goodput <= usual.goodput + 1e-4, name
    assert outcome(replace(fleet, mtbf=math.inf, spares=0.0), members, elastic=elastic).goodput == pytest.approx(1)


@pytest.mark.parametrize("elastic", [False, True])
def test_more_members_lose_less_and_a_quorum_costs(elastic):
    goodputs = [outcome(LARGE, members, elastic=elastic).goodput for members in (1, 2, 4, 8)]
    assert goodputs == sorted(goodputs) and goodputs[-1] > goodputs[0] + 0.1
    quorums = [outcome(replace(LARGE, quorum=least), 4, elastic=elastic) for least in (1, 2, 3, 4)]
    assert [each.uptime for each in quorums] == sorted((each.uptime for each in quorums), reverse=True)
    assert quorums[3].uptime == pytest.approx(group_of(LARGE, 4, elastic=elastic).running ** 4)


def test_the_spares_that_are_chosen_are_the_best_ones():
    best = spare_slices(LARGE, 2)
    slices = round(LARGE.chips / 2 / LARGE.slice)
    tried = {n: outcome(replace(LARGE, spares=n / slices), 2, elastic=False).goodput for n in range(best - 3, best + 4)}
    assert max(tried, key=tried.__getitem__) == best > slices * 0.005


@pytest.mark.slow
def test_nine_published_cells_are_met_with_one_set_of_assumptions():
    cells = paper.cells()
    assert len(cells) == 9
    assert max(abs(cell.ours - cell.published) for cell in cells) < 2.5
    assert max(abs(cell.ours - cell.simulated) for cell in cells) < 0.5
    assumed = paper.assumed(paper.FITTED_ON)
    assert {name: getattr(assumed, name) for name in paper.GRID} == paper.fitted()
    assert paper.written(PAGE, cells) == PAGE  # to write it again: python -m studies.paper.fleet --write
    for chips in (1_200_000, 2_400_000):  # published: 100 % from four members on
        assert outcome(paper.assumed(chips), 4, elastic=True).uptime > 0.995
    slow = replace(assumed, restart=600)
    shares = [outcome(slow, members, elastic=False).goodput for members in (1, 16)]
    assert [f"{share:.0%}" for share in shares] == ["4%", "40%"]  # as the page says


def test_the_figure_is_that_of_the_assumptions():
    assert paper.plot.svg(paper.figure()) == paper.FIGURE.read_text()
    assert paper.FIGURE.read_text().count("<circle") == 9


@pytest.mark.slow
def test_a_million_chips_for_thirty_days_agree_with_the_closed_form(tmp_path):
    code, out, err = run_here(tmp_path, "fleet", "--chips", "1m", "--mtbf", "1y", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert len(found["rows"]) == 10
    for row in found["rows"]:
        assert row["predicted"]["goodput"] == pytest.approx(row["simulated"]["goodput"], abs=0.005)


def test_effects_are_those_of_one_input_and_the_largest_is_first():
    found = effects(replace(LARGE, grace=5), 8)
    assert [effect.span for effect in found] == sorted((effect.span for effect in found), reverse=True)
    by_name = {effect.input: effect for effect in found}
    assert "rejoin" not in by_name  # 0: nothing to halve
    resize = by_name["resize"]
    assert resize.goodputs[0][0] == resize.goodputs[0][1]  # a rigid group is never resized
    assert resize.goodputs[3] == tuple(
        outcome(replace(LARGE, grace=5, resize=each), 8, elastic=True).goodput for each in (10, 40)
    )


@pytest.mark.parametrize(("quorum", "tried"), [(1, (1, 2)), (3, (1, 6)), (5, (2, 8))])
def test_a_quorum_is_halved_and_doubled_to_whole_numbers_of_members(quorum, tried):
    fleet = replace(LARGE, quorum=quorum)
    (effect,) = (each for each in effects(fleet, 8) if each.input == "quorum")
    assert effect.value == quorum
    assert effect.goodputs[0][0] == effect.goodputs[0][1]  # data-parallel training has none
    for place, elastic in ((2, False), (3, True)):
        expected = tuple(outcome(replace(fleet, quorum=each), 8, elastic=elastic).goodput for each in tried)
        assert effect.goodputs[place] == expected and expected[0] > expected[1]


def test_the_page_shows_what_each_input_matters_in_a_fleet_where_none_is_zero():
    assert f"diloco fleet {paper.SMALL}" in SHOWN
    assert {effect.input for effect in effects(paper.small(), 8)} == set(INPUTS)
    table = PAGE.partition("<!-- small -->\n")[2].partition("<!-- /small -->")[0]
    assert table == paper.effects(paper.small())  # to write it again: python -m studies.paper.fleet --write


@pytest.mark.parametrize("width", [60, 80])
def test_the_tables_fit_and_cut_no_number(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["fleet", "--chips", "2.4m", "--mtbf", "1y", "--days", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out and max(map(len, out.splitlines())) <= width
    assert out.startswith("Somewhere in this fleet a chip fails every 13.1 s.")
    for text in ("uptime", "spares", "mtbf", "simulated"):
        assert text in out


@pytest.mark.parametrize(("chips", "members"), [("16", (2,)), ("64", (2, 4, 8)), ("16k", (2, 4, 8, 16))])
def test_the_default_numbers_of_members_are_those_that_fit(tmp_path, chips, members):
    code, out, err = run_here(tmp_path, "fleet", "--chips", chips, "--json")
    assert code == 0, err
    assert {row["members"] for row in json.loads(out)["rows"]} - {1} == set(members)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--chips is missing"),
        (["--chips", "few"], "chips='few': write 25b"),
        (["--chips", "1k", "--members", "1"], "give numbers from 2 on"),
        (["--chips", "64", "--members", "16"], "too few for 16 members"),
        (["--chips", "8"], "too few for 2 members"),
        (["--chips", "1k", "--quorum", "3"], "give 1 to 2, the smallest of --members"),
        (["--chips", "1k", "--slice", "0"], "at least 1"),
        (["--chips", "1k", "--spares", "5"], "share from 0 to 1"),
        (["--chips", "1k", "--snapshot", "1gb"], "give both"),
        (["--chips", "1k", "--mtbf", "0y"], "above 0"),
        (["--chips", "1k", "--days", "0"], "above 0"),
        (["--chips", "1b", "--days", "900"], "too many to simulate; give at most"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys, words, says):
    assert main(["fleet", *words]) == 2
    assert says in (said := capsys.readouterr().err) and said.count("\n") == 1


@pytest.mark.slow
def test_the_commands_of_the_page_run_as_they_stand_there(tmp_path):
    verbs = [shlex.split(command)[1] for command in SHOWN]
    assert verbs.count("fleet") >= 3
    for command in SHOWN:
        program, *words = shlex.split(command)
        assert program == "diloco"
        words = [str(ROOT / word) if word.endswith(".toml") else word for word in words]
        code, out, err = run_here(tmp_path, *words)
        assert code == 0 and out, err


def test_the_page_has_the_answer_and_the_tables_beside_the_curves(tmp_path, capsys):
    words = ["--chips", "64k", "--mtbf", "1y", "--members", "2", "8", "--days", "1", "--plot"]
    assert main(["fleet", *words, str(tmp_path / "fleet.html")]) == 0
    page = html.unescape((tmp_path / "fleet.html").read_text())
    assert " ".join(capsys.readouterr().out.partition("\n\n")[0].split()) in page
    assert "Elastic groups: a member goes on" in page and "your fleet, 64 k chips" in page
    assert page.count('<th scope="col">goodput</th>') == 2
