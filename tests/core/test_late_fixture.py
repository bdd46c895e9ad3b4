"""The late device is as late as an accelerator may be, and notices what an accelerator would not."""

import gc
import threading

import pytest
import torch

from tests.support import late_device
from tests.support.late_device import Race, Stream
from tests.support.processes import run

N = 8
pytestmark = pytest.mark.slow


def alone(function):
    """A test in a process of its own, in which the device is installed."""

    def test():
        assert run(1, function) == [None]

    return test


def setup():
    late_device.install()
    return torch.full((N,), 2.0, device="late"), torch.empty(N, pin_memory=True), Stream()


def _sources(rank):
    x, host, _ = setup()
    x.copy_(host.fill_(1.0), non_blocking=True)
    assert x.sum().item() == N
    x.copy_(host, non_blocking=True)
    host.fill_(5.0)
    with pytest.raises(Race, match="source"):
        late_device.synchronize()
    assert len(late_device.races) == 1


def _overwritten(rank):
    x, host, _ = setup()
    host.copy_(x, non_blocking=True)
    host.fill_(0.0)
    with pytest.raises(Race, match="target"):
        late_device.synchronize()


def _streams(rank):
    x, host, side = setup()
    with side, pytest.raises(Race, match="stream 1 reads what stream 0 writes"):
        x + 1
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(x, non_blocking=True)
        done = side.record_event()
    with pytest.raises(Race, match="stream 0 writes what stream 1 reads"):
        x.add_(1)
    done.wait()
    x.add_(1)
    assert host.isnan().all()
    assert x.sum().item() == 3 * N and host.tolist() == [2.0] * N  # the stream's wait is one of the host's, too
    with side:
        x.add_(1)  # somebody has waited for all others
    assert len(late_device.races) == 2


def _only_what_is_needed(rank):
    x, host, side = setup()
    early, late = torch.empty(N, pin_memory=True), torch.empty(N, pin_memory=True)
    early.copy_(x, non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    late.copy_(x, non_blocking=True)
    side.wait_event(event)
    with side:
        host.copy_(x, non_blocking=True)
    side.synchronize()
    assert host.tolist() == early.tolist() == [2.0] * N and late.isnan().all()
    event.record()  # what waited for it before did not wait for this
    assert late.isnan().all()


def _freed(rank):
    x, host, side = setup()
    late_device.synchronize()
    for shares, expected in ((True, 0), (False, 1)):
        y = x + 1
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            host.copy_(y, non_blocking=True)
        if shares:
            y.record_stream(side)
        del y
        gc.collect()
        assert len(late_device.races) == expected
        side.synchronize()
    y = x + 1
    host.copy_(y, non_blocking=True)
    del y  # the same stream: what gets its memory next comes later
    late_device.synchronize()
    assert len(late_device.races) == 1 and host.tolist() == [3.0] * N


def _pageable(rank):
    x, pinned, _ = setup()
    late_device.synchronize()
    counters = late_device.counters = late_device.Counters()
    host = torch.ones(N)
    assert not host.is_pinned() and pinned.is_pinned() and pinned[2:].is_pinned() and host.pin_memory().is_pinned()
    x.copy_(host, non_blocking=True)
    host.fill_(9.0)
    assert not counters.waits
    host.copy_(x, non_blocking=True)
    assert host.tolist() == [1.0] * N and counters.waits == {"MainThread": 1}
    pinned.copy_(x)  # blocking
    assert pinned.tolist() == [1.0] * N
    assert counters.pageable == {"up": 4 * N, "down": 4 * N}
    del pinned
    assert not any(torch.empty(N).is_pinned() for _ in range(100))  # in the memory that was pinned, perhaps


def _counters(rank):
    x, host, side = setup()
    late_device.synchronize()
    counters = late_device.counters = late_device.Counters()
    with side:
        x.copy_(host.fill_(1.0), non_blocking=True)
        side.record_event().synchronize()
        y = x * 2
        host[:2].copy_(y[:2], non_blocking=True)
    thread = threading.Thread(target=side.synchronize, name="other")
    thread.start()
    thread.join()
    side.synchronize()  # there is nothing to wait for
    assert counters.copied == {(side.stream_id, "up"): 4 * N, (side.stream_id, "down"): 8}
    assert counters.waits == {"MainThread": 1, "other": 1}
    assert counters.kernels == {side.stream_id: 1}
    x.add_(1)
    event = torch.accelerator.current_stream().record_event()
    while not event.query():
        pass
    assert counters.pending == {"MainThread": 1} and counters.waits == {"MainThread": 1, "other": 1}


test_a_copy_to_the_device_reads_its_source_late = alone(_sources)
test_a_target_that_the_host_changes_meanwhile_is_noticed = alone(_overwritten)
test_streams_that_use_the_same_memory_must_wait_for_each_other = alone(_streams)
test_waiting_for_an_event_runs_only_what_comes_before_it = alone(_only_what_is_needed)
test_memory_that_is_freed_while_another_stream_uses_it_is_noticed = alone(_freed)
test_pageable_memory_is_copied_at_once_and_counted = alone(_pageable)
test_copies_are_counted_by_stream_and_waits_and_polls_by_thread = alone(_counters)
