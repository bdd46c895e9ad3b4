"""What goes wrong ends alike on every replica, soon, with a message that says what to do; nothing is half applied."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from diloco import (
    SGD,
    Balanced,
    Collective,
    ConfigError,
    DiLoCo,
    DiLoCoError,
    Diverged,
    Float32,
    Mismatch,
    Nesterov,
    NotFinite,
    PeerLost,
)
from diloco.codec import CHUNK
from diloco.formats import GATHER
from diloco.reduce import Delta, State, groups, local, mean
from diloco.reduce.groups import Broken
from tests.support.members import until
from tests.support.models import Tiny, adamw, anchors, flat, loss_of, steps
from tests.support.netns import DEVICE, impossible, network
from tests.support.processes import message_of, run


def _lose_a_peer(rank, how, folder):
    """Replica 1 is lost after step 12. With overlap 0 no exchange is under way then."""
    model = Tiny()
    optimizer = adamw(model)
    diloco = DiLoCo(model, optimizer, sync_every=5, overlap=0, reduce=Collective(timeout=600.0))
    learned = [folder / "0", folder / "2"]
    _ask_until_the_survivors_have_answered(diloco)
    try:
        with diloco:
            for step in steps(model, optimizer, rank, 1, 1000):
                if step == 12 and rank == 1:
                    (folder / "pid").write_text(str(os.getpid()))
                    if how == "leave":
                        raise KeyboardInterrupt
                    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
                    break  # it was woken, and would find itself alone
                if step == 12 and how == "stop":
                    _shorten_the_timeout(diloco.reduce, 1)
    except PeerLost as error:
        (folder / str(rank)).touch()
        if how == "stop" and rank == 0:
            until(lambda: all(each.exists() for each in [*learned, folder / "pid"]))
            os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
        return str(error), diloco.state_dict()["shard 0 of 1"]["step"]
    except KeyboardInterrupt:
        until(lambda: all(each.exists() for each in learned))  # the process lives on, but has left
    return None


def _ask_until_the_survivors_have_answered(diloco):
    """However long that takes: the time in which others may say that they are there stands still until then."""
    now = itertools.count()

    def monotonic():
        store = diloco.reduce._connection.groups._store
        return float(1000 * next(now)) if store.check(["broken/0", "broken/2"]) else 0.0

    groups.PATIENCE = 200.0
    groups.time = SimpleNamespace(monotonic=monotonic, perf_counter=time.perf_counter, sleep=time.sleep)


def _shorten_the_timeout(reduce, seconds):
    """Only now: to start and to join takes as long as it takes."""
    opened = reduce._connection.groups
    opened._timeout = seconds
    for group in (opened._control, *opened._payload):
        group._set_default_timeout(timedelta(seconds=seconds))


@pytest.mark.slow
@pytest.mark.parametrize(("how", "text"), [
    ("kill", "is gone: its connection was closed"),
    ("leave", "is gone: its connection was closed"),
    ("stop", "did not answer within 1 s"),
])  # fmt: skip
def test_a_lost_peer_is_named_soon_on_every_survivor_and_the_state_can_be_saved(how, text, tmp_path):
    """Soon: long before the timeout of 600 s, unless the peer is only silent."""
    results = run(3, _lose_a_peer, how, tmp_path, may_die=True)
    messages = [results[rank][0] for rank in (0, 2)]
    assert any(text in message for message in messages)
    pid = (tmp_path / "pid").read_text()
    for message in messages:
        assert re.search(rf"No answer from replica 1 \(process {pid} on [^)]+\)\.", message)
        assert "fragment" in message
        assert "round" in message
        assert "state can still be saved" in message
        assert text in message or "is gone" in message  # a survivor that sees another one close says so
    assert all(results[rank][1] >= 12 for rank in (0, 2))


def _die_within_a_payload(rank, replicas, sent):
    """The last replica dies when it has sent so many pieces of its delta."""
    mean.PIECE = CHUNK
    n = 6 * CHUNK * (1 if replicas <= GATHER else replicas)
    reduce, state = Collective(timeout=600.0), State(0, torch.zeros(n), torch.zeros(0))
    reduce.join({}, [state], [Float32()])
    send, count = groups.Transfer.send, itertools.count(1)

    def send_and_die(transfer, *args):
        send(transfer, *args)
        if next(count) == sent:
            os._exit(1)

    if rank == replicas - 1:
        groups.Transfer.send = send_and_die
    reduce.send(0, 1, lambda: Delta(torch.ones(n), 1.0, False, state.fingerprint()))
    try:
        reduce.take(0, 1)
    except PeerLost as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "sent"), [(2, 1), (3, 3), (4, 1), (4, 8)])
def test_a_peer_that_dies_within_a_payload_is_lost_at_once(replicas, sent):
    """With 4 replicas, in the sixth piece or before in what it sends to be averaged, then in averages."""
    *survivors, died = run(replicas, _die_within_a_payload, replicas, sent, may_die=True)
    assert died.exitcode == 1
    for message in survivors:
        assert f"replica {replicas - 1} (" in message


_HOST = """
import sys, torch
from diloco import Collective, Float32, PeerLost
from diloco.reduce import Delta, State, groups
groups.UNREACHABLE = 4
reduce = Collective(at="10.77.0.1:29400", replica=int(sys.argv[1]), replicas=2, timeout=600.0)
state = State(0, torch.zeros(5), torch.zeros(0))
reduce.join({}, [state], [Float32()])
print("joined", flush=True)
sys.stdin.readline()
reduce.send(0, 1, lambda: Delta(torch.ones(5), 1.0, False, state.fingerprint()))
print("sent", flush=True)
try:
    reduce.take(0, 1)
