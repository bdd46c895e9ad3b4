"""The next state of a fragment: what the mean of a round makes of the state that is held, in memory of its own.

The thread that has the payloads makes it, while training reads the state that is held; applying the round then puts the
one in the place of the other. With the kernels, decoding, mean and outer rule are one pass over the memory, which also
gives the fingerprint. Without them, or with an outer rule or codec that they do not know, the same bits come from
`Outer.step`.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from diloco import kernels
from diloco.codec import native_name
from diloco.outer import SGD, Nesterov, Outer, Stage
from diloco.reduce import State, fingerprint, words
from diloco.reduce.mean import Encoded, decode, exact


class Buffers:
    """Host memory that is used again: fresh pages cost several times what a pass over them does.

    What was given back is kept until another size is asked for. So fragments of equal size that are synced in turn
    share the memory of one, and no more is kept than was in use at one time.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._free: list[tuple[Tensor, Callable[[], None]]] = []
        self._lock = threading.Lock()

    def take(self, n: int) -> Tensor:
        """Memory for n values. May wait for copies out of it."""
        with self._lock:
            same = [i for i, (tensor, _) in enumerate(self._free) if len(tensor) == n]
            found = self._free.pop(same[0]) if same else None
            if found is None and n:
                self._free.clear()
        if found is None:
            return torch.empty(n, dtype=torch.float32, device="cpu", pin_memory=self._pinned)
        tensor, copied = found
        copied()
        return tensor

    def give(self, tensor: Tensor, copied: Callable[[], None]) -> None:
        """Take back memory that nobody reads or writes any more once `copied` has returned."""
        if len(tensor):
            with self._lock:
                self._free.append((tensor, copied))


class Memory:
    """What all fragments share: memory for deltas in flight and for next states. `pinned`: an accelerator copies from
    and to it."""

    def __init__(self, pinned: bool = False) -> None:
        self.deltas, self.anchors, self.outers = Buffers(pinned), Buffers(pinned), Buffers()


class NextState:
    def __init__(self, state: State, outer: Outer, memory: Memory, lr: float) -> None:
        self._old, self._outer, self._stage = state, outer, Stage(state.index + 1, lr)
        self._rule = _native_rule(outer, self._stage, state.outer)
        self._parts: list[Encoded] = []  # without a native rule: all of them, until the end
        kept = type(outer) is SGD  # SGD has no state of its own, and leaves that of another rule as it is
        spare = state.outer if kept else memory.outers.take(len(state.outer))
        self._new = memory.anchors.take(len(state.anchor)), spare
        self._words: tuple[int, int] | None = None if kept and len(state.outer) else (0, 0)

    def add(self, part: Encoded) -> None:
        if self._rule is None:
            self._parts.append(part)
            return
        name = native_name(part.codec)
        if name is None:
            part, name = replace(exact(part.values())[0], at=part.at), "float32"
        here = slice(part.at, part.at + part.n)
        old, new = (self._old.anchor[here], self._old.outer[here]), (self._new[0][here], self._new[1][here])
        sums = kernels.advance(name, part.payloads, part.factors, self._rule, old, new)
        if part.at % 2:
            self._words = None  # pairs that begin at an odd value are not those of the fingerprint
        elif self._words is not None:
            self._words = self._words[0] + sums[0], self._words[1] + sums[1]

    def state(self, index: int) -> State:
        anchor, outer = self._new
        if self._rule is None:
            anchor.copy_(self._old.anchor)
            outer.copy_(self._old.outer)
            self._outer.step(anchor, decode(self._parts), outer, self._stage)
            return State(index, anchor, outer)
        if self._rule.momentum is not None:
            outer[len(anchor) :] = self._stage.lr
        known = None
        if self._words is not None:  # over the pairs of values; what is behind the last pair is missing
            rest = len(anchor) // 2 * 2
            sums = [total + words(t[rest:]) for total, t in zip(self._words, self._new, strict=True)]
            known = fingerprint(*(total % (1 << 64) for total in sums))
        return State(index, anchor, outer, known)


def _native_rule(outer: Outer, stage: Stage, state: Tensor) -> kernels.Rule | None:
    """A rule that the kernels know, if they are there. A class derived from it may differ."""
    if kernels.level == "reference":
        return None
    if type(outer) is Nesterov:
        return kernels.Rule(*outer.at(stage, state))
    return kernels.Rule(outer.lr) if type(outer) is SGD else None
