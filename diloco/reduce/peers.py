"""Who the other replicas are and, after an exchange has broken, which of them does not answer.

A broken connection has an address, but often one of a port that nobody knows, or that of another survivor that gave up
first. So each replica whose exchange breaks says so in the store through which all found each other: who does not is
gone, or was not in the exchange at all.
"""

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

PATIENCE = 2.0
"""Seconds in which the others can say that their exchange broke too. They learn of it at once."""


def own_name() -> str:
    """For the messages of other replicas.

    >>> own_name()  # doctest: +SKIP
    'process 4711 on gpu07'
    """
    return f"process {os.getpid()} on {socket.gethostname()}"


class RollCall:
    """Begins at once, on a thread of its own: the store may be one that never answers."""

    def __init__(self, store: dist.Store, replica: int, names: Sequence[str]) -> None:
        self._store, self._replica, self._names = store, replica, names
        self._missing = set(range(len(names))) - {replica}
        self._asked = False
        self._thread = threading.Thread(target=self._ask, name="roll call", daemon=True)
        if len(names) > 2:
            self._thread.start()

    def result(self) -> str:
        """Who is missing, in a sentence."""
        if len(self._names) == 2:
            return f"The other is {self._named(self._missing)}."
        self._thread.join(PATIENCE + 1)
        if not self._asked:
            return "Which one is not known: the store that all could ask does not answer."
        if not self._missing:
            return "All replicas answer: only the connection between two processes broke."
        return f"No answer from {self._named(self._missing)}."

    def _named(self, replicas: set[int]) -> str:
        return ", ".join(f"replica {m} ({self._names[m]})" for m in sorted(replicas))

    def _ask(self) -> None:
        deadline = time.monotonic() + PATIENCE
        with suppress(RuntimeError):  # the store is gone
            self._store.set(f"broken/{self._replica}", "")
            while True:
                self._missing -= {m for m in self._missing if self._store.check([f"broken/{m}"])}
                self._asked = True
                if not self._missing or time.monotonic() > deadline:
                    return
                time.sleep(0.02)
