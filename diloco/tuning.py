"""What may change in the course of a run: the overlap, by this replica alone; sync_every and codec, by all together.

All replicas hear the same wishes in a round of fragment 0, and each has applied it before fragment 0 is sent again,
because the overlap is below sync_every. From that send on the new terms hold, at the same step everywhere. What is in
flight then keeps the codec that it was sent with.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from diloco.codec import Codec, codec_named, feedback_of, name_of
from diloco.pace import Pace, RoundTimes, StepClock
from diloco.schedule import Schedule, check_overlap
from diloco.sync import FragmentSync
from diloco.terms import Change, Terms, agree

Overlap = int | Literal["auto"]


class Tuning:
    """`feedback`: of all codecs; None: what each is meant for."""

    def __init__(
        self, sync_every: int, fragments: int, overlap: Overlap, codec: Codec, feedback: float | None = None
    ) -> None:
        if overlap != "auto":
            check_overlap(overlap, sync_every)
        self.auto = overlap == "auto"
        self.schedule, self.codec, self._feedback = Schedule(sync_every, fragments), codec, feedback
        self._given = self.held
        self._fixed = 1 if overlap == "auto" else overlap
        self._pace = self._new_pace(1)
        self._next: Change | None = None
        self.wish: Terms | None = None
        """What this replica would like all to change to."""
        self.clock = StepClock()

    @property
    def held(self) -> Terms:
        return Terms(self.schedule.sync_every, name_of(self.codec))

    @property
    def feedback(self) -> float:
        return feedback_of(self.codec) if self._feedback is None else self._feedback

    @property
    def overlap(self) -> int:
        return self._pace.overlap if self.auto else self._fixed

    def begin_with(self, overlap: int) -> None:
        """The first overlap, if it is this replica's to choose."""
        self._pace = self._new_pace(overlap)

    def landed(self, times: RoundTimes) -> None:
        """A round was applied: choose the overlap of the next ones."""
        if self.auto:
            self._pace.after(times, self.clock.seconds)

    def said(self, fragment: int) -> Terms | None:
        """The wish that goes with a round. With a fixed overlap, sync_every stays above it."""
        wish = self.wish if fragment == 0 else None
        return wish if wish and (self.auto or wish.sync_every > self._fixed) else None

    def heard(self, wishes: Sequence[Terms | None], sent_step: int) -> None:
        """A round of fragment 0 was applied, in which the replicas wished this."""
        if (terms := agree(wishes, self.held)) is not None:
            self._next = Change(sent_step + self.schedule.sync_every, terms)

    def switch(self, step: int, fragments: Sequence[FragmentSync], ending: bool = False) -> None:
        """Take the terms that were agreed on, if they hold from this step on. `ending`: replicas that end at different
        steps must have the same ones in their last round, so these hold at once."""
        if self._next is None or not (step >= self._next.step or ending):
            return
        change, self._next, self.wish = self._next, None, None
        self._hold(change.terms, origin=change.step - change.terms.sync_every)
        self.recode(fragments)

    def recode(self, fragments: Sequence[FragmentSync]) -> None:
        for fragment in fragments[: self.schedule.fragments]:  # the last one may hold buffers, which stay exact
            fragment.recode(self.codec, self.feedback)

    def _hold(self, terms: Terms, origin: int) -> None:
        self.schedule = Schedule(terms.sync_every, self.schedule.fragments, origin)
        if terms.codec:
            self.codec = codec_named(terms.codec)
        self._pace = self._new_pace(self.overlap)

    def _new_pace(self, overlap: int) -> Pace:
        return Pace(overlap, self.schedule.fragments, self.schedule.sync_every)

    def saved(self) -> dict[str, Any]:
        """Not what was agreed on for a later step: on resume a replica that had not heard of it would not know."""
        terms = {"given": _pair(self._given), "held": _pair(self.held), "origin": self.schedule.origin}
        return {**terms, "overlap": self.overlap if self.auto else None}

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Hold what was held, unless this run was given other settings than the one that was saved."""
        same = saved is not None and tuple(saved["given"]) == _pair(self._given)
        terms = Terms(*saved["held"]) if saved and same else self._given
        self._next = self.wish = None
        self._hold(terms, saved["origin"] if saved and same else 0)
        if saved and saved["overlap"] is not None:
            self.begin_with(saved["overlap"])


def _pair(terms: Terms) -> tuple[int, str]:
    return terms.sync_every, terms.codec
