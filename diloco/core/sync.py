"""One fragment on one replica: its values in this process, the agreed state, the delta in flight."""

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor, nn

from diloco.codecs.codec import Codec, Float32, is_coarse
from diloco.core.fragment import Fragment, Piece
from diloco.core.lane import Wait, already
from diloco.core.memory import Memory
from diloco.core.outer import SGD, Outer, denormals
from diloco.core.payload import packed
from diloco.core.placement import OnHost, Placement
from diloco.core.stats import RoundStats
from diloco.core.tensors import checksum, float_buffers, fsdp_modules, reshard
from diloco.core.view import FlatView, Uploads
from diloco.errors import Mismatch, NotFinite
from diloco.exchange.contract import FROZEN
from diloco.exchange.mean import Packed, decode_cuts
from diloco.exchange.reducer import Advance, Delta, Next, NonFinite, Round, State


@dataclass(frozen=True)
class Work:
    """Work of a replica, as a running total or a difference of two."""

    amount: float = 0.0  # tokens or steps
    lr_sum: float | Tensor = 0.0  # inner learning rates of all steps; on the device if they are
    steps: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.amount + other.amount, self.lr_sum + other.lr_sum, self.steps + other.steps)

    def __sub__(self, other: "Work") -> "Work":
        return Work(self.amount - other.amount, self.lr_sum - other.lr_sum, self.steps - other.steps)

    @property
    def lr(self) -> float:
        """The mean over the steps."""
        return float(self.lr_sum) / self.steps if self.steps else 0.0

    def saved(self) -> tuple[float, float, int]:
        return self.amount, float(self.lr_sum), self.steps


@dataclass(frozen=True)
class InFlight:
    """A delta that was sent and whose round has not been applied."""

    index: int
    step: int
    done: Work  # by this replica when it was sent
    new: Work  # the part that is not in the anchor yet
    memory: Tensor  # of the values
    values: Callable[[], Tensor | Packed]  # waits for copies from the device
    sent_at: float
    seconds: float = 0.0  # of the training thread, to take the delta