except PeerLost as error:
    print(error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif((REASON := impossible()) is not None, reason=str(REASON))
def test_a_cable_that_is_cut_is_noticed_on_both_sides_long_before_the_timeout():
    """The first replica waits for the other when it happens; the second has not sent yet."""
    with network(2) as net:
        hosts = [
            subprocess.Popen(
                [*net.command(m), sys.executable, "-c", _HOST, str(m)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, env=os.environ | {"GLOO_SOCKET_IFNAME": DEVICE},
            )
            for m in range(2)
        ]  # fmt: skip
        try:
            assert [host.stdout.readline() for host in hosts] == ["joined\n"] * 2
            hosts[0].stdin.write("\n")
            hosts[0].stdin.flush()
            assert hosts[0].stdout.readline() == "sent\n"
            subprocess.run(["ip", "-n", net.namespaces[1], "link", "set", DEVICE, "down"], check=True)
            said = [host.communicate("\n", timeout=100)[0] for host in hosts]
        finally:
            for host in hosts:
                host.kill()
                host.communicate()
    for m, text in enumerate(said):
        assert "unreachable for 4 s" in text
        assert f"The other is replica {1 - m} " in text


def _slow(rank):
    groups.UNREACHABLE = 4
    model = Tiny()
    optimizer = adamw(model)
    with DiLoCo(model, optimizer, sync_every=2, overlap=0, reduce=Collective(timeout=600.0)) as diloco:
        for step in steps(model, optimizer, rank, 1, 4):
            if step == 3 and rank == 1:
                time.sleep(6)  # an evaluation
    return diloco.stats.rounds


@pytest.mark.slow
def test_a_slow_replica_is_not_taken_for_an_unreachable_one():
    first, second = run(2, _slow)
    assert first == second > 0


def _learn_of_it_from_a_survivor(rank, folder):
    """Replica 0 finds the exchange broken, as if by a third one; its process lives on and has not left."""
    reduce = Collective(timeout=600.0)
    state = State(0, torch.zeros(5), torch.zeros(0))
    reduce.join({}, [state], [Float32()])

    def broken(header):
        raise Broken("another replica is gone")

    if rank == 0:
        reduce._connection.groups.exchange = broken
    reduce.send(0, 1, lambda: Delta(torch.ones(5), 1.0, False, state.fingerprint()))
    with pytest.raises(PeerLost) as lost:
        reduce.take(0, 1)
    if rank == 1:
        (folder / "learned").touch()
        return str(lost.value)
    until((folder / "learned").exists)
    return str(lost.value)


@pytest.mark.slow
def test_a_survivor_that_waits_for_another_learns_at_once_what_that_one_has_found(tmp_path):
    first, second = run(2, _learn_of_it_from_a_survivor, tmp_path)
    assert "fragment 0, round 1" in first and "another replica is gone" in first
    assert "fragment 0, round 1" in second and "its connection was closed" in second
    assert "The other is replica 1 (process " in first and "The other is replica 0 (process " in second


def _poison(rank, value):
    model = Tiny()
    optimizer = adamw(model)
    diloco = DiLoCo(model, optimizer, sync_every=5, overlap=1, fragments=Balanced(1))
    before = None
    try:
        with diloco:
            for step in range(1, 20):
                loss_of(model, rank, step).backward()
                if step == 10 and rank == 1:
                    with torch.no_grad():
                        model.layers[2].weight[0, 0] = value
                before = anchors(diloco)
                optimizer.step()
                optimizer.zero_grad()
    except NotFinite as error:
        return str(error), torch.equal(before, anchors(diloco)), diloco.step_count
    return None


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inf_or_nan_in_one_replica_raises_the_same_error_on_all_and_nothing_is_applied(value):
    results = run(3, _poison, value)
    for message, unchanged, step in results:
        assert message == results[0][0]
        assert "round 2" in message
        assert "layers.2.weight on replica 1" in message
        assert unchanged
        assert step == 11


def _unequal(rank, counts):
    model = Tiny(seed=rank)
    optimizer = adamw(model)
    with DiLoCo(model, optimizer, sync_every=6, overlap=3, fragments=Balanced(4)) as diloco:
        for _ in steps(model, optimizer, rank, 1, counts[rank]):
            pass
    return flat(model), diloco.stats.rounds, [p.state.index for p in diloco._fragments]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:finish.. after no step", "ignore:.*finished while others still train")
@pytest.mark.parametrize("counts", [[20, 31], [7, 40, 23], [0, 13], [5, 5, 5, 90]])
def test_replicas_with_unequal_step_counts_all_finish_and_are_equal(counts):
    apart = run(len(counts), _unequal, counts)
    assert all(torch.equal(r[0], apart[0][0]) for r in apart)
    assert all(r[1:] == apart[0][1:] for r in apart)

    def loop(reduce):
        model = Tiny(seed=reduce.replica)
        optimizer = adamw(model)
        with DiLoCo(model, optimizer, sync_every=6, overlap=3, fragments=Balanced(4), reduce=reduce) as diloco:
            for _ in steps(model, optimizer, reduce.replica, 1, counts[reduce.replica]):
                pass
        return flat(model), diloco.stats.rounds, [p.state.index for p in diloco._fragments]

    together = local.run(len(counts), loop)
    assert torch.equal(together[0][0], apart[0][0])
    assert together[0][1:] == apart[0][1:]


def _end_apart(reduce, counts):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Tiny()
        optimizer = adamw(model)
        with DiLoCo(model, optimizer, sync_every=2, fragments=Balanced(2), reduce=reduce):
            for _ in steps(model, optimizer, reduce.replica, 1, counts[reduce.replica]):
                pass
    return [str(w.message) for w in caught if "finished" in str(w.message)]


def _ends(rank, counts):
    return _end_apart(Collective(), counts)


@pytest.mark.slow
@pytest.mark.parametrize(("counts", "told"), [([20, 5], [1, 0]), ([8, 8], [0, 0])])
def test_the_replicas_that_still_train_are_told_once_that_another_has_finished(counts, told):
    messages = run(2, _ends, counts)
    assert [len(each) for each in messages] == told
    assert all("replica 1 finished" in message for message in messages[0])
    together = local.run(2, lambda reduce: _end_apart(reduce, counts))
    assert len({message for each in together for message in each}) == max(told)


@message_of(Mismatch)
def _differ(rank, settings, widths):
    with DiLoCo(Tiny(width=widths[rank]), None, **settings[rank]):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "widths", "text"), [
    ([{"sync_every": 10}, {"sync_every": 20}], [16, 16], "sync_every is 10 on replica 0, 20 on replica 1"),
    ([{}, {"codec": Float32()}], [16, 16], r"codec is E3M0() on replica 0, Float32() on replica 1"),
    ([{}, {}], [16, 8], "embedding.weight is [50, 16] / [50, 8]"),
    ([{}, {"fragments": Balanced(2)}], [16, 16], "fragments of replica 0 / replica 1"),
])  # fmt: skip
def test_replicas_that_disagree_are_told_which_settings_differ_on_both_sides(settings, widths, text):
    one, two = run(2, _differ, settings, widths)
    assert one == two
    assert text in one and len(one) < 300


