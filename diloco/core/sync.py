"""One fragment on one replica: its values in this process, the agreed state, the delta in flight."""

import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor

from diloco.codecs.codec import Codec, is_coarse
from diloco.core import checks
from diloco.core.fragment import Fragment
from diloco.core.lane import Wait, already
from diloco.core.memory import Memory
from diloco.core.outer import SGD, Outer
from diloco.core.payload import packed
from diloco.core.placement import Placement
from diloco.core.stats import RoundStats
from diloco.core.view import FlatView, Uploads
from diloco.errors import Mismatch, NotFinite
from diloco.exchange.mean import Packed, decode_cuts
from diloco.exchange.reducer import Delta, Next, NonFinite, Outcome, Reducer, Round, State

LAST = SGD(lr=1.0)
"""The outer optimizer of the last round of all replicas: the anchors become their mean. A full step with momentum on
what a few steps have changed overshoots: in all of nine short runs the mean had the lower loss."""


@dataclass(frozen=True)
class Work:
    """Work of a replica, as a running total or a difference of two."""

    amount: float = 0.0  # tokens or steps
    lr_sum: float | Tensor = 0.0  # inner learning rates of all steps; on the device if they are
    steps: int = 0
    tokens: bool = False  # what the amount counts

    def __add__(self, other: "Work") -> "Work":
        amount, lr_sum, steps = self.amount + other.amount, self.lr_sum + other.lr_sum, self.steps + other.steps
        return Work(amount, lr_sum, steps, self.tokens or other.tokens)

    def __sub__(self, other: "Work") -> "Work":
        return self + Work(-other.amount, -other.lr_sum, -other.steps, other.tokens)

    @property
    def lr(self) -> float:
        """The mean over the steps."""
        return float(self.lr_sum) / self.steps if self.steps else 0.0

    def saved(self) -> tuple[float, float, int, bool]:
        return self.amount, float(self.lr_sum), self.steps, self.tokens


@dataclass(frozen=True)
class InFlight:
    """A delta that was sent and whose round has not been applied."""

    done: Work  # by this replica when it was sent
    new: Work  # the part that is not in the anchor yet
    memory: Tensor  # of the values
    values: Callable[[], Tensor | Packed]  # waits for copies from the device
    sent_at: float
    seconds: float = 0.0  # of the training thread, to take the delta


