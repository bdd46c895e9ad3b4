"""How busy a replica is when it syncs over a link: the paper's simulator (section 3.1 and appendix).

A step of T seconds is a forward pass (T/3) and a backward pass (2T/3) over L equal layers. When the backward pass of a
layer that is due has ended, its message queues for the link, which carries one at a time. The forward pass of that
layer, `overlap` steps later than the next, waits for it. Utilization is time computing / total time.

That is all of the paper. Beyond it, and off by default, are round trips, headers, codec time, cores that training and
communication share, links that differ up and down, more than two replicas, replicas of unequal speed and jitter
(`Group`), and rounds as this library makes them (`by_fragment`): a complete fragment after
the step, one round after another, awaited by the complete model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from diloco.plan.traffic import Array, Bytes, Link, Reduce, round_bytes, round_trips, transfer_seconds

Message = tuple[int, float]
"""(layer, values): sent when the layer's backward pass has ended, awaited by its forward pass."""
Sends = Callable[[int], Sequence[Message]]
"""The messages of a step, from the last layer to the first."""

MOST_PERIODS = 64
"""Near the least bandwidth a queue builds up slowly. Stopping after n periods overstates utilization by at most
(overlap + 1) / (n · period)."""
SETTLED = 1e-11
"""Seconds in a second by which two periods may differ and count as the same."""


@dataclass(frozen=True)
class Method:
    """What is sent when, and in how many bytes."""

    layers: int
    sends: Sends
    nbytes: Bytes
    period: int
    """After how many steps the sends repeat."""
    overlap: int = 0
    reduce: Reduce = "collective"
    by_fragment: bool = False
    """Whether a message is the round of a complete fragment, which begins only when the round before has ended.
    Otherwise messages follow each other on the link."""
    first: int = 1
    """The step from which the sends repeat."""

    def values(self) -> float:
        """Values sent in a period."""
        return sum(n for t in range(self.first, self.first + self.period) for _, n in self.sends(t))


@dataclass(frozen=True)
class Group:
    """The replicas and what lies between them, except the rate of the link."""

    step_seconds: float
    replicas: int = 2
    round_trip: float = 0.0
    codec_ns: float = 0.0
    """Nanoseconds that the communication thread needs for a value in a round: encode, decode, mean, outer step."""
    hook_ns: float = 0.0
    """Nanoseconds that the training thread needs for a value in a round: take the delta, write the result."""
    speeds: tuple[float, ...] = ()
    """Speed of each replica; 1 takes `step_seconds` a step. Empty: all 1."""
    jitter: float = 0.0
    """Standard deviation of a step's time, as a share of it, independent from step to step."""
    seed: int = 0
    busy_ns: float = 0.0
    """Nanoseconds of training that a value costs in each round, where communication shares training's cores."""
    round_seconds: float = 0.0
    """Seconds of the training thread in a round, whatever its size (`traffic.ROUND_SECONDS`)."""
    wire: float = 1.0
    """What the link could carry in the time of a byte of payload: headers, acknowledgements, gaps (`traffic.WIRE`)."""

    def step_times(self, steps: int) -> Array:
        """Seconds of each step of each replica: (replicas or 1, steps or 1)."""
        means = self.step_seconds / np.asarray(self.speeds or (1.0,), dtype=np.float64)[:, None]
        if not self.jitter:
            return means
        draws = np.random.default_rng(self.seed).normal(1.0, self.jitter, (self.replicas, steps))
        return means * np.maximum(draws, 0.1)  # no step takes no time


def simulate(
    method: Method, group: Group, link: Link, steps: int, *, begin: int = 1, times: Array | None = None
) -> Array:
    """Utilization of a run of this many steps, for each link. The run ends when all that is in flight has arrived.

    `begin`: the number of its first step. `times`: the seconds of each step of each replica, if they are known.
    """
    times = group.step_times(steps) if times is None else times
    state = _start(method, group, link, times)
    for step in range(begin, begin + steps):
        _advance(state, step)
    computed = np.broadcast_to(times, (len(times), steps)).sum(axis=1).mean()
    return computed / np.maximum(state.clock.max(axis=0), state.latest)


def utilization(method: Method, group: Group, link: Link) -> Array:
    """Utilization of a run that never ends, for each link: the start is left out, the sends repeat."""
    up, down = np.broadcast_arrays(np.atleast_1d(link.up), np.atleast_1d(link.down))
    dead = (up == 0) | (down == 0)  # exact, and not 0/0: nothing arrives, nothing goes on
    live = Link(np.where(dead, 1.0, up).astype(float), np.where(dead, 1.0, down).astype(float))
    share = np.minimum(_settled(method, group, live), _link_bound(method, group, live))
    return np.where(dead & (method.values() > 0) & (group.replicas > 1), 0.0, share)


