"""The records of one replica, as they are read: all of them, or so many that memory stays flat however long it runs."""

from dataclasses import dataclass, fields

from diloco.runs.schema import Evaluation, Event, Record, Round, Step, keys

POINTS = 2000
"""Steps that are kept of a replica if they are thinned, at most: as many points as a screen can show."""
ROUNDS = 6000
"""Rounds that are kept of a replica if they are thinned, at most."""
_FIELDS = tuple(field.name for field in fields(Step))
_SUMS = {"step_seconds"}
_MEANS = {name for name, key in keys(Step) if key.startswith("train/")} - _SUMS
"""Fields of which several steps in one entry have the sum, and the mean; of the others, which count since the start of
the run, they have the last."""


@dataclass(frozen=True)
class Replica:
    number: int
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]
    rounds: tuple[Round, ...]
    events: tuple[Event, ...]
    left_out: int = 0
    """Rounds that are not in `rounds`, because they were thinned."""
    carried_left_out: int = 0
    """Those of them that did not count."""


class Growing:
    """A replica that is read while it goes on.

    If `thinned`, an entry of `steps` stands for `width` steps (a power of 2, see `merged`), and of the rounds of each
    fragment every `every`-th is kept.
    """

    def __init__(self, thinned: bool = False) -> None:
        self._thinned = thinned
        self.width = self.every = 1
        self.steps: list[Step] = []
        self.evaluations: list[Evaluation] = []
        self.rounds: list[Round] = []
        self.events: list[Event] = []
        self._left_out = self._carried = 0

    def add(self, record: Record) -> None:
        if isinstance(record, Step):
            _rewind(self.steps, record.step)
            _rewind(self.evaluations, record.step)
            self._add_step(record)
        elif isinstance(record, Evaluation):
            _rewind(self.evaluations, record.step)
            self.evaluations.append(record)
        elif isinstance(record, Round):
            self._add_round(record)
        else:
            if record.event == "resume":
                _rewind(self.rounds, record.step + 1)
            self.events.append(record)

    def _add_step(self, step: Step) -> None:
        if self.steps and block(self.steps[-1].step, self.width) == block(step.step, self.width):
            self.steps[-1] = merged(self.steps[-1], step, self.width)
        else:
            self.steps.append(step)
        if self._thinned and len(self.steps) > POINTS:
            self.widen(2 * self.width)

    def _add_round(self, round: Round) -> None:
        self.rounds.append(round)
        if round.index % self.every:
            self._leave_out(len(self.rounds) - 1)
        while self._thinned and len(self.rounds) > ROUNDS:
            self.every *= 2
            self._leave_out(0)

    def _leave_out(self, first: int) -> None:
        """Thin the rounds from this place on."""
        out = [round for round in self.rounds[first:] if round.index % self.every]
        self.rounds[first:] = [round for round in self.rounds[first:] if not round.index % self.every]
        self._left_out += len(out)
        self._carried += sum(not round.counted for round in out)

    def widen(self, width: int) -> None:
        """Let an entry of `steps` stand for more of them."""
        while self.width < width:
            self.width *= 2
            wide: list[Step] = []
            for step in self.steps:
                same = wide and block(wide[-1].step, self.width) == block(step.step, self.width)
                wide[-1:] = [merged(wide[-1], step, self.width)] if same else [*wide[-1:], step]
            self.steps = wide

    def replica(self, number: int) -> Replica:
        kept = tuple(self.steps), tuple(self.evaluations), tuple(self.rounds), tuple(self.events)
        return Replica(number, *kept, self._left_out, self._carried)


def block(step: int, width: int) -> int:
    """The last of the `width` steps that this one is drawn with: the same on all replicas.

    >>> [block(step, 4) for step in (1, 4, 5)]
    [4, 4, 8]
    """
    return -(-step // width) * width


def merged(first: Step, second: Step, width: int) -> Step:
    """One entry for two that follow each other in a block: means of what is measured, sums of time, the last of what
    is counted."""
    before, here = first.step - (block(first.step, width) - width), second.step - first.step
    share = here / (before + here)
    values = []
    for name in _FIELDS:
        one, two = getattr(first, name), getattr(second, name)
        values.append(one + share * (two - one) if name in _MEANS else one + two if name in _SUMS else two)
    return Step(*values)


def _rewind(entries: "list[Step] | list[Evaluation] | list[Round]", step: int) -> None:
    """Forget what was done at this step and later: the run was resumed before it and did it again."""
    while entries and entries[-1].step >= step:
        entries.pop()
