"""What every reducer promises (`diloco.reduce.Reduce`), written once: two replicas do the same with each of them.

A play is what one replica does: `play(reduce, number, folder)`. It runs as threads that take turns (local), as real
processes (collective, and the reducer of docs/extending.md: gather), as two members of a folder (bucket), the second of
them also with two ranks inside (ranks), and with the fake whose peers are written down (fake).
"""

import gc
import os
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from diloco import E3M0, Collective, Mismatch
from diloco.bucket import Bucket
from diloco.bucket.ranks import First, Other
from diloco.bucket.run import find_run
from diloco.codec import pack, unpack
from diloco.reduce import Delta, Dropped, Round, State, local
from diloco.reduce.groups import Groups, Place
from diloco.reduce.mean import exact
from tests.support.fake_reduce import Script, reference_mean
from tests.support.members import PATIENT, until
from tests.support.processes import run

SIZES = [5, 300]  # the first fragment's delta asks for `own`
CODEC = E3M0()
WEIGHTS = [1.0, 3.0]
LRS = [0.1, 0.3]
LR = 0.25 * 0.1 + 0.75 * 0.3
CONTRACT = {"sync_every": 10}
PAGE = Path(__file__).parents[2] / "docs/extending.md"
# The quorum makes each round wait for both members, however late one of them is.
MEMBER = {"quorum": 2, "heartbeat": 0.2, "poll": 0.02}


def _local(play, folder, with_rounds):
    return local.run(2, lambda reduce: play(reduce, reduce.replica, folder))


def _collective(play, folder, with_rounds):
    return run(2, _in_process, play, folder, seconds=PATIENT)


def _in_process(rank, play, folder):
    return play(Collective(timeout=PATIENT), rank, folder)


def _gather(play, folder, with_rounds):
    return run(2, _on_the_page, play, folder, seconds=PATIENT)


def _on_the_page(rank, play, folder):
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[2]
    exec(compile(code.partition("\ndiloco = ")[0], "extending.md", "exec"), names := {})
    return play(names["Gather"](), rank, folder)


def _bucket(play, folder, with_rounds):
    url = str(folder / "run")
    return _meet_in(url, play, folder, [Bucket(url, name, **MEMBER) for name in "ab"])


def _meet_in(url, play, folder, processes):
    """What each process returns: that of the first member, which begins the run, and those of the second."""
    with ThreadPoolExecutor(len(processes)) as pool:
        first = pool.submit(play, processes[0], 0, folder)
        until(lambda: find_run(url) is not None or first.done())
        rest = [pool.submit(play, each, 1, folder) for each in processes[1:]]
        return [each.result(PATIENT) for each in (first, *rest)]


class _Once:
    """In place of how often groups of a name were opened: here, two ranks are threads of one process."""

    def __getitem__(self, name):
        return 1

    def __setitem__(self, name, count):
        pass


