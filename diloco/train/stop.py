"""Stop all replicas after the same step, so that their checkpoints match.

A signal to any replica triggers it, or the death of the process that started them.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Self

import torch.distributed as dist

from diloco.exchange.world import orphaned


class Stop:
    """Every process publishes its step in the store four times a second and checks for a step to stop at. A process
    that is asked to stop proposes one far enough ahead that even the fastest process usually hears of it in time. Each
    then promises to go no further than that step, or than its own step if it is further already, until it knows what
    the others have promised: all stop after the latest of these steps.

    A context manager: inside it, signals request a stop and, until `end`, a thread polls the store.
    """

    POLL = 0.25
    PATIENCE = 30.0
    """Seconds to wait for the promises of the others. A process that has failed makes none."""
    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    """Ctrl-C; the default of kill, Slurm and Kubernetes; a closed terminal; the early warning that many Slurm scripts
    request."""

    def __init__(self, store: dist.Store, rank: int = 0, size: int = 1) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._now = (0, math.inf)  # step, and seconds per step
        self._asked: set[int] = set()
        self._proposed = False
        self._promise: int | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop", daemon=True)

    def __enter__(self) -> Self:
        heeded = [number for number in self.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores
        self._before = {int(number): signal.signal(number, self._ask) for number in heeded}
        self._thread.start()
        return self

    def end(self) -> None:
        """No step follows. The run is about to be saved, so a signal changes nothing until it is repeated."""
        self._done.set()
        with contextlib.suppress(RuntimeError):
            self._promise_to_stop(self._now[0])
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self._done.set()  # after an error the store may never answer
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ask(self) -> None:
        """Request that all replicas stop. Returns immediately."""
        self._asked.add(0)

    def after(self, step: int, step_seconds: float) -> bool:
        """Whether to stop after this step."""
        with self._lock:
            self._now = (step, step_seconds)
        if self._asked and not self._proposed:
            self._proposed = True
            self._promise_to_stop(int(self._store.compare_set("stop", "", str(self._ahead()))))
        return self._promise is not None and step >= self._promise and step >= self._last_step()

    def look(self) -> None:
        """Publish this process's step, and check whether another process has proposed one."""
        step, seconds = self._now
        self._store.set(f"at/{self._rank}", f"{step} {seconds}")
        if self._promise is None and self._store.check(["stop"]):
            self._promise_to_stop(int(self._store.get("stop")), under_way=1)

    def _promise_to_stop(self, step: int, *, under_way: int = 0) -> None:
        """`under_way`: steps that the training thread may have begun."""
        with self._lock:  # only for a moment: the training thread must not wait for the store
            if self._promise is not None:
                return
            self._promise = max(step, self._now[0] + under_way)
        self._store.set(f"promise/{self._rank}", str(self._promise))

    def _last_step(self) -> int:
        """The latest step that somebody has promised."""
        names, until = [f"promise/{rank}" for rank in range(self._size)], time.monotonic() + self.PATIENCE
        while not self._store.check(names) and time.monotonic() < until:
            time.sleep(0.02)
        return max(int(self._store.get(name)) for name in names if self._store.check([name]))

    def _ahead(self) -> int:
        """The step to propose: the fastest replica needs one poll to publish and one to learn; doubled as a margin."""
        if self._size == 1:
            return self._now[0]
        others = [f"at/{rank}" for rank in range(self._size) if rank != self._rank]
        texts = [self._store.get(name).decode().split() for name in others if self._store.check([name])]
        progress = [self._now, *((int(step), float(seconds)) for step, seconds in texts)]
        fastest = max(min(seconds for _, seconds in progress), 1e-3)
        return max(step for step, _ in progress) + math.ceil(4 * self.POLL / fastest) + 1

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number in self._asked:
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)
        if not self._asked:
            does = "finishing" if self._done.is_set() else "saving a checkpoint and stopping"
            print(f"{does}; press Ctrl-C again to stop now without saving", file=sys.stderr, flush=True)  # noqa: T201
        self._asked.add(number)

    def _watch(self) -> None:
        while not self._done.wait(self.POLL):
            if orphaned() and not self._asked:
                text = "the process that started this run is gone: saving a checkpoint and stopping"
                print(text, file=sys.stderr, flush=True)  # noqa: T201
                self.ask()
            try:
                self.look()
            except RuntimeError:  # the store is gone, with the replica that hosts it
                return
