"""The schedule is a pure function of integers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco import ConfigError
from diloco.core.schedule import Schedule, check_overlap

schedules = st.builds(Schedule, sync_every=st.integers(1, 60), fragments=st.integers(1, 40))


@given(schedules)
def test_every_fragment_sends_exactly_once_in_any_sync_every_steps(schedule):
    h = schedule.sync_every
    for fragment in range(schedule.fragments):
        sends = [step for step in range(1, 5 * h + 1) if schedule.sends_at(fragment, step)]
        assert sends[0] == h + schedule.offset(fragment) >= h
        assert all(b - a == h for a, b in pairwise(sends))


@given(schedules)
def test_sends_are_spread_as_evenly_as_integers_allow(schedule):
    h = schedule.sync_every
    counts = [len(schedule.sends(step)) for step in range(2 * h, 3 * h)]
    assert sum(counts) == schedule.fragments
    assert max(counts) - min(counts) <= 1
    busy = [i for i, count in enumerate(counts) if count]
    gaps = [b - a for a, b in pairwise(busy)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(schedules, st.data())
def test_in_flight_counts_what_is_under_way_at_once(schedule, data):
    h = schedule.sync_every
    overlap = data.draw(st.integers(0, h - 1))
    sent = {step: len(schedule.sends(step)) for step in range(1, 4 * h + 1)}
    under_way = [sum(sent[t] for t in range(step - overlap + 1, step + 1)) for step in range(3 * h, 4 * h + 1)]
    assert schedule.in_flight(overlap) == max(under_way)


@pytest.mark.parametrize("overlap", [0, 1, 99])
def test_an_overlap_within_its_range_is_accepted(overlap):
    check_overlap(overlap, 100)


@pytest.mark.parametrize("overlap", [-1, 100, 101])
def test_an_overlap_outside_its_range_is_refused_with_the_range(overlap):
    with pytest.raises(ConfigError, match=f"overlap={overlap} .* from 0 .* to 99"):
        check_overlap(overlap, 100)


@pytest.mark.parametrize(("sync_every", "fragments"), [(0, 1), (-3, 1), (1, 0)])
def test_impossible_schedules_are_refused(sync_every, fragments):
    with pytest.raises(ConfigError, match="at least"):
        Schedule(sync_every, fragments)