def _ranks(play, folder, with_rounds):
    """A member of one process, and one whose two ranks are threads."""
    url, store = str(folder / "run"), dist.HashStore()

    def among(place, asked):
        if place is None:
            return None
        return First(place, (0, 1), asked) if place.index == 0 else Other(place, (0, 1))

    with (patch("diloco.bucket.bucket.ranks_of", among), patch.object(Groups, "_opened", _Once()),
          patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo")):  # fmt: skip
        ranks = [Bucket(url, "b", ddp_ranks=Place(k, 2, store, "b"), **MEMBER) for k in range(2)]
        return _meet_in(url, play, folder, [Bucket(url, "a", **MEMBER), *ranks])


def _fake(play, folder, with_rounds):
    first = Script(_outcomes(0) if with_rounds else {})
    second = Script(_outcomes(1) if with_rounds else {}, first=first)
    return [play(first, 0, folder), play(second, 1, folder)]


SHIPPED = [_local, _collective, _bucket, _ranks, _fake]
PROCESSES = [_collective, _gather]
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
    for f, n in enumerate(SIZES):
        mine = unpack(CODEC, pack(CODEC, values(f, number)), n)
        average = reference_mean(CODEC, CODEC, [values(f, m) for m in (0, 1)], WEIGHTS)
        members = {str(m): weight for m, weight in enumerate(WEIGHTS)}
        outcomes |= {
            (f, i): [(0, Round(i, exact(average), members, LR, own=(lambda mine=mine: mine) if f == 0 else None))]
            for i in (1, 2)
        }
    return outcomes


def values(fragment, number):
    return torch.randn(SIZES[fragment], generator=torch.Generator().manual_seed(10 * fragment + number))


def states(index=0):
    return [State(index, torch.full((n,), 1.0 + index), torch.zeros(n)) for n in SIZES]


def join(reduce, contract=CONTRACT):
    return reduce.join(contract, states(), [CODEC] * len(SIZES))


def ranks_in(reduce):
    """Ranks of a member: each counts its own tokens, and all do one step later what the first one found out."""
    return len(reduce.ddp_ranks) if isinstance(reduce, Bucket) else 0


def send(reduce, fragment, number, index=1, calls=None):
    """Start round `index`, whose delta is against the state of the round before."""

    def delta():
        if calls is not None:
            calls.append(fragment)
        against = states(index - 1)[fragment].fingerprint()
        own = values(fragment, number), WEIGHTS[number] / (ranks_in(reduce) or 1), True, against
        return Delta(*own, lr=LRS[number], feedback=fragment == 0)

    reduce.send(fragment, index, delta)


def take(reduce, fragment, index=1):
    """The outcome of a round that was sent. A bucket does not wait for it, so ask again, after another step."""
    found = []

    def there():
        found.append(reduce.take(fragment, index))
        for f in range(len(SIZES)) if found[-1] is None and ranks_in(reduce) else ():
            reduce.due(f, 1, False)
        return found[-1] is not None

    until(there)
    return found[-1]


def due(reduce, steps, slot):
    said = reduce.due(0, steps, slot)
    return reduce.due(0, steps + 1, False) if ranks_in(reduce) else said


def _join_apart(reduce, number, folder):
    mine = states()
    mine[1].anchor.fill_(float(number))
    mine[1].outer.fill_(number + 0.5)
    taken = reduce.join(CONTRACT, mine, [CODEC] * len(SIZES))
    reduce.leave()
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


def _disagree(reduce, number, folder):
    try:
        join(reduce, {"sync_every": 10 + number})
    except Mismatch as error:
        return str(error)
    finally:
        reduce.leave()
    return None


@every
def test_a_contract_that_differs_raises_a_mismatch_that_says_where(kind, tmp_path):
    """On both sides, where both wait for each other to join; otherwise on the one that comes later."""
    first, *seconds = meet(kind, _disagree, tmp_path)
    for second in seconds:
        assert "sync_every is" in second
        assert "10" in second and "11" in second
    assert first == (None if kind in (*MEMBERS, _fake) else seconds[0])


def _due(reduce, number, folder):
    join(reduce)
    before = due(reduce, 1, False), due(reduce, 2, True)
    (folder / f"asked by {number}").touch()
    if isinstance(reduce, Bucket):  # what one sends calls the other, slot or not
        until((folder / f"asked by {1 - number}").exists)
    send(reduce, 0, number)
    take(reduce, 0)
    reduce.applied(0, states(1)[0])
    after = due(reduce, 1, False), due(reduce, CONTRACT["sync_every"], False)
    reduce.leave()
    return before, after


@every
def test_due_says_yes_in_the_slot_of_the_first_round_and_not_outside_it(kind, tmp_path):
    """After the first round a bucket differs: members are not in step, so each counts its own steps since it sent."""
    for before, after in meet(kind, _due, tmp_path):
        assert before == (False, True)
        assert after == (False, kind in MEMBERS)


def _first_sends_before_second(reduce, number, folder):
    calls = []
    join(reduce)
    if number == 1:
        until((folder / "the first has sent").exists)
    for f in range(len(SIZES)):
        send(reduce, f, number, calls=calls)
    (folder / "the first has sent").touch()
    for f in reversed(range(len(SIZES))):
        take(reduce, f)
    reduce.leave()
    return sorted(calls)


@every
def test_send_returns_before_the_others_have_sent_and_each_delta_is_asked_for_once(kind, tmp_path):
    assert all(calls == [0, 1] for calls in meet(kind, _first_sends_before_second, tmp_path))


def _round(reduce, number, folder):
    join(reduce)
    unsent = [reduce.take(f, 1) for f in range(len(SIZES))]
    for f in range(len(SIZES)):
        send(reduce, f, number)
    rounds = [take(reduce, f) for f in range(len(SIZES))]
    again = [reduce.take(f, 1) for f in range(len(SIZES))]
    reduce.leave()
    told = [(r.index, r.mean, list(r.members.values()), r.counted, r.faults, r.own and r.own()) for r in rounds]
    assert [r.lr for r in rounds] == [LR] * 2
    return unsent, told, again


@every
def test_take_gives_none_for_what_was_not_sent_and_one_round_with_the_same_mean_on_all(kind, tmp_path):
    results = meet(kind, _round, tmp_path)
    for number, (unsent, told, again) in zip((0, 1, 1), results, strict=False):
        assert unsent == again == [None, None]
        for f, (index, mean, weights, counted, faults, own) in enumerate(told):
            assert torch.equal(mean, results[0][1][f][1])
            assert torch.equal(mean, reference_mean(CODEC, CODEC, [values(f, m) for m in (0, 1)], WEIGHTS))
            assert (index, counted, dict(faults)) == (1, True, {})
            # Only the proportion is promised: the record of a bucket names shares, the others name the work itself.
            assert [weight / sum(weights) for weight in weights] == [0.25, 0.75]
            if f == 0 and kind is not _gather:  # which does not tell it, says the page
                assert torch.equal(own, unpack(CODEC, pack(CODEC, values(f, number)), SIZES[f]))
            else:
                assert own is None  # not asked for


def _applied(reduce, number, folder):
    join(reduce)
    send(reduce, 0, number)
    take(reduce, 0)
    state = states(1)[0]
    before = state.fingerprint()
    reduce.applied(0, state)
    same = state.fingerprint() == before
    state.anchor.fill_(float("nan"))  # it is the core's again
    kept = weakref.ref(state), weakref.ref(state.anchor)
    del state
    gc.collect()
    send(reduce, 0, number, index=2)
    mean = take(reduce, 0, 2).mean
    reduce.leave()
    return same, [reference() for reference in kept], mean


@every
def test_applied_neither_changes_nor_keeps_the_state_and_the_next_round_takes_place(kind, tmp_path):
    for same, kept, mean in meet(kind, _applied, tmp_path):
        assert same
        assert kept == [None, None]
        assert torch.equal(mean, reference_mean(CODEC, CODEC, [values(0, m) for m in (0, 1)], WEIGHTS))


def _settle_with_a_round_of_one(reduce, number, folder):
    join(reduce)
    outcome = None
    if number == 0:
        send(reduce, 0, number)
    reduce.settle()
    if number == 0:
        outcome = take(reduce, 0)
    reduce.leave()
    return outcome


@over(SHIPPED)
def test_a_round_that_not_all_have_sent_is_dropped_after_settle(kind, tmp_path, monkeypatch):
    """A bucket cannot know who will never send: it drops the round once its patience is over, here at once."""
    monkeypatch.setattr("diloco.bucket.bucket.PATIENCE", -PATIENT)
    dropped, *rest = meet(kind, _settle_with_a_round_of_one, tmp_path, with_rounds=False)
    assert dropped == Dropped() and rest in ([None], [None, None])


def _last_round(reduce, number, folder):
    join(reduce)
    reduce.settle()
    send(reduce, 0, number)
    last = reduce.take(0, 1)  # now every reducer waits
    reduce.leave()
    return last.mean


@every
def test_after_settle_a_last_round_is_waited_for(kind, tmp_path):
    for mean in meet(kind, _last_round, tmp_path):
        assert torch.equal(mean, reference_mean(CODEC, CODEC, [values(0, m) for m in (0, 1)], WEIGHTS))


def _leave_twice(reduce, number, folder):
    join(reduce)
    reduce.leave()
    reduce.leave()
    return True


@every
def test_leave_may_be_called_twice(kind, tmp_path):
    assert all(meet(kind, _leave_twice, tmp_path))
