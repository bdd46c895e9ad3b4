"""The accelerator's branches of the core, on a device that does everything as late as it may; the CPU has the bits.

Each test runs in processes of its own, because the device is there for the rest of a process.
"""

import copy
import gc
import re
import threading
import time
import warnings
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from diloco import E3M0, SGD, Balanced, BFloat16, DiLoCo, Float32, Nesterov
from diloco.codecs.codec import codec_named
from diloco.codecs.formats import FORMATS
from diloco.core import lane as lane_module
from diloco.core.fragment import Piece
from diloco.core.lane import Lane
from diloco.core.memory import Memory
from diloco.core.placement import OnDevice, OnHost
from diloco.core.view import FlatView, Span, lanes_for
from diloco.errors import ConfigError, DiLoCoError, Mismatch, NotFinite
from diloco.exchange import local
from diloco.exchange.mean import exact
from diloco.exchange.reducer import Round, State
from diloco.exchange.thread import start_threads
from diloco.runs.config import TrainConfig
from diloco.train.setup import attach, placed
from tests.support import late_device, players
from tests.support.fake_reducer import Mean, Script
from tests.support.models import Tiny, adamw, anchors, batch, flat, steps
from tests.support.processes import run

pytestmark = pytest.mark.slow  # processes

STEPS = 30
LATE = late_device.NAME


def small(span):
    """Some are handled together, as those of an accelerator are: the late device's are of a class of their own."""
    return span.size < 300 and span.size == span.tensor.numel()


def start(device, *, dtype=torch.float32, seed=0, **settings):
    if device == "cpu":
        settings.pop("state", None)
    Span.small = property(small)
    model = Tiny(seed).to(dtype).to(device)
    optimizer = adamw(model)
    return model, optimizer, DiLoCo(model, optimizer, **settings)


def slower(model, optimizer, rank, first=1):
    """Steps with a learning rate that falls, and with it what the outer optimizer keeps."""
    for step in range(first, STEPS + 1):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 40)
        yield from steps(model, optimizer, rank, step, step)


def play(device, rank, *, look=0, **settings):
    """Weights and anchors at the end; `look`: every so many steps also what the anchors and the state are then."""
    model, optimizer, diloco = start(device, **settings)
    history = []
    with diloco:
        for step in slower(model, optimizer, rank):
            if look and step % look == 0:
                with diloco.anchors():
                    history.append(flat(model).cpu())
                history.append(flat(model).cpu())
            if look and step % (look - 1) == 0:
                parts = diloco.state_dict()["shard 0 of 1"]["fragments"]
                history += [torch.cat([part["anchor"], part["outer"]]).cpu() for part in parts.values()]
                history += [torch.tensor([bool(part["flight"])]) for part in parts.values()]
    return [flat(model).cpu(), anchors(diloco).cpu(), *history]


def same(expected, found):
    """Bit for bit."""
    return len(expected) == len(found) and all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(expected, found, strict=True)
    )


def _both_in_a_group(rank, settings):
    late_device.install()
    same_bits = same(play("cpu", rank, **settings), play(LATE, rank, **settings))
    return same_bits, late_device.races


OUTER = Nesterov(0.4, 0.9)  # with momentum from the first round on
OVERLAPS = {
    "waits": {"sync_every": 4, "overlap": 0, "fragments": Balanced(2)},
    "one step": {"sync_every": 6, "overlap": 1, "fragments": Balanced(3)},
    "several in flight": {"sync_every": 10, "overlap": 9, "fragments": Balanced(5)},
    "keeps half": {"sync_every": 5, "overlap": 4, "fragments": Balanced(4), "keep_local": 0.5},
    "on the device": {"sync_every": 5, "overlap": 1, "fragments": Balanced(3), "state": "device", "outer": OUTER},
    "on the device, waits": {"sync_every": 4, "overlap": 0, "fragments": Balanced(2), "state": "device"},
    "on the device, several in flight": {
        "sync_every": 10,
        "overlap": 9,
        "fragments": Balanced(5),
        "keep_local": 0.5,
        "state": "device",
    },
}