def _seeds(rank):
    model = Tiny(seed=rank)
    model.register_buffer("running", torch.full((3,), float(rank)))
    with DiLoCo(model) as diloco:
        first = flat(model)
        model.running += 2 + rank  # type: ignore[operator]
        diloco.step()
    return first, model.running.tolist()


@pytest.mark.slow
def test_other_initial_weights_are_replaced_by_the_first_replicas_and_buffers_are_averaged_at_the_end():
    results = run(3, _seeds)
    for weights, running in results:
        assert torch.equal(weights, flat(Tiny(seed=0)))
        assert running == [3.0] * 3  # all started from replica 0's, and went up by 2, 3 and 4


@message_of(Mismatch)
def _other_base(rank):
    model = Tiny(seed=rank)
    model.embedding.requires_grad_(False)
    with DiLoCo(model):
        pass


@pytest.mark.slow
def test_frozen_parameters_that_differ_are_refused_for_they_would_never_be_synced():
    one, two = run(2, _other_base)
    assert one == two
    assert "differ in value, embedding.weight: load the same base model" in one


def _corrupt(rank):
    model = Tiny()
    optimizer = adamw(model)
    try:
        with DiLoCo(model, optimizer, sync_every=5, overlap=1, outer=Nesterov(momentum=0.9)) as diloco:
            for step in steps(model, optimizer, rank, 1, 30):
                if step == 8 and rank == 1:
                    diloco._fragments[0].state.outer.view(torch.int32)[3] ^= 1  # one bit
    except Diverged as error:
        return str(error), diloco.step_count
    return None


