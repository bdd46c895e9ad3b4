"""One fragment on one replica: its values in this process, the agreed state, the delta in flight."""

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diloco.advance import Memory, NextState
from diloco.codec import Codec, Float32
from diloco.errors import Mismatch, NotFinite
from diloco.flat import FlatView, checksum, fsdp_modules, reshard
from diloco.fragment import Fragment, Piece
from diloco.module import float_buffers
from diloco.outer import SGD, Outer, denormals
from diloco.reduce import Delta, Round, State
from diloco.reduce.contract import FROZEN
from diloco.stats import RoundStats


@dataclass(frozen=True)
class Trained:
    """What a replica has trained."""

    work: float = 0.0  # tokens, or steps
    lr_sum: float | Tensor = 0.0  # the inner learning rates of all steps; on a device if those are
    steps: int = 0

    def __sub__(self, other: "Trained") -> "Trained":
        return Trained(self.work - other.work, self.lr_sum - other.lr_sum, self.steps - other.steps)

    @property
    def lr(self) -> float:
        """The mean over the steps."""
        return float(self.lr_sum) / self.steps if self.steps else 0.0

    def saved(self) -> tuple[float, float, int]:
        return self.work, float(self.lr_sum), self.steps


@dataclass(frozen=True)
class InFlight:
    """A delta that was sent and whose round is not applied yet."""

    index: int
    step: int
    trained: Trained  # by this replica when it was sent
    new: Trained  # the part of it that is not in the anchor yet
    values: Tensor
    ready: Callable[[], None]  # wait for copies from the device
    sent_at: float
    seconds: float = 0.0  # of the training thread, spent on taking the delta


LAST = SGD(lr=1.0)
"""The outer rule of the last round of all replicas: the anchors become their mean. A full step with momentum on what a
few steps have changed goes too far: in nine short runs the mean was below the anchors in all."""