@pytest.mark.parametrize("look", [0, 4], ids=["plain", "looked at"])
@pytest.mark.parametrize("name", OVERLAPS)
def test_replicas_on_the_device_have_the_bits_of_replicas_on_the_cpu(name, look):
    assert run(2, _both_in_a_group, OVERLAPS[name] | {"look": look}) == [(True, [])] * 2


def _unequal_starts(rank, devices, settings):
    late_device.install()
    return play(devices[rank], rank, seed=rank, **settings), late_device.races


@pytest.mark.parametrize("name", ["several in flight", "on the device"])
@pytest.mark.parametrize("devices", [(LATE, LATE), ("cpu", LATE), (LATE, "cpu")], ids=" ".join)
def test_replicas_with_unequal_starts_take_that_of_the_first_wherever_they_are(name, devices):
    expected = [values for values, _ in run(2, _unequal_starts, ("cpu", "cpu"), OVERLAPS[name])]
    found = run(2, _unequal_starts, devices, OVERLAPS[name])
    assert [races for _, races in found] == [[], []]
    assert all(same(a, b) for a, (b, _) in zip(expected, found, strict=True))


def _crossing(rank):
    """Two threads of which the first to enter is the first to leave."""
    late_device.install()
    lane, entered, left = Lane(torch.device(LATE), 8), threading.Event(), threading.Event()
    own, streams = torch.Stream(), {}
    torch.accelerator.set_stream(own)
    torch.accelerator.set_device_index(3)

    def other():
        with lane.copying():
            entered.set()
            left.wait(60)
        streams["other"] = torch.accelerator.current_stream()

    with lane.copying():
        (thread,) = start_threads([other], "other")
        entered.wait(60)
    streams["training"] = torch.accelerator.current_stream()
    left.set()
    thread.join()
    return streams["training"] is own, streams["other"] is not own, torch.accelerator.current_device_index()


def test_two_threads_that_copy_return_to_streams_of_their_own():
    assert run(1, _crossing) == [(True, True, 3)]


def _device_of_threads(rank):
    late_device.install()
    torch.accelerator.set_device_index(3)
    found = []
    (thread,) = start_threads([lambda: found.append(torch.accelerator.current_device_index())], "other")
    thread.join()
    return found


def test_threads_have_the_accelerator_of_the_thread_that_starts_them():
    assert run(1, _device_of_threads) == [[3]]


def _both_in_one_process(rank, settings, replicas):
    late_device.install()

    def on(device):
        return local.run(replicas, lambda reducer: play(device, reducer.replica, reducer=reducer, look=5, **settings))

    found = [same(*pair) for pair in zip(on("cpu"), on(LATE), strict=True)]
    return found, late_device.races


@pytest.mark.parametrize(
    "settings",
    [
        *({"codec": codec_named(name)} for name in FORMATS),
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "keep_local": 0.5},
        {"dtype": torch.bfloat16, "keep_local": 0.5, "state": "device"},
        {"codec": codec_named("bfloat16"), "outer": SGD(0.8), "state": "device"},
    ],
    ids=[*FORMATS, "bf16 parameters", "keeps half", "keeps half, on the device", "SGD, on the device"],
)
def test_every_codec_and_type_of_parameter_has_the_bits_of_the_cpu(settings):
    settings = {"sync_every": 6, "overlap": 2, "fragments": Balanced(3)} | settings
    assert run(1, _both_in_one_process, settings, 2) == [([True, True], [])]


@pytest.mark.parametrize("state", ["host", "device"])
def test_four_replicas_that_average_shares_have_the_bits_of_the_cpu(state):
    settings = {"sync_every": 6, "overlap": 2, "fragments": Balanced(3), "state": state}
    assert run(1, _both_in_one_process, settings, 4) == [([True] * 4, [])]


