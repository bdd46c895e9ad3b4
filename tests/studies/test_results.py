"""The results of the parity study: added to by several processes, each run done once, in the order of importance."""

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from studies.parity import run, today
from studies.parity.cell import Cell, data_parallel
from studies.parity.results import append, claim, load
from studies.parity.run import train

LINES, LONG = 200, 20_000


def write(path: Path, name: str) -> None:
    for number in range(LINES):
        append(path, {"key": f"{name}{number}", "text": name * LONG})


def test_lines_of_several_processes_are_not_mixed(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    writers = [multiprocessing.get_context("fork").Process(target=write, args=(path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    results = load(path)
    assert len(results) == LINES * len(writers)
    assert all(set(result["text"]) == {key[0]} for key, result in results.items())


def test_a_run_is_claimed_once_until_its_process_ends(tmp_path: Path):
    with claim("a", tmp_path) as mine, claim("a", tmp_path) as again, claim("b", tmp_path) as other:
        assert (mine, again, other) == (True, False, True)
    with claim("a", tmp_path) as mine:
        assert mine


def test_what_another_process_does_or_has_done_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(today, "PATH", tmp_path / "today.jsonl")
    cell = Cell(width=16, lr=0.004)
    with claim(cell.key):
        assert today.run(cell) is None
    append(today.PATH, {"key": cell.key})
    assert today.run(cell) is None
    assert len(today.PATH.read_text().splitlines()) == 1


def test_headlines_come_first_then_one_seed_of_every_row():
    order = today.wanted({}, [""], [1, 2])
    first = 2 * len(today.HEADLINES)
    assert {name for name, _ in order[:first]} == set(today.HEADLINES)
    assert [cell.seed for _, cell in order[first:]] == sorted(cell.seed for _, cell in order[first:])
    assert len({cell.key for _, cell in order}) == len(order)
    done = {order[0][1].key: {}}
    assert today.wanted(done, [""], [1, 2]) == order[1:]


def test_rows_are_chosen_by_parts_of_their_names():
    chosen = today.wanted({}, ["M = 4", "top-k"], [3])
    assert {cell.replicas for _, cell in chosen} == {2, 4} and {cell.seed for _, cell in chosen} == {3}
    assert all("M = 4" in name or "top-k" in name for name, _ in chosen)


def test_every_result_has_the_key_of_its_cell():
    for line in today.PATH.read_text().splitlines():
        result = json.loads(line)
        assert Cell(**result["cell"]).key == result["key"]


@pytest.mark.slow
def test_the_mean_of_the_last_steps_is_evaluated_and_training_goes_on_from_the_last(monkeypatch: pytest.MonkeyPatch):
    plain = replace(data_parallel(lr=0.004, width=16, steps=12), evaluated=4096)
    last, mean = (train(replace(plain, tail=tail))["final"] for tail in (1, 6))
    assert train(plain)["final"] == last != mean
    assert mean == pytest.approx(last, rel=0.05)
    monkeypatch.setattr(run, "CURVE_EVERY", 4)
    assert train(replace(plain, tail=6))["final"] == mean
