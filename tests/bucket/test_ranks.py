"""A member with DDP inside: one rank uses the store, and all ranks do the same after the same step."""

import io
import os
import time
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from diloco import E3M0, Balanced, ConfigError, DiLoCo, DiLoCoError, Float32, Mismatch, PeerLost, TwoBit
from diloco.bucket import Bucket
from diloco.reduce import Round
from tests.support.members import PATIENT, until
from tests.support.models import Tiny, adamw, flat, loss_of
from tests.support.processes import Died, run

pytestmark = pytest.mark.slow  # processes

ROUNDS = 4
FAST = {"heartbeat": 0.2, "poll": 0.01, "grace": PATIENT}


class Rank:
    """One of ranks 0 and 1, which are member `pair`, or rank 2, which is member `one`."""

    def __init__(self, rank, url, codec=E3M0(), saved=None, **options):  # noqa: B008
        group = dist.new_group([0, 1])
        self.rank, self.member = rank, "one" if rank == 2 else "pair"
        self.bucket = Bucket(url, self.member, ddp_ranks=group if rank < 2 else None, **FAST, **options)
        self.model = Tiny(seed=rank)
        self.optimizer = adamw(self.model)
        self.diloco = DiLoCo(self.model, self.optimizer, sync_every=8, overlap=2, fragments=Balanced(3), codec=codec,
                             reduce=self.bucket)  # fmt: skip
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
        residuals = [f.residual for f in diloco._fragments if f.residual is not None]
        return {"weights": flat(self.model), "history": self.history, "rounds": list(diloco.stats.last),
                "requests": traffic["requests"], "residuals": residuals}  # fmt: skip


def _to_the_end(rank, url, codec, pace, saved=(None, None)):
    mine = Rank(rank, url, codec, saved[rank == 2], rounds=ROUNDS, pace=pace).join()
    began = mine.diloco.indices
    while not mine.bucket.ended:
        mine.step(tokens=16)
    residuals = [f.residual.clone() for f in mine.diloco._fragments if f.residual is not None]
    mine.diloco.finish()
    return mine.result() | {"began": began, "residuals": residuals}


@pytest.mark.parametrize(("codec", "pace"), [(E3M0(), "decoupled"), (TwoBit(), "decoupled"), (E3M0(), "strict")])
def test_ranks_of_a_member_are_equal_after_every_step_and_members_at_the_end(codec, pace, tmp_path):
    first, second, other = run(3, _to_the_end, str(tmp_path / "run"), codec, pace, seconds=600)
    assert first["history"] == second["history"] and len(first["history"]) > 8
    assert torch.equal(first["weights"], second["weights"]) and torch.equal(first["weights"], other["weights"])
    assert all(round.members == 2 and round.counted for round in second["rounds"])
    assert len(first["rounds"]) == len(second["rounds"]) >= 3 * ROUNDS
    assert first["requests"] > 50 and second["requests"] == 0
    assert len(first["residuals"]) == (3 if codec == TwoBit() else 0)
    assert all(torch.equal(a, b) for a, b in zip(first["residuals"], second["residuals"], strict=True))


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
    assert saved[0]["step"] == saved[1]["step"] and any(part["flight"] for part in saved[0]["parts"].values())
    ends = run(3, _to_the_end, url, E3M0(), "decoupled", (one, other), seconds=600)
    assert ends[0]["history"] == ends[1]["history"] and ends[0]["history"][0][0] == saved[0]["step"] + 1
    assert min(ends[0]["began"]) >= 1 and ends[0]["began"] == ends[1]["began"]
    assert torch.equal(ends[0]["weights"], ends[1]["weights"]) and torch.equal(ends[0]["weights"], ends[2]["weights"])