def required_rates(method: Method, group: Group, targets: Sequence[float], like: Link | None = None) -> list[float]:
    """The least rate, in bits a second, at which utilization reaches each target; inf if none does.

    The rate is that of both directions. If a link is given, it is that of its slower direction, and the other keeps its
    ratio.
    """
    like = like or Link.same(1.0)
    low, high = np.full(len(targets), 1e3), np.full(len(targets), 1e15)
    points = 48
    wanted = np.asarray(targets)
    if group.replicas == 1:
        return [0.0] * len(targets)
    for _ in range(5):  # 12 decades / 47^5: eight digits
        rates = np.geomspace(low, high, points)
        reached = utilization(method, group, like.scaled(rates.ravel())).reshape(points, -1) >= wanted
        at = np.where(reached.any(axis=0), reached.argmax(axis=0), points - 1)
        columns = np.arange(len(targets))
        low, high = rates[np.maximum(at - 1, 0), columns], rates[at, columns]
    return [float(rate) if rate < 9e14 else float("inf") for rate in high]


@dataclass
class _State:
    """Clocks in seconds: (replicas, links) for the compute, (links,) for the link."""

    method: Method
    times: Array
    cost: Callable[[float], tuple[Array, float]]
    clock: Array
    net: Array
    latest: Array
    lost: float
    """Seconds that the round of a value takes from training while it is under way."""
    hook: Callable[[float], float]
    """Seconds that training stands still for a round of this many values before it begins."""
    need: dict[int, list[tuple[int, Array]]] = field(default_factory=dict)
    """By step: (layer, when its message is there)."""


def _start(method: Method, group: Group, link: Link, times: Array) -> _State:
    costs: dict[float, tuple[Array, float]] = {}
    latency = group.round_trip * round_trips(group.replicas, method.reduce, method.nbytes)

    def cost(values: float) -> tuple[Array, float]:
        """Seconds that a message occupies the link, and seconds that it takes to arrive after that."""
        if values not in costs:
            up, down = round_bytes(values, method.nbytes, group.replicas, method.reduce)
            busy = transfer_seconds(group.wire * up, group.wire * down, link, method.reduce)
            if group.replicas > 1 and method.by_fragment:
                busy = busy + values * group.codec_ns * 1e-9
            costs[values] = (busy + latency, 0.0) if method.by_fragment else (busy, latency)
        return costs[values]

    links, alone = len(cost(1.0)[0]), group.replicas == 1
    lost = 0.0 if alone else group.busy_ns * 1e-9

    def hook(values: float) -> float:
        return 0.0 if alone or not method.by_fragment else group.round_seconds + values * group.hook_ns * 1e-9

    return _State(method, times, cost, np.zeros((len(times), links)), np.zeros(links), np.zeros(links), lost, hook)


def _advance(state: _State, step: int) -> None:
    """One step of every replica."""
    layers, clock = state.method.layers, state.clock
    needed, sent = state.need.pop(step, ()), state.method.sends(step)
    seconds = state.times[:, (step - 1) % state.times.shape[1], None]
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
        state.net = np.maximum(clock.max(axis=0), state.net) + busy
        ready = state.net + latency
        state.latest = np.maximum(state.latest, ready)
        state.need.setdefault(step + 1 + state.method.overlap, []).append((layer, ready))
        clock = clock + values * state.lost
    state.clock = clock + above * 2 * forward if above else clock


def _settled(method: Method, group: Group, link: Link) -> Array:
    """Simulate period after period until one is like the one before."""
    most = MOST_PERIODS if not group.jitter else max(8, -(-400 // method.period))
    state = _start(method, group, link, group.step_times(method.first + most * method.period))
    before, ends = None, [np.zeros_like(state.net)]
    for number in range(most):
        begin = method.first + number * method.period
        for step in range(begin, begin + method.period):
            _advance(state, step)
        ends.append(state.clock.max(axis=0))
        waiting = [ready for _, messages in sorted(state.need.items()) for _, ready in messages]
        now = np.stack([state.net, *state.clock, *waiting]) - ends[-1]
        alike = before is not None and before.shape == now.shape and (np.abs(now - before) <= SETTLED * ends[-1]).all()
        if alike and not group.jitter:
            return _computed(method, state.times, number, number + 1) / (ends[-1] - ends[-2])
        before = now
    return _computed(method, state.times, most // 2, most) / (ends[-1] - ends[most // 2])


def _computed(method: Method, times: Array, begin: int, end: int) -> float:
    """Seconds of compute in these periods, averaged over replicas."""
    steps = (end - begin) * method.period
    if times.shape[1] == 1:
        return float(times.mean()) * steps
    start = method.first - 1 + begin * method.period
    return float(times[:, start : start + steps].sum(axis=1).mean())


def _link_bound(method: Method, group: Group, link: Link) -> Array:
    """A period cannot be shorter than its messages take on the link."""
    state = _start(method, group, link, group.step_times(method.first + method.period))
    messages = [n for t in range(method.first, method.first + method.period) for _, n in method.sends(t)]
    total = sum((state.cost(n)[0] for n in messages), start=np.zeros_like(state.net))
    with np.errstate(divide="ignore"):
        return np.minimum(_computed(method, state.times, 0, 1) / total, 1.0)
