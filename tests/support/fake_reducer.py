"""A reducer that plays back outcomes, and a model of one parameter to run against it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from diloco import SGD, Balanced, DiLoCo, Float32
from diloco.core.memory import Memory
from diloco.core.next_state import NextState
from diloco.exchange.contract import compare, sources
from diloco.exchange.mean import Encoded, decode, encode_cuts, exact, mean_of_encoded
from diloco.exchange.reducer import Dropped, Identity, Join, Jump, Round, State, advanced, unchanged


@dataclass(frozen=True)
class Mean:
    """A round whose state the script computes when it hands it over."""

    parts: Sequence[Encoded]
    members: dict[str, float]
    counted: bool = True
    lr: float = 0.0
    own: object = None
    earlier: bool = False


class Script:
    """One replica whose peers are written down. It keeps the promises of every reducer (tests/reduce/test_contract.py).

    Args:
        outcomes: {(fragment, index): [(step from which it is there, outcome), …]}. A round that counts this replica is
            there only once this replica has sent.
        calls: numbers of the calls of `should_send` that are answered with yes, scheduled or not.
        first: a script that has joined before: this one compares its contract and takes its states.
    """

    identity = Identity("me")

    def __init__(self, outcomes=None, calls=(), first=None):
        self.outcomes, self.calls, self.first = outcomes or {}, set(calls), first
        self.sent, self.asked, self.left, self.now = [], [], 0, 0
        self.under_way, self.dropped, self.last = set(), set(), set()

    def join(self, job):
        self.job, self.states = job, list(job.states)
        if self.first is None:
            return [None] * len(job.states)
        compare([self.first.job.contract, job.contract])
        indices = [[(s.index, s.fingerprint()) for s in states] for states in (self.first.job.states, job.states)]
        entered = []
        for f, source in enumerate(sources(indices)):
            theirs = self.first.job.states[f]
            entered.append(None if source is None else State(theirs.index, theirs.anchor.clone(), theirs.outer.clone()))
            self.states[f] = entered[f] or self.states[f]
        return entered

    def should_send(self, fragment, steps, scheduled):
        self.asked.append((fragment, steps, scheduled))
        return scheduled or len(self.asked) in self.calls

    def send(self, fragment, index, delta):
        self.under_way.add((fragment, index))
        sent = delta()
        if sent.last:
            self.last.add((fragment, index))
        self.sent.append((fragment, index, replace(sent, values=sent.values.clone())))  # their memory is used again

    def poll(self, fragment, index):
        key = fragment, index
        if key in self.dropped:
            self.dropped.remove(key)
            return Dropped()
        queue = self.outcomes.get(key, [])
        if not queue or queue[0][0] > self.now:
            return None
        if getattr(queue[0][1], "counted", False) and key not in self.under_way:
            return None
        self.under_way.discard(key)
        outcome = queue.pop(0)[1]
        if isinstance(outcome, Mean):
            outcome = self._round(fragment, outcome, last=key in self.last)
        if isinstance(outcome, (Round, Jump)):
            self.states[fragment] = outcome.state
        return outcome

    def _round(self, fragment, mean, last):
        state = self.states[fragment]
        if any(mean.members.values()):
            state = advanced(self.job, fragment, state, mean.parts, lr=mean.lr, last=last)
        else:
            state = unchanged(state)
        return Round(state, mean.members, mean.counted, mean.earlier, mean.own)

    def drain(self, seconds=None):
        self.dropped |= {key for key in self.under_way if not self.outcomes.get(key)}
        self.under_way -= self.dropped
        return False

    def leave(self):
        self.left += 1


def job(states, codecs, contract=None, sync_every=10, outer=SGD(1.0)):  # noqa: B008 (frozen)
    """What the core hands over. With SGD(1), a round moves the anchor by the mean of the deltas."""
    memory = Memory()

    def advance(fragment, state, *, lr, last):
        return NextState(state, outer, memory, lr)

    return Join(contract or {}, states, codecs, advance, sync_every=sync_every)


def reference_mean(codec, mean_codec, deltas, weights):
    """What the replicas of a collective agree on, bit for bit."""
    encoded = [encode_cuts(codec, delta, len(deltas)) for delta in deltas]
    return decode(mean_of_encoded(codec, mean_codec, encoded, weights, len(deltas[0])))


def mean(value, counted, weight=1.0, earlier=False):
    return Mean(exact(torch.tensor([value])), {"a": weight}, counted, earlier=earlier)


def start(script, **settings):
    """One parameter that starts at 0 and goes up by 1 a step."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    settings = {
        "sync_every": 4,
        "overlap": 2,
        "outer": SGD(1.0),
        "codec": Float32(),
        "fragments": Balanced(1),
    } | settings
    diloco = DiLoCo(model, reducer=script, **settings)

    def step():
        diloco.join()
        with torch.no_grad():
            model.weight += 1
        script.now += 1
        diloco.step()
        return model.weight.item()

    return diloco, step