def _mistakes(rank, url):
    def join(name, sync_every=5, **options):
        model = DistributedDataParallel(Tiny())
        DiLoCo(model, adamw(model), sync_every=sync_every, reduce=Bucket(url, name, **options)).join()

    group, alone = dist.group.WORLD, (dist.new_group([0]), dist.new_group([1]))
    with pytest.raises(ConfigError, match=r"over the ranks \[0, 1\] with a Bucket that is told of none: .*ddp_ranks="):
        join(f"m{rank}")
    with pytest.raises(ConfigError, match=r"over the ranks \[0, 1\] with a Bucket that is told of none"):
        join(f"m{rank}", ddp_ranks=alone[rank])
    with pytest.raises(
        Mismatch, match=r"rank 0 of this member and rank 1 of this member disagree: sync_every is 5 .* 6"
    ):
        join("a", ddp_ranks=group, sync_every=5 + rank)
    with pytest.raises(Mismatch, match="rounds is 3 on the run, 2 on this member") as found:
        join("a", ddp_ranks=group, rounds=2)
    assert ("the first rank of this member has stopped" in str(found.value)) is (rank == 1)
    ahead = DiLoCo(Tiny(), reduce=Bucket(url, "a", ddp_ranks=group), fragments=Balanced(1))
    if rank:
        ahead._fragments[0].state = replace(ahead._fragments[0].state, index=2)
    with pytest.raises(
        Mismatch, match=r"fragment 0: rank 0 of this member holds round 0, .*the same checkpoint on all"
    ):
        ahead.join()
    return True


def test_what_ranks_get_wrong_is_said_on_all_of_them(tmp_path):
    before = Bucket(str(tmp_path), "before", rounds=3)
    model = Tiny()
    DiLoCo(model, adamw(model), sync_every=5, reduce=before).join()
    before.leave()
    assert run(2, _mistakes, str(tmp_path), seconds=600) == [True, True]


def _not_wrapped(rank, url):
    """The ranks train apart: only the first one's work would count, in silence."""
    bucket = Bucket(url, "a", ddp_ranks=dist.group.WORLD, **FAST)
    model = Tiny()
    optimizer = adamw(model)
    diloco = DiLoCo(model, optimizer, sync_every=4, fragments=Balanced(2), reduce=bucket)
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
    assert "trained other weights" in warning and "DistributedDataParallel(model)" in warning


def _apart(rank, url):
    """The second rank finishes a step earlier."""
    bucket = Bucket(url, "a", ddp_ranks=dist.group.WORLD, **FAST)
    model = Tiny()
    diloco = DiLoCo(model, fragments=Balanced(2), reduce=bucket)
    diloco.join()
    for _ in range(5 - rank):
        diloco.step()
    if rank == 1:
        with pytest.raises(
            DiLoCoError, match=r"rank 0 of this member is at a step, this one at a finish: .*same steps"
        ):
            diloco.finish()
    dist.barrier()
    return True


def test_ranks_that_make_other_steps_are_told(tmp_path):
    assert run(2, _apart, str(tmp_path), seconds=600) == [True, True]


def _spoiled(rank, url):
    """The first rank's delta is not finite: both go back to the anchors, and train on."""
    mine = Rank(rank, url, rounds=ROUNDS).join()
    while not mine.bucket.ended:
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
    mine = Bucket(url, "a", ddp_ranks=dist.group.WORLD, **FAST)
    diloco = DiLoCo(Tiny(), fragments=Balanced(2), reduce=mine)
    diloco.join()
    diloco.step()
    dist.barrier()
    if rank == 0:
        os._exit(9)
    with pytest.raises(
        PeerLost, match=r"the ranks \[0, 1\] of this member cannot go on together: another rank.* is gone"
    ):
        diloco.step()
    return True


def test_when_the_first_rank_dies_the_others_are_told(tmp_path):
    first, second = run(2, _killed, str(tmp_path), seconds=600, may_die=True)
    assert isinstance(first, Died) and second is True


def _weights(rank, url):
    """Both members make steps of 100 tokens on each rank, and wait for the other's delta after as many of them; but for
    the step after which ranks do what was found out after the one before."""
    mine = Rank(rank, url, codec=Float32(), rounds=1, pace="strict").join()
    outcomes, take = [], mine.bucket.take
    mine.bucket.take = lambda *args: outcomes.append(outcome := take(*args)) or outcome
    while not mine.bucket.ended:
        mine.step(tokens=100)
    mine.diloco.finish()
    return [(outcome.index, dict(outcome.members)) for outcome in outcomes if isinstance(outcome, Round)]


def test_a_member_weighs_by_the_tokens_of_all_its_ranks(tmp_path):
    one, two, other = run(3, _weights, str(tmp_path / "run"), seconds=600)
    assert one == two == other
    for (index, members), steps in zip(one, (8, 10, 13), strict=True):  # the slots of the three fragments
        assert index == 1 and members["pair"] == pytest.approx(2 * (steps + 1) / (2 * (steps + 1) + steps))
