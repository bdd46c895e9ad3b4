"""The lock of a bucket: the training thread comes first."""

import threading
import time

from diloco.bucket import bucket
from diloco.bucket.bucket import PriorityLock


def waits(lock, target):
    """A thread of training that waits for the lock."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    while lock.passed.is_set():
        time.sleep(0.001)
    return thread


def test_one_that_wants_the_lock_again_lets_the_training_thread_pass(monkeypatch):
    monkeypatch.setattr(bucket, "LONGEST_YIELD", 60.0)
    lock, order = PriorityLock(), []

    def train():
        with lock:
            order.append("training")

    with lock.behind:
        thread = waits(lock, train)
    for _ in range(3):
        with lock.behind:
            order.append("other")
    thread.join()
    assert order == ["training", "other", "other", "other"]


def test_nobody_waits_for_long_for_a_training_thread_that_does_not_come():
    lock, entered = PriorityLock(), []
    lock.passed.clear()
    with lock.behind:
        entered.append(1)
    assert entered
