"""Ctrl-C or SIGTERM on any replica stops all of them after the same step, so that their checkpoints fit together."""

import math
import signal
import threading
from types import FrameType

import torch.distributed as dist


class Stop:
    """Whoever is asked proposes a step a little ahead; the others learn of it from the store, four times a second."""

    POLL = 0.25

    def __init__(self, store: dist.Store, margin: int) -> None:
        self._store, self._margin = store, margin  # margin: steps by which another replica may be ahead
        self._asked = self._proposed = False
        self._at: int | None = None
        self._done = threading.Event()
        self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        self._thread = threading.Thread(target=self._watch, name="stop", daemon=True)
        self._thread.start()

    def after(self, step: int, step_seconds: float) -> bool:
        """Whether to stop after this step."""
        if self._asked and not self._proposed:
            self._proposed = True
            wait = math.ceil(4 * self.POLL / max(step_seconds, 1e-3))
            self._at = int(self._store.compare_set("stop", "", str(step + self._margin + wait)))
        return self._at is not None and step >= self._at

    def close(self) -> None:
        self._done.set()
        self._thread.join()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def _watch(self) -> None:
        while not self._done.wait(self.POLL):
            try:
                if self._at is None and self._store.check(["stop"]):
                    self._at = int(self._store.get("stop"))
            except RuntimeError:  # the store is gone, and with it the replica that holds it
                return