@pytest.mark.slow
def test_one_flipped_bit_in_the_outer_state_is_detected_on_all():
    results = run(2, _corrupt)
    for message, step in results:
        # The fingerprint is computed with the state: the round after the flip has the first that differs.
        assert "replicas 0 and 1 hold different anchors or outer state at round 2 of fragment 0" in message
        assert step == 16


@message_of(Mismatch)
def _resumed_apart(rank):
    model = Tiny()
    optimizer = adamw(model)
    diloco = DiLoCo(model, optimizer, sync_every=6, overlap=0, fragments=Balanced(2))
    diloco.step_count = 8 * rank  # as if the checkpoints were of different steps
    with diloco:
        for _ in steps(model, optimizer, rank, 1, 30):
            pass


@pytest.mark.slow
def test_replicas_that_resume_out_of_step_are_told_so():
    one, two = run(2, _resumed_apart)
    assert one == two
    assert "resume all from the same one" in one


@message_of(Mismatch)
def _half_counting(rank):
    model = Tiny()
    optimizer = adamw(model)
    with DiLoCo(model, optimizer, sync_every=3) as diloco:
        for _ in range(10):
            if rank == 0:
                diloco.count(100)
            optimizer.step()


@pytest.mark.slow
def test_tokens_on_one_side_and_steps_on_the_other_are_refused():
    for message in run(2, _half_counting):
        assert "only one of the replicas 0 and 1 calls count(tokens)" in message


