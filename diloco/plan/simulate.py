"""Utilization of a replica that syncs over a link: the paper's simulator (section 3.1 and appendix).

A step of T seconds is a forward pass (T/3) and a backward pass (2T/3) over L equal layers. When the backward pass of a
layer that is due ends, its message queues for the link, which carries one message at a time. The forward pass of that
layer, `overlap` steps after the next step, waits for the message. Utilization is compute time / total time.

Off by default, because the paper does not have them: round trips, headers, codec time, cores that training and
communication share, more than two replicas (`Group`), and rounds as this
library makes them (`by_fragment`): a whole fragment after the step, one at a time, awaited by the whole model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from diloco.plan.traffic import Array, Bytes, Reduce, round_bytes, round_trips, transfer_seconds

Message = tuple[int, float]
"""(layer, values): sent when the layer's backward pass ends, awaited by its forward pass."""
Sends = Callable[[int], Sequence[Message]]
"""The messages of a step, from the last layer to the first."""

MOST_PERIODS = 64
"""Near the least sufficient bandwidth a queue builds up slowly. Stopping after n periods overstates utilization by at
most (overlap + 1) / (n · period)."""
SETTLED = 1e-11
"""Relative difference up to which two periods count as alike."""


@dataclass(frozen=True)
class Method:
    """When each message is sent, and its size."""

    layers: int
    sends: Sends
    nbytes: Bytes
    period: int
    """Number of steps after which the sends repeat."""
    overlap: int = 0
    reduce: Reduce = "collective"
    by_fragment: bool = False
    """Whether a message is the round of a whole fragment, which starts only when the previous round ends. Otherwise
    messages follow each other on the link."""
    first: int = 1
    """The step from which the sends repeat."""

    def values(self) -> float:
        """Values sent in a period."""
        return sum(n for t in range(self.first, self.first + self.period) for _, n in self.sends(t))


@dataclass(frozen=True)
class Group:
    """The replicas and everything between them except the rate of the link."""

    step_seconds: float
    replicas: int = 2
    round_trip: float = 0.0
    codec_ns: float = 0.0
    """Nanoseconds of the communication thread per value of a round: encode, decode, mean, outer step."""
    hook_ns: float = 0.0
    """Nanoseconds of the training thread per value of a round: take the delta, write the result."""
    copy_ns: float = 0.0
    """Nanoseconds of copies between host and accelerator per value of a round. Training does not wait for them, but
    the round does."""
    busy_ns: float = 0.0
    """Nanoseconds of training lost per value of a round, where communication shares training's cores."""
    round_seconds: float = 0.0
    """Seconds of the training thread per round, whatever its size (`traffic.ROUND_SECONDS`)."""
    wire: float = 1.0
    """Link capacity used per byte of payload: headers, acknowledgements, gaps (`traffic.WIRE`)."""


def simulate(method: Method, group: Group, rate: float | Array, steps: int, *, begin: int = 1) -> Array:
    """Utilization of a run of `steps` steps on each link, from step `begin` until all in flight has arrived."""
    state = _start(method, group, np.atleast_1d(rate))
    for step in range(begin, begin + steps):
        _advance(state, step)
    return steps * group.step_seconds / np.maximum(state.clock, state.latest)


def utilization(method: Method, group: Group, rate: float | Array) -> Array:
    """Utilization of an endless run on each link: the steady state, without the start. `rate`: bits per second."""
    rates = np.atleast_1d(np.asarray(rate, dtype=np.float64))
    dead = rates == 0  # nothing ever arrives; computed separately to avoid 0/0
    live = np.where(dead, 1.0, rates)
    share = np.minimum(_settled(method, group, live), _link_bound(method, group, live))
    return np.where(dead & (method.values() > 0) & (group.replicas > 1), 0.0, share)


def required_rates(method: Method, group: Group, targets: Sequence[float]) -> list[float]:
    """The lowest rate, in bits per second, at which utilization reaches each target; inf if none does."""
    low, high = np.full(len(targets), 1e3), np.full(len(targets), 1e15)
    points = 48
    if group.replicas == 1:
        return [0.0] * len(targets)
    for _ in range(5):  # 12 decades / 47^5: eight digits
        rates = np.geomspace(low, high, points)
        reached = utilization(method, group, rates.ravel()).reshape(points, -1) >= np.asarray(targets)
        at = np.where(reached.any(axis=0), reached.argmax(axis=0), points - 1)
        columns = np.arange(len(targets))
        low, high = rates[np.maximum(at - 1, 0), columns], rates[at, columns]
    return [float(rate) if rate < 9e14 else float("inf") for rate in high]


