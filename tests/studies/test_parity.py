"""The parity study: what it runs next, and that a run is what its cell says."""

import json
import math
from dataclasses import replace
from random import Random

import pytest
import torch

from studies.parity import claims, study, tuning
from studies.parity.__main__ import run_all as study_run_all
from studies.parity.cell import Cell, data_parallel
from studies.parity.controls import KEPT, Zeroing
from studies.parity.paired import FEW, MANY, compared, differences, judged, noise
from studies.parity.rows import DILOCO, DP, NAMED, OUTER, ROWS, STREAMING, Row
from studies.parity.run import train
from studies.parity.spread import Spread, residual, spread

SHORT = Cell(width=16, lr=0.004, outer_lr=0.4, sync_every=5, steps=12, evaluated=4096)


def bowl(cell: Cell, noise: float = 0.001) -> float:
    """A loss with its optimum at lr 0.03 and outer lr 0.1, far from where tuning starts."""
    outer = math.log(cell.outer_lr / 0.1) ** 2 if cell.outer_lr else 0.0
    return 1.5 + 0.1 * math.log(cell.lr / 0.03) ** 2 + 0.1 * outer + noise * math.sin(17 * cell.seed + cell.overlap)


def run_all(
    rows: tuple[Row, ...] = ROWS[:3], stop_after: int | None = None, noise: float = 0.001
) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    while todo := [cell for _, cell in study.wanted(results, rows) if cell.key not in results]:
        results |= {cell.key: {"final": bowl(cell, noise)} for cell in todo}
        if stop_after is not None and len(results) >= stop_after:
            break
    return results


def test_tuning_goes_on_until_the_optimum_is_inside_the_grid():
    results = run_all()
    for row in ROWS[:3]:
        best, missing = tuning.tuned(row, results)
        assert best is not None and not missing
        assert abs(math.log(best.lr / 0.03)) < math.log(tuning.FACTOR)
        if OUTER in row.tune:
            assert abs(math.log(best.outer_lr / 0.1)) < math.log(tuning.FACTOR)


def test_noise_is_no_reason_to_move_on():
    around = {(0,): 1.5, (-1,): 1.5 * (1 - 0.9 * tuning.NOISE / 100), (1,): 1.6}
    assert tuning.climb(1, around.get) == ((0,), [])
    around[(-1,)] = 1.5 * (1 - 1.1 * tuning.NOISE / 100)
    assert tuning.climb(1, around.get) == (None, [(-2,)])


def test_an_interrupted_study_wants_the_same_runs():
    whole, part = run_all(), run_all(stop_after=9)
    assert set(part) < set(whole)
    assert part == {key: whole[key] for key in part}


def test_headlines_come_first_and_get_seeds_until_they_are_resolved():
    assert next(iter(study.wanted({})))[0] == DP
    for chance, seeds in ((0.0, FEW), (0.02, MANY)):
        assert len(judged(NAMED[STREAMING], run_all(noise=chance))) == seeds


@pytest.mark.parametrize(("mean", "half_width", "verdict"), [(0.2, 0.1, "met"), (0.45, 0.1, "unresolved"),
                                                              (-0.9, 0.1, "**missed**")])  # fmt: skip
def test_a_bar_needs_the_whole_interval(mean: float, half_width: float, verdict: str):
    assert claims.Bar("", Spread(mean, half_width, 5), -0.5, 0.5).verdict == verdict


@pytest.mark.slow
def test_rows_that_are_alike_share_their_noise_and_others_have_their_own():
    rows = (*ROWS[:5], NAMED["M = 4"])
    results = run_all(rows, noise=0.01)
    shared = noise(32, results)
    assert shared.freedom == (5 - 1) * (MANY - 1)
    for against in (DP, DILOCO):
        found = compared(NAMED[STREAMING], NAMED[against], results)
        assert found == spread(differences(NAMED[STREAMING], NAMED[against], results), shared)
    unlike = differences(NAMED["M = 4"], NAMED[STREAMING], results)
    assert compared(NAMED["M = 4"], NAMED[STREAMING], results) == spread(unlike)


def test_the_noise_is_that_of_made_up_rows_and_seeds():
    """Levels of rows and seeds are taken out, also where seeds are missing; what is left is 0.3 for each run."""
    random = Random(0)
    levels = {(row, seed): 3.0 * len(row) + 5.0 * seed for row in ("a", "bb", "ccc", "dddd") for seed in range(60)}
    noisy = {key: value + random.gauss(0, 0.3) for key, value in levels.items() if random.random() < 0.8}
    found = residual(noisy)
    assert found.deviation == pytest.approx(0.3 * 2**0.5, rel=0.1)
    assert found.freedom == len(noisy) - 4 - 60 + 1


@pytest.mark.slow
def test_replicas_that_average_after_each_step_of_one_are_data_parallel_of_one():
    """M = 1, outer lr 1, momentum 0: plain training, to rounding."""
    plain = train(replace(data_parallel(lr=0.004, width=16, steps=12), evaluated=SHORT.evaluated))
    alone = train(replace(SHORT, replicas=1, outer_lr=1.0, momentum=0.0, overlap=0, codec="float32"))
    assert alone["final"] == pytest.approx(plain["final"], abs=1e-4)


@pytest.mark.slow
def test_a_run_repeats_exactly_and_depends_on_its_seed():
    first, second, other = train(SHORT), train(SHORT), train(replace(SHORT, seed=1))
    assert first["final"] == second["final"] != other["final"]
    assert first["key"] != other["key"]
    assert all(-1 <= cosine <= 1 for fragment in first["cosines"] for cosine in fragment)
    assert {"final", "anchors", "mean", "replica"} <= set(first)


@pytest.mark.slow
def test_freezing_trains_only_the_fragment_that_is_sent_next():
    assert train(replace(SHORT, freeze=True))["final"] > train(SHORT)["final"]


def test_zeroing_keeps_one_value_in_eight():
    codec = Zeroing(torch.Generator().manual_seed(0))
    kept = codec.decode(codec.encode(torch.ones(100_000)), 100_000)
    assert kept.mean().item() == pytest.approx(KEPT, abs=0.005)


def test_results_of_another_corpus_are_not_added_to(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"key": "a", "corpus": "that of another Python"}) + "\n")
    with pytest.raises(SystemExit, match="standard library of another Python: move it away"):
        study_run_all(path, ROWS, 1, FEW)
