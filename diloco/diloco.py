"""Streaming DiLoCo (arXiv 2501.18512), Algorithm 2, attached to a training loop through the optimizer's hook.

After each step, for each fragment that is due:
    send   delta = anchor − local goes to the other replicas; training goes on
    apply  `overlap` steps later: anchor ← outer(anchor, mean delta); local ← keep_local·local + (1 − keep_local)·anchor
"""

import contextlib
import enum
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from diloco import mistakes
from diloco.advance import Memory
from diloco.codec import E3M0, Codec, check_sizes, feedback_of
from diloco.errors import ConfigError, DiLoCoError, Mismatch, NotFinite
from diloco.flat import ShardId, checksum, forget_not_finite, pinned, reshard, shard_id
from diloco.fragment import Fragment, Fragmenter, Strided
from diloco.hook import Optimizers, as_list, attach, evaluate, lr_of
from diloco.module import find_layers, frozen, trainable, trained_buffers, unwrap
from diloco.outer import Nesterov, Outer, denormals
from diloco.reduce import Dropped, Jump, Reduce, Round
from diloco.schedule import Schedule, check_overlap
from diloco.stats import Stats
from diloco.sync import FragmentSync, Trained, sync_of_buffers

F = TypeVar("F", bound=Callable[..., None])


def _eager(method: F) -> F:
    """A compiled optimizer.step would compile its hooks too, and with them the outer step: other bits, or an error."""
    disable: Any = torch.compiler.disable
    return disable(torch.no_grad()(method))


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
        overlap: int = 1,
        keep_local: float = 0.0,
        codec: Codec = E3M0(),  # noqa: B008
        outer: Outer = Nesterov(),  # noqa: B008
        feedback: float | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        mistakes.check_arguments(model, sync_every, overlap, fragments, codec, outer, reduce)
        check_overlap(overlap, sync_every)
        if not 0 <= keep_local <= 1:
            raise ConfigError(f"keep_local={keep_local}: give a number from 0 (take the anchor) to 1 (never take it)")
        feedback = feedback_of(codec) if feedback is None else feedback
        if not 0 <= feedback <= 1:
            raise ConfigError(f"feedback={feedback}: give a number from 0 (off) to 1 (all that the codec lost)")
        check_sizes(codec)
        mistakes.hint_momentum(codec, outer)
        self._optimizers = as_list(optimizer)  # refuses what is not an optimizer, before anything is done
        self._model = model = unwrap(model)
        reshard(model)  # after a forward without a backward FSDP2 shows gathered parameters, which it frees later
        parameters: dict[str, Tensor] = dict(trainable(model))
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        pieces = fragments.split(shapes, find_layers(model, parameters))
        mistakes.hint_one_fragment(fragments, pieces)
        self.schedule = Schedule(sync_every, len(pieces))
        self.overlap, self.keep_local = overlap, keep_local
        self._shard = shard_id(parameters.values())
        self.reduce = _default_reduce(self._shard) if reduce is None else reduce
        self._shapes, self._trained = shapes, list(parameters.values())
        memory = Memory(pinned({p.device.type for p in parameters.values()}))
        self._fragments = [
            FragmentSync(i, piece, parameters, outer, codec, memory, feedback) for i, piece in enumerate(pieces)
        ]
        self._buffers = sync_of_buffers(len(pieces), trained_buffers(model), memory)
        self.step_count = 0
        self.stats = Stats()
        self._progress, self._tokens = Trained(), False
        self._spoiled: int | None = None  # the step at which local values were given up, until a delta counts again
        self._life = _Life.APART
        self._detach = attach(self._optimizers, self.join, self.step)

    @_eager
    def step(self) -> None:
        """What happens after an inner step. Called by the optimizer's hook; call it yourself only without one."""
        if self._life is not _Life.JOINED:
            self._meet(self._all_fragments())  # the step is done: what was there at construction is the start
        self.step_count += 1
        self._add(0.0 if self._tokens else 1.0, lr_of(self._optimizers))
        try:
            for fragment in self._fragments:
                self._apply(fragment)
        finally:  # also after a lost peer: what is sent now is saved, and sent again when all resume
            now, slot = self.step_count, self.schedule.sends_at
            due = [f for f in self._fragments if self.reduce.due(f.number, now - f.sent_step, slot(f.number, now))]
            if due:
                self._check_trained()
            for fragment in due:
                self._send(fragment)
        if self.overlap == 0:
            for fragment in self._fragments:
                self._apply(fragment)

    def _check_trained(self) -> None:
        reshard(self._model)  # FSDP2 may show gathered parameters in the place of its own
        mistakes.check_trained(self._model, self._trained, self._optimizers)

    def _send(self, fragment: FragmentSync) -> None:
        sent = fragment.take_delta(self.step_count, self._progress)
        self.reduce.send(fragment.number, sent.index, fragment.delta_later(sent, self._tokens))

    def _apply(self, fragment: FragmentSync) -> None:
        """Apply what has arrived: `overlap` steps after the send, or at once if nothing is under way."""
        finishing = self._life is _Life.FINISHING
        while (sent := fragment.in_flight) is None or self.step_count >= sent.step + self.overlap or finishing:
            began = time.perf_counter()
            outcome = self.reduce.take(fragment.number, fragment.state.index + 1)
            taken = time.perf_counter()
            match outcome:
                case None:
                    return
                case Dropped(reset):
                    fragment.in_flight = None
                    if reset:
                        self._recover()
                case Jump(state):
                    fragment.jump(state, self._progress)
                case Round():
                    fragment.apply(outcome, self.keep_local)
                    self._spoiled = None if outcome.counted else self._spoiled
                    if self._tokens and not self._progress.work and not any(outcome.members.values()):
                        mistakes.warn_no_tokens()
                    hook = time.perf_counter() - taken
                    self.stats.add(fragment.statistics(outcome, sent, self.step_count, taken - began, hook))
                    self.reduce.applied(fragment.number, fragment.state)

    def _recover(self) -> None:
        """A delta was not finite. What made it so is in every fragment by now, and in the optimizers' moments."""
        if self._spoiled is not None and self.step_count - self._spoiled > self.schedule.sync_every:
            raise NotFinite(f"step {self.step_count}: inf or nan again, after going back to the anchors at step "
                            f"{self._spoiled}. A lower learning rate or gradient clipping may prevent it.")  # fmt: skip
        self._spoiled = self._spoiled or self.step_count
        for fragment in self._fragments:
            fragment.go_back(self._progress)
        reshard(self._model)
        for optimizer in self._optimizers:
            forget_not_finite(optimizer)

    @_eager
    def join(self) -> None:
        """Meet the other replicas: compare settings, agree on every fragment's state. `with` and the first step do it.

        Where the weights differ, the first replica's are taken, or those of a replica that is ahead after a resume.
        """
        if self._life is _Life.JOINED:
            return
        self._check_open()
        fragments = self._all_fragments()
        self._find_buffers()
        if self.step_count == 0 and not any(fragment.state.index for fragment in fragments):
            for fragment in fragments:  # weights loaded since construction are the start, not progress
                fragment.view.read(fragment.state.anchor)
        self._meet(fragments)
        for fragment in fragments:
            if fragment.in_flight is None:
                self._apply(fragment)  # rounds that others finished before this replica came

    def _meet(self, fragments: list[FragmentSync]) -> None:
        self._check_open()
        self._check_trained()
        mistakes.check_ranks(self._trained, self.reduce)
        mistakes.claim(self._model, self.reduce, self)
        mistakes.expect_end(self)
        states = self.reduce.join(self._contract(), [f.state for f in fragments], [f.codec for f in fragments])
        self._life = _Life.JOINED
        for fragment, state in zip(fragments, states, strict=True):
            if state is not None:
                fragment.jump(state, self._progress)
        reshard(self._model)
        # What was under way when the state was saved is sent again, in the same order: equal deltas, equal mean.
        again = [(fragment, sent) for fragment in fragments if (sent := fragment.in_flight) is not None]
        for fragment, sent in sorted(again, key=lambda each: (each[1].step, each[0].number)):
            self.reduce.send(fragment.number, sent.index, fragment.delta_later(sent, self._tokens))

    @torch.no_grad()
    def finish(self) -> None:
        """Sync every fragment a last time and detach. All replicas are equal then, whatever their step counts were."""
        if self._life in (_Life.FINISHING, _Life.FINISHED):
            return
        self.join()
        self._check_open()
        self._check_trained()
        if not self.step_count and not any(self.indices):
            mistakes.check_no_step(any(fragment.moved() for fragment in self._fragments))
        self._detach()
        together = self.reduce.settle()
        self._life = _Life.FINISHING
        fragments = self._all_fragments()
        self._find_buffers()
        for fragment in fragments:
            self._apply(fragment)
        evaluate(self._optimizers)
        for fragment in fragments:
            fragment.ending = together
            self._send(fragment)
        for fragment in fragments:
            self._apply(fragment)
            fragment.view.write(fragment.state.anchor)
        reshard(self._model)
        self._leave()

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:  # no sync from a broken replica
                self.finish()
        finally:
            self._leave()

    def count(self, tokens: float) -> None:
        """Count work: in the mean, replicas weigh by tokens since the last sync. Without it they weigh by steps."""
        if not self._tokens and self._progress.work:
            raise DiLoCoError("count() was first called after a step: call it before every step, or never")
        if not 0 <= float(tokens) < float("inf"):
            raise ConfigError(f"count({tokens}): give the number of tokens of this step, 0 or more")
        self._tokens = True
        self._add(float(tokens), 0.0)

    def _add(self, work: float, lr: float | Tensor) -> None:
        self._progress = Trained(self._progress.work + work, self._progress.lr_sum + lr)

    @contextlib.contextmanager
    def anchors(self) -> Iterator[None]:
        """Put the agreed weights into the model, to evaluate or export them, and take them out again."""
        if self._life is _Life.ANCHORS:
            self._check_open()
        before, self._life = self._life, _Life.ANCHORS
        # Not pinned: torch never gives pinned memory back.
        saved = [(fragment, torch.empty_like(fragment.state.anchor)) for fragment in self._fragments]
        with torch.no_grad():
            for fragment, values in saved:
                fragment.view.read(values)
                fragment.view.write(fragment.state.anchor)
        reshard(self._model)
        try:
            yield
        finally:
            self._life = before if self._life is _Life.ANCHORS else self._life
            with torch.no_grad():
                for fragment, values in saved:
                    fragment.view.write(values)
            reshard(self._model)

    def state_dict(self) -> dict[str, Any]:
        """Anchors, outer state, step, and the deltas under way, which are sent again on resume. Never waits.

        Resuming is exact if all replicas have the same overlap. Otherwise a replica that still waited for a
        round which another had applied takes that replica's state at once.
        Not the model and not the optimizer: save these as always. The tensors are the live ones, not copies.
        """
        mistakes.has_end(self)
        parts = {str(fragment.number): fragment.state_dict() for fragment in self._all_fragments()}
        # One entry per shard: torch.distributed.checkpoint takes equal names on several ranks for equal values. It does
        # not load a state with a name that the saved one lacks: so the replica's number is kept under an old name.
        tokens = self._tokens, mistakes.known_as(self.reduce)
        return {
            str(self._shard): {
                "step": self.step_count,
                "work": self._progress.saved(),
                "tokens": tokens,
                "parts": parts,
            }
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state: on every replica, before the next step. Load model and optimizer too."""
        mistakes.check_state(state_dict, str(self._shard))
        saved, fragments = state_dict[str(self._shard)], self._all_fragments()
        tokens, replica = saved["tokens"] if isinstance(saved["tokens"], (tuple, list)) else (saved["tokens"], None)
        mistakes.check_replica(replica, mistakes.known_as(self.reduce))
        parts = saved["parts"]
        if len(parts) != len(fragments):
            raise Mismatch(
                f"the saved state has {len(parts)} fragments, this model {len(fragments)}: use the model and the "
                "fragments of the run that was saved"
            )
        self._check_open()
        for fragment in fragments:
            fragment.load_state_dict(parts[str(fragment.number)])
        self.step_count, self._progress, self._tokens = saved["step"], Trained.load(saved["work"]), tokens
        self._life = _Life.APART

    def __repr__(self) -> str:
        first, count = self._fragments[0], sum(p.numel() for p in self._trained)
        feedback = f"feedback={first.feedback:g}, " if first.feedback else ""
        return (
            f"DiLoCo({count:,} parameters in {len(self._fragments)} fragments, sync_every={self.schedule.sync_every}, "
            f"overlap={self.overlap}, keep_local={self.keep_local:g}, codec={first.codec}, outer={first.outer}, "
            f"{feedback}reduce={type(self.reduce).__name__}, step {self.step_count}, {self.stats.rounds} rounds)"
        )

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
            fragment.find(trained_buffers(self._model))

    def _all_fragments(self) -> list[FragmentSync]:
        return self._fragments + self._buffers

    def _contract(self) -> dict[str, object]:
        fragments = self._all_fragments()
        return {
            "sync_every": self.schedule.sync_every,
            "codec": repr(self._fragments[0].codec),
            "outer": repr(self._fragments[0].outer),
            "parameters": {name: list(shape) for name, shape in self._shapes.items()},
            # Rounded to another dtype, equal anchors give unequal weights.
            "dtypes": {s.name: str(s.tensor.dtype).removeprefix("torch.") for f in fragments for s in f.view.spans},
            "denormals": denormals(),
            "frozen parameters": {name: checksum(p) for name, p in frozen(self._model).items()},
            "shard": str(self._shard),
            "fragments": {str(p.number): [[q.name, q.start, q.stop] for q in p.pieces] for p in fragments},
        }

    def _leave(self) -> None:
        """Detach and leave the others, so that they do not wait for this replica."""
        if self._life not in (_Life.FINISHED, _Life.LEFT):
            self._detach()
            mistakes.release(self._model, self.reduce, self)
            self._life = _Life.FINISHED if self._life is _Life.FINISHING else _Life.LEFT
            self.reduce.leave()

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
