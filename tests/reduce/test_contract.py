"""The contract of `Reducer`, written once: two replicas do the same with each reducer.

A play is what one replica does: `play(reducer, number, folder)`. It runs as threads that take turns (local), as real
processes (collective, and the reducer of docs/extending.md: gather), as two members of a folder (bucket), the second of
them also with two ranks behind `FirstRank` (ranks), and with the fake whose peers are written down (fake).
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from diloco import E3M0, Collective, FirstRank, Mismatch
from diloco.bucket import Bucket, bucket
from diloco.bucket.run import find_run
from diloco.codecs.codec import pack, unpack
from diloco.exchange import local
from diloco.exchange.mean import exact
from diloco.exchange.reducer import Delta, Dropped, State
from tests.support.fake_reducer import Mean, Script, job, reference_mean
from tests.support.members import PATIENT, until
from tests.support.pages import blocks
from tests.support.processes import run

SIZES = [5, 300]  # the first fragment's delta needs `own`
CODEC = E3M0()
WEIGHTS = [1.0, 3.0]
LRS = [0.1, 0.3]
LR = 0.25 * 0.1 + 0.75 * 0.3
CONTRACT = {"sync_every": 10}
# The quorum makes each round wait for both members, however late one of them is.
MEMBER = {"quorum": 2, "heartbeat": 0.2, "poll": 0.02}


def _local(play, folder, with_rounds):
    return local.run(2, lambda reducer: play(reducer, reducer.replica, folder))


def _collective(play, folder, with_rounds):
    return run(2, _in_process, play, folder, seconds=PATIENT)


def _in_process(rank, play, folder):
    return play(Collective(timeout=PATIENT), rank, folder)


def _gather(play, folder, with_rounds):
    return run(2, _on_the_page, play, folder, seconds=PATIENT)


def _on_the_page(rank, play, folder):
    (code,) = (block.text for block in blocks("docs/extending.md") if "class Gather" in block.text)
    exec(compile(code.partition("\ndiloco = ")[0], "extending.md", "exec"), names := {})
    return play(names["Gather"](), rank, folder)


def _bucket(play, folder, with_rounds):
    """The first member begins the run."""
    url = str(folder / "run")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(play, Bucket(url, "a", **MEMBER), 0, folder)
        until(lambda: find_run(url) is not None or first.done())
        second = pool.submit(play, Bucket(url, "b", **MEMBER), 1, folder)
        return [first.result(PATIENT), second.result(PATIENT)]


def _ranks(play, folder, with_rounds):
    return run(3, _as_rank, play, folder, bucket.PATIENCE, seconds=PATIENT)


def _as_rank(rank, play, folder, patience):
    """Rank 0 is a member, ranks 1 and 2 are another one."""
    bucket.PATIENCE = patience
    url, group = str(folder / "run"), dist.new_group([1, 2])
    if rank == 0:
        return play(Bucket(url, "a", **MEMBER), 0, folder)
    until((folder / "run/run.json").exists)
    return play(FirstRank(Bucket(url, "b", **MEMBER), group), 1, folder)


def _fake(play, folder, with_rounds):
    first = Script(_outcomes(0) if with_rounds else {})
    second = Script(_outcomes(1) if with_rounds else {}, first=first)
    return [play(first, 0, folder), play(second, 1, folder)]


SHIPPED = [_local, _collective, _bucket, _ranks, _fake]
PROCESSES = [_collective, _gather, _ranks]
MEMBERS = [_bucket, _ranks]


def over(kinds):
    slow = {kind: [pytest.mark.slow] if kind in PROCESSES else [] for kind in kinds}
    return pytest.mark.parametrize(
        "kind", [pytest.param(kind, id=kind.__name__[1:], marks=slow[kind]) for kind in kinds]
    )


every = over([*SHIPPED, _gather])


def meet(kind, play, folder, with_rounds=True):
    """What each of two replicas returns from the play, and of the second each rank. Replica 0 is the first that joins,
    where that matters. `with_rounds`: the peers of the fake send."""
    return kind(play, folder, with_rounds)


def _outcomes(number):
    """The fake gets the rounds that the others owe it. When and how it hands them out is its own."""
    outcomes = {}
    for f in range(len(SIZES)):
        members = {str(m): weight for m, weight in enumerate(WEIGHTS)}
        own = (lambda f=f: as_sent(f, number)) if f == 0 else None
        mean = Mean(exact(mean_of(f)), members, lr=LR, own=own)
        outcomes |= {(f, 1): [(0, mean)], (f, 2): [(0, mean)]}
    return outcomes


def values(fragment, number):
    return torch.randn(SIZES[fragment], generator=torch.Generator().manual_seed(10 * fragment + number))


def as_sent(fragment, number):
    return unpack(CODEC, pack(CODEC, values(fragment, number)), SIZES[fragment])


def mean_of(fragment):
    return reference_mean(CODEC, CODEC, [values(fragment, m) for m in (0, 1)], WEIGHTS)


def states():
    return [State(0, torch.ones(n), torch.zeros(n)) for n in SIZES]


def join(reducer, contract=CONTRACT, states_=None):
    """Join with SGD(1): a round subtracts the mean from the anchor. Returns the states taken, and a list to which each
    round's learning rate is added."""
    offer, lrs = job(states_ or states(), [CODEC] * len(SIZES), contract), []

    def advance(fragment, state, *, lr, last):
        lrs.append(lr)
        return offer.advance(fragment, state, lr=lr, last=last)

    return reducer.join(replace(offer, advance=advance)), lrs