class FragmentSync:
    remedy = (
        "Nothing was applied on any replica. Resume from a checkpoint; a lower learning rate or gradient clipping may "
        "prevent it."
    )

    def __init__(
        self, number: int, pieces: Fragment, view: FlatView, place: Placement, *, outer: Outer, codec: Codec,
        memory: Memory, packs_for: int | None = None,
    ) -> None:  # fmt: skip
        """`packs_for`: replicas for which the device encodes deltas."""
        self.number, self.pieces, self.view, self.place = number, pieces, view, place
        self.outer, self.codec, self.memory, self._packs_for = outer, codec, memory, packs_for
        self.in_flight: InFlight | None = None
        self.sent_step = 0
        self.counted = Work()  # what is in the anchor
        self.resumed = Work()  # what an earlier life had done when it saved the state that this one began with
        self.lost = (0, 0)  # the last steps whose work was given up: after the first number, up to the second

    @property
    def state(self) -> State:
        return self.place.state

    def take_delta(self, step: int, done: Work) -> InFlight:
        """Take the delta against the anchor, never against the merged local value."""
        began = time.perf_counter()
        memory = self.memory.deltas.take(self.place.size)
        values = self._values(memory, self._packs_for, self.place.send(memory))
        seconds, new = time.perf_counter() - began, done - self.counted
        self.sent_step = step
        self.in_flight = InFlight(
            self.state.index + 1, step, done, new, memory, values, sent_at=time.time(), seconds=seconds
        )
        return self.in_flight

    def _values(self, memory: Tensor, packed_for: int | None, arrived: Wait) -> Callable[[], Tensor | Packed]:
        def values() -> Tensor | Packed:
            arrived()
            return packed(memory, self.codec, self.view.size, packed_for) if packed_for else memory

        return values

    def moved(self) -> bool:
        """Whether the model differs from the anchor."""
        values = torch.empty_like(self.state.anchor)
        self.view.read(values)
        return not torch.equal(values, self.state.anchor)

    def delta_later(self, sent: InFlight, *, tokens: bool, last: bool) -> Callable[[], Delta]:
        """The function that the reducer calls on another thread. `state` does not change meanwhile: jumps and rounds
        replace it."""
        state, coarse = self.state, is_coarse(self.codec)
        # The last delta of a coarse codec has what was never sent, even if this replica has made no step since.
        weight = 1.0 if last and coarse else sent.new.amount

        def delta() -> Delta:
            values = sent.values()
            return Delta(
                values=values,
                weight=weight,
                tokens=tokens,
                fingerprint=self.place.fingerprint(state, sent.memory),
                lr=sent.new.lr,
                last=last,
                needs_own=coarse,
                find_non_finite=lambda: self.view.find_non_finite(values),
            )

        return delta

    def apply(self, round: Round, keep_local: float, done: Work) -> None:
        """Adopt the state after the round and merge it. If this replica's delta did not count, rebase: follow the
        anchor and keep all local work.

        Except if one counted that an earlier life sent after it had saved the state that this one began with: all the
        work in that state was in it. It cannot be told from the steps made since, which are lost with it."""
        sent, old, uploads = self.in_flight, self.state, self.place.adopt(round.state)
        assert self.state.index == old.index + 1 and (sent is not None or not round.counted)
        if sent is not None and round.counted:
            if round.own is None:
                self.view.merge(self.state.anchor, keep_local, uploads)
            else:
                self.view.merge(self._with_loss(sent, round.own()), keep_local)
            self.counted = sent.done
            self._free(old, sent)
        elif round.earlier and self.resumed.steps > self.counted.steps:
            self.counted = self.resumed
            self._give_up(done, uploads)
        else:
            self.view.rebase(self.state.anchor, old.anchor, uploads)
        self.in_flight = None

    def _with_loss(self, sent: InFlight, decoded: Tensor) -> Tensor:
        """The anchor and what a coarse codec lost of this replica's delta: that stays where training put it, and the
        next delta contains it again. Overwrites the delta."""
        return torch.sub(decoded, sent.memory, out=sent.memory).add_(self.state.anchor)

    def fail(self, outcome: NonFinite) -> None:
        where = ", ".join(f"{self.pieces[span].name} on replica {name}" for name, span in outcome.spans.items())
        raise NotFinite(f"fragment {self.number}, round {outcome.index}: inf or nan in {where}. {self.remedy}")

    def _free(self, old: State, sent: InFlight) -> None:
        """The delta was counted, so no other thread reads this memory. Copies from it to a device may still be
        running."""
        copied = self.view.mark()
        if old.anchor is not self.state.anchor:
            self.memory.anchors.give(old.anchor, copied)
        if old.outer is not self.state.outer:
            self.memory.outers.give(old.outer, already)
        self.memory.deltas.give(sent.memory, copied)

    def jump(self, state: State, done: Work) -> None:
        """Replace the state; local work since the last round is lost."""
        self.place.replace(state)
        self.in_flight = None
        self._give_up(done)

    def reset(self, done: Work) -> None:
        """Set the local values to the anchor. A delta in flight remains; if it does not count, its work is lost."""
        self._give_up(done)

    def _give_up(self, done: Work, uploads: Uploads = ()) -> None:
        if done.steps > self.counted.steps:
            self.lost = self.counted.steps, done.steps
        self.counted = done
        self.view.write(self.state.anchor, uploads)

    def stats(
        self, round: Round, sent: InFlight | None, *, name: str, step: int, waited: float, applying: float, overlap: int
    ) -> RoundStats:
        """Figures of a round that was applied: seconds for which training waited for it, and that applying took."""
        return RoundStats(
            fragment=self.number,
            index=round.state.index,
            sent_step=sent.step if sent else None,
            applied_step=step,
            sent_at=sent.sent_at if sent else time.time(),
            seconds_exposed=waited + applying + (sent.seconds if sent else 0.0) + (device := self.memory.seconds()),
            seconds_device=device,
            seconds_waited=waited,
            members=len(round.members),
            counted=round.counted,
            overlap=overlap,
            share=round.members.get(name, 0.0) / (sum(round.members.values()) or 1.0),
            **vars(round.cost),
        )

    def _pieces(self) -> str:
        return json.dumps([(piece.name, piece.start, piece.stop) for piece in self.pieces])

    def state_dict(self) -> dict[str, Any]:
        return {
            "pieces": self._pieces(),
            "index": self.state.index,
            "sent_step": self.sent_step,
            "counted": self.counted.saved(),
            "anchor": self.state.anchor,
            "outer": self.state.outer,
            "flight": self._flight(),  # not a tensor: checkpoints need the same tensors in every save
        }

    def _flight(self) -> bytearray:
        """The delta in flight. Not bytes, which torch.load(weights_only=True) refuses."""
        if (sent := self.in_flight) is None:
            return bytearray()
        packed_for = self._packs_for if isinstance(sent.values(), Packed) else None
        buffer = io.BytesIO()
        torch.save((sent.index, sent.step, sent.done.saved(), sent.new.saved(), sent.memory, packed_for), buffer)
        return bytearray(buffer.getvalue())

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        saved_sizes, sizes = ((len(s["anchor"]), len(s["outer"])) for s in (saved, vars(self.state)))
        if saved_sizes != sizes:
            raise Mismatch(
                f"fragment {self.number} has (anchor, outer state) of {saved_sizes} values in the saved state and of "
                f"{sizes} here: load it with the model, fragments and outer optimizer it was saved with"
            )
        if saved["pieces"] != self._pieces():
            raise Mismatch(
                f"fragment {self.number} holds other parameters in the saved state: load it with the fragments it was "
                "saved with"
            )
        self.place.replace(State(saved["index"], saved["anchor"], saved["outer"]), reuse=True)
        self.sent_step, self.counted, self.in_flight = saved["sent_step"], Work(*saved["counted"]), None
        if saved["flight"]:
            index, step, done, new, memory, packed_for = torch.load(io.BytesIO(saved["flight"]), weights_only=True)
            if packed_for and packed_for != self._packs_for:  # the replicas or their devices have changed
                encoded = packed(memory, self.codec, self.view.size, packed_for)
                memory = decode_cuts(self.codec, encoded.payloads, self.view.size, packed_for)
                if not encoded.finite:  # which no payload can tell
                    memory[0] = nan
                packed_for = None
            values = self._values(memory, packed_for, already)
            self.in_flight = InFlight(index, step, Work(*done), Work(*new), memory, values, sent_at=time.time())