def _resumed(device, rank, at, states=("host", "host")):
    """The end of a run that was saved with deltas in flight and continued from there. `states`: before and after."""
    settings = {"sync_every": 8, "overlap": 5, "fragments": Balanced(4), "keep_local": 0.25, "outer": OUTER}
    model, optimizer, diloco = start(device, state=states[0], **settings)
    with diloco:
        for step in slower(model, optimizer, rank):
            if step == at:
                saved = {
                    "model": {n: p.detach().cpu() for n, p in model.named_parameters()},
                    "diloco": tree_map_only(torch.Tensor, lambda x: x.cpu(), diloco.state_dict()),
                }
                saved["optimizer"] = [{n: v.cpu() for n, v in s.items()} for s in optimizer.state.values()]
                saved = copy.deepcopy(saved)
    whole = [flat(model).cpu(), anchors(diloco).cpu()]
    model, optimizer, diloco = start(device, state=states[1], **settings)
    model.load_state_dict(saved["model"])
    for p, state in zip(model.parameters(), saved["optimizer"], strict=True):
        optimizer.state[p] = {n: v.to(device) for n, v in state.items()}
    diloco.load_state_dict(saved["diloco"])
    with diloco:
        for _ in slower(model, optimizer, rank, at + 1):
            pass
    return [*whole, flat(model).cpu(), anchors(diloco).cpu()]


def _resume_both(rank, states):
    late_device.install()
    on_cpu, late = _resumed("cpu", rank, 19), _resumed(LATE, rank, 19, states)
    return same(on_cpu, late), same(late[:2], late[2:]), late_device.races


@pytest.mark.parametrize(
    "states", [("host", "host"), ("device", "device"), ("host", "device"), ("device", "host")], ids=" then ".join
)
def test_a_run_on_the_device_continues_from_any_step(states):
    assert run(2, _resume_both, states) == [(True, True, [])] * 2


def _bucket_steps(devices, count):
    """Three members after each step. One is often late: its deltas do not count, and it follows."""
    world = players.World(values=600)
    members = []
    for name, device in zip("abc", devices, strict=True):
        model = torch.nn.Linear(world.values, world.fragments, bias=False)
        torch.nn.init.zeros_(model.weight)
        members.append(players.Player(world, name, rate=0.1 * (1 + len(members)), model=model.to(device)))
    players.meet(*members)
    for step in range(count):
        for k, member in enumerate(members):
            member.step()
            if k < 2 or step % 10 == 0:
                member.turn()
        world.now += 0.5
        yield members


def _bucket(*devices):
    *_, members = _bucket_steps(devices, 60)
    outcomes = Counter(
        (o.counted, i) for i, m in enumerate(members) for _, o in m.reduce.outcomes if isinstance(o, Round)
    )
    return [flat(m.model).cpu() for m in members] + [anchors(m.diloco) for m in members], outcomes


def _bucket_both(rank, devices):
    late_device.install()
    (on_cpu, expected), (others, outcomes) = _bucket("cpu", "cpu", "cpu"), _bucket(*devices)
    return same(on_cpu, others), expected == outcomes, {counted for counted, _ in outcomes}, late_device.races


@pytest.mark.parametrize("devices", [(LATE, LATE, LATE), ("cpu", LATE, LATE)], ids=["all", "two of three"])
def test_members_of_a_bucket_on_the_device_have_the_bits_of_members_on_the_cpu(devices):
    assert run(1, _bucket_both, devices) == [(True, True, {True, False}, [])]


def _bucket_pinned(rank):
    late_device.install()
    counted, pinned = Counter(), []
    for members in _bucket_steps((LATE, LATE, LATE), 240):
        pinned.append([member.diloco.replica.memory.pinned_bytes for member in members])
        counted.update(o.counted for _, o in members[2].reduce.outcomes if isinstance(o, Round))
        for member in members:
            member.reduce.outcomes.clear()  # they have the states
    return pinned[59], pinned[239], counted


def test_a_member_whose_deltas_do_not_count_pins_no_more_memory_in_four_times_as_many_steps():
    ((early, late, counted),) = run(1, _bucket_pinned)
    assert counted[False] > 10
    assert late == early and max(late) <= 2 * min(late)


def _counted(rank, settings):
    """What 30 steps copy and wait for, without the batches."""
    late_device.install()
    model, optimizer, diloco = start(LATE, **settings)
    diloco.join()
    counters = late_device.counters = late_device.Counters()
    batches = 0
    for step in steps(model, optimizer, rank, 1, STEPS):
        batches += sum(tensor.nbytes for tensor in batch(rank, step))
    diloco.leave()
    counters.copied[0, "up"] -= batches
    counters.pageable["up"] -= batches
    sizes = [fragment.view.size for fragment in diloco._fragments]
    sent = [sizes[round.fragment] for round in diloco.stats.last]
    sent += [sizes[f.number] for f in diloco._fragments if f.in_flight is not None]
    return counters, sent


