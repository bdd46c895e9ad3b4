"""A reducer that plays back outcomes, and a model of one parameter to run against it."""

from dataclasses import replace

import torch
from torch import nn

from diloco import SGD, Balanced, DiLoCo, Float32
from diloco.reduce import Dropped, Round, State
from diloco.reduce.contract import compare, sources
from diloco.reduce.mean import decode, encode_cuts, exact, mean_of_encoded


class Script:
    """One replica whose peers are written down. It keeps the promises of every reducer (tests/reduce/test_contract.py).

    Args:
        outcomes: {(fragment, index): [(step from which it is there, outcome), …]}. A round that counts this replica is
            there only once this replica has sent.
        calls: numbers of the calls of `due` that are answered with yes, slot or not.
        first: a script that has joined before: this one compares its contract and takes its states.
    """

    def __init__(self, outcomes=None, calls=(), first=None):
        self.outcomes, self.calls, self.first = outcomes or {}, set(calls), first
        self.sent, self.applied_states, self.asked, self.left, self.now = [], [], [], 0, 0
        self.under_way, self.dropped = set(), set()

    def join(self, contract, states, codecs):
        self.contract, self.states = contract, states
        if self.first is None:
            return [None] * len(states)
        compare([self.first.contract, contract])
        held = [[(s.index, s.fingerprint()) for s in each] for each in (self.first.states, states)]
        theirs = zip(self.first.states, sources(held), strict=True)
        return [None if source is None else State(s.index, s.anchor.clone(), s.outer.clone()) for s, source in theirs]

    def due(self, fragment, steps, slot):
        self.asked.append((fragment, steps, slot))
        return slot or len(self.asked) in self.calls

    def send(self, fragment, index, delta):
        self.under_way.add((fragment, index))
        made = delta()
        self.sent.append((fragment, index, replace(made, values=made.values.clone())))  # their memory is used again

    def take(self, fragment, index):
        key = fragment, index
        if key in self.dropped:
            self.dropped.remove(key)
            return Dropped()
        queue = self.outcomes.get(key, [])
        if not queue or queue[0][0] > self.now:
            return None
        if isinstance(queue[0][1], Round) and queue[0][1].counted and key not in self.under_way:
            return None
        self.under_way.discard(key)
        return queue.pop(0)[1]

    def applied(self, fragment, state):
        self.applied_states.append((fragment, state.index, state.anchor.clone()))

    def settle(self):
        self.dropped |= {key for key in self.under_way if not self.outcomes.get(key)}
        self.under_way -= self.dropped
        return False

    def leave(self):
        self.left += 1


def reference_mean(codec, mean_codec, deltas, weights):
    """What the replicas of a collective agree on, bit for bit."""
    encoded = [encode_cuts(codec, delta, len(deltas)) for delta in deltas]
    return decode(mean_of_encoded(codec, mean_codec, encoded, weights, len(deltas[0])))


def mean(index, value, counted, weight=1.0):
    return Round(index, exact(torch.tensor([value])), {"a": weight}, counted=counted)


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
    diloco = DiLoCo(model, reduce=script, **settings)

    def step():
        with torch.no_grad():
            model.weight += 1
        script.now += 1
        diloco.step()
        return model.weight.item()

    return diloco, step