LAST = SGD(lr=1.0)
"""The outer optimizer of the last round of all replicas: the anchors become their mean. A full step with momentum on
what a few steps have changed goes too far: in nine short runs the mean was below the anchors in all."""


def advance_of(fragments: Sequence[FragmentSync]) -> Advance:
    """What a reducer calls to compute the next state of a fragment."""

    def advance(fragment: int, state: State, *, lr: float, last: bool) -> Next:
        sync = fragments[fragment]
        return sync.place.advance(state, LAST if last else sync.outer, lr)

    return advance


def whole(tensors: Mapping[str, Tensor]) -> Fragment:
    return tuple(Piece(name, 0, len(tensor) if tensor.dim() else 1) for name, tensor in tensors.items())


def sync_of_buffers(buffers: dict[str, Tensor], memory: Memory) -> list[FragmentSync]:
    """Buffers stay local until finish(), which averages those that training changes: a fragment off the schedule."""
    if not buffers:
        return []
    pieces, outer, codec = whole(buffers), SGD(lr=1.0), Float32()
    view = FlatView(pieces, buffers, memory.lanes)
    place = OnHost(view, outer, memory, codec, None)
    fragment = FragmentSync(0, pieces, view, place, outer=outer, codec=codec, memory=memory)
    fragment.remedy = (
        "This is a buffer. The parameters are synced and equal on all replicas; no buffer was averaged: repair this "
        "one, and copy all buffers from one replica to the others."
    )
    return [fragment]


@contextlib.contextmanager
def anchors_inside(fragments: Sequence[FragmentSync], model: nn.Module) -> Iterator[None]:
    """Put the anchors into the model; restore its weights and float buffers afterwards."""
    buffers = {name: buffer.clone() for name, buffer in float_buffers(model).items()}
    saved = [(fragment.view, fragment.view.copies()) for fragment in fragments]
    for fragment in fragments:
        fragment.view.write(fragment.state.anchor)
    reshard(fsdp := fsdp_modules(model))  # FSDP must gather again after each change
    try:
        yield
    finally:
        for view, copies in saved:
            view.restore(copies)
        with torch.no_grad():
            for name, buffer in float_buffers(model).items():
                if name in buffers:
                    buffer.copy_(buffers[name])
        reshard(fsdp)


def contract_of(
    fragments: Sequence[FragmentSync], shapes: Mapping[str, tuple[int, ...]], frozen: Mapping[str, Tensor]
) -> dict[str, object]:
    """What must be equal on all replicas for their fragments to be equal."""
    return {
        "parameters": {name: list(shape) for name, shape in shapes.items()},
        # Rounded to a different dtype, equal anchors give unequal weights.
        "dtypes": {s.name: str(s.tensor.dtype).removeprefix("torch.") for f in fragments for s in f.view.spans},
        "denormals": denormals(),
        FROZEN: {name: checksum(p) for name, p in frozen.items()},
        "fragments": {str(f.number): [[p.name, p.start, p.stop] for p in f.pieces] for f in fragments},
    }
