"""What the loop asks of the members of a run, and the answers for members that are fixed.

`diloco.train.elastic` has the answers for members that come and go.
"""

from pathlib import Path
from typing import Protocol

from diloco.diloco import DiLoCo
from diloco.reduce import Reduce
from diloco.runs.config import TrainConfig
from diloco.runs.schema import Step
from diloco.runs.writer import Writer
from diloco.train.data.batches import Batches
from diloco.train.data.corpus import Corpus
from diloco.train.defaults import lr_at
from diloco.world import World


class Members(Protocol):
    @property
    def reduce(self) -> Reduce | None:
        """None: the default process group."""
        ...

    @property
    def over(self) -> bool:
        """Whether the run has ended: no step is to come."""
        ...

    def begin(self, diloco: DiLoCo | None, start: int, folder: Path) -> None:
        """Join the run. `start` is the step of the checkpoint that was loaded."""
        ...

    def batches(self, corpus: Corpus, sequences: int) -> Batches:
        """What this process trains on, once it has joined."""
        ...

    def lr(self, step: int) -> float:
        """Inner learning rate of the step that comes next."""
        ...

    def after(self, step: int, writer: Writer, known: Step | None) -> None:
        """A step is done. `known`: the newest one whose loss is known."""
        ...

    def evaluated(self, loss: float) -> None:
        """The anchors have this loss."""
        ...

    def stopped(self) -> None:
        """This member was asked to stop, and has saved."""
        ...


class Fixed:
    """A number of replicas that stays the same, all of which do `config.steps` steps."""

    reduce = None

    def __init__(self, config: TrainConfig, world: World) -> None:
        assert config.steps is not None
        self._config, self._world, self._steps, self.over = config, world, config.steps, False

    def begin(self, diloco: DiLoCo | None, start: int, folder: Path) -> None:
        self.over = start >= self._steps
        if diloco:
            diloco.join()

    def batches(self, corpus: Corpus, sequences: int) -> Batches:
        return corpus.batches(self._world.rank, self._world.size, sequences, self._config.context, self._config.seed)

    def lr(self, step: int) -> float:
        return lr_at(self._config, step)

    def after(self, step: int, writer: Writer, known: Step | None) -> None:
        self.over = step >= self._steps

    def evaluated(self, loss: float) -> None: ...

    def stopped(self) -> None: ...