def ranks_in(reducer):
    """Ranks of a member: each counts its own tokens."""
    return len(reducer.identity.ddp_ranks)


def send(reducer, fragment, number, state=None, calls=None):
    """Start the round after a state, by default the first one."""
    state = state or states()[fragment]

    def delta():
        if calls is not None:
            calls.append(fragment)
        return Delta(values(fragment, number), weight=WEIGHTS[number] / (ranks_in(reducer) or 1), tokens=True,
                     fingerprint=state.fingerprint(), lr=LRS[number], needs_own=fragment == 0)  # fmt: skip

    reducer.send(fragment, state.index + 1, delta)


def outcome_of(reducer, fragment, index=1):
    """The outcome of a round that was sent. A bucket does not wait for it, so poll again, after another step."""
    polled = []

    def there():
        polled.append(reducer.poll(fragment, index))
        return polled[-1] is not None

    until(there)
    return polled[-1]


def _join_apart(reducer, number, folder):
    offered = states()
    offered[1].anchor.fill_(float(number))
    offered[1].outer.fill_(number + 0.5)
    taken, _ = join(reducer, states_=offered)
    reducer.leave()
    return taken


@every
def test_join_gives_none_for_a_state_that_all_hold_and_the_first_replicas_where_they_differ(kind, tmp_path):
    first, *seconds = meet(kind, _join_apart, tmp_path)
    assert first == [None, None]
    for same, other in seconds:
        assert same is None
        assert other.index == 0
        assert torch.equal(other.anchor, torch.zeros(SIZES[1]))
        assert torch.equal(other.outer, torch.full((SIZES[1],), 0.5))


def _disagree(reducer, number, folder):
    try:
        join(reducer, {"sync_every": 10 + number})
    except Mismatch as error:
        return str(error)
    finally:
        reducer.leave()
    return None


@every
def test_a_contract_that_differs_raises_a_mismatch_that_says_where(kind, tmp_path):
    """On both sides, where both wait for each other to join; otherwise on the one that comes later."""
    first, *seconds = meet(kind, _disagree, tmp_path)
    for second in seconds:
        assert "sync_every is" in second
        assert "10" in second and "11" in second
    assert first == (None if kind in (*MEMBERS, _fake) else seconds[0])


def _send_when_told(reducer, number, folder):
    join(reducer)
    before = reducer.should_send(0, 1, False), reducer.should_send(0, 2, True)
    (folder / f"asked by {number}").touch()
    if reducer.identity.replicas is None and not isinstance(reducer, Script):
        until((folder / f"asked by {1 - number}").exists)  # a member's delta calls the other, scheduled or not
    send(reducer, 0, number)
    outcome_of(reducer, 0)
    after = reducer.should_send(0, 1, False), reducer.should_send(0, CONTRACT["sync_every"], False)
    reducer.leave()
    return before, after


@every
def test_the_first_round_is_sent_when_it_is_scheduled_and_not_before(kind, tmp_path):
    """After the first round a bucket differs: members are not in step, so each counts its own steps since it sent."""
    for before, after in meet(kind, _send_when_told, tmp_path):
        assert before == (False, True)
        assert after == (False, kind in MEMBERS)


