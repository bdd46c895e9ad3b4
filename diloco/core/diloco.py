"""Streaming DiLoCo (arXiv 2501.18512), Algorithm 2, attached to a training loop through the optimizer's hook.

After each inner step, for each fragment that is due:
    send   delta = anchor − local goes to the other replicas; training continues
    apply  `overlap` steps later: anchor ← outer(anchor, mean delta); local ← keep_local·local + (1 − keep_local)·anchor
"""

import contextlib
import enum
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any, Literal, Self

import torch
from torch import nn

from diloco.codecs.codec import E3M0, Codec
from diloco.core import checks
from diloco.core.fragment import Fragment, Fragmenter, Strided
from diloco.core.hook import Hooks, Optimizers, as_list, eager, evaluate, evaluation_mode, lr_of
from diloco.core.outer import Nesterov, Outer
from diloco.core.overlap import Overlap
from diloco.core.placement import Where
from diloco.core.replica import Replica
from diloco.core.schedule import Schedule
from diloco.core.stats import Stats
from diloco.core.sync import FragmentSync, InFlight, Work, advance_of, anchors_inside
from diloco.errors import ConfigError, DiLoCoError, NotFinite
from diloco.exchange.reducer import Dropped, Join, Jump, NonFinite, Reducer, Round, Shard

CATCH_UP = 2
"""Rounds of a fragment that are applied after one step: a replica that was away catches up over many steps, instead of
in one long one (53 rounds: 0.23 s). With 1 it might never, if the others close a round in every step."""


class _Life(enum.Enum):
    APART = enum.auto()  # not with the others yet, or not since a state was loaded
    JOINED = enum.auto()
    ANCHORS = enum.auto()  # inside anchors(): the model does not hold the local values
    FINISHING = enum.auto()  # rounds in flight are applied regardless of overlap
    FINISHED = enum.auto()
    LEFT = enum.auto()  # by an error


