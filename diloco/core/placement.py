"""Where the agreed state of a fragment lives: in the memory of the host, or of the accelerator that holds the model.

             on the host                                      on the device
send         anchor up, delta or payload down                 payload down
round        outer step on the host, into spare memory        payloads of the others up, outer step beside training
apply        next anchor up; swap it with the old one         copy the result into the anchor
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from diloco.codecs import device as on_device
from diloco.codecs.codec import Codec, Float32, is_coarse
from diloco.codecs.kernels import Rule
from diloco.core.lane import Upload, Wait, sleep_until
from diloco.core.memory import Memory
from diloco.core.next_state import Made, NextState, rule_of
from diloco.core.outer import SGD, Nesterov, Outer, Stage, lr_before
from diloco.core.payload import room, state_fingerprint
from diloco.core.view import FlatView, Uploads
from diloco.errors import ConfigError
from diloco.exchange.mean import Encoded, exact
from diloco.exchange.reducer import Next, State

Where = Literal["host", "device", "auto"]
SHARE = 0.15
"""Of the free memory of a device: the most that a state takes without being asked for. Activations and the moments of
the inner optimizer are not there yet."""
WORD = 8
"""Bytes to which payloads are aligned on the device."""


class Placement(Protocol):
    state: State
    size: int  # of the host memory that a delta takes, in values

    def offer(self) -> State:
        """The state, on the host, for a reducer that meets the others. May wait."""
        ...

    def prepare(self) -> None:
        """A send follows after the next step."""
        ...

    def send(self, out: Tensor) -> Wait:
        """out ← the delta, or its payload. Call what this returns before you read it."""
        ...

    def fingerprint(self, state: State, out: Tensor) -> int:
        """Of the state that the delta in `out` is against."""
        ...

    def advance(self, state: State, outer: Outer, lr: float) -> Next:
        """Begin the outer step. On the communication thread."""
        ...

    def adopt(self, state: State) -> Uploads:
        """Take the state after a round. Returns copies of the new anchor that are on their way to devices."""
        ...

    def replace(self, state: State, *, reuse: bool = False) -> None:
        """Copy another state. `reuse`: no thread reads the old one."""
        ...


class OnHost:
    def __init__(self, view: FlatView, outer: Outer, memory: Memory, codec: Codec, packs_for: int | None) -> None:
        """`packs_for`: replicas for which the device encodes deltas."""
        self._view, self._memory, self._codec, self._packs_for = view, memory, codec, packs_for
        self.size = view.size if packs_for is None else room(codec, view.size, packs_for)
        momentum = outer.state(view.size)
        momentum = memory.outers.take(len(momentum)).copy_(momentum)
        self.state = State(0, memory.anchors.take(view.size), momentum)
        self._uploads: Uploads = ()  # of the anchor, ahead of the next send
        view.read(self.state.anchor)
        memory.reserve(anchor=view.size, delta=self.size)

    def offer(self) -> State:
        return self.state

    def prepare(self) -> None:
        self._uploads = self._view.upload(self.state.anchor)

    def send(self, out: Tensor) -> Wait:
        uploads, self._uploads = self._uploads, ()
        if self._packs_for is None:
            return self._view.subtract(self.state.anchor, out, uploads)
        lane = self._view.lane
        assert lane is not None
        payload = lane.scratch()
        self._view.pack(self.state.anchor, self._codec, self._packs_for, payload[: self.size], uploads=uploads)
        arrived = lane.download(payload, out)
        lane.give(payload, arrived)
        return partial(sleep_until, arrived)

    def fingerprint(self, state: State, out: Tensor) -> int:
        return state.fingerprint()

    def advance(self, state: State, outer: Outer, lr: float) -> Next:
        # What a coarse codec has lost is added on the host, before the sum goes to the device.
        return NextState(
            state, outer, self._memory, lr, (lambda _: ()) if is_coarse(self._codec) else self._view.upload
        )

    def adopt(self, state: State) -> Uploads:
        if self._memory.lanes and not isinstance(state, Made):  # in memory that may not be pinned
            self.replace(state)
            return ()
        self.state, self._uploads = state, ()
        return state.uploads if isinstance(state, Made) else ()

    def replace(self, state: State, *, reuse: bool = False) -> None:
        """Into other memory, unless `reuse`: a thread may still read a delta against the old one."""
        anchor, outer = self.state.anchor, self.state.outer
        if state.anchor is not anchor:
            if not reuse:
                anchor, outer = self._memory.anchors.take(len(anchor)), self._memory.outers.take(len(outer))
            state = State(state.index, anchor.copy_(state.anchor), outer.copy_(state.outer))
        self.state, self._uploads = state, ()


@dataclass
class _Step:
    """An outer step whose inputs are on the device."""

    parts: list[Encoded]
    rule: Rule
    lr: float  # inner
    arrived: torch.Event
    result: tuple[Upload, Upload] | None  # anchor and momentum; None: no buffer was free


@dataclass(frozen=True, eq=False)
class _Computed(State):
    """The state after a step, whose values are still those before it."""

    step: _Step | None = None


class OnDevice:
    """Anchor and momentum stay where they are. The result of a round waits in two buffers of the lane; if another round
    has them, it is computed when it is applied."""

    def __init__(self, view: FlatView, outer: Outer, memory: Memory, codec: Codec, replicas: int) -> None:
        lane = view.lane
        assert lane is not None
        self._view, self._memory, self._codec, self._replicas = view, memory, codec, replicas
        self._lane, self.size = lane, room(codec, view.size, replicas)
        anchor, self._payload = (
            torch.empty(n, device=lane.device, dtype=torch.float32) for n in (view.size, self.size)
        )
        self.state = State(0, anchor, outer.state(view.size).to(lane.device))
        view.read(anchor)
        on_device.prepare(lane.device)
        memory.reserve(delta=self.size)
        self._sent: Tensor | None = None  # host memory that holds what the payload does
        self._lr = 0.0  # of the round before
        self._read = lane.training.record_event()  # the payload was read, for the last time

    def offer(self) -> State:
        state = self.state
        copy = State(state.index, state.anchor.cpu(), state.outer.cpu())
        self.state = State(state.index, state.anchor, state.outer, copy.fingerprint())
        return copy

    def prepare(self) -> None:
        pass

    def send(self, out: Tensor) -> Wait:
        self._lane.training.wait_event(self._read)
        state = self.state.anchor, self.state.outer
        self._view.pack(state[0], self._codec, self._replicas, self._payload, state=state)
        self._sent, self._read = out, self._lane.download(self._payload, out)
        return partial(sleep_until, self._read)

    def fingerprint(self, state: State, out: Tensor) -> int:
        return state_fingerprint(out) if out is self._sent else state.fingerprint()

    def advance(self, state: State, outer: Outer, lr: float) -> Next:
        rule = rule_of(outer, Stage(state.index + 1, lr), self._lr)
        assert rule is not None, "checked when the placement was chosen"
        return _DeviceNext(self, rule, lr)

    def computed(self, index: int, parts: Sequence[Encoded], rule: Rule, lr: float) -> State:
        """The state after a round, on the communication thread. The copies' stream comes after what training has
        written to the old one: it has waited for the delta against it."""
        lane, fetched = self._lane, self._fetch(parts)
        result = lane.pair(self._view.size)
        if result is not None:
            with lane.copying():
                self._advance(fetched, rule, (result[0].room(), result[1].room()))
            result[0].arrived = result[1].arrived = lane.copies.record_event()
        self._read = lane.copies.record_event()
        step = _Step([] if result else fetched, rule, lr, self._read, result)
        return _Computed(index, self.state.anchor, self.state.outer, step=step)

    def _fetch(self, parts: Sequence[Encoded]) -> list[Encoded]:
        """The parts with their payloads on the device. What this replica has sent is there."""
        others = [payload for part in parts for payload in part.payloads if not self._is_sent(payload)]
        ends = np.cumsum([0] + [-(-len(payload) // WORD) * WORD for payload in others]).tolist()
        staged = self._memory.deltas.take(ends[-1] // 4)
        for start, payload in zip(ends, others, strict=False):
            staged.view(torch.uint8)[start : start + len(payload)] = payload
        with self._lane.copying():  # to which the allocator then gives this memory
            received = torch.empty(ends[-1], dtype=torch.uint8, device=self._payload.device)
            received.copy_(staged.view(torch.uint8), non_blocking=True)
        self._memory.deltas.give(staged, partial(sleep_until, self._lane.copies.record_event()))
        places = iter(ends)

        def fetched(payload: Tensor) -> Tensor:
            source, start = (received, next(places)) if not self._is_sent(payload) else (
                self._payload.view(torch.uint8), payload.storage_offset())  # fmt: skip
            return source[start : start + len(payload)]

        return [
            Encoded(part.at, part.n, part.codec, [fetched(payload) for payload in part.payloads], part.factors)
            for part in parts
        ]

    def _is_sent(self, payload: Tensor) -> bool:
        sent = self._sent
        return sent is not None and payload.untyped_storage().data_ptr() == sent.untyped_storage().data_ptr()

    def _advance(self, parts: Sequence[Encoded], rule: Rule, new: tuple[Tensor, Tensor]) -> None:
        old = self.state.anchor, self.state.outer
        for part in parts:
            span = slice(part.at, part.at + part.n)
            before, after = (old[0][span], old[1][span]), (new[0][span], new[1][span])
            on_device.advance(part.codec, part.payloads, part.factors, rule, before, after)

    def adopt(self, state: State) -> Uploads:
        anchor, outer = self.state.anchor, self.state.outer
        if isinstance(state, _Computed) and state.step is not None:
            with self._lane.timed():
                self._take(state.step, anchor, outer)
        self.state = State(state.index, anchor, outer)
        return ()

    def _take(self, step: _Step, anchor: Tensor, outer: Tensor) -> None:
        if step.result is not None:
            new_anchor, momentum = step.result
            anchor.copy_(new_anchor.values())
            if step.rule.momentum is not None:
                outer[: len(anchor)].copy_(momentum.values())
            new_anchor.release()
            momentum.release()
        else:
            self._lane.training.wait_event(step.arrived)
            self._advance(step.parts, step.rule, (anchor, outer))
            self._read = self._lane.training.record_event()
            self._lane.copies.wait_event(self._read)  # before the payloads are freed
        if step.rule.momentum is not None:
            outer[len(anchor) :].fill_(step.lr)
            self._lr = float(np.float32(step.lr))
        step.parts, step.result = [], None

    def replace(self, state: State, *, reuse: bool = False) -> None:
        anchor, outer = self.state.anchor, self.state.outer
        self._lane.training.wait_event(self._read)
        self.state = State(state.index, anchor.copy_(state.anchor), outer.copy_(state.outer))
        self._lr, self._sent = lr_before(state.outer), None


def choose(
    where: Where, views: Sequence[FlatView], codec: Codec, outer: Outer, packs_for: int | None
) -> tuple[bool, str]:
    """Whether the state of these fragments is on the device, and why. `packs_for`: see `Identity`."""
    if where not in ("host", "device", "auto"):
        raise ConfigError(f'state={where!r}: pass "host", "device" or "auto"')
    obstacle = _obstacle(views, codec, outer, packs_for)
    if where == "device" and obstacle:
        raise ConfigError(f'state="device": {obstacle}; pass state="host"')
    if where != "auto" or obstacle:
        return where == "device", obstacle or "as set"
    taken: Counter[torch.device] = Counter()
    for view in views:
        assert view.lane is not None and packs_for is not None
        taken[view.lane.device] += 4 * (2 * view.size + room(codec, view.size, packs_for))
    try:
        free = {device: torch.accelerator.get_memory_info(device)[0] for device in taken}
    except RuntimeError:  # some drivers and backends
        return False, f"torch cannot tell the free memory of {', '.join(map(str, taken))}"
    device = max(taken, key=lambda device: taken[device] / max(free[device], 1))
    figures = f"the state is {taken[device] / 1e9:.2g} GB, and {free[device] / 1e9:.2g} GB of {device} are free"
    return taken[device] <= SHARE * free[device], figures


def _obstacle(views: Sequence[FlatView], codec: Codec, outer: Outer, packs_for: int | None) -> str:
    """Why the state cannot be on the device, or ""."""
    if not any(run.lane for view in views for run in view.runs):
        return "the model is not on an accelerator"
    if any(view.lane is None for view in views):
        return "a fragment lies on several devices"
    if not on_device.supports(codec):
        return f"codec={codec} runs on the host only"
    if type(outer) not in (Nesterov, SGD):
        return f"outer={outer} runs on the host only"
    return "" if packs_for else "the reducer computes on the host"


class _DeviceNext:
    """Collects the parts of a mean: a round that has failed must not have touched the state."""

    def __init__(self, place: OnDevice, rule: Rule, lr: float) -> None:
        self._place, self._rule, self._lr = place, rule, lr
        self._parts: list[Encoded] = []

    def add(self, part: Encoded) -> None:
        if not on_device.decodes(part.codec):
            part = Encoded(part.at, part.n, Float32(), exact(part.values())[0].payloads, [1.0])
        self._parts.append(part)

    def state(self, index: int) -> State:
        return self._place.computed(index, self._parts, self._rule, self._lr)
