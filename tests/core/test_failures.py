"""What goes wrong ends alike on every replica, soon, with a message that says what to do; nothing is half applied."""

import contextlib
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

from diloco import (
    Balanced,
    Collective,
    DiLoCo,
    DiLoCoError,
    Diverged,
    Float32,
    Mismatch,
    Nesterov,
    NotFinite,
    PeerLost,
)
from diloco.codecs.codec import CHUNK
from diloco.codecs.formats import GATHER
from diloco.exchange import local, mean, transport
from diloco.exchange.reducer import Delta, State
from diloco.exchange.transport import Broken
from tests.support.fake_reducer import job
from tests.support.members import until
from tests.support.models import Tiny, anchors, flat, loss_of, make, steps, train, train_steps
from tests.support.netns import DEVICE, impossible, network
from tests.support.processes import message_of, run

pytestmark = pytest.mark.slow  # processes


def _lose_a_peer(rank, how, folder):
    """Replica 1 is lost after step 12. With overlap 0 no exchange is under way then."""
    model, optimizer, diloco = make(sync_every=5, overlap=0, reducer=Collective(timeout=600.0))
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
                    _shorten_the_timeout(diloco.reducer, 1)
    except PeerLost as error:
        (folder / str(rank)).touch()
        if how == "stop" and rank == 0:
            until(lambda: all(path.exists() for path in [*learned, folder / "pid"]))
            os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
        return str(error), diloco.state_dict()["shard 0 of 1"]["work"][2]
    except KeyboardInterrupt:
        until(lambda: all(path.exists() for path in learned))  # the process lives on, but has left
    return None


def _ask_until_the_survivors_have_answered(diloco):
    """However long that takes: the time in which others may say that they are there stands still until then."""
    now = itertools.count()

    def monotonic():
        store = diloco.reducer._connection.groups._store
        return float(1000 * next(now)) if store.check(["broken/0", "broken/2"]) else 0.0

    transport.PATIENCE = 200.0
    transport.time = SimpleNamespace(monotonic=monotonic, perf_counter=time.perf_counter, sleep=time.sleep)


def _shorten_the_timeout(reducer, seconds):
    """Only now: to start and to join takes as long as it takes."""
    opened = reducer._connection.groups
    opened._timeout = seconds
    for group in (opened._control, *opened._payload):
        group._set_default_timeout(timedelta(seconds=seconds))


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
    reducer, state = Collective(timeout=600.0), State(0, torch.zeros(n), torch.zeros(0))
    reducer.join(job([state], [Float32()]))
    send, count = transport.Transfer.send, itertools.count(1)

    def send_and_die(transfer, *args):
        send(transfer, *args)
        if next(count) == sent:
            os._exit(1)

    if rank == replicas - 1:
        transport.Transfer.send = send_and_die
    reducer.send(0, 1, lambda: Delta(torch.ones(n), 1.0, False, state.fingerprint()))
    try:
        reducer.poll(0, 1)
    except PeerLost as error:
        return str(error)
    return None


@pytest.mark.parametrize(("replicas", "sent"), [(2, 1), (3, 3), (4, 1), (4, 8)])
def test_a_peer_that_dies_within_a_payload_is_lost_at_once(replicas, sent):
    """With 4 replicas, in the sixth piece or before in what it sends to be averaged, then in averages."""
    *survivors, died = run(replicas, _die_within_a_payload, replicas, sent, may_die=True)
    assert died.exitcode == 1
    for message in survivors:
        assert f"replica {replicas - 1} (" in message


def _fail_alone(rank, kind):
    reducer, state = Collective(timeout=600.0), State(0, torch.zeros(5), torch.zeros(0))
    reducer.join(job([state], [Float32()]))

    def delta():
        if rank == 1:
            raise kind("no memory for the delta")
        return Delta(torch.ones(5), 1.0, False, state.fingerprint())

    messages = []
    for index in (1, 2):
        reducer.send(0, index, delta)
        with pytest.raises((PeerLost, kind)) as error:
            reducer.poll(0, index)
        messages.append(f"{type(error.value).__name__}: {error.value}")
    return messages


@pytest.mark.parametrize("kind", [MemoryError, DiLoCoError])
def test_an_error_of_one_replica_alone_is_not_waited_for_by_the_others(kind):
    (lost, _), (failed, later) = run(2, _fail_alone, kind)
    assert lost.startswith("PeerLost") and "closed" in lost
    assert failed == f"{kind.__name__}: no memory for the delta"
    assert later.startswith("PeerLost") and failed in later


