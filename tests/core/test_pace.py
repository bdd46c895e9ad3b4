"""The overlap that a replica chooses for itself: the rule with virtual seconds, then in a loop."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from diloco.core import overlap as module
from diloco.core.overlap import Overlap
from diloco.exchange.reducer import Cost
from tests.support.fake_reducer import Script, mean, start

STEP = 0.25


def auto(first=1, fragments=4, sync_every=30, step=STEP):
    """An automatic overlap that knows the time of a step."""
    overlap = Overlap("auto", fragments, sync_every, first=first)
    overlap._step_seconds.append(step)
    return overlap


def play(overlap, seconds, rounds, apart=0.0):
    """Rounds that take this long, of which training waits for what the overlap does not hide."""
    chosen = []
    for _ in range(rounds):
        waited = max(seconds - overlap.steps * STEP, 0.0)
        overlap.observe(seconds=seconds, apart=apart, waited=waited)
        chosen.append(overlap.steps)
    return chosen


@pytest.mark.parametrize(
    ("steps", "overlap"), [(0.01, 1), (0.9, 1), (1.01, 2), (1.1, 2), (1.95, 3), (3.5, 4), (4.9, 5), (20, 5)]
)
def test_it_becomes_the_smallest_overlap_that_hides_a_round(steps, overlap):
    assert play(auto(), steps * STEP, 20)[-1] == overlap


def test_it_rises_after_two_rounds_that_were_waited_for_and_falls_after_two_calm_periods():
    pace = auto()
    assert play(pace, 0.5 * STEP, 8) == [1] * 8
    assert play(pace, 2.5 * STEP, 3) == [1, 3, 3]
    assert play(pace, 0.5 * STEP, 9)[-2:] == [1, 1]
    assert play(auto(3), 0.5 * STEP, 8) == [3] * 7 + [1]


def test_a_single_slow_round_changes_nothing():
    pace = auto()
    for _ in range(5):
        assert play(pace, 0.5 * STEP, 8) == [1] * 8
        assert play(pace, 40 * STEP, 1) == [1]


def test_the_largest_fragment_counts_though_it_comes_once_in_a_period():
    pace = auto()
    for _ in range(3):
        play(pace, 0.3 * STEP, 3)
        play(pace, 1.7 * STEP, 1)
    assert pace.steps == 2


def test_at_the_border_it_does_not_go_to_and_fro():
    pace = auto(fragments=2)
    chosen = [c for i in range(40) for c in play(pace, (0.97 if i % 2 else 0.9) * STEP, 1)]
    assert sum(a != b for a, b in pairwise(chosen)) <= 1


def test_waiting_for_a_replica_that_is_late_once_does_not_count_and_the_way_there_does():
    pace = auto(fragments=2)
    play(pace, 0.6 * STEP, 4, apart=0.1 * STEP)
    for _ in range(6):
        pace.observe(seconds=8 * STEP, apart=7.5 * STEP, waited=7 * STEP)  # the others come seven steps late
    assert pace.steps == 1
    assert play(auto(fragments=2), 1.5 * STEP, 4, apart=0.8 * STEP)[-1] == 2  # a long way


def test_it_stays_below_sync_every_and_without_a_known_step_time_as_it_is():
    assert play(auto(fragments=1, sync_every=3), 9 * STEP, 9)[-1] == 2
    assert auto(4, fragments=1, sync_every=2).steps == 1
    assert play(auto(step=0.0), 9 * STEP, 9)[-1] == 1


def test_the_step_time_is_the_usual_one_without_what_is_done_between_two_steps(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    overlap = Overlap("auto", 4, 30)
    assert overlap.step_seconds == 0.0
    for i in range(20):
        with overlap.between_steps():
            now[0] += 7
        now[0] += 30.0 if i % 10 == 9 else 0.5  # an evaluation after every tenth
    assert overlap.step_seconds == 0.5


class Slow(Script):
    """Each round is there at once, and says that it took some seconds and was waited for."""

    seconds = 0.0

    def poll(self, fragment, index):
        if (fragment, index) not in self.under_way:
            return None
        self.outcomes[fragment, index] = [(0, mean(0.0, True))]
        time.sleep(0.002)
        return replace(super().poll(fragment, index), cost=Cost(seconds=self.seconds))


def test_in_a_loop_auto_follows_its_rounds_and_the_statistics_say_which_overlap_each_had(monkeypatch):
    reduce = Slow()
    diloco, step = start(reduce, sync_every=8, overlap="auto")
    assert diloco.overlap == 1 and "overlap=1 (auto)" in repr(diloco)
    monkeypatch.setattr(Overlap, "step_seconds", 0.001)
    reduce.seconds = 0.0025
    for _ in range(30):
        step()
    assert diloco.overlap == 3
    assert [r.overlap for r in diloco.stats.last][:2] == [1, 1]
    assert diloco.stats.last[-1].overlap == 3
    assert diloco.stats.last[-1].applied_step - (diloco.stats.last[-1].sent_step or 0) == 3


def test_the_overlap_that_was_found_is_saved():
    diloco, step = start(Slow(), sync_every=8, overlap="auto")
    diloco._overlap.steps = 4
    step()
    again, _ = start(Slow(), sync_every=8, overlap="auto")
    again.load_state_dict(diloco.state_dict())
    assert again.overlap == 4
    fixed, _ = start(Slow(), sync_every=8, overlap=2)
    fixed.load_state_dict(diloco.state_dict())
    assert fixed.overlap == 2


@pytest.mark.parametrize(("first", "sync_every", "taken"), [(0, 30, 1), (2, 30, 2), (9, 30, 5), (3, 2, 1), (0, 1, 0)])
def test_it_begins_within_what_it_may_choose(first, sync_every, taken):
    """A planner may ask for 0 where a round is short beside a step."""
    assert auto(first, sync_every=sync_every).steps == taken
