"""Replicas that are asked to stop do so after the same step, wherever they are."""

import threading
import time

import pytest
import torch.distributed as dist

from diloco.train.stop import Stop


def play(stop, seconds, ended):
    for step in range(1, 2000):
        time.sleep(seconds)
        if stop.after(step, seconds):
            ended.append(step)
            return


@pytest.mark.parametrize("asked", [0, 1])
def test_the_slow_and_the_fast_stop_after_the_same_step_though_nothing_keeps_them_together(asked):
    store = dist.HashStore()
    stops, ended = [Stop(store, rank, 2) for rank in (0, 1)], []
    threads = [threading.Thread(target=play, args=(stop, seconds, ended))
               for stop, seconds in zip(stops, (0.01, 0.05), strict=True)]  # fmt: skip
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    stops[asked]._ask(15, None)
    for thread in threads:
        thread.join()
    for stop in reversed(stops):
        stop.close()
    assert len(ended) == 2 and ended[0] == ended[1] > 100 * 0.5


def test_one_process_alone_stops_at_once():
    stop, ended = Stop(dist.HashStore()), []
    stop._ask(15, None)
    play(stop, 0.0, ended)
    stop.close()
    assert ended == [1]
