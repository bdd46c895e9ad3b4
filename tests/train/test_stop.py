"""Replicas that are asked to stop do so after the same step, wherever they are."""

import os
import signal

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.train.stop import Stop

seconds = st.floats(0.01, 0.3)
phase = st.floats(0.0, Stop.POLL)


@settings(max_examples=40)
@given(asked=st.integers(0, 1), slow=seconds, fast=seconds, phases=st.tuples(phase, phase), at=st.floats(1.0, 4.0))
def test_the_slow_and_the_fast_stop_after_the_same_step_though_nothing_keeps_them_together(
    asked, slow, fast, phases, at
):
    """On a clock of the test: each replica ends a step and looks into the store at moments of its own."""
    store = dist.HashStore()
    stops = [Stop(store, rank, 2) for rank in (0, 1)]
    every = (slow, fast)
    next_step, next_look, done, ended = list(every), list(phases), [0, 0], [0, 0]
    while not all(ended):
        rank = min((0, 1), key=lambda r: min(next_step[r], next_look[r]))
        now = min(next_step[rank], next_look[rank])
        if now >= at:
            stops[asked].ask()
            at = float("inf")
        if next_look[rank] <= next_step[rank]:
            stops[rank].look()
            next_look[rank] += Stop.POLL
            continue
        next_step[rank] += every[rank]
        done[rank] += 1
        if stops[rank].after(done[rank], every[rank]):
            ended[rank], next_step[rank], next_look[rank] = done[rank], float("inf"), float("inf")
    assert ended[0] == ended[1]


def test_one_process_alone_stops_at_once():
    stop = Stop(dist.HashStore())
    assert not stop.after(1, 0.1)
    stop.ask()
    assert stop.after(2, 0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_and_outside_the_context_it_does_what_it_did_before(capfd, number):
    came = []
    before = signal.signal(number, lambda *_: came.append(number))
    try:
        with Stop(dist.HashStore()) as stop:
            os.kill(os.getpid(), number)
            assert stop.after(1, 0.1) and not came
            os.kill(os.getpid(), number)
            assert came == [number]  # asked again: as without this
        os.kill(os.getpid(), number)
        assert came == [number, number]
    finally:
        signal.signal(number, before)
    assert capfd.readouterr().err.count("saving a checkpoint and stopping") == 1
