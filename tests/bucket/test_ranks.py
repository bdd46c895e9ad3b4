"""A member with DDP inside: one rank uses the store, and all ranks do the same after the same step."""

import io
import os
import time
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from diloco import E3M0, Balanced, ConfigError, DiLoCo, DiLoCoError, FirstRank, Float32, Mismatch, PeerLost, TwoBit
from diloco.bucket import Bucket
from diloco.exchange.collective import Collective
from diloco.exchange.reducer import Delta, Round, State
from tests.support.fake_reducer import Script, job, mean
from tests.support.members import PATIENT, until
from tests.support.models import Tiny, adamw, flat, loss_of
from tests.support.processes import Died, run

pytestmark = pytest.mark.slow  # processes

ROUNDS = 4
FAST = {"heartbeat": 0.2, "poll": 0.01, "straggler_timeout": PATIENT}


class Rank:
    """One of ranks 0 and 1, which are member `pair`, or rank 2, which is member `one`."""

    def __init__(self, rank, url, codec=E3M0(), saved=None, **options):  # noqa: B008
        group = dist.new_group([0, 1])
        self.rank, self.member = rank, "one" if rank == 2 else "pair"
        self.bucket = Bucket(url, self.member, **FAST, **options)
        self.reducer = FirstRank(self.bucket, group) if rank < 2 else self.bucket
        self.model = Tiny(seed=rank)
        self.optimizer = adamw(self.model)
        self.diloco = DiLoCo(self.model, self.optimizer, sync_every=8, overlap=2, fragments=Balanced(3), codec=codec,
                             reducer=self.reducer)  # fmt: skip
        self.wrapped = self.model if rank == 2 else DistributedDataParallel(self.model, process_group=group)
        self.history = []
        if saved is not None:
            saved = torch.load(io.BytesIO(saved), weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.diloco.load_state_dict(saved["diloco"])

    def join(self):
        """And wait until the members know each other: nobody makes a round alone."""
        self.diloco.join()
        if self.bucket.session is not None:
            alive = self.bucket.session.members.alive
            until(lambda: any(not member.joining for member in alive(time.monotonic()).values()))
        dist.barrier()
        return self

    def step(self, tokens=None):
        if tokens is not None:
            self.diloco.count(tokens)
        loss_of(self.wrapped, self.rank, self.diloco.step_count + 1).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.append((self.diloco.step_count, flat(self.model).tolist(), self.diloco.indices,
                             self.diloco.in_flight))  # fmt: skip

    def save(self):
        """As bytes: tensors that are given to several processes share their memory."""
        whole = {"model": self.model, "optimizer": self.optimizer, "diloco": self.diloco}
        torch.save({name: each.state_dict() for name, each in whole.items()}, out := io.BytesIO())
        return out.getvalue()

    def result(self):
        diloco, traffic = self.diloco, self.bucket.traffic
        return {"weights": flat(self.model), "history": self.history, "rounds": list(diloco.stats.last),
                "requests": traffic["requests"]}  # fmt: skip


def _to_the_end(rank, url, codec, saved=(None, None)):
    mine = Rank(rank, url, codec, saved[rank == 2], rounds=ROUNDS).join()
    began = mine.diloco.indices
    while min(mine.diloco.indices) < ROUNDS:
        mine.step(tokens=16)
    mine.diloco.finish()
    return mine.result() | {"began": began}


@pytest.mark.parametrize("codec", [E3M0(), TwoBit()])
def test_ranks_of_a_member_are_equal_after_every_step_and_members_at_the_end(codec, tmp_path):
    first, second, other = run(3, _to_the_end, str(tmp_path / "run"), codec, seconds=600)
    assert first["history"] == second["history"] and len(first["history"]) > 8
    assert torch.equal(first["weights"], second["weights"]) and torch.equal(first["weights"], other["weights"])
    assert all(round.members == 2 and round.counted for round in second["rounds"])
    assert len(first["rounds"]) == len(second["rounds"]) >= 3 * ROUNDS
    assert first["requests"] > 50 and second["requests"] == 0


def _until_saved(rank, url):
    """All vanish in the middle, with a state saved while rounds are under way."""
    mine = Rank(rank, url, rounds=ROUNDS).join()
    while min(mine.diloco.indices) < 1 or not mine.diloco.in_flight:
        mine.step(tokens=16)
    saved = mine.save()
    dist.barrier()  # what the first rank has told last must not vanish with it
    return saved


def test_ranks_resume_from_one_checkpoint_and_end_as_the_other_member(tmp_path):
    url = str(tmp_path / "run")
    one, two, other = run(3, _until_saved, url, seconds=600)
    saved = [torch.load(io.BytesIO(each), weights_only=True)["diloco"]["shard 0 of 1"] for each in (one, two)]
    assert saved[0]["work"] == saved[1]["work"] and any(part["flight"] for part in saved[0]["fragments"].values())
    ends = run(3, _to_the_end, url, E3M0(), (one, other), seconds=600)
    assert ends[0]["history"] == ends[1]["history"] and ends[0]["history"][0][0] == saved[0]["work"][2] + 1
    assert min(ends[0]["began"]) >= 1 and ends[0]["began"] == ends[1]["began"]
    assert torch.equal(ends[0]["weights"], ends[1]["weights"]) and torch.equal(ends[0]["weights"], ends[2]["weights"])


def _mistakes(rank, url):
    def join(name, group=None, sync_every=5, **options):
        model, reducer = DistributedDataParallel(Tiny()), Bucket(url, name, **options)
        reducer = reducer if group is None else FirstRank(reducer, group)
        DiLoCo(model, adamw(model), sync_every=sync_every, reducer=reducer).join()

    group, alone = dist.group.WORLD, (dist.new_group([0]), dist.new_group([1]))
    with pytest.raises(ConfigError, match=r"over the ranks \[0, 1\] with a Bucket for one process: .*FirstRank"):
        join(f"m{rank}")
    with pytest.raises(ConfigError, match=r"over the ranks \[0, 1\] with a FirstRank for \[[01]\]"):
        join(f"m{rank}", alone[rank])
    with pytest.raises(Mismatch, match=r"rank 0 and rank 1 disagree: sync_every is 5 on rank 0, 6 on rank 1"):
        join("a", group, sync_every=5 + rank)
    with pytest.raises(Mismatch, match="rounds is 3 on the run, 2 on this member") as found:
        join("a", group, rounds=2)
    assert ("the first rank of this member stopped" in str(found.value)) is (rank == 1)
    ahead = DiLoCo(Tiny(), reducer=FirstRank(Bucket(url, "a"), group), fragments=Balanced(1))
    if rank:
        ahead._fragments[0].place.state = replace(ahead._fragments[0].state, index=2)
    with pytest.raises(Mismatch, match=r"the ranks \[0, 1\] of this member hold different states: .*same checkpoint"):
        ahead.join()
    return True


def test_what_ranks_get_wrong_is_said_on_all_of_them(tmp_path):
    before = Bucket(str(tmp_path), "before", rounds=3)
    model = Tiny()
    DiLoCo(model, adamw(model), sync_every=5, reducer=before).join()
    before.leave()
    assert run(2, _mistakes, str(tmp_path), seconds=600) == [True, True]


def _not_wrapped(rank, url):
    """The ranks train apart: only the first one's work would count, in silence."""
    reducer = FirstRank(Bucket(url, "a", **FAST), dist.group.WORLD)
    model = Tiny()
    optimizer = adamw(model)
    diloco = DiLoCo(model, optimizer, sync_every=4, fragments=Balanced(2), reducer=reducer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with diloco:
            for step in range(1, 30):
                loss_of(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
    return flat(model), [str(each.message) for each in said]


def test_ranks_that_do_not_train_together_are_warned_once(tmp_path):
    (first, quiet), (second, warned) = run(2, _not_wrapped, str(tmp_path), seconds=600)
    assert torch.equal(first, second) and not quiet
    (warning,) = warned
    assert "trained different weights" in warning and "DistributedDataParallel(model)" in warning


def _replaced(rank):
    """A newer delta replaces one that the first rank has taken, and is not taken before the round is there."""

    class Late(Script):
        def send(self, fragment, index, delta):
            if self.sent:
                self.under_way.add((fragment, index))
            else:
                super().send(fragment, index, delta)

    script = Late({(0, 1): [(0, mean(-1.0, counted=True))]})
    reducer, state = FirstRank(script, dist.group.WORLD), State(0, torch.zeros(1), torch.zeros(0))
    reducer.join(job([state], [Float32()]))
    for value in (1.0, 2.0):
        reducer.send(0, 1, partial(Delta, torch.tensor([value]), 1.0, False, state.fingerprint()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return reducer.poll(0, 1).counted


def test_ranks_that_train_together_are_not_warned_if_a_newer_delta_waits():
    assert run(2, _replaced, seconds=600) == [True, True]


def _packs(rank):
    collective = Collective(at="127.0.0.1:1", replica=0, replicas=2)
    return collective.identity.packs_for, FirstRank(collective, dist.group.WORLD).identity.packs_for


def test_ranks_share_states_on_the_host_even_if_the_reducer_takes_payloads_of_a_device():
    assert run(1, _packs) == [(2, None)]


def _outcome(rank):
    script = Script({(0, 1): [(0, mean(-1.0, counted=False, earlier=True))]})
    reducer = FirstRank(script, dist.group.WORLD)
    reducer.join(job([State(0, torch.zeros(1), torch.zeros(0))], [Float32()]))
    outcome = reducer.poll(0, 1)
    return outcome.counted, outcome.earlier, outcome.state.anchor.item()


def test_all_ranks_are_told_what_has_counted():
    assert run(2, _outcome, seconds=600) == [(False, True, 1.0)] * 2


def _apart(rank, url):
    """The second rank finishes a step earlier, which both learn."""
    reducer = FirstRank(Bucket(url, "a", **FAST), dist.group.WORLD)
    diloco = DiLoCo(Tiny(), fragments=Balanced(2), reducer=reducer)
    diloco.join()
    for _ in range(4):
        diloco.step()
    with pytest.raises(DiLoCoError, match=r"rank 0 of this member is at a step, rank 1 at a finish: .*same steps"):
        (diloco.finish if rank else diloco.step)()
    dist.barrier()  # neither is gone before the other has heard it
    return True


def test_ranks_that_make_other_steps_are_told(tmp_path):
    assert run(2, _apart, str(tmp_path), seconds=600) == [True, True]


def _spoiled(rank, url):
    """The first rank's delta is not finite: both go back to the anchors, and train on."""
    mine = Rank(rank, url, rounds=ROUNDS).join()
    while min(mine.diloco.indices) < ROUNDS:
        mine.step(tokens=16)
        if mine.diloco.step_count == 5 and rank < 2:
            with torch.no_grad():
                mine.model.head.weight[0, 0] = float("nan")
    mine.diloco.finish()
    return mine.result()


def test_nan_takes_all_ranks_back_to_the_anchors(tmp_path):
    first, second, other = run(3, _spoiled, str(tmp_path / "run"), seconds=600)
    assert torch.equal(first["weights"], second["weights"]) and torch.equal(first["weights"], other["weights"])
    assert first["weights"].isfinite().all()


def _killed(rank, url):
    reducer = FirstRank(Bucket(url, "a", **FAST), dist.group.WORLD)
    diloco = DiLoCo(Tiny(), fragments=Balanced(2), reducer=reducer)
    diloco.join()
    diloco.step()
    dist.barrier()
    if rank == 0:
        os._exit(9)
    with pytest.raises(PeerLost, match=r"the ranks \[0, 1\] of this member lost each other: another rank"):
        diloco.step()
    return True


def test_when_the_first_rank_dies_the_others_are_told(tmp_path):
    first, second = run(2, _killed, str(tmp_path), seconds=600, may_die=True)
    assert isinstance(first, Died) and second is True


def _weights(rank, url):
    """Each rank makes steps of 100 tokens. Returns the rounds, and the steps in each fragment's last delta."""
    mine = Rank(rank, url, codec=Float32(), rounds=1, quorum=2).join()
    outcomes, poll = [], mine.reducer.poll
    steps, send = {}, mine.reducer.send

    def noting_steps(fragment, index, delta):
        if index == 1:
            steps[fragment] = mine.diloco.step_count
        send(fragment, index, delta)

    mine.reducer.send = noting_steps
    mine.reducer.poll = lambda *args: outcomes.append(outcome := poll(*args)) or outcome
    while min(mine.diloco.indices) < 1:
        mine.step(tokens=100)
    mine.diloco.finish()
    return [(outcome.state.index, dict(outcome.members)) for outcome in outcomes if isinstance(outcome, Round)], steps


def test_a_member_weighs_by_the_tokens_of_all_its_ranks(tmp_path):
    (one, of_pair), (two, _), (other, of_one) = run(3, _weights, str(tmp_path / "run"), seconds=600)
    assert one == two and len(one) == len(other) == 3
    expected = [2 * of_pair[f] / (2 * of_pair[f] + of_one[f]) for f in range(3)]
    assert sorted(members["pair"] for _, members in one) == pytest.approx(sorted(expected))
