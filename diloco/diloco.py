"""Streaming DiLoCo (arXiv 2501.18512), Algorithm 2, attached to a training loop through the optimizer's hook.

After each step, for each fragment that is due:
    send   delta = anchor − local goes to the other replicas; training goes on
    apply  `overlap` steps later: anchor ← outer(anchor, mean delta); local ← keep_local·local + (1 − keep_local)·anchor
"""

import contextlib
import enum
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from diloco import mistakes, saved
from diloco.advance import Memory
from diloco.codec import E3M0, Codec, check_sizes, feedback_of
from diloco.errors import ConfigError, DiLoCoError, NotFinite
from diloco.flat import ShardId, checksum_all, forget_not_finite, fsdp_modules, pinned, reshard, shard_id
from diloco.fragment import Fragment, Fragmenter, Strided
from diloco.hook import Optimizers, as_list, attach, eager, evaluate, evaluation_mode, lr_of
from diloco.module import find_layers, frozen, trainable, trained_buffers, unwrap
from diloco.outer import Nesterov, Outer
from diloco.pace import Pace, RoundTimes
from diloco.reduce import Dropped, Jump, Reduce, Round
from diloco.schedule import Schedule
from diloco.stats import Stats
from diloco.sync import FragmentSync, Trained, anchors_inside, contract_of, sync_of_buffers

CATCH_UP = 2
"""Rounds of a fragment that are applied after one step: a replica that was away catches up over many steps, instead of
in one that takes long (53 rounds: 0.23 s). With 1 it might never, if the others close a round in every step."""


class _Life(enum.Enum):
    APART = enum.auto()  # not with the others yet, or not any more since a state was loaded
    JOINED = enum.auto()
    ANCHORS = enum.auto()  # inside anchors(): the model does not hold the local values
    FINISHING = enum.auto()  # what is in flight is applied without regard to overlap
    FINISHED = enum.auto()
    LEFT = enum.auto()  # by an error


