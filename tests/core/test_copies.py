"""The worst legal order of an accelerator's copies, over the real code.

An accelerator takes copies into a queue. What it copies to the host is there only after waiting for an event that was
recorded later; until then it may also still read what it copies from. `Late` is a fragment's view with such a device:
deltas are nan until their event, and every source is compared at its event with what it was when it was queued.
"""

import threading
from typing import ClassVar

import pytest
import torch

from diloco import E3M0, Balanced, DiLoCo, sync
from diloco.advance import Buffers
from diloco.errors import NotFinite
from diloco.flat import FlatView
from diloco.fragment import Piece
from tests.support.models import Tiny, adamw, flat, steps
from tests.support.processes import run


class Race(AssertionError):
    """Memory was used while the device still copied."""


class Late(FlatView):
    lock = threading.Lock()
    queued: ClassVar[list] = []  # (memory, what it must hold once the device has copied, whether the device writes it)
    waits = True  # False: as if no code ever waited

    def subtract(self, anchor, out, residual=None):
        copied = torch.empty_like(out)
        super().subtract(anchor, copied, residual)
        out.fill_(torch.nan)
        with self.lock:
            self.queued.append((anchor, anchor.clone(), False))
            self.queued.append((out, copied, True))

    def write(self, values):
        super().write(values)
        with self.lock:
            self.queued.append((values, values.clone(), False))

    def merge(self, anchor, keep_local):
        super().merge(anchor, keep_local)
        with self.lock:
            self.queued.append((anchor, anchor.clone(), False))

    def read(self, out):
        super().read(out)  # to memory that is not pinned: the host waits for the device
        self.mark()(always=True)

    def mark(self):
        with self.lock:
            before = list(self.queued)

        def wait(always=False):
            with self.lock:
                for each in before if self.waits or always else ():
                    if any(each is still for still in self.queued):
                        self.queued[:] = [still for still in self.queued if still is not each]
                        self._copied(*each)

        return wait

    @staticmethod
    def _copied(memory, expected, device_writes):
        if device_writes:
            memory.copy_(expected)
        elif not torch.equal(memory, expected):
            raise Race("a source was changed before its copy was done")


def play(rank, device, **settings):
    """Train, and look at the anchors and at the state in between."""
    sync.FlatView = Late if device else FlatView
    model = Tiny()
    optimizer = adamw(model)
    diloco = DiLoCo(model, optimizer, **settings)
    history = []
    with diloco:
        for step in steps(model, optimizer, rank, 1, 30):
            if step % 4 == 0:
                with diloco.anchors():
                    history.append(float(flat(model).sum()))
            if step % 3 == 0:
                parts = diloco.state_dict()["shard 0 of 1"]["parts"]
                history.append([float(part["anchor"].sum()) for part in parts.values()])
    diloco._fragments[0].view.mark()()
    return flat(model), history


SETTINGS = [
    {"sync_every": 6, "overlap": 1, "fragments": Balanced(3)},
    {"sync_every": 5, "overlap": 4, "fragments": Balanced(4), "keep_local": 0.5},
    {"sync_every": 4, "overlap": 0, "fragments": Balanced(2), "codec": E3M0(), "feedback": 0.5},
]


def _both(rank, settings):
    return play(rank, True, **settings), play(rank, False, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=["overlap 1", "overlap 4", "overlap 0, feedback"])
def test_copies_that_are_as_late_as_they_may_be_change_no_bit(settings):
    for (late, late_history), (weights, history) in run(2, _both, settings):
        assert torch.equal(late, weights)
        assert late_history == history


def _without_waiting(rank):
    Late.waits = False
    try:
        play(rank, True, **SETTINGS[0])
    except NotFinite:
        return "a delta was sent before it was there"
    return "nothing"


@pytest.mark.slow
def test_a_delta_that_is_not_waited_for_is_noticed():
    assert run(2, _without_waiting) == ["a delta was sent before it was there"] * 2


@pytest.mark.parametrize("waits", [True, False])
def test_the_memory_of_an_anchor_is_used_again_only_after_its_copies(waits):
    model, buffers = torch.nn.Linear(4, 4, bias=False), Buffers()
    view = Late((Piece("weight", 0, 4),), {"weight": model.weight})
    anchor = buffers.take(view.size).fill_(1.0)
    view.write(anchor)  # as anchors() does, and a merge
    buffers.give(anchor, view.mark() if waits else lambda: None)
    assert buffers.take(view.size).fill_(2.0) is anchor
    if waits:
        view.mark()()
    else:
        with pytest.raises(Race):
            view.mark()()
