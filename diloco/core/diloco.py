"""Streaming DiLoCo (arXiv 2501.18512), Algorithm 2, attached to a training loop through the optimizer's hook.

After each inner step, for each fragment that is due:
    send   delta = anchor − local goes to the other replicas; training continues
    apply  `overlap` steps later: anchor ← outer(anchor, mean delta); local ← keep_local·local + (1 − keep_local)·anchor
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any, Literal, Self

import torch
from torch import nn

from diloco.codecs.codec import E3M0, Codec
from diloco.core import checks
from diloco.core.fragment import Fragment, Fragmenter, Strided
from diloco.core.hook import Hooks, Optimizers, as_list, eager, evaluate
from diloco.core.life import Life
from diloco.core.outer import Nesterov, Outer
from diloco.core.overlap import Overlap
from diloco.core.placement import Where
from diloco.core.replica import Replica
from diloco.core.schedule import Schedule
from diloco.core.stats import Stats
from diloco.core.sync import FragmentSync
from diloco.errors import DiLoCoError
from diloco.exchange.reducer import Called, Dropped, Jump, NonFinite, Reducer, Round, Shard

CATCH_UP = 2
"""Rounds of a fragment that are applied after one step: a replica that was away catches up over many steps, instead of
in one long one (53 rounds: 0.23 s). With 1 it might never, if the others close a round in every step."""


class DiLoCo:
    """Keep this replica's model in sync with the others.

    Args:
        model: any module, or a list of them, such as the stages of a pipeline. Its trained parameters are read and
            written in place; the model is not wrapped.
        optimizer: the inner optimizer, or a list of all of them. A step is complete when each has stepped. None: call
            `join()` before the first step and `step()` after each, as you must where hooks do not run or run too early:
            after the replay of a CUDA graph that holds the optimizer's step, and before FSDP2's `set_post_optim_event`.
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
            take at most 15 % of its free memory. `replica.where` says which, `replica.why` why.
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
        Schedule(sync_every)  # checked before the model is cut
        self.replica = Replica(model, as_list(optimizer), outer, state)
        self.model = self.replica.model
        self.reducer = _default_reducer(self.replica.shard) if reducer is None else reducer
        checks.check_reducer(self.reducer, auto=overlap == "auto")
        self.replica.cut(fragments, codec, self.reducer)
        self.fragmenter, self.codec, self.outer, self.keep_local = fragments, codec, outer, keep_local
        self.schedule = Schedule(sync_every, len(self._fragments))
        self._overlap = Overlap(overlap, len(self._fragments), sync_every)
        self.after_step: Callable[[], None] | None = None
        self._called = False
        self._life = Life.APART
        self._hooks = Hooks(self.replica.optimizers, before=self.join, after=self._step)

    @eager
    def _step(self) -> None:
        """One iteration of Algorithm 2, after the inner optimizer has stepped."""
        with self._overlap.between_steps():
            self.replica.count_step()
            try:  # what was sent `overlap` steps ago; before the send, whose delta is then against the new anchor
                self._apply(self._fragments, most=CATCH_UP)
            finally:  # even if a peer is lost: a delta that is taken now is saved, and sent again when all resume
                for fragment in self._due():
                    fragment.send(self.replica.work)  # anchor − local
            if self.overlap == 0:
                self._apply(self._fragments)
            self.replica.prepare(self.schedule)
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
            self.replica.check_trained()
        return due

    def _apply(self, fragments: Sequence[FragmentSync], most: float = inf) -> None:
        """Apply the rounds that have arrived, at most this many of each fragment, in turn: a replica that is behind
        fetches all fragments at the same time."""
        while fragments and most > 0:
            fragments, most = [fragment for fragment in fragments if self._apply_next(fragment)], most - 1

    def _apply_next(self, fragment: FragmentSync) -> bool:
        """`overlap` steps after the send, or at once if nothing is in flight. False: nothing to apply."""
        sent, finishing = fragment.in_flight, self._life is Life.FINISHING
        if sent is not None and self.step_count < sent.done.steps + self.overlap and not finishing:
            return False
        outcome = fragment.poll()
        match outcome:
            case Round():
                cost = fragment.apply(outcome, self.keep_local, self.replica.work, overlap=self.overlap)
                self.replica.record(cost)
                if sent is not None and not finishing:
                    self._overlap.observe(seconds=cost.seconds, apart=cost.seconds_apart, waited=cost.seconds_waited)
            case Dropped():
                fragment.in_flight = None
                if outcome.reset:
                    self.replica.reset(outcome, self.schedule.sync_every)
            case Jump():
                fragment.jump(outcome.state, self.replica.work)
            case NonFinite():
                fragment.fail(outcome)
            case Called():
                self._called = True
                return False
        return outcome is not None

    def step(self) -> None:
        """Call this after each inner step if you passed no optimizer; otherwise the hook does it."""
        if self.replica.optimizers:
            raise DiLoCoError("the optimizer's hook already counts steps: remove this call of step()")
        if self._life is Life.APART:
            raise DiLoCoError("step() before join(): call join() after the weights are loaded and before the first "
                              "step, which moves them; `with diloco:` does it for you")  # fmt: skip
        self._life.check_open()
        self._step()

    @eager
    def join(self) -> None:
        """Meet the other replicas: compare settings, agree on the state of every fragment. `with` and the optimizer's
        hook do it for you.

        Where weights differ, all take the first replica's, or those of a replica that is ahead after a resume.
        """
        if self._life is Life.JOINED:
            return
        self._life.check_open()
        self.replica.check_start()
        self.replica.read_start()
        self.replica.round_start()
        self._meet()
        # Rounds that the others finished before this replica came.
        self._apply([fragment for fragment in self.replica.all if fragment.in_flight is None])

    def _meet(self) -> None:
        self._life.check_open()
        self.replica.check_trained()
        checks.check_ranks(self.replica.parameters, self.reducer, self.reducer.identity)
        if self._overlap.auto:
            checks.check_overlap_of_copies(self.replica.parameters, self.replica.shard.count)
        checks.claim(self.model, self.reducer, self)
        states = self.reducer.join(self.replica.offer(self.schedule.sync_every, self.codec))
        self._life = Life.JOINED
        self.replica.take(states)

    @torch.no_grad()
    def finish(self) -> None:
        """Sync every fragment a last time and detach. Then all replicas are equal, whatever their step counts were."""
        if self._life is Life.FINISHED:
            return
        last = self._stop_training()
        if not self.replica.started:
            checks.warn_no_step()
        self.replica.find_buffers()
        self._await_rounds()
        evaluate(self.replica.optimizers)
        for fragment in self.replica.all:
            fragment.send(self.replica.work, last=last)
        self._await_rounds()
        if self.reducer.identity.replicas is None:
            self._sync_uncounted()
        self.replica.write_anchors(self.replica.all)
        self.leave()
        self._life = Life.FINISHED

    def _stop_training(self, seconds: float | None = None) -> bool:
        """No step follows, only rounds. Returns whether they are the last ones of all replicas."""
        self.join()
        self.replica.check_trained()
        self.replica.check_counted()
        self._hooks.detach()
        self._life = Life.FINISHING
        return self.reducer.drain(seconds)

    def _await_rounds(self) -> None:
        """Apply all rounds in flight. Send what the others wait for meanwhile: two members of a bucket that finish at
        the same time, each with a different fragment in flight, would wait for each other."""
        self._apply(self.replica.all)
        while self._called:
            self._called = False
            for fragment in self._fragments:
                steps = self.step_count - fragment.sent_step
                if fragment.in_flight is None and self.reducer.should_send(fragment.number, steps, scheduled=False):
                    fragment.send(self.replica.work)
            self._apply(self.replica.all)

    def _sync_uncounted(self) -> None:
        """Send what no round has counted, and again if a round of a bucket was closed without it, as long as rounds are
        closed in time."""
        indices = None
        while indices != self.indices and (behind := self.replica.uncounted()):
            indices = self.indices
            for fragment in behind:
                if fragment.in_flight is None:
                    fragment.send(self.replica.work)
            self._await_rounds()

    @torch.no_grad()
    def flush(self, seconds: float) -> int:
        """Before this member of a bucket leaves for a while: sync its work since the last rounds, for at most this
        long. Returns the steps that no round has counted; their work stays in the weights.

        It makes no step afterwards: save its state if it is to return, and call leave().
        """
        if self.reducer.identity.replicas is not None:
            raise DiLoCoError("flush() is for a member of a bucket. Fixed replicas stop after the same step and lose "
                              "nothing: save and leave()")  # fmt: skip
        self._stop_training(seconds)
        self._sync_uncounted()
        self.replica.reshard()
        return self.step_count - self.replica.counted_steps

    def leave(self) -> None:
        """Detach and leave the others without a last sync, so that they do not wait for this replica."""
        if self._life not in (Life.FINISHED, Life.LEFT):
            self._hooks.detach()
            checks.release(self.model, self.reducer, self)
            self._life = Life.LEFT
            self.reducer.leave()
            self.replica.close()

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._life is not Life.LEFT:  # no sync from a broken replica
                self.finish()
        finally:
            self.leave()

    def count(self, tokens: float) -> None:
        """Count tokens: in the mean, replicas weigh by tokens since the last sync. Without it they weigh by steps."""
        self.replica.count_tokens(tokens)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Ignore optimizer steps inside, such as those with which torch.distributed.checkpoint fills an optimizer."""
        return self._hooks.paused()

    @contextlib.contextmanager
    def anchors(self) -> Iterator[None]:
        """Put the agreed weights into the model, to evaluate or export them, and take them out again.

        On exit, weights and float buffers are what they were. Buffers, such as the running statistics of BatchNorm, are
        this replica's own inside too: only finish() averages them. A schedule-free optimizer is in evaluation mode
        inside, so that its eval() does not move the anchors.
        """
        if self._life is Life.ANCHORS:
            self._life.check_open()
        self._check_counted()
        if self._life is Life.APART:
            self.replica.read_start()
        before, self._life = self._life, Life.ANCHORS
        try:
            with self.replica.holding_anchors():
                yield
        finally:
            self._life = before if self._life is Life.ANCHORS else self._life

    @torch.no_grad()
    def restart(self, *, sync_every: int, fragments: Fragmenter, overlap: int, codec: Codec) -> None:
        """Change the settings after all: on all replicas after the same step, before the first round is sent. An
        automatic overlap starts from this one."""
        if any(self.indices) or self.in_flight or self._life is not Life.JOINED:
            raise DiLoCoError("settings can change only before the first round is sent")
        with self.anchors():  # the new fragments start from the agreed state, not from what was trained since
            self.replica.cut(fragments, codec, self.reducer)
        self.fragmenter, self.codec, self.schedule = fragments, codec, Schedule(sync_every, len(self._fragments))
        self._overlap = self._overlap.restarted(overlap, len(self._fragments), sync_every)
        self._meet()  # which compares the settings

    def state_dict(self) -> dict[str, Any]:
        """Anchors, outer state, step, statistics, and the deltas in flight, which are sent again on resume. Never
        waits.

        Resuming is exact if all replicas have the same overlap. Otherwise a replica that was still waiting for a round
        that another had applied takes that replica's state at once.
        Save the model and the optimizer at the same step, as always: the state has only a checksum of the weights, by
        which join() refuses a model of another state. The tensors are the live ones, not copies.
        """
        self._check_counted()
        state = self.replica.state_dict() | {"overlap": self.overlap, "replica": self.reducer.identity.name}
        return {str(self.replica.shard): state}  # torch.distributed.checkpoint takes equal keys for equal values

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state: on every replica, before the next step. Also load the model and the optimizer
        that this replica saved with it; in any order, before join()."""
        checks.check_saved(state_dict, str(self.replica.shard))
        self._life.check_open()
        state = state_dict[str(self.replica.shard)]
        checks.check_saved_replica(state["replica"], self.reducer.identity.name)
        self.replica.load_state_dict(state)
        if self._overlap.auto:
            self._overlap = self._overlap.restarted(state["overlap"], len(self._fragments), self.schedule.sync_every)
        self._life = Life.APART

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.replica.parameters)
        return (
            f"DiLoCo({count:,} parameters in {len(self._fragments)} fragments, sync_every={self.schedule.sync_every}, "
            f"overlap={self.overlap}{' (auto)' if self._overlap.auto else ''}, keep_local={self.keep_local:g}, "
            f"codec={self.codec}, outer={self.outer}, reducer={type(self.reducer).__name__}, "
            f"step {self.step_count}, {self.stats.rounds} rounds)"
        )

    @property
    def step_count(self) -> int:
        return self.replica.work.steps

    @property
    def stats(self) -> Stats:
        return self.replica.stats

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
        return sum(fragment.in_flight is not None for fragment in self.replica.all)

    @property
    def _fragments(self) -> list[FragmentSync]:
        return self.replica.fragments

    def _check_counted(self) -> None:
        if self._life is Life.JOINED:
            self.replica.check_counted()


def _default_reducer(shard: Shard) -> Reducer:
    from diloco.exchange.collective import Collective

    checks.check_unsharded(shard)
    return Collective()