class DiLoCo:
    """Keep this replica's model in agreement with the others'.

    Args:
        model: any module, or a list of them, as the parts of a pipeline. Its trained parameters are read and written in
            place; the model is not wrapped.
        optimizer: the inner optimizer, or all of them. A step is complete when each has stepped. None: call `step()`,
            as you must where hooks do not run or run too early: after the replay of a CUDA graph that holds the
            optimizer's step, and before FSDP2's `set_post_optim_event`.
        sync_every: steps between two syncs of the same fragment (H).
        fragments: how the model is cut into what is synced in turn.
        overlap: steps between sending a fragment and applying the result (τ); 0 waits for it. May differ by replica.
            "auto": the smallest, from 1 to 5, with which this replica does not wait; follows the link in mid-run.
        keep_local: weight of the local value when the result is applied (α). May differ by replica: anchors stay equal,
            and finish() does not use it.
        codec: numbers on the wire.
        outer: what the mean delta does to the anchor.
        feedback: share of what the codec lost of the last delta that goes into the next one; 0: off. None: what the
            codec is meant for: 0.9 for `TwoBit`, 0.95 for `TopK`, 0 for the others.
        reduce: who computes the mean; by default `Collective()` over all ranks.
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
        feedback: float | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        mistakes.check_arguments(model, sync_every, overlap, fragments, codec, outer, reduce)
        if not 0 <= keep_local <= 1:
            raise ConfigError(f"keep_local={keep_local}: give a number from 0 (take the anchor) to 1 (never take it)")
        if feedback is not None and not 0 <= feedback <= 1:
            raise ConfigError(f"feedback={feedback}: give a number from 0 (off) to 1 (all that the codec lost)")
        check_sizes(codec)
        mistakes.hint_momentum(codec, outer)
        self._optimizers = as_list(optimizer)  # refuses what is not an optimizer, before anything is done
        self.model = model = unwrap(model)
        self._fsdp = fsdp_modules(model)
        reshard(self._fsdp)  # after a forward without a backward FSDP2 shows gathered parameters, which it frees later
        parameters: dict[str, Tensor] = dict(trainable(model))
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self._shapes, self._trained, self._shard = shapes, list(parameters.values()), shard_id(parameters.values())
        self.reduce = _default_reduce(self._shard) if reduce is None else reduce
        self._name = mistakes.known_as(self.reduce)
        self.outer, self.keep_local, self._feedback = outer, keep_local, feedback
        first = 1 if overlap == "auto" else overlap
        self._cut(sync_every, fragments, first, codec, auto=overlap == "auto")
        self._buffers = sync_of_buffers(len(self._fragments), trained_buffers(model), self._fragments[0].memory)
        self.step_count = 0
        self.stats = Stats()
        self.watch: Callable[[], None] | None = None  # called after each step of this replica
        self._progress, self._tokens = Trained(), False
        self._spoiled: int | None = None  # the step at which local values were given up, until a delta counts again
        self._loaded: int | None = None  # checksum of the weights that belong to a loaded state, until they are seen
        self._life = _Life.APART
        self._detach = attach(self._optimizers, self.join, self._step)

    def _cut(self, sync_every: int, fragments: Fragmenter, overlap: int, codec: Codec, auto: bool) -> None:
        parameters: dict[str, Tensor] = dict(trainable(self.model))
        pieces = fragments.split(self._shapes, find_layers(self.model, parameters))
        mistakes.hint_one_fragment(fragments, pieces)
        self.fragmenter, self.codec, self.schedule = fragments, codec, Schedule(sync_every, len(pieces))
        self.pace = Pace(overlap, len(pieces), sync_every, auto)
        feedback = feedback_of(codec) if self._feedback is None else self._feedback
        memory = Memory(pinned({p.device.type for p in self._trained}))
        self._fragments = [FragmentSync(number, piece, parameters, self.outer, codec, memory, feedback)
                           for number, piece in enumerate(pieces)]  # fmt: skip

    @torch.no_grad()
    def settle_on(self, sync_every: int, fragments: Fragmenter, overlap: int, codec: Codec) -> None:
        """Begin with other settings after all: on all replicas after the same step, before the first round is sent. An
        overlap that is chosen automatically begins with this one."""
        if any(self.indices) or self.in_flight or self._life is not _Life.JOINED:
            raise DiLoCoError("fragments can be cut again only before the first round is sent")
        clock = self.pace.clock
        with self.anchors():  # what the new fragments read is the agreed start, not what was trained since
            self._cut(sync_every, fragments, overlap, codec, self.pace.auto)
        for each in self._buffers:
            each.number = len(self._fragments)
        self.pace.clock, self._life = clock, _Life.APART  # the next step compares the settings

    def step(self) -> None:
        """Call this after each inner step if DiLoCo was made without an optimizer; otherwise the hook does it."""
        if self._optimizers:
            raise DiLoCoError("the optimizer's hook already counts steps: remove this call of step()")
        self._step()

    @eager
    def _step(self) -> None:
        if self._life is not _Life.JOINED:
            self._meet(self._all_fragments())  # the step is done: what was there at construction is the start
        self.pace.clock.begin(time.perf_counter())
        self.step_count += 1
        self._add(0.0 if self._tokens else 1.0, lr_of(self._optimizers), steps=1)
        try:
            self._apply(self._fragments, CATCH_UP)
        finally:  # also after a lost peer: what is sent now is saved, and sent again when all resume
            now, slot = self.step_count, self.schedule.sends_at
            due = [f for f in self._fragments if self.reduce.due(f.number, now - f.sent_step, slot(f.number, now))]
            if self._fragments[0] in due:  # not at each send: it looks at every module
                self._check_trained()
            for fragment in due:
                self._send(fragment)
        if self.overlap == 0:
            self._apply(self._fragments)
        if self.watch:
            self.watch()
        self.pace.clock.end(time.perf_counter())

    def _check_trained(self) -> None:
        reshard(self._fsdp)  # FSDP2 may show gathered parameters in the place of its own
        mistakes.check_trained(self.model, self._trained, self._optimizers)

    def _send(self, fragment: FragmentSync) -> None:
        sent = fragment.take_delta(self.step_count, self._progress)
        self.reduce.send(fragment.number, sent.index, fragment.delta_later(sent, self._tokens))

    def _apply(self, fragments: Sequence[FragmentSync], most: float = inf) -> None:
        """Apply what has arrived, one round of each in turn: so a replica that is behind fetches all side by side.
        `most`: rounds of each."""
        while fragments and most > 0:
            fragments, most = [fragment for fragment in fragments if self._apply_next(fragment)], most - 1

    def _apply_next(self, fragment: FragmentSync) -> bool:
        """`overlap` steps after the send, or at once if nothing is under way. False if there is nothing to apply."""
        sent, finishing = fragment.in_flight, self._life is _Life.FINISHING
        if sent is not None and self.step_count < sent.step + self.overlap and not finishing:
            return False
        began = time.perf_counter()
        outcome = self.reduce.take(fragment.number, fragment.state.index + 1)
        taken = time.perf_counter()
        match outcome:
            case Dropped(reset, spoiled):
                fragment.in_flight = None
                if reset:
                    self._recover(spoiled)
            case Jump(state):
                fragment.jump(state, self._progress)
            case Round():
                fragment.apply(outcome, self.keep_local)
                self._spoiled = None if outcome.counted else self._spoiled
                if self._tokens and not self._progress.work and not any(outcome.members.values()):
                    mistakes.warn_no_tokens()
                hook, waited = time.perf_counter() - taken, taken - began
                self.stats.add(fragment.statistics(outcome, sent, self.step_count, waited, hook, self.overlap))
                if sent and fragment.number < len(self._fragments) and not finishing:
                    self.pace.after(RoundTimes(outcome.seconds, outcome.apart, waited), self.pace.clock.seconds)
                self.reduce.applied(fragment.number, fragment.state)
        return outcome is not None

    def _recover(self, spoiled: bool) -> None:
        """Local work is given up. If a delta was not finite, what made it so is in all fragments and moments by now."""
        if spoiled and self._spoiled is not None and self.step_count - self._spoiled > self.schedule.sync_every:
            raise NotFinite(f"step {self.step_count}: inf or nan again, after going back to the anchors at step "
                            f"{self._spoiled}. A lower learning rate or gradient clipping may prevent it.")  # fmt: skip
        self._spoiled = (self._spoiled or self.step_count) if spoiled else self._spoiled
        for fragment in self._fragments:
            fragment.go_back(self._progress)
        reshard(self._fsdp)
        for optimizer in self._optimizers:
            forget_not_finite(optimizer)

    @eager
    def join(self) -> None:
        """Meet the other replicas: compare settings, agree on every fragment's state. `with` and the first step do it.

        Where the weights differ, the first replica's are taken, or those of a replica that is ahead after a resume.
        """
        if self._life is _Life.JOINED:
            return
        self._check_open()
        mistakes.check_weights(self._loaded, self._trained)
        self._loaded = None
        fragments = self._all_fragments()
        self._find_buffers()
        if self.step_count == 0 and not any(fragment.state.index for fragment in fragments):
            for fragment in fragments:  # weights loaded since construction are the start, not progress
                fragment.view.read(fragment.state.anchor)
                fragment.view.write(fragment.state.anchor)  # float64 rounded to fp32, as the others get it
        self._meet(fragments)
        # Rounds that others finished before this replica came.
        self._apply([fragment for fragment in fragments if fragment.in_flight is None])

    def _meet(self, fragments: list[FragmentSync]) -> None:
        self._check_open()
        self._check_trained()
        mistakes.check_ranks(self._trained, self.reduce)
        mistakes.claim(self.model, self.reduce, self)
        mistakes.expect_end(self)
        states = self.reduce.join(self._contract(), [f.state for f in fragments], [f.codec for f in fragments])
        self._life = _Life.JOINED
        for fragment, state in zip(fragments, states, strict=True):
            if state is not None:
                fragment.jump(state, self._progress)
        reshard(self._fsdp)
        # What was under way when the state was saved is sent again, in the same order: equal deltas, equal mean.
        again = [(fragment, sent) for fragment in fragments if (sent := fragment.in_flight) is not None]
        for fragment, sent in sorted(again, key=lambda each: (each[1].step, each[0].number)):
            self.reduce.send(fragment.number, sent.index, fragment.delta_later(sent, self._tokens))

    @torch.no_grad()
    def finish(self) -> None:
        """Sync every fragment a last time and detach. All replicas are equal then, whatever their step counts were."""
        if self._life is _Life.FINISHED:
            return
        self.join()
        self._check_trained()
        self._check_counted()
        if not self.step_count and not any(self.indices):
            mistakes.warn_no_step()
        self._detach()
        together = self.reduce.settle()
        self._life = _Life.FINISHING
        fragments = self._all_fragments()
        self._find_buffers()
        self._apply(fragments)
        evaluate(self._optimizers)
        for fragment in fragments:
            fragment.ending = together
            self._send(fragment)
        self._apply(fragments)
        for fragment in fragments:
            fragment.view.write(fragment.state.anchor)
        reshard(self._fsdp)
        self.leave()
        self._life = _Life.FINISHED

    def leave(self) -> None:
        """Detach and leave the others without a last sync, so that they do not wait for this replica."""
        if self._life not in (_Life.FINISHED, _Life.LEFT):
            self._detach()
            mistakes.release(self.model, self.reduce, self)
            self._life = _Life.LEFT
            self.reduce.leave()

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
        """Count work: in the mean, replicas weigh by tokens since the last sync. Without it they weigh by steps."""
        if not self._tokens and self._progress.work:
            raise DiLoCoError("count() was first called after a step: call it before every step, or never")
        if not 0 <= float(tokens) < float("inf"):
            raise ConfigError(f"count({tokens}): give the number of tokens of this step, 0 or more")
        self._tokens = True
        self._add(float(tokens))

    def _add(self, work: float, lr: float | Tensor = 0.0, steps: int = 0) -> None:
        so_far = self._progress
        self._progress = Trained(so_far.work + work, so_far.lr_sum + lr, so_far.steps + steps)

    @contextlib.contextmanager
    def anchors(self) -> Iterator[None]:
        """Put the agreed weights into the model, to evaluate or export them, and take them out again.

        On exit, weights and float buffers are what they were. Buffers, such as the running statistics of BatchNorm, are
        this replica's own also inside: only finish() averages them. A schedule-free optimizer is in evaluation mode
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

    def state_dict(self) -> dict[str, Any]:
        """Anchors, outer state, step, and the deltas under way, which are sent again on resume. Never waits.

        Resuming is exact if all replicas have the same overlap. Otherwise a replica that still waited for a
        round which another had applied takes that replica's state at once.
        The overlap is in it if that is "auto".
        Save the model and the optimizer at the same step, as always: of the weights there is only a checksum in it, by
        which join() refuses a model that belongs to another state. The tensors are the live ones, not copies.
        """
        self._check_counted()
        weights = checksum_all(self._trained)
        overlap = self.overlap if self.pace.auto else None
        progress = saved.Progress(self.step_count, self._progress, self._tokens, weights, overlap)
        return saved.save(str(self._shard), self._name, progress, self._all_fragments())

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state: on every replica, before the next step. Load the model and the optimizer that this
        replica saved with it, too; in any order, before join()."""
        shard, fragments = str(self._shard), self._all_fragments()
        saved.check(state_dict, shard, self._name, fragments)
        self._check_open()
        progress = saved.load(state_dict, shard, fragments)
        if self.pace.auto and progress.overlap is not None:
            self.pace = Pace(progress.overlap, len(self._fragments), self.schedule.sync_every)
        self.step_count, self._progress, self._tokens = progress.step, progress.trained, progress.tokens
        # Compared now if the model is loaded already: optimizer.train() of a schedule-free one moves it before join().
        self._loaded = None if progress.weights == checksum_all(self._trained) else progress.weights
        self._life = _Life.APART

    def __repr__(self) -> str:
        first, count = self._fragments[0], sum(p.numel() for p in self._trained)
        feedback = f"feedback={first.feedback:g}, " if first.feedback else ""
        return (
            f"DiLoCo({count:,} parameters in {len(self._fragments)} fragments, sync_every={self.schedule.sync_every}, "
            f"overlap={self.overlap}{' (auto)' if self.pace.auto else ''}, keep_local={self.keep_local:g}, "
            f"codec={first.codec}, outer={first.outer}, "
            f"{feedback}reduce={type(self.reduce).__name__}, step {self.step_count}, {self.stats.rounds} rounds)"
        )

    @property
    def overlap(self) -> int:
        """At the moment; "auto" changes it."""
        return self.pace.overlap

    @property
    def fragments(self) -> list[Fragment]:
        """The pieces of each fragment. A piece is a range of rows of a named parameter."""
        return [fragment.pieces for fragment in self._fragments]

    @property
    def indices(self) -> list[int]:
        """The round that this replica holds of each fragment."""
        return [fragment.state.index for fragment in self._fragments]

    @property
    def in_flight(self) -> int:
        """Rounds that were sent and are not applied yet."""
        return sum(fragment.in_flight is not None for fragment in self._all_fragments())

    def _find_buffers(self) -> None:
        """Modules may have put other tensors in the place of those that were there."""
        for fragment in self._buffers:
            fragment.find(trained_buffers(self.model))

    def _all_fragments(self) -> list[FragmentSync]:
        return self._fragments + self._buffers

    def _contract(self) -> dict[str, object]:
        about = {"sync_every": self.schedule.sync_every, "codec": repr(self.codec),
                 "outer": repr(self.outer), "shard": str(self._shard)}  # fmt: skip
        return about | contract_of(self._all_fragments(), self._shapes, frozen(self.model))

    def _check_counted(self) -> None:
        """Raise if the model was trained and no step counted, as soon as the loop evaluates or saves: without one the
        last sync would put the start in the place of what was trained."""
        if self._life is _Life.JOINED and not self.step_count and not any(self.indices):
            mistakes.check_no_step(any(fragment.moved() for fragment in self._fragments))

    def _check_open(self) -> None:
        if self._life is _Life.ANCHORS:
            raise DiLoCoError(
                "inside anchors() the model holds the anchors: leave it before optimizer.step(), finish(), "
                "load_state_dict() or another anchors()"
            )
        if self._life not in (_Life.APART, _Life.JOINED):
            raise DiLoCoError("this DiLoCo has left the other replicas, by finish() or an error: make a new one")


def _default_reduce(shard: ShardId) -> Reduce:
    from diloco.reduce.collective import Collective

    mistakes.check_whole(shard)
    return Collective()