def _interrupted(rank):
    """The user presses Ctrl-C while training waits for a round; the loop catches it and continues."""
    reducer, state = Collective(), State(0, torch.zeros(5), torch.zeros(0))
    reducer.join(job([state], [Float32()]))
    reducer.send(0, 1, lambda: Delta(torch.ones(5), 1.0, False, state.fingerprint()))
    future = reducer._rounds[0, 1]
    reducer._rounds[0, 1] = SimpleNamespace(result=lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        reducer.poll(0, 1)
    assert (0, 1) in reducer._rounds
    reducer._rounds[0, 1] = future
    return reducer.poll(0, 1).state.index, reducer.poll(0, 1)


def test_a_round_that_was_interrupted_is_still_there():
    assert run(1, _interrupted) == [(1, None)]


_HOST = """
import sys, torch
from diloco import Collective, Float32, PeerLost
from diloco.exchange import transport
from diloco.exchange.reducer import Delta, State
from tests.support.fake_reducer import job
transport.UNREACHABLE = 4
reducer = Collective(at="10.77.0.1:29400", replica=int(sys.argv[1]), replicas=2, timeout=600.0)
state = State(0, torch.zeros(5), torch.zeros(0))
reducer.join(job([state], [Float32()]))
print("joined", flush=True)
sys.stdin.readline()
reducer.send(0, 1, lambda: Delta(torch.ones(5), 1.0, False, state.fingerprint()))
print("sent", flush=True)
try:
    reducer.poll(0, 1)
except PeerLost as error:
    print(error, flush=True)
"""


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
            outputs = [host.communicate("\n", timeout=100)[0] for host in hosts]
        finally:
            for host in hosts:
                host.kill()
                host.communicate()
    for m, text in enumerate(outputs):
        assert "unreachable for 4 s" in text
        assert f"The other is replica {1 - m} " in text


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_two_machines_meet_though_their_names_mean_other_addresses():
    """In a namespace the machine's name stands for an address that the other host does not reach."""
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    environment |= {"WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    code = (
        "from diloco.exchange.rendezvous import meet; from diloco.exchange.world import own_world; "
        "import torch.distributed as dist; meet(own_world(1, None)); dist.barrier(); print(dist.get_world_size())"
    )
    with network(2) as net:
        hosts = [
            subprocess.Popen(
                [*net.command(m), sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                env=environment | {"RANK": str(m), "MASTER_ADDR": net.address(0)},
            )
            for m in range(2)
        ]  # fmt: skip
        try:
            assert [host.communicate(timeout=120)[0] for host in hosts] == ["2\n"] * 2
        finally:
            for host in hosts:
                host.kill()
                host.communicate()


def _slow(rank):
    transport.UNREACHABLE = 4
    model, optimizer, diloco = make(sync_every=2, overlap=0, reducer=Collective(timeout=600.0))
    with diloco:
        for step in steps(model, optimizer, rank, 1, 4):
            if step == 3 and rank == 1:
                time.sleep(6)  # an evaluation
    return diloco.stats.rounds


def test_a_slow_replica_is_not_taken_for_an_unreachable_one():
    first, second = run(2, _slow)
    assert first == second > 0


def _learn_of_it_from_a_survivor(rank, folder):
    """Replica 0 finds the exchange broken, as if by a third one; its process lives on and has not left."""
    reducer = Collective(timeout=600.0)
    state = State(0, torch.zeros(5), torch.zeros(0))
    reducer.join(job([state], [Float32()]))

    def broken(header):
        raise Broken("another replica is gone")

    if rank == 0:
        reducer._connection.groups.exchange = broken
    reducer.send(0, 1, lambda: Delta(torch.ones(5), 1.0, False, state.fingerprint()))
    with pytest.raises(PeerLost) as lost:
        reducer.poll(0, 1)
    if rank == 1:
        (folder / "learned").touch()
        return str(lost.value)
    until((folder / "learned").exists)
    return str(lost.value)


def test_a_survivor_that_waits_for_another_learns_at_once_what_that_one_has_found(tmp_path):
    first, second = run(2, _learn_of_it_from_a_survivor, tmp_path)
    assert "fragment 0, round 1" in first and "another replica is gone" in first
    assert "fragment 0, round 1" in second and "its connection was closed" in second
    assert "The other is replica 1 (process " in first and "The other is replica 0 (process " in second


def _poison(rank, value):
    model, optimizer, diloco = make(sync_every=5, overlap=1, fragments=Balanced(1))
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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inf_or_nan_in_one_replica_raises_the_same_error_on_all_and_nothing_is_applied(value):
    results = run(3, _poison, value)
    for message, unchanged, step in results:
        assert message == results[0][0]
        assert "round 2" in message
        assert "layers.2.weight on replica 1" in message
        assert unchanged
        assert step == 11


def _unequal(replica, counts, reducer=None):
    settings = {"sync_every": 6, "overlap": 3, "fragments": Balanced(4), "reducer": reducer}
    model, optimizer, diloco = make(Tiny(seed=replica), **settings)
    with diloco:
        train_steps(model, optimizer, replica, 1, counts[replica])
    return flat(model), diloco.stats.rounds, diloco.indices


@pytest.mark.filterwarnings("ignore:finish.. without a single step", "ignore:.*finished while others still train")
@pytest.mark.parametrize("counts", [[20, 31], [7, 40, 23], [0, 13], [5, 5, 5, 90]])
def test_replicas_with_unequal_step_counts_all_finish_and_are_equal(counts):
    apart = run(len(counts), _unequal, counts)
    together = local.run(len(counts), lambda reducer: _unequal(reducer.replica, counts, reducer))
    for weights, *rounds in [*apart, *together]:
        assert torch.equal(weights, apart[0][0]) and rounds == list(apart[0][1:])


def _ends(replica, counts, reducer=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(replica, counts[replica], sync_every=2, fragments=Balanced(2), reducer=reducer)
    return [str(w.message) for w in caught if "finished" in str(w.message)]


@pytest.mark.parametrize(("counts", "warned"), [([20, 5], [1, 0]), ([8, 8], [0, 0])])
def test_the_replicas_that_still_train_are_told_once_that_another_has_finished(counts, warned):
    apart = run(2, _ends, counts)
    assert [len(messages) for messages in apart] == warned
    assert all("replica 1 finished" in message for message in apart[0])
    together = local.run(2, lambda reducer: _ends(reducer.replica, counts, reducer))
    assert len({message for messages in together for message in messages}) == max(warned)


def _seeds(rank):
    model = Tiny(seed=rank)
    model.register_buffer("running", torch.full((3,), float(rank)))
    with DiLoCo(model) as diloco:
        first = flat(model)
        model.running += 2 + rank  # type: ignore[operator]
        diloco.step()
    return first, model.running.tolist()


def test_different_initial_weights_become_the_first_replicas_and_buffers_are_averaged_at_the_end():
    for weights, running in run(3, _seeds):
        assert torch.equal(weights, flat(Tiny(seed=0)))
        assert running == [3.0] * 3  # all started from replica 0's, and went up by 2, 3 and 4


def _corrupt(rank):
    model, optimizer, diloco = make(sync_every=5, overlap=1, outer=Nesterov(momentum=0.9))
    try:
        with diloco:
            for step in steps(model, optimizer, rank, 1, 30):
                if step == 8 and rank == 1:
                    diloco._fragments[0].state.outer.view(torch.int32)[3] ^= 1  # one bit
    except Diverged as error:
        return str(error), diloco.step_count
    return None


def test_one_flipped_bit_in_the_outer_state_is_detected_on_all():
    for message, step in run(2, _corrupt):
        # The fingerprint is computed with the state: the round after the flip has the first that differs.
        assert "replicas 0 and 1 hold different anchors or outer state at round 2 of fragment 0" in message
        assert step == 16


@message_of(Mismatch)
def _half_counting(rank):
    _, optimizer, diloco = make(sync_every=3)
    with diloco:
        for _ in range(10):
            if rank == 0:
                diloco.count(100)
            optimizer.step()


def test_tokens_on_one_side_and_steps_on_the_other_are_refused():
    for message in run(2, _half_counting):
        assert "only one of replicas 0 and 1 calls count(tokens)" in message


def _twice(rank):
    """An error that the user catches leaves nothing behind: the next DiLoCo works."""
    model, optimizer, diloco = make(sync_every=4)
    with contextlib.suppress(ZeroDivisionError), diloco:
        for step in steps(model, optimizer, rank, 1, 12):
            if step == 6:
                raise ZeroDivisionError
    return train(rank, 12, sync_every=4)["weights"], bool(optimizer._optimizer_step_post_hooks)


def test_leaving_by_an_exception_detaches_and_a_new_start_works():
    one, two = run(2, _twice)
    assert torch.equal(one[0], two[0])
    assert not one[1]


def test_a_replica_in_one_process_that_dies_ends_the_others():
    def loop(reducer):
        model, optimizer, diloco = make(sync_every=4, reducer=reducer)
        with diloco:
            for step in steps(model, optimizer, reducer.replica, 1, 20):
                if reducer.replica == 1 and step == 10:
                    raise ZeroDivisionError
                seen[reducer.replica] = step

    seen = {}
    with pytest.raises((ZeroDivisionError, PeerLost)):
        local.run(3, loop)
    assert seen[1] == 9
    assert seen[0] < 20 and seen[2] < 20
