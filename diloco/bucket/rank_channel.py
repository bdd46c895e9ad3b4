"""The channel from the first rank of a member to its others: messages in their order, and tensors beside them."""

import atexit
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from diloco.reduce.groups import Broken, Groups, Place
from diloco.reduce.thread import CommThread

SHORT = 512
"""Bytes of a message. What is longer goes as a second one."""
OPENING, LAST = 600.0, 5.0
"""Seconds to wait for the other ranks to join, and for them to take the last messages."""


class RankChannel:
    def __init__(self, place: Place) -> None:
        self._groups = Groups(replace(place, name=f"ranks of a member {place.name}"), OPENING)
        self._groups.open(1, Place(), Place())
        self._thread = CommThread()
        self._under_way: list[tuple[Any, Tensor]] = []
        self.later = self._thread.submit
        self.gather = self._groups.gather_json
        atexit.register(self.close)  # a group that is destroyed waits for what is under way, which nobody may take

    def tell(self, message: dict[str, Any]) -> None:
        """Returns at once."""
        data = json.dumps(message).encode()
        head = len(data).to_bytes(4, "little") + data[: SHORT - 4]
        for part in (head.ljust(SHORT, b"\0"), data[SHORT - 4 :]):
            if part:
                self._start(torch.frombuffer(bytearray(part), dtype=torch.uint8), beside=False)

    def hear(self) -> dict[str, Any]:
        """The next message."""
        head = torch.empty(SHORT, dtype=torch.uint8)
        self._groups.rest(self._groups.start_broadcast(head, 0))
        said = head.numpy().tobytes()
        count = int.from_bytes(said[:4], "little")
        data = said[4 : 4 + count]
        if count > SHORT - 4:
            more = torch.empty(count - len(data), dtype=torch.uint8)
            self._groups.rest(self._groups.start_broadcast(more, 0))
            data += more.numpy().tobytes()
        return json.loads(data)

    def start(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Give tensors, or get them, in the order of the calls on all ranks."""
        return [self._start(tensor, beside=True) for tensor in tensors if len(tensor)]

    def _start(self, tensor: Tensor, beside: bool) -> Any:
        self._under_way = [(work, sent) for work, sent in self._under_way if not self._done(work)]
        work = self._groups.start_broadcast(tensor, 0, beside)
        self._under_way.append((work, tensor))
        return work

    def wait(self, works: Sequence[Any]) -> None:
        self._groups.wait(works)

    def _done(self, work: Any) -> bool:
        return work.is_completed() and not self.wait([work])  # which raises what went wrong

    def close(self) -> None:
        """After the others have taken what is under way, if they still do."""
        atexit.unregister(self.close)
        self._flush(time.monotonic() + LAST)
        self._thread.close(self._drop)

    def _drop(self) -> None:
        self._flush(inf)
        self._thread.unless_exiting(self._groups.drop)

    def _flush(self, deadline: float) -> None:
        with suppress(Broken):
            while not all(self._done(work) for work, _ in self._under_way) and time.monotonic() < deadline:
                time.sleep(0.001)