class FragmentSync:
    """Sends the deltas of one fragment and applies the rounds that come back."""

    remedy = (
        "Nothing was applied on any replica. Resume from a checkpoint; a lower learning rate or gradient clipping may "
        "prevent it."
    )

    def __init__(
        self, number: int, pieces: Fragment, view: FlatView, place: Placement, *, reducer: Reducer, outer: Outer,
        codec: Codec, memory: Memory, packs_for: int | None = None,
    ) -> None:  # fmt: skip
        """`packs_for`: replicas for which the device encodes deltas."""
        self.number, self.pieces, self.view, self.place = number, pieces, view, place
        self.reducer, self.outer, self.codec, self.memory, self._packs_for = reducer, outer, codec, memory, packs_for
        self.in_flight: InFlight | None = None
        self._replaced: list[Work] = []  # done at the sends that the delta in flight replaces
        self.sent_step = 0
        self.counted = Work()  # what is in the anchor
        self.resumed = Work()  # what an earlier life had done when it saved the state that this one began with
        self.lost = (0, 0)  # the last steps whose work was given up: after the first number, up to the second
        self._waited = 0.0  # seconds, in the last poll

    @property
    def state(self) -> State:
        return self.place.state

    def send(self, done: Work, *, last: bool = False) -> None:
        """Start a round. `last`: of all replicas."""
        self.take_delta(done)
        self.send_in_flight(last=last)

    def take_delta(self, done: Work) -> None:
        """Take the delta against the anchor, never against the merged local value."""
        began = time.perf_counter()
        memory = self.memory.deltas.take(self.place.size)
        values = self._values(memory, self._packs_for, self.place.send(memory))
        seconds = time.perf_counter() - began
        self.sent_step = done.steps
        self._replaced = [] if self.in_flight is None else [*self._replaced, self.in_flight.done]
        self.in_flight = InFlight(done, done - self.counted, memory, values, sent_at=time.time(), seconds=seconds)

    def send_in_flight(self, *, last: bool = False) -> None:
        """Start the round of the delta in flight, for the first time or after a resume."""
        self.reducer.send(self.number, self.state.index + 1, self.delta_later(last=last))

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

    def delta_later(self, *, last: bool = False) -> Callable[[], Delta]:
        """The function that the reducer calls on another thread. `state` does not change meanwhile: jumps and rounds
        replace it."""
        sent, state, coarse = self.in_flight, self.state, is_coarse(self.codec)
        assert sent is not None

        def delta() -> Delta:
            values = sent.values()
            return Delta(
                values=values,
                # The last delta of a coarse codec has what was never sent, even without a step since.
                weight=1.0 if last and coarse else sent.new.amount,
                tokens=sent.new.tokens,
                fingerprint=self.place.fingerprint(state, sent.memory),
                lr=sent.new.lr,
                last=last,
                needs_own=coarse,
                find_non_finite=lambda: self.view.find_non_finite(values),
            )

        return delta

    def poll(self) -> Outcome | None:
        """The outcome of the next round, if it is there."""
        began = time.perf_counter()
        outcome = self.reducer.poll(self.number, self.state.index + 1)
        self._waited = time.perf_counter() - began
        return outcome

    def advance(self, state: State, *, lr: float, last: bool) -> Next:
        """Begin the outer step. On the communication thread."""
        return self.place.advance(state, LAST if last else self.outer, lr)

    def apply(self, round: Round, keep_local: float, done: Work, *, overlap: int) -> RoundStats:
        """Adopt the state after the round and merge it. If this replica's delta did not count, rebase: follow the
        anchor and keep all local work.

        Exception: the round may count a delta that this replica sent after its checkpoint, before it was restarted. It
        contains all the work in the checkpoint. Steps made since cannot be separated from that work, so they are
        dropped too."""
        began = time.perf_counter()
        if done.tokens and not done.amount and not any(round.members.values()):
            checks.warn_no_tokens()
        sent, old, uploads = self.in_flight, self.state, self.place.adopt(round.state)
        assert self.state.index == old.index + 1 and (sent is not None or not round.counted)
        if sent is not None and round.counted and round.newer:
            self._merge_older(round, sent, old, uploads, done)
        elif sent is not None and round.counted:
            if round.own is None:
                self.view.merge(self.state.anchor, keep_local, uploads)
            else:
                self.view.merge(self._with_loss(sent, round.own()), keep_local)
            self.counted = sent.done
            self._free(old, sent)
        elif round.earlier and self.resumed.steps > self.counted.steps:
            self.counted = self.resumed
            self.give_up(done, uploads)
        else:
            self.view.rebase(self.state.anchor, old.anchor, uploads)
        self.in_flight = None
        return self._stats(round, sent, applied_step=done.steps, applying=time.perf_counter() - began, overlap=overlap)

    def _merge_older(self, round: Round, sent: InFlight, old: State, uploads: Uploads, done: Work) -> None:
        """The delta that counted was replaced by a newer one, over a slow uplink. Keep what was trained since it was
        sent; if it is not known any more, that is lost. Overwrites the newer delta, which nobody reads any more."""
        self.counted = self._replaced[-round.newer]
        if round.own is None:
            return self.give_up(done, uploads)
        self.view.rebase(self.state.anchor, torch.sub(old.anchor, round.own(), out=sent.memory), uploads)
        return self._free(old, sent)

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
        self.give_up(done)

    def give_up(self, done: Work, uploads: Uploads = ()) -> None:
        """Set the local values to the anchor. A delta in flight remains; if it does not count, its work is lost."""
        if done.steps > self.counted.steps:
            self.lost = self.counted.steps, done.steps
        self.counted = done
        self.view.write(self.state.anchor, uploads)

    def _stats(
        self, round: Round, sent: InFlight | None, *, applied_step: int, applying: float, overlap: int
    ) -> RoundStats:
        device, part = self.memory.seconds(), round.members.get(str(self.reducer.identity.name), 0.0)
        return RoundStats(
            fragment=self.number,
            index=round.state.index,
            sent_step=sent.done.steps if sent else None,
            applied_step=applied_step,
            sent_at=sent.sent_at if sent else time.time(),
            seconds_exposed=self._waited + applying + (sent.seconds if sent else 0.0) + device,
            seconds_device=device,
            seconds_waited=self._waited,
            members=len(round.members),
            counted=round.counted,
            overlap=overlap,
            share=part / (sum(round.members.values()) or 1.0),
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
        codec = repr(self.codec) if packed_for else ""
        torch.save((sent.done.saved(), sent.new.saved(), sent.memory, packed_for, codec), buffer)
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
            done, new, memory, packed_for, codec = torch.load(io.BytesIO(saved["flight"]), weights_only=True)
            if packed_for and codec != repr(self.codec):
                raise Mismatch(f"fragment {self.number} has a saved delta in flight, encoded as {codec}, and this run "
                               f"sends {self.codec!r}: resume with the codec it was saved with")  # fmt: skip
            if packed_for and packed_for != self._packs_for:  # the replicas or their devices have changed
                encoded = packed(memory, self.codec, self.view.size, packed_for)
                memory = decode_cuts(self.codec, encoded.payloads, self.view.size, packed_for)
                if not encoded.finite:  # which no payload can tell
                    memory[0] = nan
                packed_for = None
            values = self._values(memory, packed_for, already)
            self.in_flight = InFlight(Work(*done), Work(*new), memory, values, sent_at=time.time())