class DiLoCo:
    """Keep this replica's model in agreement with the others'.

    Args:
        model: any module, or a list of them, such as the stages of a pipeline. Its trained parameters are read and
            written in place; the model is not wrapped.
        optimizer: the inner optimizer, or a list of all of them. A step is complete when each has stepped. None: call
            `step()`, as you must where hooks do not run or run too early: after the replay of a CUDA graph that holds
            the optimizer's step, and before FSDP2's `set_post_optim_event`.
        sync_every: steps between two syncs of the same fragment (H).
        fragments: how to cut the model into the parts that are synced in turn.
        overlap: steps between sending a fragment and applying the result (τ); 0 waits for it. May differ by replica.
            "auto": the smallest, from 1 to 5, with which this replica does not wait; it follows the link.
        keep_local: weight of the local value when the result is applied (α). May differ by replica: anchors stay equal,
            and finish() does not use it.
        codec: number format on the wire.
        outer: the outer optimizer, which applies the mean delta to the anchor.
        reducer: averages the deltas of the replicas; by default `Collective()` over all ranks.
        state: where anchors and momentum are: in the memory of the "host", or of the accelerator, "device": 8.5 bytes
            a value more there, and 1 byte a value and round over the bus instead of 8.5. "auto": on the device if they
            take at most 15 % of its free memory. `placement` says which, and why.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizers = None,
        *,
        sync_every: int = 100,
        fragments: Fragmenter = Strided(layers=3),  # noqa: B008 (frozen)
        overlap: int | Literal["auto"] = 1,
        keep_local: float = 0.0,
        codec: Codec = E3M0(),  # noqa: B008
        outer: Outer = Nesterov(),  # noqa: B008
        reducer: Reducer | None = None,
        state: Where = "host",
    ) -> None:
        checks.check_model(model)
        checks.check_settings(fragments=fragments, codec=codec, outer=outer, keep_local=keep_local)
        self._optimizers = as_list(optimizer)
        self._replica = Replica(model, outer)
        self.model = self._replica.model
        self.reducer = _default_reducer(self._replica.shard) if reducer is None else reducer
        checks.check_reducer(self.reducer, auto=overlap == "auto")
        Schedule(sync_every)  # checked before the model is cut
        self._replica.cut(fragments, codec, self.reducer.identity.packs_for, state)
        self._where: Where = state
        self.fragmenter, self.codec, self.outer, self.keep_local = fragments, codec, outer, keep_local
        self.schedule = Schedule(sync_every, len(self._fragments))
        self._overlap = Overlap(overlap, len(self._fragments), sync_every)
        self.after_step: Callable[[], None] | None = None
        self._reset_step: int | None = None  # of the last reset for inf or nan, until a delta counts again
        self._last_round = False
        self._life = _Life.APART
        self._hooks = Hooks(self._optimizers, before=self.join, after=self._step)

    @eager
    def _step(self) -> None:
        """One iteration of Algorithm 2, after the inner optimizer has stepped."""
        if self._life is not _Life.JOINED:
            self._meet()  # without join(): the model has moved, so the start is what it held at construction
        with self._overlap.between_steps():
            replica = self._replica
            replica.check_not_captured()
            replica.step_count += 1
            replica.work += Work(0.0 if replica.counts_tokens else 1.0, lr_of(self._optimizers), steps=1)
            try:
                self._apply(self._fragments, most=CATCH_UP)
            finally:  # even if a peer is lost: a delta that is taken now is saved, and sent again when all resume
                for fragment in self._due():
                    fragment.take_delta(self.step_count, replica.work)
                    self._send(fragment)
            if self.overlap == 0:
                self._apply(self._fragments)
            replica.prepare(self.schedule)
            if self.after_step:
                self.after_step()

    def _due(self) -> list[FragmentSync]:
        """The fragments to send after this step: those whose turn it is, unless the reducer says otherwise."""
        due, step = [], self.step_count
        for fragment in self._fragments:
            scheduled = self.schedule.sends_at(fragment.number, step)
            if self.reducer.should_send(fragment.number, step - fragment.sent_step, scheduled):
                due.append(fragment)
        if self._fragments[0] in due:  # once a period, because it looks at every module
            self._replica.check_trained(self._optimizers)
        return due

    def _send(self, fragment: FragmentSync) -> None:
        """Start the round of the delta in flight."""
        sent = fragment.in_flight
        assert sent is not None
        delta = fragment.delta_later(sent, tokens=self._replica.counts_tokens, last=self._last_round)
        self.reducer.send(fragment.number, sent.index, delta)

    def _apply(self, fragments: Sequence[FragmentSync], most: float = inf) -> None:
        """Apply the rounds that have arrived, at most this many of each fragment, in turn: a replica that is behind
        fetches all fragments at the same time."""
        while fragments and most > 0:
            fragments, most = [fragment for fragment in fragments if self._apply_next(fragment)], most - 1

    def _apply_next(self, fragment: FragmentSync) -> bool:
        """`overlap` steps after the send, or at once if nothing is in flight. False: nothing to apply."""
        sent, finishing = fragment.in_flight, self._life is _Life.FINISHING
        if sent is not None and self.step_count < sent.step + self.overlap and not finishing:
            return False
        began = time.perf_counter()
        outcome = self.reducer.poll(fragment.number, fragment.state.index + 1)
        arrived = time.perf_counter()
        match outcome:
            case Round():
                fragment.apply(outcome, self.keep_local, self._replica.work)
                self._record(fragment, outcome, sent, waited=arrived - began, applying=time.perf_counter() - arrived)
            case Dropped():
                fragment.in_flight = None
                if outcome.reset:
                    self._reset(outcome.non_finite)
            case Jump():
                fragment.jump(outcome.state, self._replica.work)
            case NonFinite():
                fragment.fail(outcome)
        return outcome is not None

    def _record(
        self, fragment: FragmentSync, round: Round, sent: InFlight | None, *, waited: float, applying: float
    ) -> None:
        if round.counted:
            self._reset_step = None
        if self._replica.counts_tokens and not self._replica.work.amount and not any(round.members.values()):
            checks.warn_no_tokens()
        cost = {"step": self.step_count, "waited": waited, "applying": applying, "overlap": self.overlap}
        self.stats.add(fragment.stats(round, sent, name=str(self.reducer.identity.name), **cost))
        if sent is not None and fragment in self._fragments and self._life is not _Life.FINISHING:
            self._overlap.observe(seconds=round.cost.seconds, apart=round.cost.seconds_apart, waited=waited)

    def _reset(self, non_finite: bool) -> None:
        """Give up local work. If a delta was not finite, by now its cause is in all fragments and moments."""
        since = self._reset_step
        if non_finite and since is not None and self.step_count - since > self.schedule.sync_every:
            raise NotFinite(f"step {self.step_count}: inf or nan again, after going back to the anchors at step "
                            f"{since}. A lower learning rate or gradient clipping may prevent it.")  # fmt: skip
        if non_finite and since is None:
            self._reset_step = self.step_count
        self._replica.reset(self._optimizers)

    def step(self) -> None:
        """Call this after each inner step if you passed no optimizer; otherwise the hook does it."""
        if self._optimizers:
            raise DiLoCoError("the optimizer's hook already counts steps: remove this call of step()")
        self._step()

    @eager
    def join(self) -> None:
        """Meet the other replicas: compare settings, agree on the state of every fragment. `with` and the first step do
        it for you.

        Where weights differ, all take the first replica's, or those of a replica that is ahead after a resume.
        """
        if self._life is _Life.JOINED:
            return
        self._check_open()
        self._replica.check_weights()
        self._replica.find_buffers()
        if not self._replica.started:
            self._replica.read_start()
        self._meet()
        # Rounds that the others finished before this replica came.
        self._apply([fragment for fragment in self._replica.all if fragment.in_flight is None])

    def _meet(self) -> None:
        self._check_open()
        replica, fragments = self._replica, self._replica.all
        replica.check_trained(self._optimizers)
        checks.check_ranks(replica.parameters, self.reducer, self.reducer.identity)
        checks.claim(self.model, self.reducer, self)
        job = Join(
            contract=replica.contract(self.schedule.sync_every, self.codec),
            states=[fragment.place.offer() for fragment in fragments],
            codecs=[fragment.codec for fragment in fragments],
            advance=advance_of(fragments),
            sync_every=self.schedule.sync_every,
            shard=replica.shard,
        )
        for fragment in fragments:  # the reducer may write to the anchors
            fragment.view.mark()()
        states = self.reducer.join(job)
        self._life = _Life.JOINED
        for fragment, state in zip(fragments, states, strict=True):
            if state is not None:
                fragment.jump(state, replica.work)
        replica.reshard()
        # Deltas in flight when the state was saved are sent again, in the same order: equal deltas, equal mean.
        in_flight = [(sent.step, fragment.number) for fragment in fragments if (sent := fragment.in_flight) is not None]
        for _, number in sorted(in_flight):
            self._send(fragments[number])

    @torch.no_grad()
    def finish(self) -> None:
        """Sync every fragment a last time and detach. Then all replicas are equal, whatever their step counts were."""
        if self._life is _Life.FINISHED:
            return
        self.join()
        self._replica.check_trained(self._optimizers)
        self._replica.check_counted()
        if not self._replica.started:
            checks.warn_no_step()
        self._hooks.detach()
        all_done = self.reducer.drain()
        self._life = _Life.FINISHING
        fragments = self._replica.all
        self._replica.find_buffers()
        self._apply(fragments)
        evaluate(self._optimizers)
        self._last_round = all_done
        for fragment in fragments:
            fragment.take_delta(self.step_count, self._replica.work)
            self._send(fragment)
        self._apply(fragments)
        for fragment in fragments:
            fragment.view.write(fragment.state.anchor)
        self._replica.reshard()
        self.leave()
        self._life = _Life.FINISHED

    @torch.no_grad()
    def flush(self, seconds: float) -> int:
        """Before this member of a bucket leaves for a while: sync its work since the last rounds, for at most this
        long. Returns the steps that no round has counted; their work stays in the weights.

        It makes no step afterwards: save its state if it is to return, and call leave().
        """
        if self.reducer.identity.replicas is not None:
            raise DiLoCoError("flush() is for a member of a bucket. Fixed replicas stop after the same step and lose "
                              "nothing: save and leave()")  # fmt: skip
        self.join()
        self._replica.check_trained(self._optimizers)
        self._hooks.detach()
        self.reducer.drain(seconds)
        self._life = _Life.FINISHING
        steps, indices = self._replica.work.steps, None
        # Again if a round was closed without this delta, as long as rounds are closed in time.
        while indices != self.indices and (open := [f for f in self._fragments if f.counted.steps < steps]):
            indices = self.indices
            for fragment in open:
                if fragment.in_flight is None:
                    fragment.take_delta(self.step_count, self._replica.work)
                    self._send(fragment)
            self._apply(open)
        self._replica.reshard()
        return steps - self.counted_steps

    def leave(self) -> None:
        """Detach and leave the others without a last sync, so that they do not wait for this replica."""
        if self._life not in (_Life.FINISHED, _Life.LEFT):
            self._hooks.detach()
            checks.release(self.model, self.reducer, self)
            self._life = _Life.LEFT
            self.reducer.leave()
            self._replica.close()

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:  # no sync from a broken replica
                self.finish()
        finally:
            self.leave()

    def count(self, tokens: float) -> None:
        """Count tokens: in the mean, replicas weigh by tokens since the last sync. Without it they weigh by steps."""
        if not self._replica.counts_tokens and self._replica.work.amount:
            raise DiLoCoError("count() was first called after a step: call it before every step, or never")
        if not 0 <= float(tokens) < inf:
            raise ConfigError(f"count({tokens}): pass the number of tokens of this step, 0 or more")
        self._replica.counts_tokens = True
        self._replica.work += Work(float(tokens))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore optimizer steps inside, such as those with which torch.distributed.checkpoint fills an optimizer."""
        self._hooks.paused = True
        try:
            yield
        finally:
            self._hooks.paused = False

    @contextlib.contextmanager
    def anchors(self) -> Iterator[None]:
        """Put the agreed weights into the model, to evaluate or export them, and take them out again.

        On exit, weights and float buffers are what they were. Buffers, such as the running statistics of BatchNorm, are
        this replica's own inside too: only finish() averages them. A schedule-free optimizer is in evaluation mode
        inside, so that its eval() does not move the anchors.
        """
        if self._life is _Life.ANCHORS:
            self._check_open()
        self._check_counted()
        before, self._life = self._life, _Life.ANCHORS
        try:
            with anchors_inside(self._fragments, self.model), evaluation_mode(self._optimizers):
                yield
        finally:
            self._life = before if self._life is _Life.ANCHORS else self._life

    @torch.no_grad()
    def restart(self, *, sync_every: int, fragments: Fragmenter, overlap: int, codec: Codec) -> None:
        """Change the settings after all: on all replicas after the same step, before the first round is sent. An
        automatic overlap starts from this one."""
        if any(self.indices) or self.in_flight or self._life is not _Life.JOINED:
            raise DiLoCoError("settings can change only before the first round is sent")
        with self.anchors():  # the new fragments start from the agreed state, not from what was trained since
            self._replica.cut(fragments, codec, self.reducer.identity.packs_for, self._where)
        self.fragmenter, self.codec, self.schedule = fragments, codec, Schedule(sync_every, len(self._fragments))
        self._overlap = self._overlap.restarted(overlap, len(self._fragments), sync_every)
        self._life = _Life.APART  # the next step compares the settings

    def state_dict(self) -> dict[str, Any]:
        """Anchors, outer state, step, statistics, and the deltas in flight, which are sent again on resume. Never
        waits.

        Resuming is exact if all replicas have the same overlap. Otherwise a replica that was still waiting for a round
        that another had applied takes that replica's state at once.
        Save the model and the optimizer at the same step, as always: the state has only a checksum of the weights, by
        which join() refuses a model of another state. The tensors are the live ones, not copies.
        """
        self._check_counted()
        overlap = self.overlap if self._overlap.auto else None
        state = {"replica": self.reducer.identity.name, "overlap": overlap} | self._replica.state_dict()
        return {str(self._replica.shard): state}  # torch.distributed.checkpoint takes equal keys for equal values

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state: on every replica, before the next step. Also load the model and the optimizer
        that this replica saved with it; in any order, before join()."""
        checks.check_saved(state_dict, str(self._replica.shard))
        self._check_open()
        state = state_dict[str(self._replica.shard)]
        checks.check_saved_replica(state["replica"], self.reducer.identity.name)
        self._replica.load_state_dict(state)
        if self._overlap.auto and state["overlap"] is not None:
            self._overlap = self._overlap.restarted(state["overlap"], len(self._fragments), self.schedule.sync_every)
        self._life = _Life.APART

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self._replica.parameters)
        return (
            f"DiLoCo({count:,} parameters in {len(self._fragments)} fragments, sync_every={self.schedule.sync_every}, "
            f"overlap={self.overlap}{' (auto)' if self._overlap.auto else ''}, keep_local={self.keep_local:g}, "
            f"codec={self.codec}, outer={self.outer}, reducer={type(self.reducer).__name__}, "
            f"step {self.step_count}, {self.stats.rounds} rounds)"
        )

    @property
    def step_count(self) -> int:
        return self._replica.step_count

    @property
    def counted_steps(self) -> int:
        """Steps whose work rounds of every fragment have counted, unless it was given up."""
        return min(fragment.counted.steps for fragment in self._fragments)

    @property
    def lost_steps(self) -> tuple[int, int]:
        """The last steps whose work was given up: after the first number, up to the second."""
        end = max(fragment.lost[1] for fragment in self._fragments)
        return min(fragment.lost[0] for fragment in self._fragments if fragment.lost[1] == end), end

    @property
    def stats(self) -> Stats:
        return self._replica.stats

    @property
    def overlap(self) -> int:
        """The current one; "auto" changes it."""
        return self._overlap.steps

    @property
    def step_seconds(self) -> float:
        """The usual time of an inner step; 0 if unknown."""
        return self._overlap.step_seconds

    @property
    def fragments(self) -> list[Fragment]:
        """The pieces of each fragment. A piece is a range of rows of a named parameter."""
        return [fragment.pieces for fragment in self._fragments]

    @property
    def indices(self) -> list[int]:
        """The last round of each fragment that was applied."""
        return [fragment.state.index for fragment in self._fragments]

    @property
    def in_flight(self) -> int:
        """Rounds that were sent and not applied yet."""
        return sum(fragment.in_flight is not None for fragment in self._replica.all)

    @property
    def pinned_bytes(self) -> int:
        """Host memory from and to which accelerators copy; 0 for a model on the host."""
        return self._replica.memory.pinned_bytes

    @property
    def placement(self) -> str:
        """Where the state is, and why."""
        return f"{self._replica.where}: {self._replica.why}"

    @property
    def _fragments(self) -> list[FragmentSync]:
        return self._replica.fragments

    def _check_counted(self) -> None:
        if self._life is _Life.JOINED:
            self._replica.check_counted()

    def _check_open(self) -> None:
        if self._life is _Life.ANCHORS:
            raise DiLoCoError(
                "inside anchors() the model holds the anchors: leave it before optimizer.step(), finish(), "
                "load_state_dict() or another anchors()"
            )
        if self._life not in (_Life.APART, _Life.JOINED):
            raise DiLoCoError("this DiLoCo has left the other replicas, by finish() or an error: create a new one")


def _default_reducer(shard: Shard) -> Reducer:
    from diloco.exchange.collective import Collective

    checks.check_unsharded(shard)
    return Collective()
