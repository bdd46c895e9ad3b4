"""Checkpoints of one replica: complete or absent, the last few kept, found again by step.

Each replica has its own folder, on its own machine or not. A checkpoint is written under another name by
torch.distributed.checkpoint and renamed when it is complete: a kill at any moment leaves only complete ones.
"""

import errno
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from diloco.errors import ConfigError
from diloco.reduce.groups import gather_json


class Checkpoints:
    """Checkpoints of a replica. `group`: its ranks, if there are several; `leader`: this rank renames and deletes."""

    def __init__(self, folder: Path, keep: int, group: dist.ProcessGroup | None = None, leader: bool = True) -> None:
        self._folder, self._keep, self._group, self._leader = folder, keep, group, leader
        self._store: dist.Store = dist.distributed_c10d._get_default_store()
        self._publish(0)

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint here."""
        found = self._folder.glob("step-*") if self._folder.exists() else ()
        return sorted(int(path.name.removeprefix("step-")) for path in found if (path / ".metadata").exists())

    def newest_common(self) -> int | None:
        """The newest step of which all replicas have a complete checkpoint."""
        return max(set.intersection(*map(set, gather_json(dist.group.WORLD, self.steps()))), default=None)

    def save(self, step: int, state: dict[str, Any]) -> None:
        final, temporary = self._path(step), self._folder / f"writing-{step:08d}"
        try:
            if self._leader:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            self._barrier()
            with alone():
                dcp.save(state, checkpoint_id=temporary, process_group=self._group, no_dist=self._group is None)
            if self._leader:
                shutil.rmtree(final, ignore_errors=True)
                temporary.rename(final)
        except (OSError, CheckpointException, RuntimeError) as error:
            if self._leader:
                shutil.rmtree(temporary, ignore_errors=True)
            raise _explain(error, self._folder, self.steps()) from error
        self._barrier()
        self._publish(step)
        if self._leader:
            self._prune()

    def load(self, step: int, state: dict[str, Any]) -> None:
        """Fill `state` in place."""
        try:
            with alone():
                dcp.load(state, checkpoint_id=self._path(step), process_group=self._group, no_dist=self._group is None)
        except (CheckpointException, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1][:200]
            raise ConfigError(
                f"{self._path(step)} does not fit this run ({reason}): it has another model, method or number of "
                "shards; resume with the settings in the run's config.toml, or start under another --name"
            ) from error

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)

    def _publish(self, step: int) -> None:
        self._store.set(f"saved/{dist.get_rank()}", str(step))

    def _prune(self) -> None:
        """Delete all but the last few, but none that is newer than what every replica is known to have."""
        common = min(int(self._store.get(f"saved/{rank}")) for rank in range(dist.get_world_size()))
        for step in self.steps()[: -self._keep]:
            if step < common:
                shutil.rmtree(self._path(step))


@contextmanager
def alone() -> Iterator[None]:
    """Silence torch, which warns each time that a replica saves alone: that is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _explain(error: BaseException, folder: Path, steps: list[int]) -> Exception:
    """Checkpoint errors come as a table of all ranks; the system's reason is somewhere inside."""
    numbers = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    full = isinstance(error, OSError) and error.errno in numbers
    texts = ("No space left", "File too large", "Disk quota", "PytorchStreamWriter", "unexpected pos")
    if full or any(text in f"{error!r} {error}" for text in texts):
        kept = f"the checkpoint of step {steps[-1]} is complete" if steps else "there is no earlier checkpoint"
        return ConfigError(f"no space left to save in {folder}: {kept}; make room and start again with --resume")
    return error if isinstance(error, Exception) else RuntimeError(str(error))
