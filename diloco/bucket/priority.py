"""A lock that the training thread gets before all others."""

import threading

LONGEST = 0.05
"""Seconds for which others let the training thread pass. A bound, so that nobody waits for a thread that has ended."""


class PriorityLock(threading.Condition):
    """`with lock:` is for the training thread, `with lock.behind:` for all others.

    Python's locks are not fair: a thread that releases one and wants it again at once has it again, because the thread
    that waits for it must first be given the interpreter. Threads that follow many rounds would keep a hook waiting.
    """

    def __init__(self) -> None:
        super().__init__()
        self.passed = threading.Event()
        self.passed.set()
        self.behind = Behind(self)

    def __enter__(self) -> bool:
        self.passed.clear()
        entered = super().__enter__()
        self.passed.set()
        return entered


class Behind:
    """The same lock, for those that let the training thread pass."""

    def __init__(self, lock: PriorityLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.passed.wait(LONGEST)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