def _twice(rank):
    """An error that the user catches leaves nothing behind: the next DiLoCo works."""
    for attempt in range(2):
        model = Tiny()
        optimizer = adamw(model)
        try:
            with DiLoCo(model, optimizer, sync_every=4):
                for step in steps(model, optimizer, rank, 1, 12):
                    if attempt == 0 and step == 6:
                        raise ZeroDivisionError
        except ZeroDivisionError:
            attached = bool(optimizer._optimizer_step_post_hooks)
    return flat(model), attached


@pytest.mark.slow
def test_leaving_by_an_exception_detaches_and_a_new_start_works():
    one, two = run(2, _twice)
    assert torch.equal(one[0], two[0])
    assert not one[1]


def _local(**settings):
    return local.run(1, lambda reduce: DiLoCo(Tiny(), adamw(Tiny()), reduce=reduce, **settings))


@pytest.mark.parametrize(("act", "message"), [
    (lambda: _local(sync_every=0, overlap=0), "overlap=0 with sync_every=0|sync_every=0"),
    (lambda: _local(overlap=100), "overlap=100 with sync_every=100: .* give 0 .* to 99"),
    (lambda: _local(keep_local=1.5), "keep_local=1.5: give a number from 0 .* to 1"),
    (lambda: DiLoCo(Tiny(), adamw(Tiny())), "no process group: call torch.distributed.init_process_group.*torchrun"),
    (lambda: DiLoCo(Tiny(), Tiny()), "optimizer is a Tiny: give a torch.optim.Optimizer"),  # type: ignore[arg-type]
    (lambda: local.run(0, lambda reduce: None), "replicas=0"),
    (lambda: local.run(print, 2), "give a whole number of at least 1, then the loop"),  # type: ignore[arg-type]
    (lambda: _local(codec="e3m0"), r"codec='e3m0': give an object, as in E3M0\(\)"),
    (lambda: _local(fragments=3), r"fragments=3: give an object, as in Strided\(layers=3\)"),
    (lambda: _local(outer=SGD), "outer=<class .*: give an object"),
    (lambda: DiLoCo(nn.Linear(2, 2).requires_grad_(False)), "no parameter of the model has requires_grad"),
])  # fmt: skip
def test_wrong_arguments_fail_at_construction_with_what_is_allowed(act, message):
    with pytest.raises(ConfigError, match=message):
        act()


def _wrong_collective(rank):
    messages = []
    for arguments in ({"streams": 0}, {"timeout": 0}, {"timeout": -1.0}):
        try:
            Collective(**arguments)
        except ConfigError as error:
            messages.append(str(error))
    return messages


@pytest.mark.slow
def test_a_collective_refuses_wrong_arguments():
    (messages,) = run(1, _wrong_collective)
    assert len(messages) == 3
    assert all("at least 1 stream" in m for m in messages)


def test_stepping_inside_anchors_and_counting_late_are_refused():
    def loop(reduce):
        model = Tiny()
        optimizer = adamw(model)
        with DiLoCo(model, optimizer, reduce=reduce) as diloco:
            with pytest.raises(DiLoCoError, match="inside anchors"), diloco.anchors():
                optimizer.step()
            optimizer.step()
            with pytest.raises(DiLoCoError, match="call it before every step, or never"):
                diloco.count(10)

    local.run(1, loop)


def test_a_replica_in_one_process_that_dies_ends_the_others():
    def loop(reduce):
        model = Tiny()
        optimizer = adamw(model)
        with DiLoCo(model, optimizer, sync_every=4, reduce=reduce):
            for step in steps(model, optimizer, reduce.replica, 1, 20):
                if reduce.replica == 1 and step == 10:
                    raise ZeroDivisionError
                seen[reduce.replica] = step

    seen = {}
    with pytest.raises((ZeroDivisionError, PeerLost)):
        local.run(3, loop)
    assert seen[1] == 9
    assert seen[0] < 20 and seen[2] < 20