class FragmentSync:
    remedy = (
        "Nothing was applied on any replica. Resume from a checkpoint; a lower learning rate or gradient clipping may "
        "prevent it."
    )

    def __init__(
        self,
        number: int,
        pieces: Fragment,
        tensors: dict[str, Tensor],
        outer: Outer,
        codec: Codec,
        memory: Memory,
        feedback: float = 0.0,
    ) -> None:
        self.number, self.pieces, self.outer, self.codec = number, pieces, outer, codec
        self.view = FlatView(pieces, tensors)
        self.memory = memory
        anchor = memory.anchors.take(self.view.size)
        self.state = State(0, anchor, outer.state(self.view.size))
        self.view.read(self.state.anchor)
        self.in_flight: InFlight | None = None
        self.ending = False  # the next round is the last one of all replicas
        self.sent_step = 0
        self.counted = Trained()  # what is in the anchor
        self.feedback = feedback
        # What the codec lost of the deltas that counted, for the next one. Never changed while a delta is being taken.
        self.residual = self.memory.anchors.take(self.view.size).zero_() if feedback else None

    @property
    def _rule(self) -> Outer:
        return LAST if self.ending else self.outer

    def take_delta(self, step: int, trained: Trained) -> InFlight:
        """Take the delta against the anchor, never against the merged local value."""
        began = time.perf_counter()
        values = self.memory.deltas.take(self.view.size)
        self.view.subtract(self.state.anchor, values, self.residual)
        ready, taken = self.view.mark(), time.perf_counter() - began
        self.sent_step, index, new = step, self.state.index + 1, trained - self.counted
        self.in_flight = InFlight(index, step, trained, new, values, ready, time.time(), taken)
        return self.in_flight

    def moved(self) -> bool:
        """Whether the model's values are other than the anchor."""
        values = torch.empty_like(self.state.anchor)
        self.view.read(values)
        return not torch.equal(values, self.state.anchor)

    def delta_later(self, sent: InFlight, tokens: bool) -> Callable[[], Delta]:
        """The function that the reducer calls, on another thread. The state does not change while it is read: jumps and
        rounds make a new one."""
        state, rule, feedback = self.state, self._rule, self.residual is not None

        def delta() -> Delta:
            sent.ready()
            return Delta(
                values=sent.values,
                weight=sent.new.work,
                tokens=tokens,
                fingerprint=state.fingerprint(),
                find_fault=lambda: self.view.find_fault(sent.values),
                lr=sent.new.lr,
                feedback=feedback,
                next=partial(NextState, state, rule, self.memory),
            )

        return delta

    def apply(self, round: Round, keep_local: float) -> None:
        """Take the state after the round; then merge. If the own delta was not counted, follow the anchor and keep all
        local work."""
        if round.faults:
            where = ", ".join(f"{self.pieces[i].name} on replica {m}" for m, i in round.faults.items())
            raise NotFinite(f"fragment {self.number}, round {round.index}: inf or nan in {where}. {self.remedy}")
        sent, old = self.in_flight, self.state
        assert sent is not None or not round.counted
        trained = sum(round.members.values()) > 0
        if not trained:  # momentum alone must not move anything
            self.state = State(round.index, old.anchor, old.outer, old.known)
        else:
            self.state = round.state or self._advance(round)
        assert self.state.index == round.index == old.index + 1
        if sent is not None and round.counted:
            self.view.merge(self.state.anchor, keep_local)
            self.counted = sent.trained
            if trained:
                self._keep_loss(sent, round)
                self._free(old, sent)
        else:
            self.view.carry(self.state.anchor, old.anchor)
        self.in_flight = None

    def _advance(self, round: Round) -> State:
        prepared = NextState(self.state, self._rule, self.memory, round.lr)
        for part in round.encoded:
            prepared.add(part)
        return prepared.state(round.index)

    def _free(self, old: State, sent: InFlight) -> None:
        """The round has counted the delta, so no other thread reads this memory any more. Copies from the old anchor to
        a device may still be in progress."""
        copied = self.view.mark()
        self.memory.anchors.give(old.anchor, copied)
        if old.outer is not self.state.outer:
            self.memory.outers.give(old.outer, _already)
        self.memory.deltas.give(sent.values, _already)

    def _keep_loss(self, sent: InFlight, round: Round) -> None:
        """residual ← feedback · (what was sent − what the others decoded of it)."""
        if self.residual is None:
            return
        if round.own is None:  # an older delta was counted, its loss is not known
            self._forget_residual()
        else:
            torch.sub(sent.values, round.own(), out=self.residual).mul_(self.feedback)

    def _forget_residual(self) -> None:
        """In new memory: the old one may still be copied to a device."""
        if self.residual is not None:
            self.residual = self.memory.anchors.take(self.view.size).zero_()

    def jump(self, state: State, trained: Trained) -> None:
        """Replace the state; local work since the last round is lost."""
        self.state = state if state.anchor is self.state.anchor else self._copy(state)
        self.in_flight, self.counted = None, trained
        self._forget_residual()
        self.view.write(self.state.anchor)

    def go_back(self, trained: Trained) -> None:
        """Set the local values to the anchor. A delta in flight remains; if it is not counted, its work is lost."""
        self.view.write(self.state.anchor)
        self.counted = trained
        self._forget_residual()

    def find(self, tensors: Mapping[str, Tensor]) -> None:
        """Use these tensors instead, from here on."""
        self.view = FlatView(self.pieces, {s.name: s.tensor for s in self.view.spans} | dict(tensors))

    def _copy(self, state: State) -> State:
        """A copy in new memory. That of the old state is not given back: a thread may still read a delta against it."""
        anchor, outer = self.memory.anchors.take(len(state.anchor)), self.memory.outers.take(len(state.outer))
        return State(state.index, anchor.copy_(state.anchor), outer.copy_(state.outer))

    def statistics(
        self, round: Round, sent: InFlight | None, step: int, waited: float, hook: float, overlap: int
    ) -> RoundStats:
        """Figures of a round that was applied. `hook`: seconds that it took."""
        return RoundStats(
            fragment=self.number,
            index=round.index,
            sent_step=sent.step if sent else None,
            applied_step=step,
            sent_at=sent.sent_at if sent else time.time(),
            bytes_sent=round.sent,
            bytes_received=round.received,
            seconds=round.seconds,
            seconds_exposed=waited + hook + (sent.seconds if sent else 0.0),
            seconds_waited=waited,
            members=len(round.members),
            counted=round.counted,
            seconds_apart=round.apart,
            seconds_transfer=round.transfer,
            overlap=overlap,
        )

    def _pieces(self) -> str:
        return json.dumps([(piece.name, piece.start, piece.stop) for piece in self.pieces])

    def state_dict(self) -> dict[str, Any]:
        residual = {} if self.residual is None else {"residual": self.residual}
        return {
            "pieces": self._pieces(),
            "index": self.state.index,
            "sent_step": self.sent_step,
            "counted": self.counted.saved(),
            "anchor": self.state.anchor,
            "outer": self.state.outer,
            "flight": self._flight(),  # not a tensor: checkpoints want the same tensors in every save
            **residual,
        }

    def _flight(self) -> bytearray:
        """The delta under way. torch.load(weights_only=True) refuses bytes."""
        if (sent := self.in_flight) is None:
            return bytearray()
        sent.ready()
        buffer = io.BytesIO()
        torch.save((sent.index, sent.step, sent.trained.saved(), sent.new.saved(), sent.values), buffer)
        return bytearray(buffer.getvalue())

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        sizes = [(len(s["anchor"]), len(s["outer"])) for s in (saved, vars(self.state))]
        if sizes[0] != sizes[1]:
            raise Mismatch(
                f"fragment {self.number} has (anchor, outer state) of {sizes[0]} values in the saved state and of "
                f"{sizes[1]} here: load it with the model, fragments and outer rule it was saved with"
            )
        if saved["pieces"] != self._pieces():
            raise Mismatch(
                f"fragment {self.number} holds other parameters in the saved state: load it with the fragments it was "
                "saved with"
            )
        self.state = State(saved["index"], self.state.anchor, self.state.outer)
        self.state.anchor.copy_(saved["anchor"])
        self.state.outer.copy_(saved["outer"])
        if self.residual is not None:
            self.residual.copy_(saved["residual"]) if "residual" in saved else self.residual.zero_()
        self.sent_step, self.counted, self.in_flight = saved["sent_step"], Trained(*saved["counted"]), None
        if saved["flight"]:
            index, step, trained, new, values = torch.load(io.BytesIO(saved["flight"]), weights_only=True)
            self.in_flight = InFlight(
                index, step, Trained(*trained), Trained(*new), values, ready=_already, sent_at=time.time()
            )


