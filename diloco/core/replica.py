"""One replica: its model cut into fragments, the work it has done, and its statistics. Saved and restored as one."""

import contextlib
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from diloco.codecs import device as device_codec
from diloco.codecs.codec import Codec, Float32
from diloco.core import checks
from diloco.core.fragment import Fragment, Fragmenter, Piece
from diloco.core.hook import evaluation_mode, lr_of
from diloco.core.memory import Memory
from diloco.core.outer import SGD, Outer, denormals
from diloco.core.placement import OnDevice, OnHost, Where, choose
from diloco.core.schedule import Schedule
from diloco.core.stats import RoundStats, Stats
from diloco.core.sync import FragmentSync, Work
from diloco.core.tensors import (
    checksum,
    checksum_all,
    find_layers,
    float_buffers,
    forget_not_finite,
    frozen,
    fsdp_modules,
    reshard,
    shard_id,
    trainable,
    trained_buffers,
    unwrap,
)
from diloco.core.view import FlatView, lanes_for
from diloco.errors import ConfigError, DiLoCoError, Mismatch, NotFinite
from diloco.exchange.contract import FROZEN
from diloco.exchange.reducer import Dropped, Join, Next, Reducer, State


class Replica:
    """`where` to keep the state: see `DiLoCo`."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        outer: Outer,
        where: Where,
    ) -> None:
        self.model, self.optimizers = unwrap(model), optimizers
        self._fsdp = fsdp_modules(self.model)
        self.reshard()  # after a forward without a backward FSDP2 shows gathered parameters, which it frees later
        self._named: dict[str, Tensor] = dict(trainable(self.model))
        self._shapes = {name: tuple(p.shape) for name, p in self._named.items()}
        self.parameters, self.shard = list(self._named.values()), shard_id(self._named.values())
        self._outer = outer
        self._wanted: Where = where
        self.fragments: list[FragmentSync] = []
        self.buffers: list[FragmentSync] = []  # one for all, off the schedule: they stay local until finish()
        self.memory = Memory()
        self.work = Work()
        self.stats = Stats()
        self._reset_step: int | None = None  # of the last reset for inf or nan, until a delta counts again
        self._expected_weights: int | None = None  # checksum that came with a loaded state, until it is compared

    def cut(self, fragmenter: Fragmenter, codec: Codec, reducer: Reducer) -> None:
        """Cut the model into fragments that start from its present values."""
        pieces = fragmenter.split(self._shapes, find_layers(self.model, self._named))
        checks.hint_one_fragment(fragmenter, pieces)
        buffers = trained_buffers(self.model)
        of_buffers = tuple(Piece(name, 0, len(b) if b.dim() else 1) for name, b in buffers.items())
        self.close()
        self.memory = memory = Memory(lanes_for([*pieces, of_buffers], self._named | buffers))
        views = [FlatView(piece, self._named, memory.lanes) for piece in pieces]
        packs_for = reducer.identity.packs_for
        on_device, self.why = choose(self._wanted, views, codec, self._outer, packs_for)
        self.where = "device" if on_device else "host"
        self.fragments = []
        for number, (piece, view) in enumerate(zip(pieces, views, strict=True)):
            packs = packs_for if view.lane and device_codec.supports(codec) else None
            if on_device and packs:
                place = OnDevice(view, self._outer, memory, codec, packs)
            else:
                place = OnHost(view, self._outer, memory, codec, packs)
            options = {"reducer": reducer, "outer": self._outer, "codec": codec, "memory": memory, "packs_for": packs}
            self.fragments.append(FragmentSync(number, piece, view, place, **options))
        agreed = [fragment.state for fragment in self.buffers]  # before a restart; training has changed its own since
        self.buffers = self._cut_buffers(buffers, of_buffers, reducer)
        for fragment, state in zip(self.buffers, agreed, strict=False):
            fragment.place.replace(state, reuse=True)

    def _cut_buffers(self, buffers: dict[str, Tensor], pieces: Fragment, reducer: Reducer) -> list[FragmentSync]:
        if not buffers:
            return []
        view, outer, codec = FlatView(pieces, buffers, self.memory.lanes), SGD(lr=1.0), Float32()
        place = OnHost(view, outer, self.memory, codec, None)
        options = {"reducer": reducer, "outer": outer, "codec": codec, "memory": self.memory}
        fragment = FragmentSync(len(self.fragments), pieces, view, place, **options)
        fragment.remedy = (
            "This is a buffer. The parameters are synced and equal on all replicas; no buffer was averaged: repair "
            "this one, and copy all buffers from one replica to the others."
        )
        return [fragment]

    def close(self) -> None:
        """No more rounds follow."""
        self.memory.close()

    @property
    def all(self) -> list[FragmentSync]:
        return self.fragments + self.buffers

    @property
    def started(self) -> bool:
        """Whether there is progress that a join must not overwrite."""
        return bool(self.work.steps) or any(fragment.state.index for fragment in self.all)

    @property
    def counted_steps(self) -> int:
        """Steps whose work rounds of every fragment have counted, unless it was given up."""
        return min(fragment.counted.steps for fragment in self.fragments)

    @property
    def lost_steps(self) -> tuple[int, int]:
        """The last steps whose work was given up: after the first number, up to the second."""
        end = max(fragment.lost[1] for fragment in self.fragments)
        return min(fragment.lost[0] for fragment in self.fragments if fragment.lost[1] == end), end

    def uncounted(self) -> list[FragmentSync]:
        """The fragments with work that no round has counted."""
        return [fragment for fragment in self.fragments if fragment.counted.steps < self.work.steps]

    def count_step(self) -> None:
        """The inner optimizers have stepped."""
        if any(lane.capturing() for lane in self.memory.lanes.values()):
            raise DiLoCoError("a CUDA graph is being captured, and its replays would not run this hook: create DiLoCo "
                              "without an optimizer, call join() before the first replay and step() after each "
                              "one")  # fmt: skip
        self.work += Work(0.0 if self.work.tokens else 1.0, lr_of(self.optimizers), steps=1)

    def count_tokens(self, tokens: float) -> None:
        if not self.work.tokens and self.work.amount:
            raise DiLoCoError("count() was first called after a step: call it before every step, or never")
        if not 0 <= float(tokens) < inf:
            raise ConfigError(f"count({tokens}): pass the number of tokens of this step, 0 or more")
        self.work += Work(float(tokens), tokens=True)

    def record(self, round: RoundStats) -> None:
        """A round was applied."""
        if round.counted:
            self._reset_step = None
        self.stats.add(round)

    def prepare(self, schedule: Schedule) -> None:
        """Begin to copy the anchors of the next step's sends to the devices."""
        for fragment in self.fragments if self.memory.lanes else ():
            if schedule.sends_at(fragment.number, self.work.steps + 1):
                fragment.place.prepare()

    def reset(self, dropped: Dropped, sync_every: int) -> None:
        """Give up local work since the anchors. If a delta was not finite, by now its cause is in all fragments and
        moments."""
        step, since = self.work.steps, self._reset_step
        if dropped.non_finite and since is not None and step - since > sync_every:
            raise NotFinite(f"step {step}: inf or nan again, after going back to the anchors at step {since}. A lower "
                            "learning rate or gradient clipping may prevent it.")  # fmt: skip
        if dropped.non_finite and since is None:
            self._reset_step = step
        for fragment in self.fragments:
            fragment.give_up(self.work)
        self.reshard()
        for optimizer in self.optimizers:
            forget_not_finite(optimizer)

    def reshard(self) -> None:
        """FSDP2 must gather again after each change, and drop gathered parameters that it shows instead of its own."""
        reshard(self._fsdp)

    def find_buffers(self) -> None:
        """Modules may have replaced their buffers."""
        for fragment in self.buffers:
            fragment.view.find(trained_buffers(self.model))

    def check_start(self) -> None:
        """After a state was loaded, the weights must be those that were saved with it."""
        checks.check_weights(self._expected_weights, self.parameters)
        self._expected_weights = None

    def read_start(self) -> None:
        """Weights loaded since construction are the start, not progress."""
        self.find_buffers()
        for fragment in () if self.started else self.all:
            fragment.view.read(fragment.state.anchor)

    def round_start(self) -> None:
        """From float64 to float32, as the others get it."""
        for fragment in () if self.started else self.all:
            fragment.view.write(fragment.state.anchor)

    def offer(self, sync_every: int, codec: Codec) -> Join:
        """For a reducer that meets the others. It may write to the anchors."""
        fragments = self.all

        def advance(fragment: int, state: State, *, lr: float, last: bool) -> Next:
            return fragments[fragment].advance(state, lr=lr, last=last)

        job = Join(
            contract=self._contract(sync_every, codec),
            states=[fragment.place.offer() for fragment in fragments],
            codecs=[fragment.codec for fragment in fragments],
            advance=advance,
            sync_every=sync_every,
            shard=self.shard,
        )
        for fragment in fragments:
            fragment.view.mark()()
        return job

    def _contract(self, sync_every: int, codec: Codec) -> dict[str, object]:
        """What all replicas must agree on for their fragments to be equal."""
        fragments = self.all
        return {
            "sync_every": sync_every,
            "codec": repr(codec),
            "outer": repr(self._outer),
            "shard": str(self.shard),
            "parameters": {name: list(shape) for name, shape in self._shapes.items()},
            # Rounded to a different dtype, equal anchors give unequal weights.
            "dtypes": {s.name: str(s.tensor.dtype).removeprefix("torch.") for f in fragments for s in f.view.spans},
            "denormals": denormals(),
            FROZEN: {name: checksum(p) for name, p in frozen(self.model).items()},
            "fragments": {str(f.number): [[p.name, p.start, p.stop] for p in f.pieces] for f in fragments},
        }

    def take(self, states: Sequence[State | None]) -> None:
        """Take the states on which the replicas agreed. Deltas in flight when the state was saved are sent again, in
        the same order: equal deltas, equal mean."""
        for fragment, state in zip(self.all, states, strict=True):
            if state is not None:
                fragment.jump(state, self.work)
        self.reshard()
        in_flight = [(sent.done.steps, f.number) for f in self.all if (sent := f.in_flight) is not None]
        for _, number in sorted(in_flight):
            self.all[number].send_in_flight()

    def write_anchors(self, fragments: Sequence[FragmentSync]) -> None:
        for fragment in fragments:
            fragment.view.write(fragment.state.anchor)
        self.reshard()

    @contextlib.contextmanager
    def holding_anchors(self) -> Iterator[None]:
        """Put the anchors into the model; restore its weights and float buffers afterwards."""
        buffers = {name: buffer.clone() for name, buffer in float_buffers(self.model).items()}
        saved = [(fragment.view, fragment.view.copies()) for fragment in self.fragments]
        try:
            self.write_anchors(self.fragments)
            with evaluation_mode(self.optimizers):
                yield
        finally:
            for view, copies in saved:
                view.restore(copies)
            with torch.no_grad():
                for name, buffer in float_buffers(self.model).items():
                    if name in buffers:
                        buffer.copy_(buffers[name])
            self.reshard()

    def check_trained(self) -> None:
        self.reshard()
        checks.check_trained(self.model, self.parameters, self.optimizers)

    def check_counted(self) -> None:
        """Raise if the model was trained and no step was counted, as soon as the loop evaluates or saves: the last sync
        would replace what was trained by the start."""
        if not self.started and any(fragment.moved() for fragment in self.fragments):
            raise DiLoCoError("the model has changed and no step was counted: the optimizers that DiLoCo has did not "
                              "(all) step. Pass the ones that train the model, or None and call join() before the "
                              "first step and step() after each")  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {
            "work": self.work.saved(),
            "weights": checksum_all(self.parameters),
            "stats": self.stats.totals(),
            "fragments": {str(fragment.number): fragment.state_dict() for fragment in self.all},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if len(saved["fragments"]) != len(self.all):
            raise Mismatch(
                f"the saved state has {len(saved['fragments'])} fragments, this model {len(self.all)}: use the model "
                "and the fragments of the run that was saved"
            )
        self.work = Work(*saved["work"])
        for fragment in self.all:
            fragment.load_state_dict(saved["fragments"][str(fragment.number)])
            fragment.resumed = self.work
        self.stats = Stats(**saved["stats"])
        # Compare now if the model is loaded already: optimizer.train() of a schedule-free one moves it before join().
        self._expected_weights = None if saved["weights"] == checksum_all(self.parameters) else saved["weights"]
