"""The overlap that a replica chooses for itself: the rule with virtual seconds, then in a loop."""

import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from diloco import ConfigError, DiLoCo
from diloco.pace import Pace, RoundTimes, StepClock
from tests.support.fake_reduce import Script, mean, start

STEP = 0.25


def play(pace, seconds, rounds, apart=0.0, step=STEP):
    """Rounds that take this long, of which training waits for what the overlap does not hide."""
    chosen = []
    for _ in range(rounds):
        waited = max(seconds - pace.overlap * step, 0.0)
        chosen.append(pace.after(RoundTimes(seconds, apart, waited), step))
    return chosen


@pytest.mark.parametrize(
    ("steps", "overlap"), [(0.01, 1), (0.9, 1), (1.01, 2), (1.1, 2), (1.95, 3), (3.5, 4), (4.9, 5), (20, 5)]
)
def test_it_becomes_the_smallest_overlap_that_hides_a_round(steps, overlap):
    assert play(Pace(1, fragments=4, sync_every=30), steps * STEP, 20)[-1] == overlap


def test_it_rises_after_two_rounds_that_were_waited_for_and_falls_after_two_calm_periods():
    pace = Pace(1, fragments=4, sync_every=30)
    assert play(pace, 0.5 * STEP, 8) == [1] * 8
    assert play(pace, 2.5 * STEP, 3) == [1, 3, 3]
    assert play(pace, 0.5 * STEP, 9)[-2:] == [1, 1]
    assert play(Pace(3, fragments=4, sync_every=30), 0.5 * STEP, 8) == [3] * 7 + [1]


def test_a_single_slow_round_changes_nothing():
    pace = Pace(1, fragments=4, sync_every=30)
    for _ in range(5):
        assert play(pace, 0.5 * STEP, 8) == [1] * 8
        assert play(pace, 40 * STEP, 1) == [1]


def test_the_largest_fragment_counts_though_it_comes_once_in_a_period():
    pace = Pace(1, fragments=4, sync_every=30)
    for _ in range(3):
        play(pace, 0.3 * STEP, 3)
        play(pace, 1.7 * STEP, 1)
    assert pace.overlap == 2


def test_at_the_border_it_does_not_go_to_and_fro():
    pace = Pace(1, fragments=2, sync_every=30)
    chosen = [c for i in range(40) for c in play(pace, (0.97 if i % 2 else 0.9) * STEP, 1)]
    assert sum(a != b for a, b in pairwise(chosen)) <= 1


def test_waiting_for_a_replica_that_is_late_once_does_not_count_and_the_way_there_does():
    pace = Pace(1, fragments=2, sync_every=30)
    play(pace, 0.6 * STEP, 4, apart=0.1 * STEP)
    for _ in range(6):
        pace.after(RoundTimes(8 * STEP, 7.5 * STEP, 7 * STEP), STEP)  # the others come seven steps late
    assert pace.overlap == 1
    assert play(Pace(1, fragments=2, sync_every=30), 1.5 * STEP, 4, apart=0.8 * STEP)[-1] == 2  # a long way


def test_it_stays_below_sync_every_and_without_a_known_step_time_as_it_is():
    assert play(Pace(1, fragments=1, sync_every=3), 9 * STEP, 9)[-1] == 2
    assert Pace(4, fragments=1, sync_every=2).overlap == 1
    assert Pace(1, fragments=1, sync_every=30).after(RoundTimes(9, 0, 9), 0.0) == 1


def test_the_clock_gives_the_usual_step_without_what_is_done_in_between():
    clock, now = StepClock(), 100.0
    assert clock.seconds == 0.0
    for i in range(20):
        clock.begin(now)
        clock.end(now + 7)
        now += 7 + (30.0 if i % 10 == 9 else 0.5)  # an evaluation after every tenth
    assert clock.seconds == 0.5


class Slow(Script):
    """Each round is there at once, and says that it took some seconds and was waited for."""

    seconds = 0.0

    def take(self, fragment, index):
        if (fragment, index) not in self.under_way:
            return None
        self.under_way.discard((fragment, index))
        time.sleep(0.002)
        outcome = mean(index, 0.0, True)
        return type(outcome)(**{**vars(outcome), "seconds": self.seconds})


def test_in_a_loop_auto_follows_its_rounds_and_the_statistics_say_which_overlap_each_had():
    reduce = Slow()
    diloco, step = start(reduce, sync_every=8, overlap="auto")
    assert diloco.overlap == 1 and "overlap=1 (auto)" in repr(diloco)
    diloco.pace.clock = SimpleNamespace(seconds=0.001, begin=lambda now: None, end=lambda now: None)
    reduce.seconds = 0.0025
    for _ in range(30):
        step()
    assert diloco.overlap == 3
    assert [r.overlap for r in diloco.stats.last][:2] == [1, 1]
    assert diloco.stats.last[-1].overlap == 3
    assert diloco.stats.last[-1].applied_step - (diloco.stats.last[-1].sent_step or 0) == 3


def test_the_overlap_that_was_found_is_saved():
    diloco, step = start(Slow(), sync_every=8, overlap="auto")
    diloco.pace.overlap = 4
    step()
    again, _ = start(Slow(), sync_every=8, overlap="auto")
    again.load_state_dict(diloco.state_dict())
    assert again.overlap == 4
    fixed, _ = start(Slow(), sync_every=8, overlap=2)
    fixed.load_state_dict(diloco.state_dict())
    assert fixed.overlap == 2


def test_auto_is_refused_where_the_ranks_of_a_replica_need_equal_weights():
    reduce = Script()
    reduce.ddp_size = 2
    with pytest.raises(ConfigError, match="DDP needs equal weights: give a number"):
        DiLoCo(torch.nn.Linear(2, 2), overlap="auto", reduce=reduce)
    with pytest.raises(ConfigError, match=r"""overlap='often': give a whole number of steps, at least 0, or "auto"$"""):
        DiLoCo(torch.nn.Linear(2, 2), overlap="often", reduce=Script())  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "sync_every", "taken"), [(0, 30, 1), (2, 30, 2), (9, 30, 5), (3, 2, 1), (0, 1, 0)])
def test_it_begins_within_what_it_may_choose(first, sync_every, taken):
    """A planner may ask for 0 where a round is short beside a step."""
    assert Pace(first, 4, sync_every).overlap == taken