def sync_of_buffers(number: int, buffers: dict[str, Tensor], memory: Memory) -> list[FragmentSync]:
    """Buffers stay local until finish(), which averages those that training changes: a fragment without a slot."""
    if not buffers:
        return []
    pieces = tuple(Piece(name, 0, len(b) if b.dim() else 1) for name, b in buffers.items())
    fragment = FragmentSync(number, pieces, buffers, SGD(lr=1.0), Float32(), memory)
    fragment.remedy = (
        "This is a buffer. The parameters are synced and equal on all replicas; no buffer was averaged: repair this "
        "one, and copy all buffers from one replica to the others."
    )
    return [fragment]


@contextlib.contextmanager
def anchors_inside(fragments: Sequence[FragmentSync], model: nn.Module) -> Iterator[None]:
    """The model holds the anchors; afterwards its own weights and float buffers again."""
    buffers = {name: buffer.clone() for name, buffer in float_buffers(model).items()}
    # Not pinned: torch never gives pinned memory back.
    saved = [(fragment, torch.empty_like(fragment.state.anchor)) for fragment in fragments]
    with torch.no_grad():
        for fragment, values in saved:
            fragment.view.read(values)
            fragment.view.write(fragment.state.anchor)
    reshard(fsdp := fsdp_modules(model))  # it must gather again after each change
    try:
        yield
    finally:
        with torch.no_grad():
            for fragment, values in saved:
                fragment.view.write(values)
            for name, buffer in float_buffers(model).items():
                if name in buffers:
                    buffer.copy_(buffers[name])
        reshard(fsdp)


def contract_of(
    fragments: Sequence[FragmentSync], shapes: Mapping[str, tuple[int, ...]], frozen: Mapping[str, Tensor]
) -> dict[str, object]:
    """What must be the same on all replicas for their fragments to be the same."""
    return {
        "parameters": {name: list(shape) for name, shape in shapes.items()},
        # Rounded to another dtype, equal anchors give unequal weights.
        "dtypes": {s.name: str(s.tensor.dtype).removeprefix("torch.") for f in fragments for s in f.view.spans},
        "denormals": denormals(),
        FROZEN: {name: checksum(p) for name, p in frozen.items()},
        "fragments": {str(p.number): [[q.name, q.start, q.stop] for q in p.pieces] for p in fragments},
    }


def _already() -> None:
    """There is nothing to wait for."""