def _first_sends_before_second(reducer, number, folder):
    calls = []
    join(reducer)
    if number == 1:
        until((folder / "the first has sent").exists)
    for f in range(len(SIZES)):
        send(reducer, f, number, calls=calls)
    (folder / "the first has sent").touch()
    for f in reversed(range(len(SIZES))):
        outcome_of(reducer, f)
    reducer.leave()
    return sorted(calls)


@every
def test_send_returns_before_the_others_have_sent_and_each_delta_is_asked_for_once(kind, tmp_path):
    calls = meet(kind, _first_sends_before_second, tmp_path)
    assert len(calls) >= 2 and all(fragments == [0, 1] for fragments in calls)


def _round(reducer, number, folder):
    _, lrs = join(reducer)
    unsent = [reducer.poll(f, 1) for f in range(len(SIZES))]
    for f in range(len(SIZES)):
        send(reducer, f, number)
    rounds = [outcome_of(reducer, f) for f in range(len(SIZES))]
    again = [reducer.poll(f, 1) for f in range(len(SIZES))]
    reducer.leave()
    return unsent, [(r.state, list(r.members.values()), r.counted, r.own and r.own()) for r in rounds], again, lrs


@every
def test_poll_gives_none_for_what_was_not_sent_and_one_round_with_the_same_state_on_all(kind, tmp_path):
    results = meet(kind, _round, tmp_path)
    assert results[0][3] == [LR] * len(SIZES)
    for number, (unsent, rounds, again, lrs) in zip((0, 1, 1), results, strict=False):
        assert unsent == again == [None, None]
        assert lrs in ([LR] * len(SIZES), [])  # a rank that is not the first computes nothing
        for f, (state, weights, counted, own) in enumerate(rounds):
            assert torch.equal(state.anchor, 1.0 - mean_of(f))
            assert (state.index, counted) == (1, True)
            # Only the proportion is promised: the record of a bucket names shares, the others name the work itself.
            assert [weight / sum(weights) for weight in weights] == [0.25, 0.75]
            if f == 0 and kind is not _gather:  # which has none, says the page
                assert torch.equal(own, as_sent(f, number))
            else:
                assert own is None  # not needed


def _two_rounds(reducer, number, folder):
    join(reducer)
    send(reducer, 0, number)
    first = outcome_of(reducer, 0).state
    send(reducer, 0, number, first)
    second = outcome_of(reducer, 0, 2).state
    reducer.leave()
    return first, second


@every
def test_a_round_starts_from_the_state_of_the_one_before_and_leaves_it_as_it_is(kind, tmp_path):
    for first, second in meet(kind, _two_rounds, tmp_path):
        assert (first.index, second.index) == (1, 2)
        assert torch.equal(first.anchor, 1.0 - mean_of(0))
        assert torch.equal(second.anchor, first.anchor - mean_of(0))


def _drain_with_a_round_of_one(reducer, number, folder):
    join(reducer)
    outcome = None
    if number == 0:
        send(reducer, 0, number)
    reducer.drain()
    if number == 0:
        outcome = outcome_of(reducer, 0)
    reducer.leave()
    return outcome


@over(SHIPPED)
def test_a_round_that_not_all_have_sent_is_dropped_after_drain(kind, tmp_path, monkeypatch):
    """A bucket cannot know who will never send: it drops the round once its patience is over, here at once."""
    monkeypatch.setattr(bucket, "PATIENCE", -PATIENT)
    dropped, *rest = meet(kind, _drain_with_a_round_of_one, tmp_path, with_rounds=False)
    assert dropped == Dropped() and rest in ([None], [None, None])


def _last_round(reducer, number, folder):
    join(reducer)
    all_done = reducer.drain()
    send(reducer, 0, number)
    last = reducer.poll(0, 1)  # now every reducer waits
    reducer.leave()
    return all_done, last.state


@every
def test_after_drain_a_last_round_is_waited_for(kind, tmp_path):
    for all_done, state in meet(kind, _last_round, tmp_path):
        assert all_done is (kind not in (*MEMBERS, _fake))  # members come and go
        assert torch.equal(state.anchor, 1.0 - mean_of(0))


def _leave_twice(reducer, number, folder):
    join(reducer)
    reducer.leave()
    reducer.leave()
    return True


@every
def test_leave_may_be_called_twice(kind, tmp_path):
    assert all(meet(kind, _leave_twice, tmp_path))
