"""Members of a bucket on real threads: each trains a small model in a thread of its own, over a real store."""

import threading
import time

from diloco import Balanced, DiLoCo
from diloco.bucket import Bucket
from tests.support.models import Tiny, adamw, steps

PATIENT = 150.0
"""Seconds: only a guard against hanging, never a measure."""


class Member(threading.Thread):
    """One member: a model, a loop, a reducer.

    Args:
        count: steps to train, unless `stop()` is called before.
        gate: a barrier that all pass together, and again once each knows all others: only then they train.
        at: step → function, called after that step on the member's own thread.
        die_at: step after which it vanishes without a word, as after kill -9.
    """

    def __init__(
        self,
        url,
        name,
        count=1_000_000,
        *,
        seed=0,
        pause=0.005,
        saved=None,
        die_at=None,
        backend=None,
        gate=None,
        at=None,
        **options,
    ):
        super().__init__(daemon=True)
        self.model = Tiny(seed)
        self.optimizer = adamw(self.model)
        options = {"heartbeat": 0.2, "poll": 0.02} | options
        self.reduce = Bucket(str(url), name, backend=backend, **options)
        self.diloco = DiLoCo(self.model, self.optimizer, sync_every=10, overlap=2, fragments=Balanced(3),
                             reducer=self.reduce)  # fmt: skip
        if saved:
            self.model.load_state_dict(saved[0])
            self.diloco.load_state_dict(saved[1])
        self.count, self.pause, self.die_at, self.number = count, pause, die_at, ord(name[0])
        self.gate, self.at = gate, at or {}
        self.error, self.begun, self.done = None, None, 0
        self.joined, self._stopped = threading.Event(), threading.Event()
        self.states = {}
        self.start()

    def run(self):
        try:
            self.diloco.join()
            self.begun = self.diloco.indices
            self.joined.set()
            if self.gate:
                self.gate.wait(PATIENT)
                until(lambda: len(self.others) >= self.gate.parties - 1)
                self.gate.wait(PATIENT)
            for step in steps(self.model, self.optimizer, self.number, 1, self.count):
                self.done = step
                self.note_states()
                self.at.get(step, lambda: None)()
                if step == self.die_at:
                    return self.vanish()
                if self._stopped.wait(self.pause):
                    break
            self.diloco.finish()
            self.note_states()
        except BaseException as error:
            self.error = error

    def note_states(self):
        self.states |= {(p.number, p.state.index): p.state.fingerprint() for p in self.diloco._fragments}

    def vanish(self):
        self.reduce._end_threads()

    def save(self):
        return {k: v.clone() for k, v in self.model.state_dict().items()}, self.diloco.state_dict()

    def stop(self):
        """Finish after the current step."""
        self._stopped.set()
        return self

    def end(self):
        """Wait until it has finished; raises what it raised."""
        self.join(PATIENT)
        assert not self.is_alive(), "it hangs"
        if self.error:
            raise self.error
        return self

    @property
    def others(self):
        """The other members that a round would wait for. One that is known to be joining is not yet among them."""
        return [m for m in self.reduce.session.members.alive(time.monotonic()).values() if not m.joining]

    @property
    def rounds(self):
        return list(self.diloco.stats.last)

    @property
    def held(self):
        return self.diloco.indices


def agree(*members):
    """Members that held the same round held the same bits."""
    together = {}
    for member in members:
        for key, fingerprint in member.states.items():
            assert together.setdefault(key, fingerprint) == fingerprint
    return together


def until(condition, *members):
    """Wait for something that comes; raises what one of the members raised meanwhile."""
    deadline = time.monotonic() + PATIENT
    while not condition():
        for member in members:
            if member.error:
                raise member.error
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.005)