@dataclass
class _State:
    """Clocks in seconds, on each link: of computing and of the link."""

    method: Method
    step_seconds: float
    cost: Callable[[float], tuple[Array, float]]
    clock: Array
    net: Array
    latest: Array
    lost: float
    """Seconds of training lost per value of a round in flight."""
    hook: Callable[[float], float]
    """Seconds for which a round of this many values blocks training before it starts."""
    need: dict[int, list[tuple[int, Array]]] = field(default_factory=dict)
    """By step: (layer, arrival time of its message)."""


def _start(method: Method, group: Group, rates: Array) -> _State:
    costs: dict[float, tuple[Array, float]] = {}
    latency = group.round_trip * round_trips(group.replicas, method.reduce)

    def cost(values: float) -> tuple[Array, float]:
        """Seconds for which a message occupies the link, and seconds until it arrives after that."""
        if values not in costs:
            up, down = round_bytes(values, method.nbytes, group.replicas, method.reduce)
            busy = transfer_seconds(group.wire * up, group.wire * down, rates, method.reduce)
            if group.replicas > 1 and method.by_fragment:
                busy = busy + values * (group.codec_ns + group.copy_ns) * 1e-9
            costs[values] = (busy + latency, 0.0) if method.by_fragment else (busy, latency)
        return costs[values]

    alone = group.replicas == 1
    lost = 0.0 if alone else group.busy_ns * 1e-9

    def hook(values: float) -> float:
        return 0.0 if alone or not method.by_fragment else group.round_seconds + values * group.hook_ns * 1e-9

    clock, net, latest = np.zeros((3, len(rates)))
    return _State(method, group.step_seconds, cost, clock, net, latest, lost, hook)


def _advance(state: _State, step: int) -> None:
    layers, clock, seconds = state.method.layers, state.clock, state.step_seconds
    needed, sent = state.need.pop(step, ()), state.method.sends(step)
    if not needed and not sent:  # most steps
        state.clock = clock + seconds
        return
    forward, done = seconds / (3 * layers), 0
    for layer, ready in sorted(needed, key=lambda message: message[0]):
        if layer > done:
            clock = clock + (layer - done) * forward
            done = layer
        clock = np.maximum(clock, ready)
    clock = clock + (layers - done) * forward
    above = layers
    for layer, values in sent:
        if layer < above:
            clock = clock + (above - layer) * 2 * forward
            above = layer
        clock = clock + state.hook(values)
        busy, latency = state.cost(values)
        state.net = np.maximum(clock, state.net) + busy
        ready = state.net + latency
        state.latest = np.maximum(state.latest, ready)
        state.need.setdefault(step + 1 + state.method.overlap, []).append((layer, ready))
        clock = clock + values * state.lost
    state.clock = clock + above * 2 * forward if above else clock


def _settled(method: Method, group: Group, rates: Array) -> Array:
    """Simulate period after period until two are alike."""
    state = _start(method, group, rates)
    computed = method.period * group.step_seconds
    previous, ends = None, [np.zeros_like(state.net)]
    for number in range(MOST_PERIODS):
        begin = method.first + number * method.period
        for step in range(begin, begin + method.period):
            _advance(state, step)
        ends.append(state.clock)
        waiting = [ready for _, messages in sorted(state.need.items()) for _, ready in messages]
        current = np.stack([state.net, state.clock, *waiting]) - ends[-1]
        comparable = previous is not None and previous.shape == current.shape
        if comparable and (np.abs(current - previous) <= SETTLED * ends[-1]).all():
            return computed / (ends[-1] - ends[-2])
        previous = current
    half = MOST_PERIODS // 2
    return computed * (MOST_PERIODS - half) / (ends[-1] - ends[half])


def _link_bound(method: Method, group: Group, rates: Array) -> Array:
    """A period cannot be shorter than its messages take on the link."""
    state = _start(method, group, rates)
    messages = [n for t in range(method.first, method.first + method.period) for _, n in method.sends(t)]
    total = sum((state.cost(n)[0] for n in messages), start=np.zeros_like(state.net))
    with np.errstate(divide="ignore"):
        return np.minimum(method.period * group.step_seconds / total, 1.0)