@pytest.mark.parametrize("codec", [Float32(), codec_named("twobit"), E3M0()], ids=str)
@pytest.mark.parametrize("name", ["one step", "keeps half", "on the device"])
def test_training_on_the_device_waits_for_nothing_and_its_stream_copies_nothing(name, codec):
    settings, encodes = OVERLAPS[name] | {"codec": codec}, codec == E3M0()
    if not encodes:
        settings.pop("state", None)
    for counters, sent in run(2, _counted, settings):
        assert not any(counters.pageable.values())
        assert not any(counters.waits.values())  # the communication thread asks and sleeps
        # So does training, once a send at most: for the copies of an earlier round from or to the memory of the delta.
        assert counters.pending["MainThread"] <= len(sent)
        assert counters.copied[0, "up"] == counters.copied[0, "down"] == 0
        up, down = (sum(n for (_, way), n in counters.copied.items() if way == wanted) for wanted in ("up", "down"))
        # E3M0 is encoded on the device: half a byte a value, filled up to words, and 32 bytes.
        assert down == sum(8 * -(-codec.nbytes(n) // 8) + 32 if encodes else 4 * n for n in sent)
        if "state" in settings:  # the payload of the other replica
            assert up + down <= 1.1 * sum(sent)
        else:  # anchors for the sends, and the states that have arrived
            assert 4 * sum(sent) < up <= 8 * sum(sent)
            assert up + down <= (8.6 if encodes else 12) * sum(sent)


def _placed(rank):
    late_device.install()
    out = []
    free = torch.accelerator.get_memory_info()[0]
    reducer = local.Local(local._Board(2, None), 0)
    for device, settings in (
        ("cpu", {}),
        (LATE, {}),
        (LATE, {"codec": codec_named("twobit")}),
        (LATE, {"outer": Momentum()}),
        (LATE, {"reducer": Script()}),
    ):
        model = torch.nn.Linear(8, 4).to(device)
        settings = {"reducer": reducer, "fragments": Balanced(2)} | settings
        replica = DiLoCo(model, state="auto", **settings).replica
        out.append((replica.where, replica.why))
        if replica.where == "host":
            with pytest.raises(ConfigError, match='state="device"'):
                DiLoCo(model, state="device", **settings)

    def refuse(device=None):
        raise NotImplementedError

    for memory_info in (lambda device=None: (2000, free), refuse):
        torch.accelerator.get_memory_info = memory_info
        replica = DiLoCo(torch.nn.Linear(8, 4).to(LATE), state="auto", reducer=reducer).replica
        out.append((replica.where, replica.why))
    return list(zip(*out, strict=True))


class Momentum(Nesterov):
    """Unknown to the device."""


def test_the_state_is_on_the_device_if_it_can_be_and_takes_a_small_part_of_the_free_memory():
    ((places, reasons),) = run(1, _placed)
    assert places == ("host", "device", "host", "host", "host", "host", "host"), reasons
    assert len(set(reasons)) == len(reasons)  # each for a reason of its own


def _trainer_places(rank):
    late_device.install()

    def attached(device):
        model, reducer = torch.nn.Linear(8, 4).to(device), local.Local(local._Board(2, None), 0)
        diloco = attach(model, [], TrainConfig(fragments="balanced:2"), None, reducer)
        return [(value.name, value.value) for value in placed(diloco, torch.device(device))]

    return attached("cpu"), attached(LATE)


def test_the_trainer_chooses_and_says_where_the_state_is_on_an_accelerator_only():
    assert run(1, _trainer_places) == [([], [("state", "device")])]


class Silent(Script):
    """Nobody takes the delta, so nobody waits for it."""

    def send(self, fragment, index, delta):
        self.under_way.add((fragment, index))


def _alone(device, reducer, codec=E3M0()):  # noqa: B008 (frozen)
    """One replica, and a function that makes a step which waits for nothing."""
    model = torch.nn.Linear(8, 4, bias=False).to(device)
    torch.nn.init.ones_(model.weight)
    settings = {"sync_every": 4, "overlap": 2, "fragments": Balanced(1), "outer": SGD(1.0), "codec": codec}
    diloco = DiLoCo(model, reducer=reducer, **settings)

    def step():
        diloco.join()
        with torch.no_grad():
            model.weight.mul_(1.5)
        reducer.now += 1
        diloco.step()

    return diloco, step


def _saved_in_flight(rank):
    late_device.install()
    flights = []
    for device in ("cpu", LATE):
        diloco, step = _alone(device, Silent())
        for _ in range(4):
            step()
        flights.append(bytes(diloco._fragments[0].state_dict()["flight"]))  # the replica's looks at the weights first
    return len(flights[0]) > 0, flights[0] == flights[1]


def _resumed_with_another_codec(rank):
    late_device.install()
    reducer = Silent()
    reducer.identity = replace(reducer.identity, packs_for=2)
    diloco, step = _alone(LATE, reducer)
    for _ in range(4):
        step()
    saved = diloco.state_dict()
    other, _ = _alone(LATE, reducer, BFloat16())
    try:
        other.load_state_dict(saved)
    except Mismatch as error:
        return str(error)


def test_an_encoded_delta_in_flight_is_refused_by_another_codec():
    assert "resume with the codec it was saved with" in run(1, _resumed_with_another_codec)[0]


def test_a_delta_is_saved_only_once_it_is_there():
    assert run(1, _saved_in_flight) == [(True, True)]


def _memory_of_the_old_anchor(rank):
    late_device.install()
    outcome = Mean(exact(torch.full((32,), -1.0)), {"a": 1.0})
    diloco, step = _alone(LATE, Script({(0, 1): [(6, outcome)]}))
    (fragment,) = diloco._fragments
    for count in range(1, 7):
        old = fragment.state.anchor
        step()
        if count == 5:
            with diloco.anchors():
                pass
    assert fragment.state.index == 1
    while fragment.memory.anchors.take(32).fill_(7.0).data_ptr() != old.data_ptr():
        pass
    late_device.synchronize()
    return late_device.races


def test_the_memory_of_an_anchor_is_used_again_only_after_it_was_copied():
    assert run(1, _memory_of_the_old_anchor) == [[]]


def _sharded(rank):
    """What FSDP2 leaves on a rank, taken and written."""
    late_device.install()
    out = []
    for device in ("cpu", LATE):
        whole = torch.arange(15.0).view(5, 3)
        mesh, mine = init_device_mesh(device, (2,)), whole.chunk(2)[rank].to(device)
        tensor = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        piece = (Piece("x", 1, 5),)
        view = FlatView(piece, {"x": tensor}, lanes_for([piece], {"x": tensor}))
        anchor, delta = (torch.full((view.size,), 2.0, pin_memory=True) for _ in range(2))
        copied = view.subtract(anchor, delta)
        view.merge(anchor, 0.25)
        copied()
        out.append([delta, tensor.to_local().cpu()])
    return same(*out), len(out[0][0]), late_device.races


def test_a_shard_on_the_device_has_the_bits_of_one_on_the_cpu():
    assert run(2, _sharded) == [(True, 6, []), (True, 6, [])]


def _not_finite(rank):
    """What a nan on one of two replicas says."""
    late_device.install()

    def loop(reducer):
        model, optimizer, diloco = start(LATE, reducer=reducer, sync_every=4, fragments=Balanced(2))
        with diloco:
            for step in steps(model, optimizer, reducer.replica, 1, STEPS):
                if step == 5 and reducer.replica == 1:
                    with torch.no_grad():
                        model.head.weight.fill_(torch.nan)

    try:
        local.run(2, loop)
    except NotFinite as error:
        return str(error)
    return "nothing"


def test_inf_and_nan_are_found_in_deltas_that_the_device_encodes():
    (message,) = run(1, _not_finite)
    assert re.search("inf or nan in [a-z0-9.]+weight on replica 1", message)  # one step later it is in all of them


def _same_data(rank):
    late_device.install()

    def loop(reducer):
        model, optimizer, diloco = start(LATE, reducer=reducer, sync_every=4, fragments=Balanced(2))
        with diloco:
            for _ in steps(model, optimizer, 0, 1, STEPS):
                pass

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        local.run(2, loop)
    return [str(warning.message) for warning in caught]


def test_replicas_that_train_on_the_same_data_are_noticed_by_digests_from_the_device():
    (messages,) = run(1, _same_data)
    assert any("sent identical updates" in message for message in messages)


def _ahead(rank):
    """Before a send, and when a round has arrived: whether the anchor is on its way to the device already."""
    late_device.install()
    outcome = Mean(exact(torch.full((32,), -1.0)), {"a": 1.0})
    script = Script({(0, 1): [(6, outcome)]})
    diloco, step = _alone(LATE, script)
    (fragment,) = diloco._fragments
    ahead = []
    for _ in range(5):
        step()
        ahead.append(any(fragment.place._uploads))
    script.now = 6
    return ahead, any(script.poll(0, 1).state.uploads)


def test_anchors_are_on_their_way_to_the_device_before_they_are_needed():
    assert run(1, _ahead) == [([False, False, True, False, False], True)]


def _applied(rank, codec, **round):
    """Buffers of the lane that are free after a round, whose state the reducer keeps."""
    late_device.install()
    outcome = Mean(exact(torch.full((32,), -1.0)), {"a": 1.0}, **round)
    diloco, step = _alone(LATE, Script({(0, 1): [(6, outcome)]}), codec)
    for _ in range(6):
        step()
    (lane,) = diloco.replica.memory.lanes.values()
    return diloco.indices, len(lane._free)


def _all_applied(rank):
    coarse = _applied(rank, codec_named("twobit"), own=lambda: torch.zeros(32))
    return coarse, _applied(rank, Float32()), _applied(rank, Float32(), counted=False)


def test_every_round_leaves_all_buffers_of_the_device_for_the_next():
    assert run(1, _all_applied) == [(([1], 3),) * 3]


class Normalized(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)


def _restarted(rank):
    """Whether the first lane is gone, and whether the agreed buffers are what they were."""
    late_device.install()
    model = Normalized().to(LATE)
    diloco = DiLoCo(model, reducer=Script(), fragments=Balanced(1))
    with torch.no_grad():
        for buffer in (model.norm.running_mean, model.norm.running_var):
            buffer.fill_(2.0)
    diloco.join()
    lanes = [weakref.ref(lane) for lane in diloco.replica.memory.lanes.values()]
    (before,) = [fragment.state.anchor.tolist() for fragment in diloco.replica.buffers]
    with torch.no_grad():
        model.norm.running_mean.fill_(3.0)
    diloco.step()
    diloco.restart(sync_every=8, fragments=Balanced(2), overlap=1, codec=E3M0())
    diloco.step()
    gc.collect()
    (after,) = [fragment.state.anchor.tolist() for fragment in diloco.replica.buffers]
    return [lane() is None for lane in lanes], before == after == [2.0] * 8, model.norm.running_mean.cpu().tolist()


def test_a_restart_leaves_nothing_of_the_first_cut_on_the_device():
    assert run(1, _restarted) == [([True], True, [3.0] * 4)]


def _place(kind, codec=None, packs_for=2):
    """600 values and their state, and the host memory of their deltas."""
    late_device.install()
    piece, tensors = (Piece("x", 0, 600),), {"x": torch.ones(600).to(LATE)}
    lanes = lanes_for([piece], tensors)
    memory = Memory(lanes)
    return kind(FlatView(piece, tensors, lanes), OUTER, memory, codec or E3M0(), packs_for), memory


def _sent_twice(rank):
    """A round was dropped: the next delta is encoded over a payload that may still be on its way to the host."""
    place, memory = _place(OnDevice)
    for _ in range(2):
        arrived = place.send(memory.deltas.take(place.size))
    arrived()
    return late_device.races


def test_a_payload_is_encoded_again_only_after_it_was_copied():
    assert run(1, _sent_twice) == [[]]


def _fetched(rank):
    """The memory in which the payloads of the others were, as soon as the next round gets it."""
    place, memory = _place(OnDevice)
    place.send(memory.deltas.take(place.size))()
    following = place.advance(place.state, OUTER, 1.0)
    following.add(*exact(torch.ones(600)))
    following.state(1)
    pinned = memory.pinned_bytes
    memory.deltas.take(600).fill_(7.0)
    assert memory.pinned_bytes == pinned  # that memory, and no other
    late_device.synchronize()
    return late_device.races


def test_the_memory_of_received_payloads_is_used_again_only_after_they_were_copied():
    assert run(1, _fetched) == [[]]


def _offered(rank):
    place, memory = _place(OnDevice)
    anchor, momentum = torch.arange(600.0), torch.arange(601.0)
    place.replace(State(1, anchor, momentum))
    prints = [place.offer().fingerprint()]
    place.send(sent := memory.deltas.take(place.size))()
    prints += [place.fingerprint(place.state, memory) for memory in (sent, torch.empty(600))]
    return prints, State(1, anchor, momentum).fingerprint()


def test_the_fingerprint_of_a_state_on_the_device_is_that_of_the_host():
    ((prints, expected),) = run(1, _offered)
    assert prints == [expected] * 3


def _pairs(rank):
    """Of three buffers: whether a round gets two while a send has one, and what is left for a send when a round has
    two."""
    late_device.install()
    lane = Lane(torch.device(LATE), 600)
    sending = lane.scratch()
    beside_a_send = lane.pair(600)
    lane.done(sending)
    first, second = lane.pair(600), lane.pair(600)
    return beside_a_send is None, first is not None, second is None, len(lane.scratch())


def test_a_result_waits_on_the_device_only_if_that_leaves_a_buffer_for_a_send():
    assert run(1, _pairs) == [(True, True, True, 600)]


def _in_flight(rank):
    """Memory of deltas and payloads as soon as they are sent."""
    place, memory = _place(OnHost)
    other, its_memory = _place(OnDevice)
    sent = [memory.deltas.take(place.size), its_memory.deltas.take(other.size)]
    place.send(sent[0])
    other.send(sent[1])
    diloco, step = _alone(LATE, Silent())
    for _ in range(4):
        step()
    sent.append(diloco._fragments[0].in_flight.memory)
    return [bool(memory.isnan().all()) for memory in sent]


def test_training_goes_on_before_its_delta_is_on_the_host():
    assert run(1, _in_flight) == [[True] * 3]


def _payload_buffer(rank):
    """Kernels of training in all buffers, right after a send."""
    place, memory = _place(OnHost)
    place.send(memory.deltas.take(place.size))
    lane = place._view.lane
    for buffer in [lane.scratch() for _ in range(3)]:
        buffer.fill_(7.0)
    return late_device.races


def test_the_buffer_of_a_payload_is_used_again_only_after_it_was_copied():
    assert run(1, _payload_buffer) == [[]]


def _replaced(rank):
    """The delta after the anchor changes although it is on its way to the device already."""
    deltas = []
    for change in (OnHost.replace, OnHost.adopt):
        place, memory = _place(OnHost, Float32(), packs_for=None)
        place.prepare()
        state = State(1, torch.full((600,), 3.0, pin_memory=True), torch.zeros(601))
        change(place, state)
        delta = memory.deltas.take(600)
        place.send(delta)()
        deltas.append(delta.unique().tolist())
    return deltas, late_device.races


def test_a_delta_is_against_the_anchor_of_now_even_if_another_was_prepared():
    assert run(1, _replaced) == [([[2.0], [2.0]], [])]


def _adopted(rank):
    """A state in memory that is not pinned, as the ranks behind `FirstRank` get it."""
    place, _ = _place(OnHost, Float32(), packs_for=None)
    place.adopt(State(1, torch.full((600,), 3.0), torch.zeros(601)))
    late_device.counters = late_device.Counters()
    place._view.write(place.state.anchor)
    return place.state.anchor.unique().tolist(), late_device.counters.pageable["up"]


def test_a_state_that_another_has_made_is_uploaded_from_pinned_memory():
    assert run(1, _adopted) == [([3.0], 0)]


def _replaced_on_the_device(rank):
    """A state that arrives while a round that will be given up is computed from the old one."""
    place, memory = _place(OnDevice)
    place.send(memory.deltas.take(place.size))()
    following = place.advance(place.state, OUTER, 1.0)
    following.add(*exact(torch.ones(600)))
    following.state(1)
    place.replace(State(5, torch.zeros(600), torch.zeros(601)))
    return place.state.anchor.sum().item(), late_device.races


def test_a_state_on_the_device_is_replaced_only_after_rounds_have_read_it():
    assert run(1, _replaced_on_the_device) == [(0.0, [])]


def _closed(rank):
    late_device.install()
    lane = Lane(torch.device(LATE), 600)
    values = torch.full((600,), 1.0, pin_memory=True)
    upload = lane.upload(values)
    Memory({lane.device: lane}).close()
    values.fill_(7.0)
    return upload.values().sum().item(), late_device.races


def test_when_memory_is_closed_no_copy_uses_it_anymore():
    assert run(1, _closed) == [(600.0, [])]


def _order(rank):
    """In which order streams work when a lane comes, and when it goes: what waits for the later of two, alone."""
    late_device.install()
    device, order = torch.device(LATE), []
    training = torch.accelerator.current_stream(device)
    late_device._enqueue(training, lambda: order.append("training, before"))
    lane = Lane(device, 600)
    late_device._enqueue(lane.copies, lambda: order.append("copies"))
    lane.copies.record_event().synchronize()
    late_device._enqueue(lane.copies, lambda: order.append("last copies"))
    del lane
    gc.collect()
    late_device._enqueue(training, lambda: order.append("training, afterwards"))
    training.record_event().synchronize()
    return order


def test_memory_is_reused_in_order_when_a_lane_takes_it_and_returns_it():
    assert run(1, _order) == [["training, before", "copies", "last copies", "training, afterwards"]]


def _hangs(rank):
    late_device.install()
    lane = Lane(torch.device(LATE), 600)
    lane_module.CLOSING = 0.05
    lane.copies = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: False))
    with pytest.warns(UserWarning, match="may hang"):
        lane.close()
    lane.copies = torch.Stream(lane.device)  # for `__del__`
    return True


