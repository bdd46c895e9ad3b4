"""The memory that is reckoned for an accelerator is what DiLoCo takes there."""

import pytest
import torch

from diloco import E3M0, Balanced, DiLoCo, Float32, Strided
from diloco.core.lane import already
from diloco.core.memory import LARGE, Buffers
from diloco.core.placement import OnDevice
from diloco.core.tensors import find_layers
from diloco.train.rehearsal import Counted, footprint
from tests.support import late_device
from tests.support.models import Tiny, adamw, steps
from tests.support.processes import run


def _taken(rank, settings):
    late_device.install()
    model = Tiny().to(late_device.NAME)
    optimizer = adamw(model)
    diloco = DiLoCo(model, optimizer, **settings)
    begun = diloco.replica.memory.pinned_bytes
    lanes = [b.nbytes for lane in diloco.replica.memory.lanes.values() for b, _ in lane._free]
    places = [f.place for f in diloco.replica.fragments if isinstance(f.place, OnDevice)]
    lanes += [tensor.nbytes for p in places for tensor in (p.state.anchor, p.state.outer, p._payload)]
    with diloco:
        for _ in steps(model, optimizer, rank, 1, 3 * settings["sync_every"]):
            pass
        taken = diloco.replica.memory.pinned_bytes
    empty = Tiny().to("meta")
    tensors = dict(empty.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in tensors.items()}
    reckoned = footprint(
        settings["fragments"].split(shapes, find_layers(empty, tensors)),
        tensors,
        codec=settings["codec"],
        schedule=diloco.schedule,
        overlap=settings["overlap"],
        packs_for=2,
        state=settings["state"],
    )
    return (
        begun,
        taken,
        diloco.replica.memory.pinned_bytes,
        sum(lanes),
        sum(p.numel() for p in model.parameters()),
        reckoned,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "state"), [(E3M0(), "host"), (Float32(), "host"), (E3M0(), "device")])
@pytest.mark.parametrize(
    ("fragments", "sync_every", "overlap"),
    [(Strided(1), 12, 1), (Balanced(3), 9, 8), (Strided(2), 8, 6)],
    ids=["one in flight", "all in flight", "several in flight"],
)
def test_pinned_memory_and_memory_of_the_device_are_what_is_reckoned(fragments, sync_every, overlap, codec, state):
    settings = {"fragments": fragments, "sync_every": sync_every, "overlap": overlap, "codec": codec, "state": state}
    for begun, taken, ended, lanes, values, reckoned in run(2, _taken, settings):
        assert lanes == pytest.approx(reckoned["device_bytes"], rel=0.01)  # momentum has a value more
        # A round that arrives late uses an anchor that was given back.
        assert begun <= taken <= reckoned["pinned_bytes"]
        if state == "device":
            assert reckoned["host_bytes"] == reckoned["pinned_bytes"] and ended <= reckoned["last_bytes"]
            continue
        assert overlap > 1 or begun == taken == reckoned["pinned_bytes"]  # no round stops the device to pin memory
        assert ended <= reckoned["last_bytes"] - 8 * values
        assert reckoned["host_bytes"] > reckoned["pinned_bytes"] + 4 * values


def test_large_fragments_of_almost_equal_size_share_pinned_memory():
    counted = Counted()
    buffers = Buffers(counted)
    for n in (16 * LARGE, 16 * LARGE - 1, 16 * LARGE - LARGE // 4):
        memory = buffers.take(n)
        assert len(memory) == n
        buffers.give(memory, already)
    assert counted.nbytes == 4 * 16 * LARGE
    assert len(buffers.take(8 * LARGE)) == 8 * LARGE and counted.nbytes == 4 * 24 * LARGE
    assert len(Buffers().take(LARGE + 1)._base or ()) == 0  # on the host, memory is freed instead


def test_pinned_memory_that_nobody_gives_back_is_used_again_once_no_tensor_has_it():
    counted = Counted()
    buffers = Buffers(counted)
    part = buffers.take(100)[10:20]
    other = buffers.take(100)
    assert counted.nbytes == 800
    del part
    again = buffers.take(100)
    assert counted.nbytes == 800 and again.data_ptr() != other.data_ptr()
    buffers.give(torch.empty(100), already)
    assert len(buffers.take(100)) == 100 and counted.nbytes == 1200  # memory from elsewhere is not pinned


def test_memory_that_was_not_taken_from_the_buffers_is_not_kept():
    """As that of states which come from another rank."""
    for buffers in (Buffers(), Buffers(Counted())):
        states = [torch.empty(100) for _ in range(3)]
        for state in states:
            buffers.give(state, already)
        assert buffers.take(100).data_ptr() not in [state.data_ptr() for state in states]
