"""The outer step of one fragment, into a second buffer.

The thread that receives the payloads computes the next state while training reads the current one; applying the round
swaps the two. The native kernels decode, average, step and fingerprint in one pass over memory. Without them, or with
an outer optimizer or codec that they do not know, `Outer.step` gives the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from diloco.codecs import kernels
from diloco.codecs.codec import native_name
from diloco.core.memory import Memory
from diloco.core.outer import SGD, Nesterov, Outer, Stage, lr_before
from diloco.core.view import Uploads
from diloco.exchange.mean import Encoded, decode, exact
from diloco.exchange.reducer import State, fingerprint, words


@dataclass(frozen=True, eq=False)
class Made(State):
    """A state in memory of the core."""

    uploads: Uploads = ()  # of the anchor


class NextState:
    """`upload`: begins to copy the new anchor to the devices that will take it."""

    def __init__(
        self, state: State, outer: Outer, memory: Memory, lr: float, upload: Callable[[Tensor], Uploads] = lambda _: ()
    ) -> None:
        self._old, self._outer, self._stage, self._upload = state, outer, Stage(state.index + 1, lr), upload
        native = kernels.level != "reference"
        self._rule = rule_of(outer, self._stage, lr_before(state.outer)) if native else None
        self._parts: list[Encoded] = []  # without a native rule: all parts, until the end
        stateless = type(outer) is SGD  # it leaves the state of another optimizer as it is
        self._anchor = memory.anchors.take(len(state.anchor))
        self._outer_state = state.outer if stateless else memory.outers.take(len(state.outer))
        self._words: tuple[int, int] | None = None if stateless and len(state.outer) else (0, 0)

    def add(self, part: Encoded) -> None:
        if self._rule is None:
            self._parts.append(part)
            return
        name = native_name(part.codec)
        if name is None:
            part, name = replace(exact(part.values())[0], at=part.at), "float32"
        span = slice(part.at, part.at + part.n)
        old = self._old.anchor[span], self._old.outer[span]
        new = self._anchor[span], self._outer_state[span]
        sums = kernels.advance(name, part.payloads, part.factors, self._rule, old, new)
        if part.at % 2:
            self._words = None  # the fingerprint sums pairs of values, and these pairs are shifted by one
        elif self._words is not None:
            self._words = self._words[0] + sums[0], self._words[1] + sums[1]

    def state(self, index: int) -> State:
        anchor, outer = self._anchor, self._outer_state
        if self._rule is None:
            anchor.copy_(self._old.anchor)
            outer.copy_(self._old.outer)
            self._outer.step(anchor, decode(self._parts), outer, self._stage)
            return Made(index, anchor, outer, uploads=self._upload(anchor))
        if self._rule.momentum is not None:
            outer[len(anchor) :] = self._stage.lr
        return Made(index, anchor, outer, self._fingerprint(anchor, outer), self._upload(anchor))

    def _fingerprint(self, anchor: Tensor, outer: Tensor) -> int | None:
        """The kernels have summed all pairs of values; add what is behind the last pair."""
        if self._words is None:
            return None
        even = len(anchor) // 2 * 2
        sums = [total + words(values[even:]) for total, values in zip(self._words, (anchor, outer), strict=True)]
        return fingerprint(*(total % (1 << 64) for total in sums))


def rule_of(outer: Outer, stage: Stage, before: float) -> kernels.Rule | None:
    """The outer optimizer as the kernels know it, if they do. A subclass may differ. `before`: see `Nesterov.at`."""
    if type(outer) is Nesterov:
        return kernels.Rule(*outer.at(stage, before))
    return kernels.Rule(outer.lr) if type(outer) is SGD else None