def test_a_device_that_hangs_does_not_keep_a_replica_from_leaving():
    assert run(1, _hangs) == [True]


def _timed(rank):
    """Seconds of the training stream: before it gets there, afterwards, and asked again; and in rounds."""
    late_device.install()
    lane = Lane(torch.device(LATE), 600)
    memory = Memory({lane.device: lane})
    with lane.timed():
        late_device._enqueue(lane.training, lambda: time.sleep(0.05))
    seconds = [memory.seconds()]
    late_device.synchronize()
    seconds += [memory.seconds(), memory.seconds()]
    model, optimizer, diloco = start(LATE, reducer=local.Local(local._Board(1, None), 0), sync_every=4)
    with diloco:
        for step in steps(model, optimizer, rank, 1, STEPS):
            if step == STEPS // 2:
                diloco.replica.memory.seconds = lambda: 100.0
    return seconds, [(round.seconds_device, round.seconds_exposed) for round in diloco.stats.last]


def test_the_time_of_the_training_stream_is_reported_once_and_as_exposed():
    (((before, once, again), rounds),) = run(1, _timed)
    assert before == again == 0.0 and once >= 0.05
    assert any(0 < device < 100 for device, _ in rounds)
    assert rounds[-1][0] == 100 < rounds[-1][1]


def _captured(rank):
    """Where torch says that a graph is being captured, which it asks of CUDA alone."""
    late_device.install()
    diloco, step = _alone(LATE, Silent())
    (lane,) = diloco.replica.memory.lanes.values()
    torch.cuda.is_current_stream_capturing = lambda: True
    for _ in range(3):
        step()
    lane.device = torch.device("cuda")
    try:
        step()
    except DiLoCoError as error:
        message = str(error)
    count = diloco.step_count
    torch.cuda.is_current_stream_capturing = lambda: False
    step()
    return message, count, diloco.step_count


def test_a_step_inside_a_captured_graph_is_refused_and_not_counted():
    ((message, *counts),) = run(1, _captured)
    assert "graph is being captured" in message and counts == [3, 4]
